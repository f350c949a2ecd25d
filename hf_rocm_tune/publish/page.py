"""``hf-rocm-tune report DIR``: plots of a run as PNG files, and its report as one HTML page; and the picture on a card.

The page is the template ``page.html.j2``, without scripts and outside requests, which its content security policy
forbids, too. Foreign text is escaped. Local paths, names of users and hosts, and secrets are removed, so the page may
be published.

Curves are drawn with matplotlib, which is imported for the first picture. Pictures contain no text of the user. Values
that are not finite are gaps. Long logs are drawn as thin lines with their running mean.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.publish import history, say
from hf_rocm_tune.publish.history import Row, RunFiles, count, figure, figures, items, number, plain, series, text
from hf_rocm_tune.redaction import Private, scrub_json, scrub_text
from hf_rocm_tune.survive.atomic import create_staging, read_plain, write_text_atomic
from hf_rocm_tune.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS = 500
_GENERATOR = b'<meta name="generator" content="hf-rocm-tune">'  # as in the template
_LEVELS = {"good": "Verified", "note": "Verified, but", "bad": "Wrong bytes", "unknown": "Not known"}
_MARKS = {"fail": "bad", "warn": "note", "ok": "good"}
_WORST_FIRST = ("fail", "warn", "unknown", "info", "ok", "skipped")


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str], *, link_of: Callable[[str], str] = lambda _: "") -> int:
    """Run the command; ``link_of`` gives the address of a finding's source."""
    wanted = _parser().parse_args(list(argv))
    run = history.collect(wanted.directory)
    target: Path = wanted.out or wanted.directory / "report.html"
    if os.path.isdir(target) or not target.name:  # unlike Path.is_dir, never raises
        raise UsageError(f"--out {target} is a directory; name the file of the page")
    if not os.path.isdir(target.parent):
        raise UsageError(f"--out {target}: there is no directory {target.parent}; create it, or name another file")
    shown = panels(run.rows, run.report)
    private = Private.of_this_machine(os.environ, paths=dict.fromkeys([str(run.directory), *_paths(run.settings)], ""))
    title = scrub_text(wanted.directory.absolute().name, private) or "run"
    content = build(_clean(run, private), shown, title=title, link_of=link_of)
    folder = target.with_name(f"{target.stem}_plots")
    pictures = [folder / f"{panel.name}.png" for panel in shown]
    if not _is_page(target) and (foreign := [path for path in (target, *pictures) if os.path.lexists(path)]):
        raise UsageError(
            f"{foreign[0]} exists and is not of an earlier `hf-rocm-tune report`: move it away, or name another file "
            "with --out"
        )
    try:
        if shown:
            folder.mkdir(exist_ok=True)
        for panel, path in zip(shown, pictures, strict=True):
            write_png(panel, path)
        write_text_atomic(target, content)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
    verdict = history.judge(run.report, finished=run.finished, damaged=run.damaged)
    missing = (f"missing: {line}" for line in run.missing)
    for line in (f"{verdict.level}: {verdict.headline}", *verdict.notes, *missing):
        say(line)
    print(*[target, *pictures], sep="\n")
    return 0


def _is_page(file: Path) -> bool:
    """Whether this command wrote the file."""
    try:
        return _GENERATOR in read_plain(file)
    except (OSError, ValueError):
        return False


def _paths(value: Any) -> list[str]:
    """The absolute paths in a plain value, at any depth; those that a run was given are private."""
    if isinstance(value, str):
        return [value] if os.path.isabs(value) else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [path for one in inner for path in _paths(one)]


def _clean(run: RunFiles, private: Private) -> RunFiles:
    return replace(
        run,
        trained=scrub_json(run.trained, private),
        report=scrub_json(run.report, private),
        settings=scrub_json(run.settings, private),
        journal=scrub_json(run.journal, private),
        missing=[scrub_text(line, private) for line in run.missing],
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-rocm-tune report",
        description="Plots of a run as PNG files, and its report as one HTML page without scripts or outside requests. "
        "Reads the files of a run, finished or not, and says what is missing.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the --output_dir of a run, or a checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in DIR); the pictures go into FILE's name with _plots, beside it",
    )
    return parser


# ---- the page -------------------------------------------------------------------------------------------------------


