"""What crosses, both ways: staging memory (`Ring`), sending (`Shipment`, `Sender`) and bringing back (`Fetcher`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Ticket
from hf_rocm_tune.transfer.damage import examine
from hf_rocm_tune.transfer.digest import Digest, combine, digest, digest_range
from hf_rocm_tune.transfer.faults import FaultyBackend
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather, ordinary, typed_view
from hf_rocm_tune.transfer.report import TransferReport

VERIFY_MODES = ("full", "sample", "off")
CORRUPTION_MODES = ("recover", "stop")


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How transfers are verified, and what happens on a mismatch.

    Attributes:
        verify: ``full``: every transfer; ``sample``: the first and every `sample_every`-th of each stage; ``off``:
            none. What is not verified is counted as such.
        on_corruption: ``recover`` sends again in other ways until it is right; ``stop`` raises at the first mismatch.
        sample_every: see `verify`.
        slots: staging slots in the ring.
        slot_bytes: bytes of a slot, a multiple of 256; None: 32 MiB page-locked on an accelerator, up to 8 MiB on the
            host. Host memory of the ring is at most ``slots * slot_bytes``.
        keep_route_after: recoveries by the same way of sending after which it is used from the start.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    verify: str = "full"
    on_corruption: str = "recover"
    sample_every: int = 16
    slots: int = 4
    slot_bytes: int | None = None
    keep_route_after: int = 3

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_MODES:
            raise UsageError(f"verify is '{self.verify}'; choose one of {', '.join(VERIFY_MODES)}")
        if self.on_corruption not in CORRUPTION_MODES:
            raise UsageError(f"on_corruption is '{self.on_corruption}'; choose one of {', '.join(CORRUPTION_MODES)}")
        for name in ("sample_every", "slots", "keep_route_after"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}; give a whole number from 1 on")
        if self.slot_bytes is not None and (self.slot_bytes < 4096 or self.slot_bytes % 256):
            raise UsageError(f"slot_bytes is {self.slot_bytes}; give a multiple of 256, at least 4096")


# ---- staging memory -----------------------------------------------------------------------------------------

SMALLEST_SLOT_BYTES = 64 << 10


class Slot:
    """Staging memory, and the ticket of the last copy that read from it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.ticket: Ticket | None = None


