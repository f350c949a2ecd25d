"""Panels drawn with matplotlib, which is imported by the first picture, not before."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import create_staging
from hf_rocm_tune.publish.plots import Curve, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    for colour, curve in zip(_colours(len(panel.curves)), panel.curves, strict=True):
        _draw(axes, curve, colour, named=len(panel.curves) > 1)
    _mark(axes, panel)
    _dress(axes, panel)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Below the axes: inside, it would lie on a curve sooner or later.
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": legend_columns, "columnspacing": 1.2}
        figure.legend(handles, labels, **place, handlelength=1.5, frameon=False, labelcolor=INK, fontsize="small")
    return figure


def _colours(wanted: int) -> list[str]:
    return [SERIES[at % len(SERIES)] for at in range(wanted)]


def _draw(axes: Axes, curve: Curve, colour: str, *, named: bool) -> None:
    label = f"{curve.label}, {curve.last:.4g} at the end" if named and curve.last is not None else None
    steps, values = _columns(curve.points)
    mean = curve.running_mean()
    alone = len(curve.points) == 1
    style: dict[str, Any] = {"color": colour, "solid_capstyle": "round"}
    if curve.marked or alone:
        style |= {"marker": "o", "markersize": 4 if len(steps) <= 40 else 2.5}
    if mean:
        axes.plot(steps, values, linewidth=0.7, alpha=0.35, **style)
        steps, values = _columns(mean)
    axes.plot(steps, values, linewidth=1.6, label=label, zorder=3, **style)


def _mark(axes: Axes, panel: Panel) -> None:
    """Small triangles on the horizontal axis."""
    for text, steps in panel.marks.items():
        colour = ALARM if "not" in text else SERIES[3]
        at = sorted(set(steps))
        axes.plot(
            at,
            [0.015] * len(at),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="^",
            markersize=5,
            color=colour,
            label=f"{text} ({len(steps)})",
            clip_on=False,
            zorder=4,
        )


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


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _tick(value: float, place: int | None = None) -> str:
    """How a value stands on an axis: "0.25", "1500", "2e-4"."""
    del place
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:g}"