def build(run: RunFiles, shown: Sequence[Panel], *, title: str, link_of: Callable[[str], str] = lambda _: "") -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["plain"] = plain
    verdict = history.judge(run.report, finished=run.finished, damaged=run.damaged)
    incidents = [history.incident(row) for row in items(run.report, "incidents")]
    names = [name for name in (incidents[0] if incidents else ()) if any(row[name] for row in incidents)]
    return environment.get_template("page.html.j2").render(
        title=title,
        most=_MOST_ROWS,
        version=__version__,
        run=run,
        report=run.report,
        history=history,
        about=_about(run),
        verdict=verdict,
        level=_LEVELS[verdict.level],
        tiles=_tiles(run),
        drawn=[(panel, base64.b64encode(png(panel)).decode()) for panel in shown],
        incident_names=names,
        incidents=[[row[name] for name in names] for row in incidents],
        journal=[(text(entry, "time"), text(entry, "event"), _details(entry)) for entry in run.journal],
        findings=_findings(run.report, link_of),
        sensors=[_sensors(seen) for seen in items(run.report, "telemetry") if isinstance(seen, dict)],
        versions=[(name, value) for name, value in history.table(run.report, "versions").items() if value],
    )


def _printable(value: Any) -> Any:
    """Control characters and lone surrogates become a replacement character."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))


def _about(run: RunFiles) -> str:
    found = run.inspection.manifest
    when = "" if found is None else found.created  # ISO 8601
    when = f"{when[:16].replace('T', ' ')} UTC" if when.endswith("+00:00") else when
    parts = [
        f"run {run.run_id}" if run.run_id else "",
        f"{'finished' if found.status == 'final' else 'checkpoint of'} {when}" if found is not None else "",
        text(run.report, "device", "name"),
        text(run.trained, "method"),
    ]
    return ", ".join(filter(None, parts))


def _tiles(run: RunFiles) -> list[tuple[str, str]]:
    """The key figures."""
    report, share = run.report, history.coverage(run.report)
    wanted = f" of {run.max_steps:,}" if run.max_steps and run.max_steps != run.step else ""
    peaks = [number(seen, "torch_peak_allocated_gib") for seen in items(report, "telemetry")]
    tiles = [
        ("steps", "" if run.step is None else f"{run.step:,}{wanted}"),
        *figures(run.rows),
        ("peak memory, GiB", figure(max((peak for peak in peaks if peak is not None), default=None))),
        ("bytes verified", f"{share:g} %" if share is not None else ""),
        ("mismatches", f"{sum(row.mismatches for row in history.counted(report)):,}" if report else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _findings(report: Mapping[str, Any], link_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Findings on the machine before the run, the worst first."""
    found = []
    for row in items(report, "findings"):
        if not isinstance(row, dict):
            continue
        status, subject = text(row, "status"), text(row, "subject")
        sources = [(source, link_of(source)) for source in filter(None, text(row, "source").split("; "))]
        found.append(
            {
                "status": status,
                "mark": _MARKS.get(status, "unknown"),
                "about": " ".join(filter(None, (text(row, "title"), f"({subject})" if subject else ""))),
                "text": text(row, "text"),
                "fix": text(row, "fix"),
                "read": [plain(line) for line in items(row, "read")],
                # Only addresses of the web become links.
                "sources": [(name, link if link.startswith(("https://", "http://")) else "") for name, link in sources],
            }
        )
    rank = {status: at for at, status in enumerate(_WORST_FIRST)}
    return sorted(found, key=lambda row: rank.get(row["status"], len(rank)))


def _sensors(seen: Mapping[str, Any]) -> dict[str, Any]:
    """One card's means and maxima, and other values."""
    measured = {key: value for key, value in seen.items() if isinstance(value, dict) and "mean" in value}
    others = {key: value for key, value in seen.items() if key not in (*measured, "rank", "seconds") and value != {}}
    return {
        "rank": count(seen, "rank"),
        "rows": [
            (name.replace("_", " "), figure(number(value, "mean")), figure(number(value, "max")))
            for name, value in measured.items()
        ],
        "others": [(key.replace("_", " "), plain(value)) for key, value in others.items()],
    }


def _details(entry: Mapping[str, Any]) -> str:
    """The other fields of an entry of the supervisor's journal."""
    shown = ("time", "event", "run_id")
    return "; ".join(f"{key}: {plain(value)}" for key, value in entry.items() if key not in shown)


# ---- curves ---------------------------------------------------------------------------------------------------------

