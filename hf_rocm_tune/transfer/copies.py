"""Copies in both directions: staging memory (`Ring`), to the device (`Transfer`, `Sender`), to the host (`Fetcher`)."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Queued
from hf_rocm_tune.transfer.damage import examine
from hf_rocm_tune.transfer.digest import Digest, combine, digest, digest_range
from hf_rocm_tune.transfer.faults import FaultyBackend
from hf_rocm_tune.transfer.interception import own_copies
from hf_rocm_tune.transfer.raw_bytes import as_bytes, dense, ordinary, typed_view
from hf_rocm_tune.transfer.report import TransferReport, own_origin

MODES = {"verify": ("full", "sample", "off"), "on_corruption": ("recover", "stop")}
SAMPLE_EVERY = 16
"""Of ``verify="sample"``: every 16th transfer of a stage."""
SMALLEST_SLOT_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How transfers are verified, and what happens on a mismatch."""

    verify: str = "full"  # every transfer; ``sample``: the first and every 16th of each stage; ``off``: none
    on_corruption: str = "recover"  # send again in other ways; ``stop``: raise at the first mismatch
    slots: int = 4  # of the ring, which takes at most ``slots * slot_bytes`` of host memory
    # A multiple of 256; None: 32 MiB page-locked on an accelerator, up to 8 MiB on the host.
    slot_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, modes in MODES.items():
            if (given := getattr(self, name)) not in modes:
                raise UsageError(f"{name} is '{given}'; choose one of {', '.join(modes)}")
        if self.slots < 1:
            raise UsageError(f"slots is {self.slots}; give a whole number of at least 1")
        if self.slot_bytes is not None and (self.slot_bytes < 4096 or self.slot_bytes % 256):
            raise UsageError(f"slot_bytes is {self.slot_bytes}; give a multiple of 256, at least 4096")


class Session:
    """What all transfers of a mover share; ``step``: of training, for incidents."""

    def __init__(self, settings: TransferSettings, report: TransferReport, faulty: FaultyBackend | None) -> None:
        self.settings, self.report, self.faulty = settings, report, faulty
        self.step: int | None = None
        self._numbers, self.sent, self._lock = itertools.count(), Counter[str](), threading.Lock()

    def number(self, stage: str) -> tuple[int, bool]:
        """The number of a new transfer, and whether it is verified."""
        with self._lock:
            number, earlier = next(self._numbers), self.sent[stage]
            self.sent[stage] += 1
        sampled = self.settings.verify == "sample" and earlier % SAMPLE_EVERY == 0
        return number, self.settings.verify == "full" or sampled


