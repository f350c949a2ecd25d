"""The transfer engine's interface to a device (`Backend`), for a plain CPU and for HIP or CUDA.

A backend is one queue ("stream") of copies and digests that run in order, concurrently with the caller. Faults are
injected here (`hf_rocm_tune.transfer.faults`), so everything above runs the same with and without them.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.digest import Digest, DigestReadback, digest, digest_on_device
from hf_rocm_tune.transfer.interception import own_copies
from hf_rocm_tune.transfer.raw_bytes import ordinary


class Part(NamedTuple):
    """Bytes [begin, end) of a copy hold the bytes of tensor `name` from `offset`; the tensor has `nbytes` bytes."""

    name: str
    begin: int
    end: int
    offset: int
    nbytes: int


class Label(NamedTuple):
    """The content of a copy: `transfer` is the number of the transfer, `attempt` counts its attempts from 0."""

    stage: str
    transfer: int
    attempt: int
    parts: tuple[Part, ...]


class Queued(Protocol):
    """A queued copy or digest."""

    # Whether it has ended, with or without an error.
    def done(self) -> bool: ...

    # Wait for its end, with or without an error: the source of a copy may be rewritten then.
    def join(self) -> None: ...

    # Wait for its end; raises its error. A digest gives a `Digest`.
    def result(self) -> Any: ...


class Backend(Protocol):
    """One device and its copy queue. All methods may be called from several threads."""

    device: torch.device
    default_slot_bytes: int
    staging_grows: bool  # whether staging memory is cheap to allocate, so that slots start small and grow

    # Host memory to copy from, uint8[nbytes], page-locked for an accelerator.
    def staging(self, nbytes: int) -> Tensor: ...

    # Device memory, uint8[nbytes]; long-lived memory (weights) is allocated for the caller's compute stream.
    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor: ...

    # The current end of the caller's compute stream; the queue waits for what was before it.
    def mark(self) -> Any: ...
    def follow(self, mark: Any) -> None: ...

    # Queue a copy of host bytes to device bytes, or back. `source` must not change until the copy is done.
    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued: ...

    # Queue setting all device bytes to `value`, or their digest, computed on the device.
    def fill(self, target: Tensor, value: int) -> None: ...
    def digest(self, target: Tensor, word_offset: int = 0) -> Queued: ...

    # Queue their digest after all copies queued so far, beside those queued later: the caller waits for its result
    # before the memory is written again.
    def digest_beside(self, target: Tensor) -> Queued: ...

    # Copy device bytes to new host memory, after everything queued; waits.
    def read_back(self, target: Tensor) -> Tensor: ...

    # Make the caller's compute stream wait for the copy, and keep the memory until that stream is done with it.
    def hand_out(self, buffer: Tensor, ticket: Queued) -> None: ...

    # End the queue. Does nothing the second time.
    def close(self) -> None: ...


class HostBackend:
    """Plain CPU: the "device" is other host memory.

    The same code runs above it as above an accelerator, and its waits are real: what is queued runs, in order, in the
    first thread that waits for some of it.
    """

    default_slot_bytes = 8 << 20
    staging_grows = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._queue: deque[_Work] = deque()
        self._running = threading.Lock()

    def staging(self, nbytes: int) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> None:
        """Nothing to mark: operations on the CPU are done when they return."""

    def follow(self, mark: None) -> None:
        """See `mark`."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued:
        ticket = self._queued(partial(self._copy_now, target, source))
        if blocking:
            ticket.result()
        return ticket

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        # Not torch's copy: above a few KiB it opens an OpenMP region, and with the teams of other threads (those that
        # load) libgomp sees more threads than cores and throttles those of the training thread.
        if not (target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes):
            raise ValueError(f"a copy of {source.nbytes} bytes into {target.nbytes}, or of strided memory")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def fill(self, target: Tensor, value: int) -> None:
        self._queued(partial(ctypes.memset, target.data_ptr(), value, target.numel()))

    def digest(self, target: Tensor, word_offset: int = 0) -> Queued:
        return self._queued(partial(digest, target, word_offset=word_offset))

    def digest_beside(self, target: Tensor) -> Queued:
        return self.digest(target)

    def read_back(self, target: Tensor) -> Tensor:
        copy: Tensor = self._queued(target.clone).result()
        return copy

    def hand_out(self, buffer: Tensor, ticket: Queued) -> None:
        ticket.result()

    def close(self) -> None:
        self._run()

    def _queued(self, do: Callable[[], Any]) -> _Work:
        work = _Work(do, self._run)
        self._queue.append(work)
        return work

    def _run(self) -> None:
        """Run everything that is queued, in order; waits if another thread is running it."""
        with self._running:
            while self._queue:
                self._queue.popleft().run()


