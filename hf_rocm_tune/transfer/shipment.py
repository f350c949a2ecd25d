"""One transfer: host tensors laid out in one piece of device memory, and the ways of sending them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Ticket
from hf_rocm_tune.transfer.digest import Digest, combine, digest_range
from hf_rocm_tune.transfer.raw_bytes import byte_count, gather
from hf_rocm_tune.transfer.ring import Ring

ALIGNMENT = 256
"""Bytes to which each tensor of a batch is aligned: what device allocators give, and more than any dtype needs."""


@dataclass
class Parcel:
    """One host tensor at its place in the device memory. Its digest is built up while it is packed."""

    name: str
    source: Tensor
    offset: int
    file: str | None = None
    pieces: list[Digest] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return byte_count(self.source)

    @property
    def digest(self) -> Digest:
        """Digest of the source as it was before packing, at its word offset in the transfer."""
        return combine(self.pieces)


@dataclass
class Shipment:
    """A transfer with its parcels, in order of their offsets. It does not keep the device memory alive."""

    number: int
    stage: str
    parcels: list[Parcel]
    verify: bool
    ticket: Ticket | None = None
    settled: bool = False
    failure: CorruptionError | None = None
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, gaps between the tensors included."""
        return self.parcels[-1].offset + self.parcels[-1].nbytes

    @property
    def expected(self) -> Digest:
        """Digest that the whole device memory must have: the gaps are zero and add nothing."""
        return combine(parcel.digest for parcel in self.parcels)

    def matches(self, found: Digest) -> bool:
        """Whether a digest of the whole device memory is the one of the sources."""
        return found.same_words(self.expected)


@dataclass(frozen=True)
class Route:
    """A way of sending: staging memory from the ring, freshly allocated, or pageable; in what pieces."""

    name: str
    staging: str = "ring"
    blocking: bool = False
    chunk_bytes: int | None = None


DIRECT = Route("first_copy")


class Sender:
    """Packs shipments through the ring and queues their copies."""

    def __init__(self, backend: Backend, ring: Ring) -> None:
        self._backend = backend
        self._ring = ring

    def send(self, shipment: Shipment, buffer: Tensor, route: Route, *, attempt: int) -> None:
        """Queue all copies into `buffer`, uint8[shipment.nbytes].

        On the first attempt the sources are digested piece by piece, while each is packed.
        """
        begun = time.perf_counter()
        digesting = shipment.verify_seconds
        step = route.chunk_bytes or self._ring.slot_bytes
        for start in range(0, shipment.nbytes, step):
            stop = min(start + step, shipment.nbytes)
            shipment.ticket = self._send_chunk(shipment, buffer, route, attempt, start, stop)
        digesting = shipment.verify_seconds - digesting
        shipment.transfer_seconds += time.perf_counter() - begun - digesting

    def _send_chunk(
        self, shipment: Shipment, buffer: Tensor, route: Route, attempt: int, start: int, stop: int
    ) -> Ticket:
        parts = list(_parts(shipment, start, stop))
        label = Label(shipment.stage, shipment.number, attempt, tuple(part for _, part in parts))
        target = buffer[start:stop]
        if route.staging == "ring":
            with self._ring.slot(stop - start) as (slot, memory):
                _pack(shipment, parts, memory, attempt)
                slot.ticket = self._backend.copy(target, memory, label, blocking=route.blocking)
                return slot.ticket
        if route.staging == "fresh":
            memory = self._backend.staging(stop - start)
        else:
            with torch.inference_mode(False):
                memory = torch.empty(stop - start, dtype=torch.uint8)
        _pack(shipment, parts, memory, attempt)
        return self._backend.copy(target, memory, label, blocking=route.blocking)


def _parts(shipment: Shipment, start: int, stop: int) -> Iterator[tuple[Parcel, Part]]:
    """What bytes [start, stop) of the device memory hold."""
    for parcel in shipment.parcels:
        begin, end = max(parcel.offset, start), min(parcel.offset + parcel.nbytes, stop)
        if begin < end:
            yield parcel, Part(parcel.name, begin - start, end - start, begin - parcel.offset, parcel.nbytes)


def _pack(shipment: Shipment, parts: list[tuple[Parcel, Part]], memory: Tensor, attempt: int) -> None:
    """Gather the sources into staging memory and zero the gaps, so that one digest covers the whole.

    The first time, where the shipment is verified, the sources are digested in the same pass.
    """
    filled = 0
    for parcel, part in parts:
        memory[filled : part.begin].zero_()
        end = part.offset + part.end - part.begin
        place = memory[part.begin : part.end]
        if shipment.verify and attempt == 0:
            begun = time.perf_counter()
            word = (parcel.offset + part.offset) // 4
            parcel.pieces.append(digest_range(parcel.source, part.offset, end, word_offset=word, copy_to=place))
            shipment.verify_seconds += time.perf_counter() - begun
        else:
            gather(parcel.source, part.offset, end, place)
        filled = part.end
    memory[filled:].zero_()
