"""The backend for a HIP or CUDA device, through the ``torch.cuda`` calls that both share.

Order and lifetime (each point is a cause of corruption in the field when it is missing):

* Copies and digests run on one stream of our own, in the order in which they were queued.
* A page-locked slot may be rewritten only after the event that follows its copy (`Ticket.join`).
* The consumer's stream waits for that event, and the memory is recorded on it, so the caching allocator does not give
  it away while kernels of that stream still read it.
* Memory of batches belongs to our stream, whose order protects it: it is allocated without a wait.
* Long-lived memory belongs to the consumer's stream; the copy stream waits for what that stream queued before, because
  the allocator may hand out memory that a kernel in flight still uses.
* Page-locked memory that is dropped with a copy in flight is kept until its end by torch's caching host allocator,
  which also makes the 16 bytes of each digest cheap to allocate.

The device is never synchronised as a whole; only events are waited for. Each of these points, taken out, makes
``tests/transfer/test_mutants_on_card.py`` fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_rocm_tune.transfer.backend import Label, PendingDigest, Ticket
from hf_rocm_tune.transfer.digest import Digest, digest_on_device, from_sums
from hf_rocm_tune.transfer.report import count_crossing


class AcceleratorBackend:
    """Page-locked staging, a copy stream, events.

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
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with torch.inference_mode(False):
            if long_lived:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                # When an exception frees it with copies in flight, it must not be given away before they end.
                buffer.record_stream(self._stream)
                return buffer
            with self._queue():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def follow(self, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

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
            with torch.inference_mode(False):
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

    def wait(self) -> None:
        self.event.synchronize()


class _EventDigest:
    def __init__(self, event: torch.cuda.Event, landing: Tensor, nbytes: int) -> None:
        self._event, self._landing, self._nbytes = event, landing, nbytes

    def result(self) -> Digest:
        self._event.synchronize()
        return from_sums(self._landing, self._nbytes)
