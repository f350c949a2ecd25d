"""``hf-rocm-tune drill``: faults of every kind put into real transfers on the user's own device, and what was found.

The transfers go through the same mover, ring, digests and ladder as those of a run; only the copies are harmed, at the
backend. Whether what arrived is right is judged apart from the digests, byte by byte.

Not covered: the libraries above the mover. Real runs take the same faults through ``HF_ROCM_TUNE_FAULT``.
"""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_rocm_tune.doctor.casts import Casts, compare_casts
from hf_rocm_tune.doctor.clean import CleanTransfers, send_clean
from hf_rocm_tune.doctor.cost import Cost, measure
from hf_rocm_tune.doctor.injected import InjectedFaults, inject
from hf_rocm_tune.doctor.progress import Progress
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.canaries import Canaries, CanaryFault, CanarySettings, watch

_CANARY_CYCLES = 200
_REHEARSED_CYCLE = 2


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
        for name in ("faults", "clean"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}; give a whole number from 1 on")
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}; give a whole number from 0 on")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no accelerator; drill on the CPU with --device cpu")

    @property
    def where(self) -> torch.device:
        """The device that is drilled."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


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
        return {
            "schema": 1,
            "settings": asdict(self.settings),
            "device": self.device,
            "torch": torch.__version__,
            "failures": self.failures(),
            "faults": [
                {"kind": kind, "persist": persist, **asdict(tally)}
                for (kind, persist), tally in injected.tallies.items()
            ],
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
    device, begun = settings.where, time.perf_counter()
    with Progress("faults", settings.faults) as bar:
        injected = inject(device, faults=settings.faults, seed=settings.seed, on_fault=bar.advance)
    with Progress("clean transfers", settings.clean) as bar:
        clean = send_clean(device, transfers=settings.clean, seed=settings.seed, on_transfer=bar.advance)
    cost = measure(device)
    casts = compare_casts(device, seed=settings.seed) if settings.full else None
    canaries = watch_canaries(device, settings.seed) if settings.full else None
    return Drill(
        settings=settings,
        device=_describe(device),
        injected=injected,
        clean=clean,
        cost=cost,
        casts=casts,
        canaries=canaries,
        seconds=time.perf_counter() - begun,
    )


def watch_canaries(device: torch.device, seed: int) -> CanaryWatch:
    """Rehearse on small canaries with a range zeroed on purpose, then watch untouched ones of the device's size."""

    def harm(cycle: int, canaries: Canaries) -> None:
        if cycle == _REHEARSED_CYCLE:
            canaries.blocks[0][64:128] = 0

    rehearsal = watch(device, CanarySettings(cycles=_REHEARSED_CYCLE + 1, seed=seed), on_cycle=harm)
    rehearsed = rehearsal is not None and (rehearsal.cycle, rehearsal.kind) == (_REHEARSED_CYCLE, "zeros")
    settings = CanarySettings.for_device(device, cycles=_CANARY_CYCLES, seed=seed)
    with Progress("canary cycles", settings.cycles) as bar:
        fault = watch(device, settings, on_cycle=lambda *_: bar.advance())
    return CanaryWatch(settings=settings, rehearsed=rehearsed, fault=fault)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{'hip' if torch.version.hip else 'cuda'} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({platform.processor() or platform.machine()})"
