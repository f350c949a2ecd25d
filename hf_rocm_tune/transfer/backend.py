"""What the transfer engine needs of a device (`Backend`), on a plain CPU and on HIP or CUDA.

A backend is one queue ("stream") of copies and digests that run in order beside the caller. Faults are put in here
(`hf_rocm_tune.transfer.faults`), so everything above runs the same with and without them.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.digest import Digest, digest, digest_on_device, from_sums
from hf_rocm_tune.transfer.raw_bytes import ordinary
from hf_rocm_tune.transfer.report import count_crossing

WAKES_WORKER_BYTES = 1 << 20
"""Copies on a plain CPU from which on the worker thread is woken for them."""


class Part(NamedTuple):
    """Bytes [begin, end) of a copy hold the bytes from `offset` on of tensor `name`, which has `nbytes` in all."""

    name: str
    begin: int
    end: int
    offset: int
    nbytes: int


class Label(NamedTuple):
    """What a copy carries: `transfer` numbers the transfer, `attempt` counts its tries from 0."""

    stage: str
    transfer: int
    attempt: int
    parts: tuple[Part, ...]


class Ticket(Protocol):
    """A copy that was queued."""

    def done(self) -> bool:
        """Whether the copy has ended, well or not."""

    def join(self) -> None:
        """Wait until the copy has ended, well or not: its source may be rewritten then."""

    def wait(self) -> None:
        """Wait, and raise what the copy raised."""


class PendingDigest(Protocol):
    """A digest that was queued."""

    def result(self) -> Digest:
        """Wait for it."""


class Backend(Protocol):
    """One device and its copy queue. All of it may be called from several threads."""

    device: torch.device
    staging_grows: bool
    """Whether staging memory is cheap to allocate, so that slots start small and grow."""
    default_slot_bytes: int

    def staging(self, nbytes: int) -> Tensor:
        """Host memory to copy from, uint8[nbytes], page-locked where the device wants that."""

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        """Device memory, uint8[nbytes]. Long-lived memory (weights) is allocated for the caller's compute stream."""

    def mark(self) -> Any:
        """The place in the caller's compute stream behind all that it has queued; for `follow`."""

    def follow(self, mark: Any) -> None:
        """Let the queue wait for what stands before `mark`, whose results it then reads."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        """Queue a copy of host bytes to device bytes, or back. `source` stays unchanged until the ticket is done."""

    def fill(self, target: Tensor, value: int) -> None:
        """Queue the filling of device bytes."""

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        """Queue a digest of device bytes, read by the processor that computes with them."""

    def read_back(self, target: Tensor) -> Tensor:
        """Device bytes as new host bytes, after everything queued; waits."""

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        """Make the caller's compute stream wait for the copy, and keep the memory until that stream is done with it."""

    def close(self) -> None:
        """End the queue. Does nothing the second time."""