class _Work:
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
        self._do = None  # frees the memory it refers to

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


class AcceleratorBackend:
    """A HIP or CUDA device: page-locked staging, a copy stream, events.

    Order and lifetime; `tests/transfer/test_mutants_on_card.py` fails when one of these points is removed:

    * Copies and digests run on one stream of their own, in the order in which they were queued; only digests that the
      caller waits for at once (`digest_beside`) have another, so that the next tensor is copied meanwhile.
    * A page-locked slot may be rewritten only after the event that follows its copy (`Queued.join`).
    * The consumer's stream waits for that event, and the memory is recorded on it, so that the caching allocator does
      not reuse it while kernels of that stream still read it.
    * Memory of batches belongs to the copy stream, whose order protects it: it is allocated without a wait.
    * Long-lived memory belongs to the consumer's stream; the copy stream waits for what that stream queued before,
      because the allocator may return memory that a running kernel still uses.

    Page-locked memory that is freed during a copy is kept until its end by torch's caching host allocator. The device
    is never synchronised as a whole. ``device`` without an index is the current one.
    """

    default_slot_bytes = 32 << 20
    staging_grows = False

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device=self.device)
        self._beside: torch.cuda.Stream = torch.cuda.Stream(device=self.device)

    @contextmanager
    def _queue(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        # The device first: a new thread's device is card 0, and `stream` alone, when it restores that device, creates a
        # context there, half a GB of memory.
        with torch.cuda.device(self.device), torch.cuda.stream(stream or self._stream), own_copies():
            yield

    def staging(self, nbytes: int) -> Tensor:
        with ordinary():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with ordinary():
            if long_lived:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                # If an exception frees it during copies, it must not be reused before they end.
                buffer.record_stream(self._stream)
                return buffer
            with self._queue():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Queued:
        with self._queue():
            target.copy_(source, non_blocking=not blocking)
            return _EventTicket(self._stream.record_event())

    def fill(self, target: Tensor, value: int) -> None:
        with self._queue():
            target.fill_(value)

    def digest(self, target: Tensor, word_offset: int = 0) -> Queued:
        return self._digest_on(self._stream, target, word_offset)

    def digest_beside(self, target: Tensor) -> Queued:
        self._beside.wait_stream(self._stream)
        return self._digest_on(self._beside, target)

    def _digest_on(self, stream: torch.cuda.Stream, target: Tensor, word_offset: int = 0) -> Queued:
        with self._queue(stream):
            return _QueuedDigest(digest_on_device(target, word_offset), target.numel())

    def read_back(self, target: Tensor) -> Tensor:
        with self._queue():
            # Blocking: pageable memory and a wait for this stream, so the host never reads before the copy ends.
            return target.cpu()

    def hand_out(self, buffer: Tensor, ticket: Queued) -> None:
        assert isinstance(ticket, _EventTicket), "a ticket of this backend"
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_event(ticket.event)
        buffer.record_stream(consumer)

    def close(self) -> None:
        """Nothing to do: events and allocators keep memory of running copies alive."""


class _EventTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self) -> None:
        self.event.synchronize()

    def result(self) -> Any:
        self.event.synchronize()


class _QueuedDigest:
    def __init__(self, sums: Tensor, nbytes: int) -> None:
        self._readback = DigestReadback(sums)
        self._nbytes = nbytes

    def done(self) -> bool:
        return self._readback.done()

    def join(self) -> None:
        self._readback.join()

    def result(self) -> Digest:
        self._readback.join()
        (digest,) = self._readback.digests([self._nbytes])
        return digest


def backend_for(device: torch.device) -> Backend:
    if device.type == "cpu":
        return HostBackend()
    if device.type == "cuda":
        return AcceleratorBackend(device)
    raise UsageError(f"device '{device}' is not supported; use cuda (HIP and CUDA) or cpu")
