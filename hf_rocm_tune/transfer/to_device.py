"""Transfers to the device: a `Transfer` of several tensors, and the `Sender` that queues its copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Queued
from hf_rocm_tune.transfer.digest import Digest, combine, digest, digest_range
from hf_rocm_tune.transfer.raw_bytes import as_bytes
from hf_rocm_tune.transfer.retry import Route
from hf_rocm_tune.transfer.staging import Ring, Slot, pageable

ALIGNMENT = 256
"""Alignment in bytes of each tensor of a batch: that of device allocators, and more than any dtype needs."""


@dataclass
class Segment:
    name: str
    source: Tensor
    offset: int  # of its first byte in the transfer's device memory
    file: str | None = None
    digest: Digest | None = None  # of the tensor as given, at its word offset in the transfer; None: not verified
    read_again: Callable[[], Tensor] | None = None  # reads it from its file, should host memory have changed

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def is_right(self, tensor: Tensor) -> bool:
        return digest(tensor, word_offset=self.offset // 4) == self.digest


@dataclass
class Transfer:
    """A transfer to the device. It does not keep device memory alive."""

    number: int
    stage: str
    segments: list[Segment]  # in order of their offsets
    # Contiguous; its bytes are those of the device memory, gaps between the segments included. None: each segment has
    # its own, and gaps are zeros.
    source: Tensor | None
    verify: bool
    origin: str = ""  # the file and function that asked for it; empty: this package
    pieces: list[Digest] = field(default_factory=list)  # digests of its chunks, taken by the first attempt, or known
    ticket: Queued | None = None
    arrived: Queued | None = None  # the digest of what arrived, queued behind the copy; None: taken when it is awaited
    is_done: bool = False
    failure: CorruptionError | None = None
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        return self.segments[-1].end if self.source is None else self.source.nbytes

    @property
    def expected(self) -> Digest:
        return combine(self.pieces)

    def matches(self, arrived: Digest) -> bool:
        return arrived.same_words(self.expected)


class Sender:
    def __init__(self, backend: Backend, ring: Ring) -> None:
        self._backend = backend
        self._ring = ring

    def send(self, transfer: Transfer, buffer: Tensor, route: Route, *, attempt: int) -> None:
        """Queue all copies into `buffer`, uint8[transfer.nbytes]; the first attempt digests what it copies."""
        begun = time.perf_counter()
        digesting = transfer.verify_seconds
        step = route.chunk_bytes or self._ring.slot_bytes
        for start in range(0, transfer.nbytes, step):
            stop = min(start + step, transfer.nbytes)
            transfer.ticket = self._send_chunk(transfer, buffer, route, attempt, start, stop)
        digesting = transfer.verify_seconds - digesting
        transfer.transfer_seconds += time.perf_counter() - begun - digesting

    def _send_chunk(
        self, transfer: Transfer, buffer: Tensor, route: Route, attempt: int, start: int, stop: int
    ) -> Queued:
        parts = tuple(
            Part(segment.name, begin - start, end - start, begin - segment.offset, segment.nbytes)
            for segment, begin, end in _within(transfer.segments, start, stop)
        )
        size = stop - start
        staged: AbstractContextManager[tuple[Slot, Tensor]]
        if route.staging == "ring":
            staged = self._ring.slot(size)
        elif route.staging == "fresh":
            staged = nullcontext((Slot(), self._backend.staging(size)))
        else:
            staged = nullcontext((Slot(), pageable(size)))
        with staged as (slot, memory):
            _fill(transfer, start, stop, memory, attempt)
            label = Label(transfer.stage, transfer.number, attempt, parts)
            slot.ticket = self._backend.copy(buffer[start:stop], memory, label, blocking=route.blocking)
            return slot.ticket


def _within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
    """The segments in bytes [start, stop) of the device memory, and where each begins and ends there."""
    for segment in segments:
        begin = max(segment.offset, start)
        end = min(segment.end, stop)
        if begin < end:
            yield segment, begin, end


def _fill(transfer: Transfer, start: int, stop: int, memory: Tensor, attempt: int) -> None:
    """Copy bytes [start, stop) of the source; on a verified first attempt digest them in the same pass."""
    if transfer.source is None:
        filled = start
        for segment, begin, end in _within(transfer.segments, start, stop):
            memory[filled - start : begin - start] = 0
            part = as_bytes(segment.source)[begin - segment.offset : end - segment.offset]
            memory[begin - start : end - start].copy_(part)
            filled = end
        memory[filled - start :] = 0
    elif transfer.verify and attempt == 0:
        begun = time.perf_counter()
        transfer.pieces.append(digest_range(transfer.source, start, stop, word_offset=start // 4, copy_to=memory))
        transfer.verify_seconds += time.perf_counter() - begun
    else:
        memory.copy_(as_bytes(transfer.source)[start:stop])