class HostBackend:
    """Plain CPU: the "device" is other host memory.

    The same code runs above it as above an accelerator, and the waits are real: a copy ends some time after it was
    queued. Large copies run on a worker thread, beside the caller; small ones are done by whoever waits first for
    something queued, because waking a thread takes longer. The worker ends with `close` or with the interpreter.
    """

    staging_grows = True
    default_slot_bytes = 8 << 20

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer")
        self._queue: deque[_Work] = deque()
        self._running = threading.Lock()

    def staging(self, nbytes: int) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> None:
        """What the caller computes is done when it returns."""

    def follow(self, mark: None) -> None:
        """See `mark`."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        ticket = self._queued(partial(self._copy_now, target, source))
        if blocking:
            ticket.wait()
        elif target.numel() >= WAKES_WORKER_BYTES:
            self._worker.submit(self._run)
        return ticket

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        # Not torch's copy: above a few KiB it opens an OpenMP region, and the threads that this leaves behind for the
        # worker make libgomp see more threads than cores, whereupon it throttles those of the training thread.
        assert target.is_contiguous() and source.is_contiguous() and target.numel() == source.numel()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def fill(self, target: Tensor, value: int) -> None:
        self._queued(partial(ctypes.memset, target.data_ptr(), value, target.numel()))

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        return self._queued(partial(digest, target, word_offset=word_offset))

    def read_back(self, target: Tensor) -> Tensor:
        found: Tensor = self._queued(target.clone).result()
        return found

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        ticket.wait()

    def close(self) -> None:
        self._run()
        self._worker.shutdown(wait=True)

    def _queued(self, do: Callable[[], Any]) -> _Work:
        work = _Work(do, self._run)
        self._queue.append(work)
        return work

    def _run(self) -> None:
        """All that is queued, in order; whoever comes while another thread is at it waits."""
        with self._running:
            while self._queue:
                self._queue.popleft().run()


class _Work:
    """Something queued: the ticket of a copy, or a digest to come."""

    def __init__(self, do: Callable[[], Any], run_queue: Callable[[], None]) -> None:
        self._do: Callable[[], Any] | None = do
        self._run_queue = run_queue
        self._found: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._do is not None, "once"
        try:
            self._found = self._do()
        except BaseException as error:
            self._error = error
        self._do = None  # with the memory that it holds

    def done(self) -> bool:
        return self._do is None

    def join(self) -> None:
        if self._do is not None:
            self._run_queue()

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._found

    wait = result


class AcceleratorBackend:
    """A HIP or CUDA device: page-locked staging, a copy stream, events.

    Order and lifetime (each point is a cause of corruption in the field when it is missing):

    * Copies and digests run on one stream of our own, in the order in which they were queued.
    * A page-locked slot may be rewritten only after the event that follows its copy (`Ticket.join`).
    * The consumer's stream waits for that event, and the memory is recorded on it, so the caching allocator does not
      give it away while kernels of that stream still read it.
    * Memory of batches belongs to our stream, whose order protects it: it is allocated without a wait.
    * Long-lived memory belongs to the consumer's stream; the copy stream waits for what that stream queued before,
      because the allocator may hand out memory that a kernel in flight still uses.
    * Page-locked memory that is dropped with a copy in flight is kept until its end by torch's caching host allocator,
      which also makes the 16 bytes of each digest cheap to allocate.

    The device is never synchronised as a whole; only events are waited for. Each of these points, taken out, makes
    ``tests/transfer/test_mutants_on_card.py`` fail.

    Args:
        device: a ``cuda`` device of torch (HIP devices have that name too); without an index, the current one.
    """

    staging_grows = False
    default_slot_bytes = 32 << 20

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device=self.device)

    @contextmanager
    def _queue(self) -> Iterator[None]:
        # The device first: a thread that was never told its device is on card 0, and when `stream` alone goes back
        # there it makes a context on that card, half a GB of memory.
        # Without torch functions: `redirected` would take these copies for somebody else's.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch._C.DisableTorchFunction():
            yield

    def staging(self, nbytes: int) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with ordinary():
            if long_lived:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                # When an exception frees it with copies in flight, it must not be given away before they end.
                buffer.record_stream(self._stream)
                return buffer
            with self._queue():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        with self._queue():
            count_crossing(**{"to_host_bytes" if source.is_cuda else "to_device_bytes": source.nbytes})
            target.copy_(source, non_blocking=not blocking)
            return _EventTicket(self._stream.record_event())

    def fill(self, target: Tensor, value: int) -> None:
        with self._queue():
            target.fill_(value)

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        with self._queue():
            sums = digest_on_device(target, word_offset)
            count_crossing(to_host_bytes=sums.nbytes)
            with ordinary():
                landing = torch.empty(2, dtype=torch.int64, pin_memory=True)
            landing.copy_(sums, non_blocking=True)
            return _EventDigest(self._stream.record_event(), landing, target.numel())

    def read_back(self, target: Tensor) -> Tensor:
        with self._queue():
            # Blocking: pageable memory and a wait for this stream, so the host never reads before the copy's end.
            count_crossing(to_host_bytes=target.nbytes)
            return target.cpu()

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        assert isinstance(ticket, _EventTicket), "one of ours"
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_event(ticket.event)
        buffer.record_stream(consumer)

    def close(self) -> None:
        """Nothing to end: events and allocators keep what is in flight."""


class _EventTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self) -> None:
        self.event.synchronize()

    wait = join


class _EventDigest:
    def __init__(self, event: torch.cuda.Event, landing: Tensor, nbytes: int) -> None:
        self._event, self._landing, self._nbytes = event, landing, nbytes

    def result(self) -> Digest:
        self._event.synchronize()
        return from_sums(self._landing, self._nbytes)


def backend_for(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        UsageError: it is neither ``cpu`` nor ``cuda``, as HIP devices are called too.
    """
    if device.type == "cpu":
        return HostBackend()
    if device.type == "cuda":
        return AcceleratorBackend(device)
    raise UsageError(f"device '{device}' is not supported; use cuda (HIP and CUDA) or cpu")