# ---- staging memory -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Slot:
    buffer: Tensor | None = None
    ticket: Queued | None = None  # of the last copy that uses it


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
            if slot.buffer is None or slot.buffer.numel() < nbytes:
                grown = max(SMALLEST_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
                wanted = min(self.slot_bytes, grown) if self._backend.staging_grows else self.slot_bytes
                slot.buffer = self._backend.staging(wanted)
            yield slot, slot.buffer[:nbytes]
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


# ---- to the device ------------------------------------------------------------------------------------------

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

    def matches(self, found: Digest) -> bool:
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
        else:
            staged = nullcontext((Slot(), self._backend.staging(size) if route.staging == "fresh" else pageable(size)))
        with staged as (slot, memory):
            _fill(transfer, start, stop, memory, attempt)
            label = Label(transfer.stage, transfer.number, attempt, parts)
            slot.ticket = self._backend.copy(buffer[start:stop], memory, label, blocking=route.blocking)
            return slot.ticket


def pageable(nbytes: int) -> Tensor:
    with ordinary():
        return torch.empty(nbytes, dtype=torch.uint8)


def _within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
    """The segments in bytes [start, stop) of the device memory, and where each begins and ends there."""
    for segment in segments:
        begin, end = max(segment.offset, start), min(segment.end, stop)
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


# ---- a batch staged in one host memory ---------------------------------------------------------------------

_TRIES = 3


class StagedTensor(NamedTuple):
    """One tensor of a `StagedBatch`, as `Segment`."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    digest: Digest | None


@dataclass(frozen=True)
class StagedBatch:
    """Layout of copies of host tensors, aligned in one memory as on the device; it does not keep the memory alive."""

    tensors: tuple[StagedTensor, ...]
    digest: Digest | None  # of the memory, with zeros in the gaps; None: not verified

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, whose first one lies in this memory, are exactly the tensors of this batch, in order."""
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
            copied = typed_view(memory, each.offset, each.dtype, each.shape)
            if digest(copied, word_offset=each.offset // 4) != each.digest:
                return each.name
        return ""


def stage_batch(named: Sequence[tuple[str, Tensor]], *, verified: bool) -> tuple[Tensor, StagedBatch]:
    """Copy dense host tensors into one memory, uint8[n].

    ``verified``: compare the copies with the originals' digests, and copy again, up to twice, if they differ.
    """
    starts, end = [], 0
    for _, tensor in named:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + tensor.nbytes
    with ordinary():
        memory = torch.zeros(end, dtype=torch.uint8)
    for _ in range(_TRIES):
        tensors = []
        for (name, tensor), start in zip(named, starts, strict=True):
            size, found, source = tensor.nbytes, None, dense(tensor)
            if verified:
                found = digest_range(source, 0, size, word_offset=start // 4, copy_to=memory[start : start + size])
            else:
                memory[start : start + size].copy_(as_bytes(source))
            tensors.append(StagedTensor(name, start, tensor.dtype, tensor.shape, found))
        whole = digest(memory) if verified else None
        if whole is None or whole.same_words(combine(each.digest for each in tensors if each.digest is not None)):
            break
    return memory, StagedBatch(tuple(tensors), whole)


# ---- to the host --------------------------------------------------------------------------------------------

_READINGS = ("first_copy", "same_copy", "pageable")  # ways to read, in order; each is verified


class Fetcher:
    """Copies device tensors to the host, verified, for averages on the host and for transfers to another card.

    A copy goes into a page-locked slot, in which the host may then work; the device digests its own bytes, and only the
    digest is sent. A wrong copy is repeated, then read through pageable memory, as are tensors larger than a slot
    (``slot_bytes``). Not covered: host memory after the verdict, and device memory that changed before `begin`.
    """

    def __init__(self, backend: Backend, session: Session) -> None:
        self.backend, self.session = backend, session
        self.slot_bytes = session.settings.slot_bytes or backend.default_slot_bytes
        self.ring = Ring(backend, slot_bytes=self.slot_bytes, slots=session.settings.slots)

    def begin(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, origin: str = "") -> Fetched:
        """Queue the copy of a tensor of this device, after ``mark`` (None: now). Waits while all slots are taken."""
        mark = mark if tensor.is_contiguous() else None
        return Fetched(self, tensor.detach().contiguous(), name, stage, mark, origin)

    @contextmanager
    def fetched(
        self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, origin: str = ""
    ) -> Iterator[Fetched]:
        found = self.begin(tensor, name=name, stage=stage, mark=mark, origin=origin)
        try:
            found.wait_verified()
            yield found
        finally:
            found.release()


class Fetched:
    """A tensor in transfer to the host.

    Attributes:
        host: of the tensor's dtype and shape, in staging memory: valid after `wait_verified` until `release`; writable.
        digest: of the fetched bytes, after `wait_verified`; None if they are not verified.
    """

    def __init__(self, fetcher: Fetcher, source: Tensor, name: str, stage: str, mark: Any, origin: str) -> None:
        self._origin = origin or own_origin(stage)
        self._session, self._backend, self._name, self._stage = fetcher.session, fetcher.backend, name, stage
        number, verify = self._session.number(stage)
        self._step = self._session.step
        self._source = as_bytes(source)  # kept alive: the caller may drop its tensor while the copy is queued
        self._slot = ExitStack()
        self.digest: Digest | None = None
        begun, size = time.perf_counter(), source.nbytes
        small = size <= fetcher.slot_bytes
        self._memory = self._slot.enter_context(fetcher.ring.slot(size))[1] if small else pageable(size)
        self.host = typed_view(self._memory, 0, source.dtype, source.shape)
        self._label = Label(stage, number, 0, (Part(name, 0, size, 0, size),))
        self._backend.follow(mark or self._backend.mark())
        self._expected = self._backend.digest(self._source) if verify else None
        # a copy to pageable memory blocks, so it runs in `wait_verified`
        self._ticket = self._copy() if small else None
        self._queueing_seconds = time.perf_counter() - begun

    def wait_verified(self) -> None:
        begun = time.perf_counter()
        (self._ticket or self._copy(blocking=True)).result()
        if self._expected is not None:
            self.digest = self._expected.result()
            self._verify(self.digest)
        else:
            self._corrupt(0)
        size = self._memory.numel()
        self._session.report.crossed("to_host", self._origin, size, verified=self.digest is not None)
        self._session.report.add(
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
        for attempt, retry in enumerate(_READINGS):
            if retry == "same_copy":
                self._copy(blocking=True)
            elif retry == "pageable":
                self._memory.copy_(self._backend.read_back(self._source))
            self._corrupt(attempt)
            if attempt:  # the sums of the first digest may have been read wrongly, too
                self.digest = right = self._backend.digest(self._source).result()
            if digest(self._memory) == right:
                if wrong is not None:
                    self._report(wrong, retry, "recovered")
                return
            wrong = self._memory.clone() if wrong is None else wrong
            stops = self._session.settings.on_corruption == "stop"
            if stops or retry == _READINGS[-1]:
                self._report(wrong, retry, "stopped" if stops else "failed")
                why = f"all {len(_READINGS)} read attempts returned wrong bytes"
                raise CorruptionError(
                    f"{self._stage} tensor '{self._name}' from {self._backend.device} arrived wrong on the host, and "
                    f"{'--on_corruption stop is set' if stops else why}. It was not used; run the doctor"
                )

    def _copy(self, *, blocking: bool = False) -> Queued:
        return self._backend.copy(self._memory, self._source, self._label, blocking=blocking)

    def _corrupt(self, attempt: int) -> None:
        if self._session.faulty is not None:
            self._session.faulty.corrupt_in_place(self._memory, self._label._replace(attempt=attempt))

    def _report(self, wrong: Tensor, retry: str, outcome: str) -> None:
        recovered = outcome == "recovered"
        self._session.report.add(self._stage, mismatches=1, recovered=int(recovered))
        row: dict[str, Any] = {"step": self._step, "stage": self._stage, "tensor": self._name}
        # The right bytes are known only if a later reading had the right digest.
        if recovered and (damage := examine(wrong, self._memory)) is not None:
            row |= damage.for_report()
        else:
            row |= {"kind": "unknown", "first_offset": 0, "length": wrong.numel()}
        self._session.report.incident({**row, "retry": retry, "outcome": outcome})


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host and compare its digest with the device's; a wrong copy is repeated up to twice."""
    right = digest(tensor.detach())
    for _ in range(_TRIES):
        with own_copies():
            host = tensor.detach().cpu()
        if digest(host) == right:
            break
    return host.contiguous()  # one that stays wrong is found when it, or the file written from it, is compared
