"""The backend for a HIP or CUDA device, through the ``torch.cuda`` calls that both share.

Order and lifetime (each point is a cause of corruption in the field when it is missing):

* Copies and digests run on one stream of our own, in the order in which they were queued.
* A page-locked slot may be rewritten only after the event that follows its copy (`Ticket.join`).
* The consumer's stream waits for that event, and the memory is recorded on it, so the caching allocator does not give
  it away while kernels of that stream still read it.
* Long-lived memory belongs to the consumer's stream; the copy stream waits for what that stream queued before, because
  the allocator may hand out memory that a kernel in flight still uses.

The device is never synchronised as a whole; only events and this stream are waited for.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from hf_rocm_tune.transfer.backend import Label, PendingDigest, Ticket
from hf_rocm_tune.transfer.digest import Digest, digest_on_device, from_sums


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
        self._results = _ResultSlots()

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
            with torch.cuda.stream(self._stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def follow(self, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        source.record_stream(self._stream)  # it may be freed before the queue has read it

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=not blocking)
            ticket = _EventTicket(self._stream.record_event())
        if blocking:
            ticket.wait()
        return ticket

    def fill(self, target: Tensor, value: int) -> None:
        with torch.cuda.stream(self._stream):
            target.fill_(value)

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        with torch.cuda.stream(self._stream):
            sums = digest_on_device(target, word_offset)
            landing = self._results.take()
            landing.copy_(sums, non_blocking=True)
            return _EventDigest(self._stream.record_event(), landing, target.numel(), self._results)

    def read_back(self, target: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            # Blocking: pageable memory and a wait for this stream, so the host never reads before the copy's end.
            return target.cpu()

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        consumer = torch.cuda.current_stream(self.device)
        if isinstance(ticket, _EventTicket):
            consumer.wait_event(ticket.event)
        else:
            ticket.wait()
        buffer.record_stream(consumer)

    def close(self) -> None:
        self._stream.synchronize()


class _EventTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self) -> None:
        self.event.synchronize()

    def wait(self) -> None:
        self.event.synchronize()


class _ResultSlots:
    """Page-locked int64[2] tensors for digests, reused: the allocation of page-locked memory is slow."""

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        with self._lock:
            if self._free:
                return self._free.popleft()
        with torch.inference_mode(False):
            return torch.empty(2, dtype=torch.int64, pin_memory=True)

    def give_back(self, landing: Tensor) -> None:
        with self._lock:
            self._free.append(landing)


class _EventDigest:
    def __init__(self, event: torch.cuda.Event, landing: Tensor, nbytes: int, results: _ResultSlots) -> None:
        self._event, self._landing, self._nbytes, self._results = event, landing, nbytes, results
        self._digest: Digest | None = None

    def result(self) -> Digest:
        if self._digest is None:
            self._event.synchronize()
            self._digest = from_sums(self._landing, self._nbytes)
            self._results.give_back(self._landing)
        return self._digest
