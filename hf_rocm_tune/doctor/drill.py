"""``hf-rocm-tune doctor --drill``: faults of every kind injected into real transfers on the user's device, and whether
they are detected.

The transfers use the same mover, ring, digests and ladder as a run; faults are injected into copies, at the backend.
What arrived is compared byte by byte, independently of the digests, in memory that was poisoned before: allocators
reuse memory, so memory that was never written may hold the correct bytes of an earlier transfer. Not covered: the
libraries above the mover (real runs under ``HF_ROCM_TUNE_FAULT``), speed (``benchmarks/transfer.py``), casts and memory
at rest (``doctor``).
"""

from __future__ import annotations

import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.transfer import (
    STAGES,
    AcceleratorBackend,
    Backend,
    FaultSpec,
    HostBackend,
    Mover,
    TransferReport,
    TransferSettings,
    digest,
)
from hf_rocm_tune.transfer.damage import POISON
from hf_rocm_tune.transfer.faults import KINDS
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather, typed_view

SLOT_BYTES = 16 << 10
"""Bytes of a staging slot in the drill: small, so that tensors of several chunks are sent fast."""
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 255, 256, 257, 1023, 4095, 4096, 4097),
    *(SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES + 1, 5 * SLOT_BYTES + 3),
)
"""Bytes: one, words and their tails, the alignment in a batch, and around the size of a slot."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)
CELLS = (
    *((kind, persist, stage) for kind in KINDS if kind != "after" for persist in (False, True) for stage in STAGES),
    ("after", False, "weights"),
)
"""Kind of fault, whether it affects retries, too, and stage. ``after`` corrupts a weight that was verified."""
TARGET = "target"
"""Name of the tensor with the fault. In a batch, its neighbours must arrive correctly."""
_POOL_BYTES = 1 << 20
_ORDINARY_BYTES = 1024
_LARGE_EVERY = 50
_COLUMNS = ("injected", "detected", "recovered", "stopped", "missed", "false alarms")

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class DrillSettings:
    """Settings of a drill.

    Attributes:
        device: ``cuda`` (HIP or CUDA) or ``cpu``; None: the accelerator if torch sees one.
        faults: number of faults that change bytes, over all kinds, stages, dtypes and sizes.
        clean: number of transfers without a fault.
        seed: the same seed gives the same transfers and faults.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    device: str | None = None
    faults: int = 2000
    clean: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("faults", 1), ("clean", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} is {getattr(self, name)}; give a whole number from {least} on")
        if self.seed >= 1 << 32:
            raise UsageError("--seed is too large: give a whole number below 2**32")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no accelerator; drill on the CPU with --device cpu")


@dataclass(kw_only=True)
class Tally:
    """Counts of one kind of fault, transient or persistent.

    Attributes:
        injected: transfers whose bytes were changed; a fault without an effect does not count.
        detected: of these, those that were reported with the tensor's name.
        recovered: reported, and the bytes were correct at the end.
        stopped: ended by an error, and nothing counted as verified.
        missed: not reported, or wrong bytes that counted as verified.
        false_alarms: reports of tensors without a fault.
    """

    injected: int = 0
    detected: int = 0
    recovered: int = 0
    stopped: int = 0
    missed: int = 0
    false_alarms: int = 0


@dataclass(kw_only=True)
class InjectedFaults:
    """Tallies by kind of fault and persistence, and the number of faults by stage, dtype and bytes."""

    tallies: dict[tuple[str, bool], Tally] = field(default_factory=dict)
    stages: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)

    def total(self) -> Tally:
        return Tally(**{name: sum(getattr(one, name) for one in self.tallies.values()) for name in vars(Tally())})


@dataclass(kw_only=True)
class CleanTransfers:
    """Results of transfers without an injected fault.

    Attributes:
        transfers: their number; a batch of three tensors is one.
        false_alarms: reports of tensors whose bytes were correct when read back.
        corrupted: reports of tensors whose bytes were wrong: this machine corrupts transfers.
        missed: tensors that counted as verified and were wrong when read back.
        example: the first report, for the user.
    """

    transfers: int = 0
    false_alarms: int = 0
    corrupted: int = 0
    missed: int = 0
    example: str | None = None