class Ring:
    """At most `slots` slots of at most `slot_bytes` each, allocated once, shared by all threads.

    A slot is rewritten only after the copy that last read it has ended. Nothing above holds a slot longer than it takes
    to fill it and queue its copy, so a batch that is abandoned, or an exception while packing, cannot starve the ring.

    Args:
        backend: allocates the staging memory. Where that is cheap, slots start small and grow to what is asked for.
        slot_bytes: bytes of a full slot, a multiple of 256.
        slots: how many.
    """

    def __init__(self, backend: Backend, *, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._backend = backend
        self._room = slots
        self._free: deque[Slot] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def slot(self, nbytes: int) -> Iterator[tuple[Slot, Tensor]]:
        """Yield a free slot and `nbytes` of its memory; set ``slot.ticket`` to the copy that reads them.

        Waits for a slot, and for the end of its last copy.
        """
        assert nbytes <= self.slot_bytes, "larger transfers are cut into chunks above"
        slot = self._take()
        try:
            if slot.ticket is not None:
                slot.ticket.join()
                slot.ticket = None
            yield slot, self._memory(slot, nbytes)
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    def _take(self) -> Slot:
        with self._changed:
            while True:
                ready = next((slot for slot in self._free if slot.ticket is None or slot.ticket.done()), None)
                if ready is not None:
                    self._free.remove(ready)
                    ready.ticket = None  # nothing to wait for
                    return ready
                if self._room:
                    self._room -= 1
                    return Slot()
                if self._free:
                    return self._free.popleft()
                self._changed.wait()

    def _memory(self, slot: Slot, nbytes: int) -> Tensor:
        if slot.buffer is None or slot.buffer.numel() < nbytes:
            wanted = self.slot_bytes
            if self._backend.staging_grows:
                wanted = min(wanted, max(SMALLEST_SLOT_BYTES, 1 << (nbytes - 1).bit_length()))
            slot.buffer = self._backend.staging(wanted)
        return slot.buffer[:nbytes]


# ---- to the device ------------------------------------------------------------------------------------------

ALIGNMENT = 256
"""Bytes to which each tensor of a batch is aligned: what device allocators give, and more than any dtype needs."""


@dataclass
class Parcel:
    """One host tensor at its place in the device memory.

    Attributes:
        offset: of its first byte in the transfer.
        digest: of the tensor as it was given, at its word offset in the transfer; None where that is not verified.
    """

    name: str
    source: Tensor
    offset: int
    file: str | None = None
    digest: Digest | None = None

    @property
    def nbytes(self) -> int:
        return byte_count(self.source)


@dataclass
class Shipment:
    """A transfer with its parcels, in order of their offsets. It does not keep the device memory alive.

    Attributes:
        source: host tensor whose bytes, in logical order, are those of the device memory, gaps between the parcels
            included.
        pieces: digests of its chunks, each taken as it was packed for the first time.
    """

    number: int
    stage: str
    parcels: list[Parcel]
    source: Tensor
    verify: bool
    pieces: list[Digest] = field(default_factory=list)
    ticket: Ticket | None = None
    settled: bool = False
    failure: CorruptionError | None = None
    transfer_seconds: float = 0.0
    verify_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return byte_count(self.source)

    @property
    def expected(self) -> Digest:
        """Digest that the whole device memory must have."""
        return combine(self.pieces)

    def matches(self, found: Digest) -> bool:
        """Whether a digest of the whole device memory is the one of the source."""
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

        On the first attempt the source is digested piece by piece, while it is packed.
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
        label = Label(shipment.stage, shipment.number, attempt, tuple(_parts(shipment, start, stop)))
        target = buffer[start:stop]
        if route.staging == "ring":
            with self._ring.slot(stop - start) as (slot, memory):
                _pack(shipment, start, stop, memory, attempt)
                slot.ticket = self._backend.copy(target, memory, label, blocking=route.blocking)
                return slot.ticket
        if route.staging == "fresh":
            memory = self._backend.staging(stop - start)
        else:
            with ordinary():
                memory = torch.empty(stop - start, dtype=torch.uint8)
        _pack(shipment, start, stop, memory, attempt)
        return self._backend.copy(target, memory, label, blocking=route.blocking)


def _parts(shipment: Shipment, start: int, stop: int) -> Iterator[Part]:
    """What bytes [start, stop) of the device memory hold."""
    for parcel in shipment.parcels:
        nbytes = parcel.nbytes
        begin, end = max(parcel.offset, start), min(parcel.offset + nbytes, stop)
        if begin < end:
            yield Part(parcel.name, begin - start, end - start, begin - parcel.offset, nbytes)


def _pack(shipment: Shipment, start: int, stop: int, memory: Tensor, attempt: int) -> None:
    """Copy bytes [start, stop) of the source; the first time, where it is verified, digest them in the same pass."""
    if shipment.verify and attempt == 0:
        begun = time.perf_counter()
        shipment.pieces.append(digest_range(shipment.source, start, stop, word_offset=start // 4, copy_to=memory))
        shipment.verify_seconds += time.perf_counter() - begun
    else:
        gather(shipment.source, start, stop, memory)


# ---- host tensors side by side -------------------------------------------------------------------------------

_TRIES = 3


class Packed(NamedTuple):
    """One tensor of a `Pack`; the attributes as of `Parcel`."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    digest: Digest | None


@dataclass(frozen=True)
class Pack:
    """Copies of host tensors, aligned in one memory, as they will lie on the device; it does not keep that alive.

    Attributes:
        digest: of all of the memory, which holds zeros in the gaps; None where that is not verified.
    """

    tensors: tuple[Packed, ...]
    digest: Digest | None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, of which the first lies in this memory, are all of its tensors, in order, and no parts."""
        storage = tensors[0].untyped_storage()
        return len(tensors) == len(self.tensors) and all(
            tensor.untyped_storage() is storage
            and tensor.storage_offset() * tensor.element_size() == known.offset
            and (tensor.dtype, tensor.shape) == (known.dtype, known.shape)
            and tensor.is_contiguous()
            for tensor, known in zip(tensors, self.tensors, strict=True)
        )

    def changed_in(self, memory: Tensor) -> str:
        """The name of the first tensor that is not what it was; empty where only gaps are."""
        for each in self.tensors:
            place = typed_view(memory, each.offset, each.dtype, each.shape)
            if digest(place, word_offset=each.offset // 4) != each.digest:
                return each.name
        return ""


def pack(named: Sequence[tuple[str, Tensor]], *, verified: bool) -> tuple[Tensor, Pack]:
    """Copy dense host tensors into one memory, uint8[n]; ``verified``: until the copies have the originals' digests."""
    offsets, end = [], 0
    for _, tensor in named:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + byte_count(tensor)
    with ordinary():
        memory = torch.zeros(end, dtype=torch.uint8)
    for _ in range(_TRIES):
        digests: list[Digest | None] = []
        for (_, tensor), offset in zip(named, offsets, strict=True):
            size = byte_count(tensor)
            place = memory[offset : offset + size]
            if verified:
                digests.append(digest_range(tensor, 0, size, word_offset=offset // 4, copy_to=place))
            else:
                gather(tensor, 0, size, place)
                digests.append(None)
        whole = digest(memory) if verified else None
        if whole is None or whole.same_words(combine(each for each in digests if each is not None)):
            break
    tensors = (
        Packed(name, offset, tensor.dtype, tensor.shape, found)
        for (name, tensor), offset, found in zip(named, offsets, digests, strict=True)
    )
    return memory, Pack(tuple(tensors), whole)


# ---- to the host --------------------------------------------------------------------------------------------

_READINGS = ("first_copy", "same_copy", "pageable")  # in order; each is verified


class Fetcher:
    """Brings device tensors to the host, verified, as what is averaged there or goes on to another card.

    A copy goes into a page-locked slot, in which the host may then work; the device digests its own bytes, and only the
    digest travels. What arrives wrong is copied again, then read in the plainest way; so is what is larger than a slot,
    at once. Not covered: the host memory after the verdict, and device memory that changed before `begin`.

    Args:
        backend: whose device they are on, without injected faults; copies run on its queue.
        faulty: harms what arrives; None for nothing.
        settings: size of the slots, and what happens on a mismatch.
        report: counters to add to.
        enter: gives for a stage the number of the transfer, whether it is verified, and the training step.

    Attributes:
        slot_bytes: the most that crosses in one piece, and without waiting.
    """

    def __init__(
        self,
        backend: Backend,
        faulty: FaultyBackend | None,
        settings: TransferSettings,
        report: TransferReport,
        enter: Callable[[str], tuple[int, bool, int | None]],
    ) -> None:
        self.backend, self.faulty, self.settings, self.report, self.enter = backend, faulty, settings, report, enter
        self.slot_bytes = settings.slot_bytes or backend.default_slot_bytes
        self.ring = Ring(backend, slot_bytes=self.slot_bytes, slots=settings.slots)

    def begin(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, into: Tensor | None = None) -> Fetched:
        """Queue the copy of a tensor of this device. Waits while all slots are taken.

        Args:
            tensor: of any dense dtype; it must not change before `Fetched.settle` has returned.
            name, stage: for incidents and faults.
            mark: see `Mover.mark`: it was computed before that. None: it was queued before this.
            into: the caller's own staging memory, uint8 of as many bytes, instead of a slot.
        """
        source = tensor.detach().contiguous()
        return Fetched(self, source, name, stage, mark if tensor.is_contiguous() else None, into)

    @contextmanager
    def fetched(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None) -> Iterator[Fetched]:
        """The bytes of a tensor on the host for the length of a block; see `begin`.

        Raises:
            CorruptionError: see `Fetched.settle`.
        """
        found = self.begin(tensor, name=name, stage=stage, mark=mark)
        try:
            found.settle()
            yield found
        finally:
            found.release()


class Fetched:
    """A tensor on its way to the host.

    Attributes:
        host: of the tensor's dtype and shape, in staging memory: to be used after `settle` and until `release`. It may
            be written to.
        digest: of the bytes that were fetched, after `settle`; None where they were not verified.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        source: Tensor,
        name: str,
        stage: str,
        mark: Any = None,
        into: Tensor | None = None,
    ) -> None:
        self._fetcher, self._backend, self._name, self._stage = fetcher, fetcher.backend, name, stage
        number, verify, self._step = fetcher.enter(stage)
        self._source = as_bytes(source)  # kept: the caller may drop its tensor with the copy still queued
        self._slot = ExitStack()
        self.digest: Digest | None = None
        begun = time.perf_counter()
        size = byte_count(source)
        at_once = into is None and size > fetcher.slot_bytes
        if into is not None:
            self._memory = into
        elif not at_once:
            _, self._memory = self._slot.enter_context(fetcher.ring.slot(size))
        else:
            with ordinary():
                self._memory = torch.empty(size, dtype=torch.uint8)
        self.host = typed_view(self._memory, 0, source.dtype, source.shape)
        self._label = Label(stage, number, 0, (Part(name, 0, size, 0, size),))
        self._backend.follow(mark or self._backend.mark())
        self._expected = self._backend.digest(self._source) if verify else None
        # Pageable memory is copied to while the caller waits: not before `settle`.
        self._ticket = None if at_once else self._copy()
        self._queueing_seconds = time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for the bytes and prove them.

        Raises:
            CorruptionError: no way of reading them helped, or the settings say to stop. `host` then holds wrong bytes.
        """
        begun = time.perf_counter()
        (self._ticket or self._copy(blocking=True)).wait()
        if self._expected is not None:
            self.digest = self._expected.result()
            self._prove(self.digest)
        else:
            self._harm(0)
        size = self._memory.numel()
        self._fetcher.report.add(
            self._stage,
            tensors=1,
            bytes=size,
            verified_bytes=size if self.digest is not None else 0,
            transfer_seconds=self._queueing_seconds,
            verify_seconds=time.perf_counter() - begun,
        )

    def release(self) -> None:
        """Give the staging memory back. Does nothing the second time."""
        self._slot.close()

    def _prove(self, right: Digest) -> None:
        wrong: Tensor | None = None
        for attempt, rung in enumerate(_READINGS):
            if rung == "same_copy":
                self._copy(blocking=True)
            elif rung == "pageable":
                self._memory.copy_(self._backend.read_back(self._source))
            self._harm(attempt)
            if digest(self._memory) == right:
                if wrong is not None:
                    self._tell(wrong, rung, "recovered")
                return
            wrong = self._memory.clone() if wrong is None else wrong
            if self._fetcher.settings.on_corruption == "stop":
                self._fail(wrong, rung, "stopped", "--on_corruption stop was asked for")
        assert wrong is not None
        self._fail(wrong, _READINGS[-1], "failed", f"{len(_READINGS)} ways of reading it did not help")

    def _copy(self, *, blocking: bool = False) -> Ticket:
        return self._backend.copy(self._memory, self._source, self._label, blocking=blocking)

    def _harm(self, attempt: int) -> None:
        if self._fetcher.faulty is not None:
            self._fetcher.faulty.harm_in_place(self._memory, self._label._replace(attempt=attempt))

    def _fail(self, wrong: Tensor, rung: str, outcome: str, why: str) -> None:
        self._tell(wrong, rung, outcome)
        raise CorruptionError(
            f"{self._stage} tensor '{self._name}' came from {self._backend.device} to the host "
            f"wrong, and {why}. Nothing of it was used; run the doctor"
        )

    def _tell(self, wrong: Tensor, rung: str, outcome: str) -> None:
        recovered = outcome == "recovered"
        self._fetcher.report.add(self._stage, mismatches=1, recovered=int(recovered))
        row: dict[str, Any] = {"step": self._step, "stage": self._stage, "tensor": self._name}
        # What was right is known for certain only where a later reading had the right digest.
        damage = examine(wrong, self._memory) if recovered else None
        if damage is None:
            row |= {"kind": "unknown", "first_offset": 0, "length": wrong.numel()}
        else:
            row |= {"kind": damage.kind, "first_offset": damage.first_offset, "length": damage.length}
            row |= {"alignment": damage.alignment, "found": damage.found}
        self._fetcher.report.incident({**row, "rung": rung, "outcome": outcome})
