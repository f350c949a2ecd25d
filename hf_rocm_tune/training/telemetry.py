"""What stands beside the loss in every log: the card's temperature, power and throttling, speed, integrity counters.

**A thread of its own looks at the card**, every ``every_s`` seconds, and not the training between its steps. At the end
of a step the card has just come to rest: transformers reads the loss of every micro-batch to filter NaN
(``logging_nan_inf_filter``), so what is looked at there is always the lull and never the load. And a driver may hang
inside a read of sysfs: then this thread hangs, and the training does not. A look is a dozen small reads, about 0.1 ms.
Not seen is what begins and ends between two looks. Only AMD cards have sensors here (sysfs); on a CUDA card torch tells
of its own memory; on the CPU there is nothing to tell. A figure that could not be read is left out, never 0.

**Thresholds** (general knowledge, lower confidence): RDNA3 regulates itself on the hotspot up to about 110 degrees
Celsius, so 105 is worth a warning; and so are clocks held down by temperature. Held down by the power or the current
limit is usual under full load: that is counted, and said once.

**Logs.** Every service that ``--report_to`` names is a callback of transformers' own and gets one dict for each
training log; what is added to it reaches all of them and the trainer's history. Beside ``gpu/...``:

    integrity/verified_gb     10^9 bytes that were verified on their way to the device, so far
    integrity/mismatches      wrong bytes found so far: in transfers, casts, gradients, frozen weights, replicas, files
    integrity/recovered       of these, made right
    speed/seconds_per_step    mean since the last log, evaluation and saving not counted
    speed/tokens_per_second   likewise; of all ranks, where the trainer counts tokens (TRL's ``num_tokens``)

The counters are those of the process that logs, rank 0; the report at the end adds up all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.machine.gpus import read_sensors, throttle_causes
from hf_rocm_tune.machine.sysfs import LiveTree, Reading, Tree

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import TransferReport

HOTSPOT_WARN_C = 105.0
# Below this a hot episode is over: without the gap a card at the threshold would be a new episode every second.
HOTSPOT_CALM_C = 95.0
_STOP_S = 1.0  # a look that hangs is not waited for
_GIB = 1 << 30
_HELD_DOWN = "held_down_"
_LIMITS = {
    "temperature": (
        frozenset({"temperature"}),
        "warning: the card holds its clocks down because of its temperature ({source}): training is slower than it "
        "could be; see to its fans and the air in the case",
    ),
    "power": (
        frozenset({"power", "current"}),
        "note: the card holds its clocks down by its power or current limit ({source}): usual under full load, "
        "nothing to do (general knowledge, lower confidence)",
    ),
    "other": (
        frozenset({"other"}),
        "warning: the card holds its clocks down, and its driver's reason is none that is known here ({source}): "
        "training may be slower than it could be",
    ),
}
# Field of the sensors' record: name of the metric, and the factor to its unit.
_METRICS = {
    "edge_c": ("edge_c", 1.0),
    "hotspot_c": ("hotspot_c", 1.0),
    "memory_c": ("memory_c", 1.0),
    "power_w": ("power_w", 1.0),
    "utilisation": ("utilisation_percent", 100.0),
    "vram_used_bytes": ("vram_used_gib", 1 / _GIB),
}


# ---- one look -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The sensors at one moment.

    Attributes:
        metrics: by name, with the unit in the name: ``hotspot_c`` and the like in degrees Celsius, ``power_w``,
            ``utilisation_percent``, ``vram_used_gib`` (2^30 bytes, of all processes).
        limits: what holds the clocks down, of ``power``, ``current``, ``temperature`` and ``other``; None where that
            could not be read. The driver's bit for the hotspot does not count.
        missing: metric to the reason why it is not in ``metrics``.
    """

    metrics: Mapping[str, float]
    limits: frozenset[str] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def sample(tree: Tree, address: str) -> Sample:
    """Read the sensors of the card at a PCI address, ``domain:bus:device.function``."""
    sensors = read_sensors(tree, address)
    metrics: dict[str, float] = {}
    missing: dict[str, str] = {}
    for field_name, (name, factor) in _METRICS.items():
        reading: Reading[float] = getattr(sensors, field_name)
        if reading.value is None:
            missing[name] = reading.reason
        else:
            metrics[name] = reading.value * factor
    held = sensors.throttle
    if held.value is None:
        missing["limits"] = held.reason
    limits = None if held.value is None else frozenset(throttle_causes(held.value))
    return Sample(metrics=metrics, limits=limits, missing=missing)


def card_of(device: torch.device) -> tuple[str | None, str]:
    """PCI address of the card behind ``device`` whose sensors can be read, or None and the reason."""
    if device.type != "cuda":
        return None, f"training on {device.type}: there are no sensors to read"
    if torch.version.hip is None:
        return None, "not an AMD card: its sensors are not read, only torch's own memory"
    address = pci_address(torch.cuda.current_device() if device.index is None else device.index)
    return address, "" if address else "this torch does not tell the PCI address of its devices"