@dataclass(frozen=True, kw_only=True)
class Drill:
    """The result of a drill."""

    settings: DrillSettings
    device: str
    injected: InjectedFaults
    clean: CleanTransfers
    seconds: float

    def failures(self) -> list[str]:
        """Counts of missed faults, false alarms and the like, one text each; empty if there are none."""
        total, clean = self.injected.total(), self.clean
        # Faults that occur once can be recovered from, except in memory at rest.
        once = [one for (kind, persist), one in self.injected.tallies.items() if not persist and kind != "after"]
        counts = {
            "faults missed": total.missed + clean.missed,
            "faults that occurred once not recovered": sum(one.detected - one.recovered for one in once),
            "false alarms": total.false_alarms + clean.false_alarms,
            f"transfers corrupted by this machine itself (the first: {clean.example})": clean.corrupted,
        }
        return [f"{count:,} {what}" for what, count in counts.items() if count]

    def to_dict(self) -> dict[str, Any]:
        injected = self.injected
        tallies = [{"kind": key[0], "persist": key[1], **asdict(one)} for key, one in injected.tallies.items()]
        return {
            "schema": 2,
            "settings": asdict(self.settings),
            "device": self.device,
            "torch": torch.__version__,
            "failures": self.failures(),
            "faults": tallies,
            "faults_total": asdict(injected.total()),
            "faults_by_stage": dict(injected.stages),
            "faults_by_dtype": dict(injected.dtypes),
            "faults_by_bytes": {str(size): count for size, count in sorted(injected.sizes.items())},
            "clean": asdict(self.clean),
            "seconds": round(self.seconds, 1),
        }


def run(settings: DrillSettings) -> Drill:
    """Run a drill. Shows a progress bar on a terminal; writes nothing."""
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = f"cpu ({platform.processor() or platform.machine()})"
    if device.type == "cuda":
        name = f"{'hip' if torch.version.hip else 'cuda'} ({torch.cuda.get_device_name(device)})"
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        advance = partial(bar.advance, bar.add_task("faults", total=settings.faults))
        injected = inject(device, faults=settings.faults, seed=settings.seed, on_fault=advance)
        advance = partial(bar.advance, bar.add_task("clean transfers", total=settings.clean))
        clean = send_clean(device, transfers=settings.clean, seed=settings.seed, on_transfer=advance)
    seconds = time.perf_counter() - began
    return Drill(settings=settings, device=name, injected=injected, clean=clean, seconds=seconds)


def table(drill: Drill) -> str:
    """The table of faults, and lines on their variety, on clean transfers and on the verdict."""

    def row(kind: str, hits: str, tally: Tally) -> str:
        counts = [f"{getattr(tally, column.replace(' ', '_')):>{max(len(column), 9)},}" for column in _COLUMNS]
        if kind == "after":
            counts[2:4] = [f"{'-':>9}"] * 2  # the sentinels of a run recover or stop
        return f"{kind:<11} {hits:<6} " + " ".join(counts)

    injected, clean = drill.injected, drill.clean
    sizes = f"{min(injected.sizes, default=0):,} to {max(injected.sizes, default=0):,}"
    return "\n".join(
        [
            f"drill on {drill.device}, seed {drill.settings.seed}, {drill.seconds:.0f} s\n",
            f"{'fault':<11} {'hits':<6} " + " ".join(f"{column:>{max(len(column), 9)}}" for column in _COLUMNS),
            *(row(kind, "always" if persist else "once", one) for (kind, persist), one in injected.tallies.items()),
            row("all", "", injected.total()) + "\n",
            f"variety      {len(injected.stages)} stages, {len(injected.dtypes)} dtypes, {sizes} bytes; 'after' "
            "corrupts memory after it was verified, and is found by another digest",
            f"clean        {clean.transfers:,} transfers: {clean.false_alarms} false alarms, {clean.corrupted} "
            f"corrupted, {clean.missed} missed",
            f"verdict      {'; '.join(drill.failures()) or 'every fault was found, without a false alarm'}",
        ]
    )