_EVAL_LOSS = re.compile(r"eval(?:_(?P<name>.+))?_loss")
_LOG_SCALE_FROM = 200.0
_MEAN_FROM = 100

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel."""

    label: str
    points: Sequence[Point]  # (step, value) in the order of the steps
    marked: bool = False  # draw a mark at each value
    exact: bool = False  # a setting, not a measurement: no running mean

    @property
    def last(self) -> float | None:
        """The newest finite value."""
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
    """One picture."""

    name: str  # of its file, without ending
    title: str
    unit: str  # on the vertical axis
    curves: Sequence[Curve]  # at least one, none of them empty
    from_zero: bool = False  # the axis begins at 0
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # steps of events, by label

    @property
    def logarithmic(self) -> bool:
        """Whether the measured values need a logarithmic axis."""
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
    steps: dict[str, list[float]] = {}
    for row in items(report, "incidents"):
        step = number(row, "step")
        if step is not None:
            ended = "recovered" if text(row, "outcome") == "recovered" else "not recovered"
            steps.setdefault(f"incident, {ended}", []).append(step)
    return steps


# Told apart by people with any kind of colour vision (Wong, Nature Methods 8, 441, 2011), darkened for a white ground.
SERIES = ("#2166ac", "#c75b12", "#1b7f5f", "#8e4585", "#6b6b00")
INK, MUTED, GRID, GROUND, ALARM = "#1f2328", "#59636e", "#d8dee4", "#ffffff", "#b3261e"


def png(panel: Panel) -> bytes:
    """Draw a panel as a PNG file, 936 by 520 pixels, on a white ground.

    Raises:
        UsageError: matplotlib is not installed or does not start.
    """
    drawn = io.BytesIO()
    with _our_style(**{"font.size": 10.5}):
        # No version and no date: the same curves give the same bytes.
        _figure(panel).savefig(drawn, format="png", dpi=130, metadata={"Software": None})
    return drawn.getvalue()


def write_png(panel: Panel, path: Path) -> None:
    """Write a panel to a file; a reader sees the old file or the new one.

    Raises:
        UsageError: matplotlib is not installed or does not start.
        OSError: the file cannot be written.
    """
    drawn = png(panel)
    staging = create_staging(path)  # the next start of a run removes it if this process is killed
    try:
        (staging / path.name).write_bytes(drawn)
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _our_style(**changed: Any) -> Iterator[None]:
    """Draw independently of the user's matplotlibrc."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(f"plots need matplotlib ({error}): `pip install matplotlib`") from error
    except ValueError as error:  # it reads its settings when it is imported
        raise UsageError(f"matplotlib does not start: {error}; correct MPLBACKEND or matplotlibrc") from error
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **changed}):
        yield


def _figure(panel: Panel) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    picture = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor=GROUND)
    axes = picture.subplots()
    for at, curve in enumerate(panel.curves):
        _draw(axes, curve, SERIES[at % len(SERIES)], named=len(panel.curves) > 1)
    style: dict[str, Any] = {"linestyle": "none", "marker": "^", "markersize": 5, "clip_on": False, "zorder": 4}
    for ending, steps in panel.marks.items():  # small triangles on the horizontal axis
        places, style["color"] = sorted(set(steps)), ALARM if "not" in ending else SERIES[3]
        style |= {"transform": axes.get_xaxis_transform(), "label": f"{ending} ({len(steps)})"}
        axes.plot(places, [0.015] * len(places), **style)
    _dress(axes, panel)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Below the axes: inside, it would cover a curve.
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": 3, "columnspacing": 1.2}
        picture.legend(handles, labels, **place, handlelength=1.5, frameon=False, labelcolor=INK, fontsize="small")
    return picture


def _draw(axes: Axes, curve: Curve, colour: str, *, named: bool) -> None:
    label = f"{curve.label}, {curve.last:.4g} at the end" if named and curve.last is not None else None
    mean = curve.running_mean()
    style: dict[str, Any] = {"color": colour, "solid_capstyle": "round"}
    if curve.marked or len(curve.points) == 1:
        style |= {"marker": "o", "markersize": 4 if len(curve.points) <= 40 else 2.5}
    if mean:
        axes.plot(*zip(*curve.points, strict=True), linewidth=0.7, alpha=0.35, **style)
    axes.plot(*zip(*(mean or curve.points), strict=True), linewidth=1.6, label=label, zorder=3, **style)


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
    """The label of a value on an axis: "0.25", "1500", "2e-4"."""
    del place
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:g}"