def torch_memory(device: torch.device) -> dict[str, float]:
    """Memory that torch's allocator holds in this process, in GiB: now, and the peak since the run began."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {
        "torch_allocated_gib": "allocated_bytes.all.current",
        "torch_reserved_gib": "reserved_bytes.all.current",
        "torch_peak_allocated_gib": "allocated_bytes.all.peak",
        "torch_peak_reserved_gib": "reserved_bytes.all.peak",
    }
    # Empty before the first allocation, and under a backend that keeps no counts.
    return {ours: stats[theirs] / _GIB for ours, theirs in names.items() if theirs in stats}


# ---- all looks of a run -------------------------------------------------------------------------------------


class _Series:
    """A metric's values: mean and greatest."""

    def __init__(self) -> None:
        self.count, self.total, self.greatest = 0, 0.0, float("-inf")

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.greatest = max(self.greatest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count


class _Alarm:
    """Counts the episodes of one cause; only the first is worth a line."""

    def __init__(self) -> None:
        self.episodes = 0
        self._on = False

    def update(self, *, begins: bool, ends: bool) -> bool:
        """Whether this is the beginning of the first episode."""
        if self._on:
            self._on = not ends
            return False
        self._on = begins
        self.episodes += begins
        return begins and self.episodes == 1


class Telemetry:
    """Gathers what one card says. ``start`` and ``stop`` may be called again and again; all else adds up.

    Args:
        read: reads the card's sensors; None where there are none to read.
        source: what ``read`` reads, or why there is nothing to read.
        every_s: seconds between two looks.
        memory: reads torch's own memory, by metric.
        tell: takes each line for the user; called from the thread.
    """

    def __init__(
        self,
        read: Callable[[], Sample] | None,
        *,
        source: str,
        every_s: float,
        memory: Callable[[], dict[str, float]] = dict,
        tell: Callable[[str], None],
    ) -> None:
        self._read = read
        self._source = source
        self._every_s = every_s
        self._memory = memory
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # over all below
        self._seconds = 0.0
        self._looks = 0
        self._run: dict[str, _Series] = {}
        self._recent: dict[str, _Series] = {}
        self._alarms = {name: _Alarm() for name in ("hotspot", *_LIMITS)}
        self._missing: dict[str, str] = {}
        self._latest: Mapping[str, float] = {}

    def start(self) -> None:
        """Begin to look, unless that goes on already or there is nothing to look at."""
        if self._read is None or self._thread is not None:
            return
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stopped,), name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._thread = None

    def _watch(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            self.look()
            stopped.wait(self._every_s)

    def look(self) -> None:
        """Read the sensors once."""
        if self._read is None:
            return
        began = time.perf_counter()
        seen = self._read()
        values = dict(seen.metrics)
        if seen.limits is not None:
            for name, (causes, _) in _LIMITS.items():
                values[f"{_HELD_DOWN}{name}"] = float(not causes.isdisjoint(seen.limits))
        with self._lock:
            self._looks += 1
            self._missing = dict(seen.missing)
            self._latest = seen.metrics
            for series in (self._run, self._recent):
                for name, value in values.items():
                    series.setdefault(name, _Series()).add(value)
            self._seconds += time.perf_counter() - began
            lines = self._judge(seen)
        for line in lines:
            self._tell(line)

    def latest(self) -> dict[str, float]:
        """Metrics by name: the last look at the card, and torch's memory now."""
        return {**self._latest, **self._memory()}

    def since_last_log(self) -> dict[str, float]:
        """Metrics by name for one training log: means since the last one, the greatest hotspot, torch's memory now.

        Nothing of the card where there was no look since then.
        """
        with self._lock:
            recent, self._recent = self._recent, {}
        found = {f"gpu/{name}": round(one.mean, 3) for name, one in recent.items() if name != f"{_HELD_DOWN}other"}
        if "hotspot_c" in recent:
            found["gpu/hotspot_max_c"] = round(recent["hotspot_c"].greatest, 3)
        return found | {f"gpu/{name}": round(value, 3) for name, value in self._memory().items() if "peak" not in name}

    def summary(self) -> dict[str, Any]:
        """What the report says: means and greatest values of the run, episodes, and why a figure is missing.

        ``held_down`` are shares of the looks; ``seconds`` is what all looks together took.
        """
        with self._lock:
            found: dict[str, Any] = {"source": self._source, "looks": self._looks, "seconds": round(self._seconds, 4)}
            shares: dict[str, float] = {}
            for name, one in self._run.items():
                if name.startswith(_HELD_DOWN):
                    shares[name.removeprefix(_HELD_DOWN)] = round(one.mean, 4)
                else:
                    found[name] = {"mean": round(one.mean, 3), "max": round(one.greatest, 3)}
            if shares:
                found["held_down"] = shares
            if self._looks:
                found["episodes"] = {name: alarm.episodes for name, alarm in self._alarms.items()}
            if missing := {name: why for name, why in self._missing.items() if name not in self._run}:
                found["missing"] = missing
        return found | {name: round(value, 3) for name, value in self._memory().items() if "peak" in name}

    def _judge(self, seen: Sample) -> list[str]:
        """Count episodes; the lines that have to be said."""
        lines = []
        hotspot = seen.metrics.get("hotspot_c")
        if hotspot is not None and self._alarms["hotspot"].update(
            begins=hotspot >= HOTSPOT_WARN_C, ends=hotspot < HOTSPOT_CALM_C
        ):
            lines.append(
                f"warning: the card's hotspot is at {hotspot:.0f} degrees Celsius ({self._source}); RDNA3 slows itself "
                "down up to about 110 (general knowledge, lower confidence): see to its fans and the air in the case, "
                "or lower its power limit"
            )
        for name, (causes, what) in _LIMITS.items() if seen.limits is not None else ():
            met = not causes.isdisjoint(seen.limits or ())
            if self._alarms[name].update(begins=met, ends=not met):
                lines.append(what.format(source=self._source))
        return lines


def of_device(
    device: torch.device,
    *,
    every_s: float,
    tell: Callable[[str], None],
    tree: Tree | None = None,
) -> Telemetry:
    """Telemetry of the very card that is trained on, found by its PCI address.

    Args:
        device: the device of this process.
        every_s, tell: see :class:`Telemetry`.
        tree: whose ``sys`` is read; this machine's unless given.
    """
    address, reason = card_of(device)
    files = tree or LiveTree()
    return Telemetry(
        None if address is None else lambda: sample(files, address),
        source=reason if address is None else f"amdgpu, {address}",
        every_s=every_s,
        memory=lambda: torch_memory(device),
        tell=tell,
    )


# ---- logs ---------------------------------------------------------------------------------------------------


def integrity_counters(report: Mapping[str, Any]) -> dict[str, float]:
    """The three ``integrity/`` metrics of `TransferReport.to_dict`."""
    sections = [section for section in report.values() if isinstance(section, Mapping)]
    return {
        "integrity/verified_gb": round(sum(one.get("verified_bytes", 0) for one in sections) / 1e9, 6),
        "integrity/mismatches": sum(one["mismatches"] for one in sections if "mismatches" in one),
        "integrity/recovered": sum(one["recovered"] for one in sections if "mismatches" in one and "recovered" in one),
    }


class MetricsCallback(TrainerCallback):
    """Adds the metrics of the module's description to each training log.

    It has to come before the callbacks of the services, which see only what a callback before them has added.

    Args:
        report: whose counters are logged.
        telemetry: of the card, looked at while a training lasts; a training that ends in an error leaves its thread to
            the end of the process. None for none.
        memory: reads the allocator's figures, by metric.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        report: TransferReport,
        telemetry: Telemetry | None = None,
        memory: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._report = report
        self._telemetry = telemetry
        self._memory = memory
        self._clock = clock
        self._seconds, self._steps, self._tokens = 0.0, 0, 0.0
        self._began: float | None = None
        self._ended: float | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Nothing has been timed yet."""
        self._seconds, self._steps, self._began, self._ended = 0.0, 0, None, None
        if self._telemetry is not None:
            self._telemetry.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Looks at the card no more."""
        if self._telemetry is not None:
            self._telemetry.stop()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Fetching the batches since the last step counts, unless something else was done meanwhile."""
        self._began = self._clock() if self._ended is None else self._ended
        self._ended = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One step more."""
        self._ended = self._clock()
        if self._began is not None:
            self._seconds += self._ended - self._began
            self._steps += 1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The time since the last step was no training."""
        self._ended = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Likewise."""
        self._ended = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Adds to training logs only: an evaluation at the same step would say the same again."""
        if logs is None or "loss" not in logs:
            return
        found = {**self._memory(), **integrity_counters(self._report.to_dict()), **self._pace(logs.get("num_tokens"))}
        if self._telemetry is not None:
            found |= self._telemetry.since_last_log()
        logs.update(found)
        state.log_history[-1].update(found)  # the trainer has entered a copy there

    def _pace(self, tokens: float | None) -> dict[str, float]:
        """Speed since the last log; nothing where no whole step was timed."""
        seconds, steps = self._seconds, self._steps
        new = 0.0 if tokens is None else tokens - self._tokens
        self._seconds, self._steps, self._tokens = 0.0, 0, tokens or 0.0
        if not steps or seconds <= 0:
            return {}
        rate = {"speed/tokens_per_second": round(new / seconds, 3)} if new > 0 else {}
        return {"speed/seconds_per_step": round(seconds / steps, 6), **rate}