class Samples:
    """Seeded host tensors: random bytes, token ids, and masks of ones, contiguous or strided, at any address."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, 32_000, (_POOL_BYTES // 8,), generator=generator)
        mask = torch.ones(_POOL_BYTES // 8, dtype=torch.int64)
        self._pools = [noise, noise, ids.view(torch.uint8), mask.view(torch.uint8)]
        self._bools = torch.randint(0, 2, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        self._dtypes = self._shuffled(DTYPES)
        self._sizes = self._shuffled(SIZES)

    def tensor(self, *, largest: int = SIZES[-1]) -> Tensor:
        """The next tensor, of about `largest` bytes at most; all dtypes and sizes occur equally often."""
        dtype, nbytes = next(self._dtypes), next(self._sizes)
        if self._rng.random() < 0.5:
            nbytes = int(2 ** self._rng.uniform(0, nbytes.bit_length()))
        size = dtype.itemsize
        count = max(min(nbytes, largest) // size, 1)
        strided = self._rng.random() < 0.25
        pool = self._bools if dtype is torch.bool else self._rng.choice(self._pools)
        offset = self._rng.randrange((_POOL_BYTES - 2 * count * size) // size) * size
        if strided:
            return typed_view(pool, offset, dtype, (count, 2))[:, 0]
        return typed_view(pool, offset, dtype, (count,))

    def sent(self, stage: str, target: Tensor) -> dict[str, Tensor]:
        """The tensors of a transfer: in a batch, `target` is between two small neighbours."""
        if stage != "batches":
            return {TARGET: target}
        return {"before": self.tensor(largest=300), TARGET: target, "behind": self.tensor(largest=300)}

    def _shuffled(self, values: tuple[Value, ...]) -> Iterator[Value]:
        while True:
            yield from self._rng.sample(values, len(values))


class IncidentLog(TransferReport):
    """A report from which the incidents of each transfer are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._incidents: list[dict[str, Any]] = []

    def incident(self, row: Mapping[str, Any]) -> None:
        self._incidents.append(dict(row))

    def take(self) -> list[dict[str, Any]]:
        taken, self._incidents = self._incidents, []
        return taken


def _mover(device: torch.device, faults: FaultSpec | None = None) -> Mover:
    """A mover that poisons device memory when it allocates it."""
    backend: Backend = AcceleratorBackend(device) if device.type == "cuda" else HostBackend()
    allocate = backend.allocate

    def poisoned(nbytes: int, *, long_lived: bool) -> Tensor:
        buffer = allocate(nbytes, long_lived=long_lived)
        backend.fill(buffer, POISON)  # an accelerator's on the copy stream
        return buffer

    backend.allocate = poisoned  # type: ignore[method-assign]
    settings = TransferSettings(slot_bytes=SLOT_BYTES, slots=3)
    return Mover(device, settings=settings, report=IncidentLog(), faults=faults, backend=backend)


def _send(mover: Mover, stage: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], CorruptionError | None]:
    """Send as a run does: a batch in one copy, else tensor by tensor. Returns what arrived and the final error."""
    arrived: dict[str, Tensor] = {}
    try:
        if stage == "batches":
            arrived = mover.begin(tensors)
        else:
            arrived = {name: mover.move(tensor, name=name, stage=stage) for name, tensor in tensors.items()}
        mover.settle(arrived)
    except CorruptionError as error:
        return arrived, error
    return arrived, None


def same_bytes(arrived: Tensor, source: Tensor) -> bool:
    """Whether a tensor on the device, read back, has the bytes of its host source."""
    expected = torch.empty(byte_count(source), dtype=torch.uint8)
    gather(source, 0, expected.numel(), expected)  # through an aligned view, as packing does
    return arrived.shape == source.shape and torch.equal(as_bytes(arrived.cpu()), expected)


