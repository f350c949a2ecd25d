"""What is drawn of a run: its panels, each with its curves, from the log history.

A panel is drawn as PNG (light ground, so that it is readable on a page of either theme) or as SVG for the report's
page, where the page's own colours take the place of the ones here. No text of the user's goes into a picture.

Values that are not finite are gaps. Long logs are drawn as they are, thin, with their running mean over them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_rocm_tune.publish.history import Row, series
from hf_rocm_tune.publish.history_values import items, number, text

_EVAL_LOSS = re.compile(r"eval(?:_(?P<name>.+))?_loss")
_LOG_SCALE_FROM = 200.0
_MEAN_FROM = 100

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel.

    Attributes:
        label: what it is called.
        points: (step, value) in the order of the steps.
        marked: few enough values that each is worth a mark.
        exact: what was set, not measured, so its mean says nothing.
    """

    label: str
    points: Sequence[Point]
    marked: bool = False
    exact: bool = False

    @property
    def last(self) -> float | None:
        """The newest value."""
        values = [value for _, value in self.points if not math.isnan(value)]
        return values[-1] if values else None

    def running_mean(self) -> list[Point]:
        """The mean over about a fiftieth of the curve around each point; empty for a short or exact curve."""
        if self.exact or len(self.points) < _MEAN_FROM:
            return []
        half = max(2, len(self.points) // 100)
        sums, counts = [0.0], [0]
        for _, value in self.points:
            gap = math.isnan(value)
            sums.append(sums[-1] + (0.0 if gap else value))
            counts.append(counts[-1] + (not gap))
        means = []
        for at, (step, _) in enumerate(self.points):
            low, high = max(0, at - half), min(len(self.points), at + half + 1)
            number_of = counts[high] - counts[low]
            means.append((step, (sums[high] - sums[low]) / number_of if number_of else math.nan))
        return means


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture.

    Attributes:
        name: of its file, without ending.
        title: what it shows.
        unit: on the vertical axis.
        curves: at least one, none of them empty.
        from_zero: an amount, whose axis begins at 0 so that small changes look small.
        marks: steps that are marked on the horizontal axis, with what happened there.
    """

    name: str
    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def logarithmic(self) -> bool:
        """Whether measured values spread so far that a linear axis would show only the greatest."""
        measured = [] if self.from_zero else [curve for curve in self.curves if not curve.exact]
        values = sorted(v for curve in measured for _, v in curve.points if not math.isnan(v))
        return bool(values) and values[0] > 0 and values[-1] / values[0] >= _LOG_SCALE_FROM

    def in_words(self) -> str:
        """For those who do not see the picture."""
        newest = [f"{one.label} {one.last:.4g}" for one in self.curves if one.last is not None]
        first, final = self.curves[0].points[0][0], self.curves[0].points[-1][0]
        return f"{self.title} ({self.unit}) from step {first:g} to {final:g}; newest: {', '.join(newest)}"


_PANELS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("learning_rate", "Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    ("gradient_norm", "Gradient norm", "norm before clipping", {"grad_norm": "gradient norm"}),
    ("tokens_per_second", "Throughput", "tokens a second", {"speed/tokens_per_second": "tokens a second"}),
    ("step_time", "Time of a step", "seconds", {"speed/seconds_per_step": "seconds a step"}),
    (
        "memory",
        "Memory of the card",
        "GiB",
        {
            "gpu/vram_used_gib": "used on the card",
            "gpu/torch_reserved_gib": "reserved by torch",
            "gpu/torch_allocated_gib": "allocated by torch",
        },
    ),
    (
        "temperature",
        "Temperature",
        "degrees Celsius",
        {"gpu/hotspot_c": "hotspot", "gpu/memory_c": "memory", "gpu/edge_c": "edge"},
    ),
    ("power", "Power of the card", "watts", {"gpu/power_w": "power"}),
)
_FROM_ZERO = frozenset({"tokens_per_second", "step_time", "memory", "power"})


def panels(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first.

    Args:
        rows: the log history.
        report: the transfer report; its incidents are marked under the loss.
    """
    found = [loss] if (loss := loss_panel(rows, report)) is not None else []
    for name, title, unit, metrics in _PANELS:
        exact = name == "learning_rate"
        curves = [
            Curve(label=label, points=points, exact=exact)
            for key, label in metrics.items()
            if (points := _drawn(rows, key))
        ]
        if curves:
            found.append(Panel(name=name, title=title, unit=unit, curves=curves, from_zero=name in _FROM_ZERO))
    return found


def loss_panel(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> Panel | None:
    """Loss of training and of each evaluation; None where none was logged."""
    curves = [Curve(label="training", points=points)] if (points := _drawn(rows, "loss")) else []
    keys = dict.fromkeys(key for row in rows for key in row)
    named = {key: match["name"] for key in keys if (match := _EVAL_LOSS.fullmatch(key))}
    for at, key in enumerate(named, start=1):
        label = "evaluation" if len(named) == 1 else f"evaluation {at}"
        if points := _drawn(rows, key):
            curves.append(Curve(label=label, points=points, marked=True))
    if not curves:
        return None
    return Panel(name="loss", title="Loss", unit="loss", curves=curves, marks=_incident_steps(report or {}))


def _drawn(rows: Sequence[Row], key: str) -> list[Point]:
    """The points of a metric; none unless one of them is finite."""
    points = series(rows, key)
    return points if any(not math.isnan(value) for _, value in points) else []


def _incident_steps(report: Mapping[str, Any]) -> dict[str, list[float]]:
    """Steps with incidents by how they ended."""
    steps: dict[str, list[float]] = {}
    for row in items(report, "incidents"):
        step = number(row, "step")
        if step is not None:
            ended = "recovered" if text(row, "outcome") == "recovered" else "not recovered"
            steps.setdefault(f"incident, {ended}", []).append(step)
    return steps
