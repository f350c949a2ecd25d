"""Copies in both directions: staging memory (`Ring`), to the device (`Transfer`, `Sender`), to the host (`Fetcher`)."""

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
from hf_rocm_tune.transfer.report import TransferReport, count_crossing

VERIFY_MODES = ("full", "sample", "off")
CORRUPTION_MODES = ("recover", "stop")


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How transfers are verified, and what happens on a mismatch.

    Attributes:
        verify: ``full``: every transfer; ``sample``: the first and every `sample_every`-th of each stage; ``off``:
            none. Transfers that are not verified are counted as such.
        on_corruption: ``recover``: send again in other ways until the bytes are right; ``stop``: raise at the first
            mismatch.
        sample_every: see `verify`.
        slots: number of staging slots in the ring.
        slot_bytes: bytes of a slot, a multiple of 256; None: 32 MiB page-locked on an accelerator, up to 8 MiB on the
            host. The ring takes at most ``slots * slot_bytes`` of host memory.
        keep_route_after: number of recoveries by the same route after which it is used from the start.
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
                raise UsageError(f"{name} is {value}; give a whole number of at least 1")
        if self.slot_bytes is not None and (self.slot_bytes < 4096 or self.slot_bytes % 256):
            raise UsageError(f"slot_bytes is {self.slot_bytes}; give a multiple of 256, at least 4096")


# ---- staging memory -----------------------------------------------------------------------------------------

SMALLEST_SLOT_BYTES = 64 << 10


class Slot:
    """Staging memory, and the ticket of the last copy that uses it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.ticket: Ticket | None = None


class Ring:
    """At most `slots` slots of at most `slot_bytes` each, allocated once, shared by all threads.

    A slot is rewritten only after the last copy from it has ended. Callers hold a slot only while they fill it and
    queue its copy, so a dropped batch, or an exception while packing, cannot exhaust the ring.
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
        assert nbytes <= self.slot_bytes, "callers split larger transfers into chunks"
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
                    ready.ticket = None
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
"""Alignment in bytes of each tensor of a batch: that of device allocators, and more than any dtype needs."""


