"""``hf-rocm-tune drill``: faults of every kind put into real transfers on the user's own device, and what was found.

The transfers go through the same mover, ring, digests and ladder as those of a run; only the copies are harmed, at the
backend. Not covered: the libraries above the mover. Real runs take the same faults through ``HF_ROCM_TUNE_FAULT``.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hf_rocm_tune.doctor.casts import Casts, compare_casts
from hf_rocm_tune.doctor.drill_faults import CleanTransfers, InjectedFaults, Tally, inject, send_clean
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.canaries import Canaries, CanaryFault, CanarySettings, watch
from hf_rocm_tune.transfer import Mover, TransferSettings

_CANARY_CYCLES = 200
_REHEARSED_CYCLE = 2
_ROUNDS = 7
_BATCH_SHAPE = (4, 2048)
_BATCHES_A_ROUND = 10
_COLUMNS = ("injected", "detected", "recovered", "stopped", "missed", "false alarms")
_SKIPPED = "skipped, --full runs them"


@dataclass(frozen=True, kw_only=True)
class DrillSettings:
    """How much is drilled.

    Attributes:
        device: ``cuda`` (HIP and CUDA alike) or ``cpu``; None: the accelerator where torch sees one.
        faults: faults that change bytes, over all kinds, stages, dtypes and sizes.
        clean: transfers without a fault.
        seed: the same seed sends and harms the same.
        full: compare casts and watch canaries as well.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    device: str | None = None
    faults: int = 2000
    clean: int = 5000
    seed: int = 0
    full: bool = False

    def __post_init__(self) -> None:
        for name, least in (("faults", 1), ("clean", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} is {getattr(self, name)}; give a whole number from {least} on")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no accelerator; drill on the CPU with --device cpu")

    @property
    def where(self) -> torch.device:
        """The device that is drilled."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed of one kind of transfer, alone and waited for, in 10^6 bytes a second; medians.

    A run overlaps its batches with compute, so what a step pays is less than this.
    """

    what: str
    verified_mb_per_s: float
    unverified_mb_per_s: float


@dataclass(frozen=True, kw_only=True)
class CanaryWatch:
    """The canaries, and whether a range zeroed on purpose was found first.

    Attributes:
        settings: sizes and cycles.
        rehearsed: whether the fault put in on purpose was found in its cycle.
        fault: the first canary that did not hold, or None.
    """

    settings: CanarySettings
    rehearsed: bool
    fault: CanaryFault | None

    @property
    def good(self) -> bool:
        """Whether the rehearsal was found and the memory held."""
        return self.rehearsed and self.fault is None