def inject(device: torch.device, *, faults: int, seed: int, on_fault: Callable[[], object]) -> InjectedFaults:
    """Inject faults into transfers until `faults` of them, evenly over `CELLS`, have changed bytes."""
    found, samples = InjectedFaults(), Samples(seed)
    with ExitStack() as stack:
        movers: dict[tuple[str, bool], Mover] = {}
        for number, (kind, persist, stage) in enumerate(CELLS):
            key = (kind, persist)
            if key not in movers:
                spec = FaultSpec(kind=kind, persist=persist, seed=seed, tensor=TARGET)
                movers[key] = stack.enter_context(_mover(device, spec))
                found.tallies[key] = Tally()
            for _ in range(faults // len(CELLS) + (number < faults % len(CELLS))):
                target = _one_fault(movers[key], kind, stage, samples, found.tallies[key])
                found.stages[stage] += 1
                found.dtypes[str(target.dtype).removeprefix("torch.")] += 1
                found.sizes[byte_count(target)] += 1
                on_fault()
    return found


def _one_fault(mover: Mover, kind: str, stage: str, samples: Samples, tally: Tally) -> Tensor:
    """Send until a fault has changed bytes: for example, a swap in a tensor of one word does not."""
    before = tally.injected
    while tally.injected == before:
        target = samples.tensor()
        if kind == "after":
            _memory_fault(mover, target, tally)
        else:
            _transfer_fault(mover, stage, samples.sent(stage, target), tally)
    return target


def _injected(mover: Mover) -> int:
    return int((mover.fault_injection() or {})["injected"])


def _incidents(mover: Mover) -> list[dict[str, Any]]:
    assert isinstance(mover.report, IncidentLog)
    return mover.report.take()


def _transfer_fault(mover: Mover, stage: str, tensors: dict[str, Tensor], tally: Tally) -> None:
    before = _injected(mover)
    arrived, error = _send(mover, stage, tensors)
    stopped, rows, changed = error is not None, _incidents(mover), _injected(mover) > before
    named = any(row["tensor"] == TARGET for row in rows)
    wrong = [name for name, tensor in arrived.items() if not same_bytes(tensor, tensors[name])]
    verified = any(mover.was_verified(tensor) for tensor in arrived.values())
    tally.injected += changed
    tally.detected += changed and named
    tally.stopped += changed and named and stopped
    tally.recovered += changed and named and not stopped and not wrong
    tally.missed += (changed and not named) or (verified and (stopped or bool(wrong)))
    tally.false_alarms += sum(row["tensor"] != TARGET or not changed for row in rows)


def _memory_fault(mover: Mover, target: Tensor, tally: Tally) -> None:
    """A weight that is corrupted after its verdict is found by another digest, as the sentinel does."""
    before = _injected(mover)
    weight = mover.move(target, name=TARGET)
    changed = _injected(mover) > before
    differs = digest(weight) != mover.digest_of(weight)
    tally.injected += changed
    tally.detected += changed and differs
    tally.missed += changed and not differs
    tally.false_alarms += differs and not changed
    tally.false_alarms += len(_incidents(mover))


def send_clean(
    device: torch.device, *, transfers: int, seed: int, on_transfer: Callable[[], object], mover: Mover | None = None
) -> CleanTransfers:
    """Send tensors of every dtype and size, through all stages in turn, and compare what arrived byte by byte.

    ``mover``: to use instead of a new one; its report must be an `IncidentLog`.
    """
    found, samples, rng = CleanTransfers(), Samples(seed + 1), random.Random(seed)
    with mover or _mover(device) as sender:
        for number in range(transfers):
            # Most are small: the number of verdicts limits the rate of false alarms, not their bytes.
            largest = SIZES[-1] if rng.randrange(_LARGE_EVERY) == 0 else _ORDINARY_BYTES
            stage = STAGES[number % len(STAGES)]
            tensors = samples.sent(stage, samples.tensor(largest=largest))
            arrived, error = _send(sender, stage, tensors)
            found.example = found.example or (str(error) if error else None)
            for row in _incidents(sender):
                # "late": it was correct when read again, which may be a false verdict as well.
                found.false_alarms += row["kind"] == "late"
                found.corrupted += row["kind"] != "late"
                found.example = found.example or f"{row['stage']} tensor: {row['kind']}, {row['outcome']}"
            found.missed += sum(not same_bytes(tensor, tensors[name]) for name, tensor in arrived.items())
            found.transfers += 1
            on_transfer()
    return found