@dataclass
class Segment:
    """One host tensor of a transfer.

    Attributes:
        offset: of its first byte in the transfer's device memory.
        digest: of the tensor as given, at its word offset in the transfer; None if that is not verified.
        read_again: reads the source from its file, should host memory have changed.
    """

    name: str
    source: Tensor
    offset: int
    file: str | None = None
    digest: Digest | None = None
    read_again: Callable[[], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return byte_count(self.source)

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.offset + self.nbytes

    def is_right(self, tensor: Tensor) -> bool:
        """Whether host memory holds the bytes that were digested."""
        return digest(tensor, word_offset=self.offset // 4) == self.digest


@dataclass
class Transfer:
    """A transfer to the device, with its segments in order of their offsets. It does not keep device memory alive.

    Attributes:
        source: host tensor whose bytes, in logical order, are those of the device memory, including gaps between the
            segments; None: each segment has its own, and gaps are zeros.
        pieces: digests of its chunks, taken while they were packed for the first attempt, or known before.
    """

    number: int
    stage: str
    segments: list[Segment]
    source: Tensor | None
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
        return self.segments[-1].end if self.source is None else byte_count(self.source)

    @property
    def expected(self) -> Digest:
        """Digest that the device memory must have."""
        return combine(self.pieces)

    def matches(self, found: Digest) -> bool:
        """Whether a digest of the device memory equals that of the source."""
        return found.same_words(self.expected)


@dataclass(frozen=True)
class Route:
    """A way to send: staging memory (``ring``, ``fresh`` or ``pageable``), blocking or not, and the chunk size."""

    name: str
    staging: str = "ring"
    blocking: bool = False
    chunk_bytes: int | None = None


DIRECT = Route("first_copy")


class Sender:
    """Packs transfers into staging memory and queues their copies."""

    def __init__(self, backend: Backend, ring: Ring) -> None:
        self._backend = backend
        self._ring = ring

    def send(self, transfer: Transfer, buffer: Tensor, route: Route, *, attempt: int) -> None:
        """Queue all copies into `buffer`, uint8[transfer.nbytes].

        On the first attempt the source is digested chunk by chunk while it is packed.
        """
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
    ) -> Ticket:
        label = Label(transfer.stage, transfer.number, attempt, tuple(_parts(transfer, start, stop)))
        target = buffer[start:stop]
        if route.staging == "ring":
            with self._ring.slot(stop - start) as (slot, memory):
                _pack(transfer, start, stop, memory, attempt)
                slot.ticket = self._backend.copy(target, memory, label, blocking=route.blocking)
                return slot.ticket
        if route.staging == "fresh":
            memory = self._backend.staging(stop - start)
        else:
            with ordinary():
                memory = torch.empty(stop - start, dtype=torch.uint8)
        _pack(transfer, start, stop, memory, attempt)
        return self._backend.copy(target, memory, label, blocking=route.blocking)


def _parts(transfer: Transfer, start: int, stop: int) -> Iterator[Part]:
    """The parts of segments in bytes [start, stop) of the device memory."""
    for segment in transfer.segments:
        begin, end = max(segment.offset, start), min(segment.end, stop)
        if begin < end:
            yield Part(segment.name, begin - start, end - start, begin - segment.offset, segment.nbytes)


def _pack(transfer: Transfer, start: int, stop: int, memory: Tensor, attempt: int) -> None:
    """Copy bytes [start, stop) of the source; on a verified first attempt digest them in the same pass."""
    if transfer.source is None:
        _pack_segments(transfer.segments, start, stop, memory)
    elif transfer.verify and attempt == 0:
        begun = time.perf_counter()
        transfer.pieces.append(digest_range(transfer.source, start, stop, word_offset=start // 4, copy_to=memory))
        transfer.verify_seconds += time.perf_counter() - begun
    else:
        gather(transfer.source, start, stop, memory)


def _pack_segments(segments: Sequence[Segment], start: int, stop: int, memory: Tensor) -> None:
    filled = start
    for segment in segments:
        begin, end = max(segment.offset, start), min(segment.end, stop)
        if begin < end:
            memory[filled - start : begin - start] = 0
            gather(segment.source, begin - segment.offset, end - segment.offset, memory[begin - start : end - start])
            filled = end
    memory[filled - start : stop - start] = 0


# ---- host tensors packed into one memory ---------------------------------------------------------------------

_TRIES = 3


class Packed(NamedTuple):
    """One tensor of a `Pack`; attributes as in `Segment`."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    digest: Digest | None


@dataclass(frozen=True)
class Pack:
    """Layout of copies of host tensors, aligned in one memory as on the device; it does not keep the memory alive.

    Attributes:
        digest: of the memory, with zeros in the gaps; None if that is not verified.
    """

    tensors: tuple[Packed, ...]
    digest: Digest | None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, whose first one lies in this memory, are exactly the tensors of this pack, in order."""
        storage = tensors[0].untyped_storage()
        return len(tensors) == len(self.tensors) and all(
            tensor.untyped_storage() is storage
            and tensor.storage_offset() * tensor.element_size() == known.offset
            and (tensor.dtype, tensor.shape) == (known.dtype, known.shape)
            and tensor.is_contiguous()
            for tensor, known in zip(tensors, self.tensors, strict=True)
        )

    def changed_in(self, memory: Tensor) -> str:
        """The name of the first tensor that has changed; empty if only gaps have."""
        for each in self.tensors:
            place = typed_view(memory, each.offset, each.dtype, each.shape)
            if digest(place, word_offset=each.offset // 4) != each.digest:
                return each.name
        return ""


def pack(named: Sequence[tuple[str, Tensor]], *, verified: bool) -> tuple[Tensor, Pack]:
    """Copy dense host tensors into one memory, uint8[n].

    ``verified``: compare the copies with the originals' digests, and copy again, up to twice, if they differ.
    """
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

_READINGS = ("first_copy", "same_copy", "pageable")  # ways to read, in order; each is verified


class Fetcher:
    """Copies device tensors to the host, verified, for averages on the host and for transfers to another card.

    A copy goes into a page-locked slot, in which the host may then work; the device digests its own bytes, and only the
    digest is sent. A wrong copy is repeated, then read through pageable memory, as are tensors larger than a slot. Not
    covered: host memory after the verdict, and device memory that changed before `begin`.

    Attributes:
        slot_bytes: the largest tensor that is copied without waiting.
    """

    def __init__(
        self,
        backend: Backend,
        faulty: FaultyBackend | None,
        settings: TransferSettings,
        report: TransferReport,
        number_transfer: Callable[[str], tuple[int, bool, int | None]],
    ) -> None:
        self.backend, self.faulty, self.settings, self.report = backend, faulty, settings, report
        self.number_transfer = number_transfer
        self.slot_bytes = settings.slot_bytes or backend.default_slot_bytes
        self.ring = Ring(backend, slot_bytes=self.slot_bytes, slots=settings.slots)

    def begin(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, into: Tensor | None = None) -> Fetched:
        """Queue the copy of a tensor of this device. Waits while all slots are taken."""
        source = tensor.detach().contiguous()
        return Fetched(self, source, name, stage, mark if tensor.is_contiguous() else None, into)

    @contextmanager
    def fetched(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None) -> Iterator[Fetched]:
        """The bytes of a tensor on the host within the block; see `begin`."""
        found = self.begin(tensor, name=name, stage=stage, mark=mark)
        try:
            found.settle()
            yield found
        finally:
            found.release()


class Fetched:
    """A tensor in transfer to the host.

    Attributes:
        host: of the tensor's dtype and shape, in staging memory: valid after `settle` and until `release`; writable.
        digest: of the fetched bytes, after `settle`; None if they are not verified.
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
        number, verify, self._step = fetcher.number_transfer(stage)
        self._source = as_bytes(source)  # kept alive: the caller may drop its tensor while the copy is queued
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
        # A copy to pageable memory blocks, so it runs in `settle`.
        self._ticket = None if at_once else self._copy()
        self._queueing_seconds = time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for the bytes and verify them."""
        begun = time.perf_counter()
        (self._ticket or self._copy(blocking=True)).wait()
        if self._expected is not None:
            self.digest = self._expected.result()
            self._verify(self.digest)
        else:
            self._corrupt(0)
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
        """Release the staging memory. Does nothing the second time."""
        self._slot.close()

    def _verify(self, right: Digest) -> None:
        wrong: Tensor | None = None
        for attempt, rung in enumerate(_READINGS):
            if rung == "same_copy":
                self._copy(blocking=True)
            elif rung == "pageable":
                self._memory.copy_(self._backend.read_back(self._source))
            self._corrupt(attempt)
            if digest(self._memory) == right:
                if wrong is not None:
                    self._report(wrong, rung, "recovered")
                return
            wrong = self._memory.clone() if wrong is None else wrong
            if self._fetcher.settings.on_corruption == "stop":
                self._fail(wrong, rung, "stopped", "--on_corruption stop is set")
        assert wrong is not None
        self._fail(wrong, _READINGS[-1], "failed", f"{len(_READINGS)} ways of reading it gave wrong bytes")

    def _copy(self, *, blocking: bool = False) -> Ticket:
        return self._backend.copy(self._memory, self._source, self._label, blocking=blocking)

    def _corrupt(self, attempt: int) -> None:
        if self._fetcher.faulty is not None:
            self._fetcher.faulty.corrupt_in_place(self._memory, self._label._replace(attempt=attempt))

    def _fail(self, wrong: Tensor, rung: str, outcome: str, why: str) -> None:
        self._report(wrong, rung, outcome)
        raise CorruptionError(
            f"{self._stage} tensor '{self._name}' from {self._backend.device} arrived wrong on the host, and {why}. It "
            "was not used; run the doctor"
        )

    def _report(self, wrong: Tensor, rung: str, outcome: str) -> None:
        recovered = outcome == "recovered"
        self._fetcher.report.add(self._stage, mismatches=1, recovered=int(recovered))
        row: dict[str, Any] = {"step": self._step, "stage": self._stage, "tensor": self._name}
        # The right bytes are known only if a later reading had the right digest.
        damage = examine(wrong, self._memory) if recovered else None
        if damage is None:
            row |= {"kind": "unknown", "first_offset": 0, "length": wrong.numel()}
        else:
            row |= {"kind": damage.kind, "first_offset": damage.first_offset, "length": damage.length}
            row |= {"alignment": damage.alignment, "found": damage.found}
        self._fetcher.report.incident({**row, "rung": rung, "outcome": outcome})


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host and compare its digest with the device's; a wrong copy is repeated up to twice."""
    right = digest(tensor.detach())
    for _ in range(_TRIES):
        if tensor.is_cuda:
            count_crossing(to_host_bytes=tensor.nbytes)
        host = tensor.detach().cpu()
        if digest(host) == right:
            break
    return host.contiguous()  # one that stays wrong is found when it, or the file written from it, is compared