@dataclass(frozen=True, kw_only=True)
class Drill:
    """All that was found; `casts` and `canaries` are None where they were skipped."""

    settings: DrillSettings
    device: str
    injected: InjectedFaults
    clean: CleanTransfers
    cost: list[Cost]
    casts: Casts | None
    canaries: CanaryWatch | None
    seconds: float

    def failures(self) -> list[str]:
        """What went wrong, a few words each; empty when everything is as it should be."""
        total = self.injected.total()
        counts = {
            "faults missed": total.missed + self.clean.missed,
            "faults that hit once not recovered": self.injected.unrecovered,
            "false alarms": total.false_alarms + self.clean.false_alarms,
            f"transfers corrupted by this machine itself (the first: {self.clean.example})": self.clean.corrupted,
        }
        if self.casts is not None:
            counts[f"elements cast wrong on the device (the first: {self.casts.example})"] = self.casts.wrong
        found = [f"{count:,} {what}" for what, count in counts.items() if count]
        if self.canaries is not None and not self.canaries.rehearsed:
            found.append("the canary that was harmed on purpose was not found")
        if self.canaries is not None and self.canaries.fault is not None:
            fault = self.canaries.fault
            found.append(
                f"memory that was right has changed: canary {fault.canary} in cycle {fault.cycle}, {fault.kind} from "
                f"byte {fault.first_offset} for {fault.length} bytes (aligned to {fault.alignment})"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        injected = self.injected
        tallies = [{"kind": key[0], "persist": key[1], **asdict(one)} for key, one in injected.tallies.items()]
        return {
            "schema": 1,
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
            "cost": [asdict(row) for row in self.cost],
            "casts": asdict(self.casts) if self.casts else None,
            "canaries": asdict(self.canaries) if self.canaries else None,
            "seconds": round(self.seconds, 1),
        }


def run(settings: DrillSettings) -> Drill:
    """Drill a device. Shows a bar on a terminal; writes nothing."""
    device, seed, begun = settings.where, settings.seed, time.perf_counter()
    with _bar("faults", settings.faults) as advance:
        injected = inject(device, faults=settings.faults, seed=seed, on_fault=advance)
    with _bar("clean transfers", settings.clean) as advance:
        clean = send_clean(device, transfers=settings.clean, seed=seed, on_transfer=advance)
    name = f"cpu ({platform.processor() or platform.machine()})"
    if device.type == "cuda":
        name = f"{'hip' if torch.version.hip else 'cuda'} ({torch.cuda.get_device_name(device)})"
    return Drill(
        settings=settings,
        device=name,
        injected=injected,
        clean=clean,
        cost=measure_cost(device),
        casts=compare_casts(device, seed=seed) if settings.full else None,
        canaries=watch_canaries(device, seed) if settings.full else None,
        seconds=time.perf_counter() - begun,
    )


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal's stderr that is wiped at the end; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.advance, progress.add_task(what, total=total))


def watch_canaries(device: torch.device, seed: int) -> CanaryWatch:
    """Rehearse on small canaries with a range zeroed on purpose, then watch untouched ones of the device's size."""

    def harm(cycle: int, canaries: Canaries) -> None:
        if cycle == _REHEARSED_CYCLE:
            canaries.blocks[0][64:128] = 0

    rehearsal = watch(device, CanarySettings(cycles=_REHEARSED_CYCLE + 1, seed=seed), on_cycle=harm)
    rehearsed = rehearsal is not None and (rehearsal.cycle, rehearsal.kind) == (_REHEARSED_CYCLE, "zeros")
    settings = CanarySettings.for_device(device, cycles=_CANARY_CYCLES, seed=seed)
    with _bar("canary cycles", settings.cycles) as advance:

        def on_cycle(cycle: int, canaries: Canaries) -> None:
            advance()

        fault = watch(device, settings, on_cycle=on_cycle)
    return CanaryWatch(settings=settings, rehearsed=rehearsed, fault=fault)


def measure_cost(device: torch.device) -> list[Cost]:
    """What verification costs: a large weight and a batch, sent with and without it in turn, with default settings."""
    mib = 64 if device.type == "cuda" else 16
    weight = torch.randn(mib << 18)
    batch = {name: torch.randint(0, 32_000, _BATCH_SHAPE) for name in ("input_ids", "labels", "attention_mask")}
    batch_bytes = sum(tensor.nbytes for tensor in batch.values())

    def send_weight(mover: Mover) -> object:
        return mover.move(weight, name="weight")

    def send_batches(mover: Mover) -> None:
        for _ in range(_BATCHES_A_ROUND):
            mover.settle(mover.begin(batch))

    return [
        _compare(device, f"one weight of {mib} MiB", weight.nbytes, send_weight),
        _compare(device, f"batches of {batch_bytes >> 10} KiB", batch_bytes * _BATCHES_A_ROUND, send_batches),
    ]


def _compare(device: torch.device, what: str, nbytes: int, send: Callable[[Mover], object]) -> Cost:
    speeds: dict[str, list[float]] = {"full": [], "off": []}
    full = Mover(device, settings=TransferSettings(verify="full"))
    off = Mover(device, settings=TransferSettings(verify="off"))
    with full, off:
        for _ in range(_ROUNDS + 1):
            for mover in (full, off):
                begun = time.perf_counter()
                arrived = send(mover)
                if device.type == "cuda":
                    # A transfer that is not verified is not waited for either.
                    torch.cuda.current_stream(device).synchronize()
                speeds[mover.settings.verify].append(nbytes / (time.perf_counter() - begun) / 1e6)
                del arrived
    # The first round allocates, and is left out.
    median = {verify: round(statistics.median(values[1:]), 1) for verify, values in speeds.items()}
    return Cost(what=what, verified_mb_per_s=median["full"], unverified_mb_per_s=median["off"])


def table(drill: Drill) -> str:
    """The table of faults, and a line each for clean transfers, cost, casts, canaries and the verdict."""
    lines = [f"drill on {drill.device}, seed {drill.settings.seed}, {drill.seconds:.0f} s", ""]
    lines.append(f"{'fault':<11} {'hits':<6} " + " ".join(f"{column:>{max(len(column), 9)}}" for column in _COLUMNS))
    for (kind, persist), tally in drill.injected.tallies.items():
        lines.append(_row(kind, "always" if persist else "once", tally))
    clean, sizes = drill.clean, drill.injected.sizes
    lines += [
        _row("all", "", drill.injected.total()),
        "",
        f"spread over  {len(drill.injected.stages)} stages, {len(drill.injected.dtypes)} dtypes, "
        f"{min(sizes, default=0):,} to {max(sizes, default=0):,} bytes; 'after' harms memory after the verdict, and is "
        "found by digesting it again",
        f"clean        {clean.transfers:,} transfers: {clean.false_alarms} false alarms, {clean.corrupted} corrupted, "
        f"{clean.missed} missed",
    ]
    for row in drill.cost:
        lines.append(
            f"cost         {row.what}, nothing overlapped: {row.verified_mb_per_s:,.0f} MB/s verified, "
            f"{row.unverified_mb_per_s:,.0f} MB/s not"
        )
    casts, watched, failures = drill.casts, drill.canaries, drill.failures()
    said = _SKIPPED
    if casts is not None:
        said = f"{casts.elements:,} elements in {casts.compared} casts against the CPU's: {casts.wrong:,} differ"
    lines.append(f"casts        {said}")
    said = _SKIPPED
    if watched is not None:
        sizing = watched.settings
        said = (
            f"{sizing.canaries} of {sizing.canary_bytes >> 20} MiB beside up to {sizing.churn_bytes >> 20:,} MiB that "
            f"come and go, {sizing.cycles} cycles: {'held' if watched.fault is None else 'one changed'}; the one "
            f"harmed on purpose was {'found' if watched.rehearsed else 'MISSED'}"
        )
    lines.append(f"canaries     {said}")
    lines.append(f"verdict      {'; '.join(failures) if failures else 'every fault was found, and nothing else'}")
    return "\n".join(lines)


def _row(kind: str, hits: str, tally: Tally) -> str:
    counts = [f"{getattr(tally, column.replace(' ', '_')):>{max(len(column), 9)},}" for column in _COLUMNS]
    if kind == "after":
        counts[2:4] = [f"{'-':>9}"] * 2  # what happens next is the sentinels' matter
    return f"{kind:<11} {hits:<6} " + " ".join(counts)
