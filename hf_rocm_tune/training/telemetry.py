"""The card's temperature, power, memory, load and throttling over a run: gathered, warned of, and summed up.

**A thread of its own looks**, every ``every_s`` seconds, and not the training between its steps, for two reasons. At
the end of a step the card has just come to rest: transformers reads the loss of every micro-batch to filter NaN
(``logging_nan_inf_filter``), which waits for all that was queued, so what is looked at there is always the lull and
never the load. And a driver may hang inside a read of sysfs: then this thread hangs, and the training does not. A look
is a dozen small reads, about 0.1 ms of this process's time in a second. Not seen is what begins and ends between two
looks; it is counted by none of the driver's files.

**Thresholds** (general knowledge, lower confidence): RDNA3 regulates itself on the hotspot up to
about 110 degrees Celsius, so 105 is worth a word; and so are clocks held down by temperature. Held down by the power
or the current limit is usual under full load: that is counted, and said once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.training.telemetry_source import Sample

HOTSPOT_WARN_C = 105.0
# Below this a hot episode is over: without the gap a card at the threshold would be a new episode every second.
HOTSPOT_CALM_C = 95.0
# A look that hangs is not waited for.
_STOP_S = 1.0


@dataclass
class _Series:
    """A metric's values: mean and greatest."""

    count: int = 0
    total: float = 0.0
    greatest: float = float("-inf")

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
        values = {**seen.metrics, **_held_down(seen.limits)}
        with self._lock:
            self._looks += 1
            self._missing = dict(seen.missing)
            for series in (self._run, self._recent):
                for name, value in values.items():
                    series.setdefault(name, _Series()).add(value)
            self._seconds += time.perf_counter() - began
            lines = self._judge(seen)
        for line in lines:
            self._tell(line)

    def since_last_log(self) -> dict[str, float]:
        """Metrics by name for one training log: means since the last one, the greatest hotspot, torch's memory now.

        Nothing of the card where there was no look since then.
        """
        with self._lock:
            recent, self._recent = self._recent, {}
        found = {f"gpu/{name}": round(one.mean, 3) for name, one in recent.items() if name != _NOT_LOGGED}
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
        if seen.limits is None:
            return lines
        for name, (causes, what) in _LIMITS.items():
            met = not causes.isdisjoint(seen.limits)
            if self._alarms[name].update(begins=met, ends=not met):
                lines.append(what.format(source=self._source))
        return lines


_HELD_DOWN = "held_down_"
_NOT_LOGGED = f"{_HELD_DOWN}other"
_LIMITS = {
    "temperature": (
        frozenset({"temperature"}),
        "warning: the card holds its clocks down because of its temperature ({source}): training is slower than it "
        "could be; see to its fans and the air in the case",
    ),
    "power": (
        frozenset({"power", "current"}),
        "note: the card holds its clocks down by its power or current limit ({source}): usual under full load, "
        "nothing is to be done (general knowledge, lower confidence)",
    ),
    "other": (
        frozenset({"other"}),
        "warning: the card holds its clocks down, and its driver's reason is none that is known here ({source}): "
        "training may be slower than it could be",
    ),
}


def _held_down(limits: frozenset[str] | None) -> dict[str, float]:
    """1 for each kind of limit that holds the clocks down, 0 for the others; nothing where that is not known."""
    if limits is None:
        return {}
    return {f"{_HELD_DOWN}{name}": float(not causes.isdisjoint(limits)) for name, (causes, _) in _LIMITS.items()}
