"""Curves of a run: its panels from the log history, drawn with matplotlib, which is imported by the first picture.

A panel is drawn as PNG (light ground, so that it is readable on a page of either theme) or as SVG for the report's
page, where the page's own colours take the place of the ones here. No text of the user's goes into a picture. Values
that are not finite are gaps. Long logs are drawn as they are, thin, with their running mean over them.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import create_staging
from hf_rocm_tune.publish.history import Row, items, number, series, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        steps, values = np.array(self.points).T
        window = np.ones(2 * max(2, len(values) // 100) + 1)
        gaps = np.isnan(values)
        sums = np.convolve(np.where(gaps, 0.0, values), window, "same")
        counts = np.convolve(~gaps, window, "same")
        means = np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)
        return list(zip(steps.tolist(), means.tolist(), strict=True))


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


# Name, title, unit, and the curves by metric.
_PANELS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("learning_rate", "Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    ("gradient_norm", "Gradient norm", "norm before clipping", {"grad_norm": "gradient norm"}),
    ("tokens_per_second", "Throughput", "tokens a second", {"speed/tokens_per_second": "tokens a second"}),
    ("step_time", "Time of a step", "seconds", {"speed/seconds_per_step": "seconds a step"}),
    ("memory", "Memory of the card", "GiB", {"gpu/vram_used_gib": "used on the card"}
     | {f"gpu/torch_{what}_gib": f"{what} by torch" for what in ("reserved", "allocated")}),
    ("temperature", "Temperature", "degrees Celsius", {f"gpu/{at}_c": at for at in ("hotspot", "memory", "edge")}),
    ("power", "Power of the card", "watts", {"gpu/power_w": "power"}),
)  # fmt: skip
_FROM_ZERO = frozenset({"tokens_per_second", "step_time", "memory", "power"})


def panels(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first."""
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


# ---- drawing --------------------------------------------------------------------------------------------------------

# Told apart by people with any kind of colour vision (Wong, Nature Methods 8, 441, 2011), darkened for a white ground.
SERIES = ("#2166ac", "#c75b12", "#1b7f5f", "#8e4585", "#6b6b00")
INK, MUTED, GRID, GROUND, ALARM = "#1f2328", "#59636e", "#d8dee4", "#ffffff", "#b3261e"

_PNG_INCHES, _SVG_INCHES = (7.2, 4.0), (4.8, 3.0)
_PNG_DPI = 130


def write_png(panel: Panel, path: Path) -> None:
    """Draw a panel into a PNG file, 936 by 520 pixels; a reader sees the old file or the new one.

    Raises:
        UsageError: matplotlib is not there or does not start.
        OSError: the file cannot be written.
    """
    drawn = io.BytesIO()
    with _our_style(**{"font.size": 10.5}):
        figure = _figure(panel, _PNG_INCHES, legend_columns=3)
        # No version and no date: the same curves give the same bytes.
        figure.savefig(drawn, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    staging = create_staging(path)  # whose name the next start of a run knows and removes, should this one be killed
    try:
        (staging / path.name).write_bytes(drawn.getvalue())
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def svg(panel: Panel) -> str:
    """A panel as an ``<svg>`` element, whose colours are variables of the page (``--series-1``, ``--ink`` ...).

    Raises:
        UsageError: matplotlib is not there or does not start.
    """
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Text stays text: it takes the page's typeface, and can be searched. The salt keeps the panels' ids apart.
    with _our_style(**{"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": panel.name}):
        figure = _figure(panel, _SVG_INCHES, legend_columns=2)
        figure.savefig(drawn, format="svg", metadata=nothing, transparent=True)
    return _for_the_page(drawn.getvalue())


def _for_the_page(text: str) -> str:
    """matplotlib's file as an element: no declarations, no fixed size, colours from the page."""
    element = text[text.index("<svg") :]
    element = re.sub(r"<(metadata|style)\b.*?</\1>", "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element)  # the same in every picture of the page
    element = re.sub(r"font-family: [^;\"]*;? ?", "", element)
    head, bracket, rest = element.partition(">")
    head = re.sub(r'\s(?:width|height|id|version|xmlns(?::\w+)?)="[^"]*"', "", head) + ' aria-hidden="true"'
    rest = rest.replace("xlink:href", "href")
    for name, colour in _VARIABLES.items():
        rest = re.sub(re.escape(colour), f"var(--{name})", rest, flags=re.IGNORECASE)
    return head + bracket + rest


_VARIABLES = {
    **{f"series-{at}": colour for at, colour in enumerate(SERIES, start=1)},
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "alarm": ALARM,
}


@contextmanager
def _our_style(**changed: Any) -> Iterator[None]:
    """Whatever the user's matplotlibrc says, pictures are drawn and written as here."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(f"plots need matplotlib ({error}): `pip install matplotlib`") from error
    except ValueError as error:  # it reads its settings when it is imported
        raise UsageError(f"matplotlib does not start: {error}; mend MPLBACKEND or matplotlibrc") from error
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **changed}):
        yield


def _figure(panel: Panel, inches: tuple[float, float], *, legend_columns: int) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    figure = Figure(figsize=inches, layout="constrained", facecolor=GROUND)
    axes = figure.subplots()
    for at, curve in enumerate(panel.curves):
        _draw(axes, curve, SERIES[at % len(SERIES)], named=len(panel.curves) > 1)
    _mark(axes, panel)
    _dress(axes, panel)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Below the axes: inside, it would lie on a curve sooner or later.
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": legend_columns, "columnspacing": 1.2}
        figure.legend(handles, labels, **place, handlelength=1.5, frameon=False, labelcolor=INK, fontsize="small")
    return figure


def _draw(axes: Axes, curve: Curve, colour: str, *, named: bool) -> None:
    label = f"{curve.label}, {curve.last:.4g} at the end" if named and curve.last is not None else None
    mean = curve.running_mean()
    style: dict[str, Any] = {"color": colour, "solid_capstyle": "round"}
    if curve.marked or len(curve.points) == 1:
        style |= {"marker": "o", "markersize": 4 if len(curve.points) <= 40 else 2.5}
    if mean:
        axes.plot(*zip(*curve.points, strict=True), linewidth=0.7, alpha=0.35, **style)
    axes.plot(*zip(*(mean or curve.points), strict=True), linewidth=1.6, label=label, zorder=3, **style)


def _mark(axes: Axes, panel: Panel) -> None:
    """Small triangles on the horizontal axis."""
    style: dict[str, Any] = {"linestyle": "none", "marker": "^", "markersize": 5, "clip_on": False, "zorder": 4}
    for ending, steps in panel.marks.items():
        at, colour = sorted(set(steps)), ALARM if "not" in ending else SERIES[3]
        where = axes.get_xaxis_transform()
        axes.plot(at, [0.015] * len(at), transform=where, color=colour, label=f"{ending} ({len(steps)})", **style)


def _dress(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(panel.title, loc="left", color=INK, fontweight="bold", fontsize="large")
    axes.set_xlabel("optimizer step", color=MUTED)
    axes.set_ylabel(panel.unit, color=MUTED)
    if panel.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    axes.margins(x=0.02)


def _tick(value: float, place: int | None = None) -> str:
    """How a value stands on an axis: "0.25", "1500", "2e-4"."""
    del place
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:g}"
