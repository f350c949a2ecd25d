"""``hf-rocm-tune report DIR [DIR ...]``: one run, or several side by side, as one HTML page; and a picture of the loss.

The page is the template ``page.html.j2``, without scripts and outside requests. Foreign text is escaped; local paths,
names of users and hosts, and secrets are removed, so the page may be published.
"""

from __future__ import annotations

import math
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.foreign import read_bytes
from hf_rocm_tune.machine.sources import link_of
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.history import Run, collect
from hf_rocm_tune.publish.templates import data_findings, data_row, render
from hf_rocm_tune.publish.training_log import Row, figures, series, shown_settings
from hf_rocm_tune.publish.values import figure, items, number, plain, text
from hf_rocm_tune.publish.verdict import LEVELS, coverage, mismatches
from hf_rocm_tune.redaction import Private, local_paths, scrub_text
from hf_rocm_tune.survive.atomic import create_staging, write_text_atomic
from hf_rocm_tune.version import __version__

PAGE_NAME = "report.html"
_MOST_ROWS = 500
_MOST_STEPS = 150  # whose values are shown under the pointer
_MOST_DOTS = 40  # a longer curve is a line without them
_GENERATOR = b'<meta name="generator" content="hf-rocm-tune">'  # as in the template


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = CommandParser(
        prog="hf-rocm-tune report",
        description="A run, its curves, verification and incidents, as one HTML page without scripts or outside "
        "requests; or several runs side by side. Reads the files of runs, finished or not, and says what is missing.",
    )
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+", help="the --output_dir of a run")
    help_out = f"write the page here (default: {PAGE_NAME} in DIR; of several runs comparison.html in this directory)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_out)
    wanted = parser.parse_args(list(argv))
    runs = [collect(directory) for directory in wanted.directories]
    alone = len(runs) == 1
    target = wanted.out or (runs[0].directory / PAGE_NAME if alone else Path("comparison.html"))
    try:
        if os.path.lexists(target) and _GENERATOR not in read_bytes(target):
            raise UsageError(
                f"{target} exists and is not of an earlier `hf-rocm-tune report`: move it away, or name another file "
                "with --out"
            )
        write_text_atomic(target, page_of(runs))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{target} cannot be written: {why}; name another file with --out") from error
    for run in runs:
        label = ""
        if not alone:
            label = f"{run.directory.name}: "
        say(f"{label}{run.verdict.level}: {run.verdict.headline}")
        for note in run.verdict.notes:
            say(label + note)
        for what in run.missing:
            say(f"{label}missing: {what}")
    print(target)
    return 0


def page_of(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side, without anything private."""
    shown: dict[str, Run] = {}
    for at, run in enumerate(runs, start=1):
        paths = dict.fromkeys([str(run.directory), *local_paths(run.settings)], "")
        private = Private.of_this_machine(os.environ, paths=paths)
        name = scrub_text(run.directory.absolute().name, private) or "run"
        shown[f"{name} ({at})" if name in shown else name] = run.without(private)
    return build(shown)


# ---- the page -------------------------------------------------------------------------------------------------------


def build(runs: Mapping[str, Run]) -> str:
    """The page of one run, or of several by name."""
    name, run = next(iter(runs.items()))
    alone = len(runs) == 1
    title = " and ".join(runs)
    about = ""
    if alone:
        title = _title(run) or name
        about = _about(name, run)
    page = render(
        "page.html.j2",
        html=True,
        most=_MOST_ROWS,
        version=__version__,
        levels={level: word.capitalize() for level, word in LEVELS.items()},
        verdicts={label: shown.verdict for label, shown in runs.items()},
        drawn=[_drawing(panel) for panel in panels(runs)],
        title=title,
        about=about,
        several=None if alone else list(runs),
        compared=_compared(runs),
        run=run,
        report=run.report,
        data=[tuple(data_row(row).values()) for row in items(run.report, "data")],
        findings=[line for row in items(run.report, "data") for line in data_findings(row)],
        link_of=link_of,
        tiles=_tiles(run),
        samples=list(_samples(run.rows).items()),
    )
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in page)


def _title(run: Run) -> str:
    """Base model and dataset; empty if unknown."""
    base = Path(text(run.settings, "model_name_or_path")).name
    data = Path(text(run.settings, "dataset_name")).name
    if base and data:
        return f"{base} on {data}"
    return base


def _about(name: str, run: Run) -> str:
    """The line below the title: the run's name, its method, when it was written, and the card."""
    when = ""
    if run.written:
        state = "finished" if run.finished else "checkpoint of"
        when = f"{state} {run.written[:16].replace('T', ' ')} UTC"
    parts = (name, text(run.trained, "method"), when, text(run.report, "device", "name"))
    return " · ".join(part for part in parts if part)


def _samples(rows: Sequence[Row]) -> dict[str, list[tuple[str, str]]]:
    """For each prompt its answers in the course of training: the step, and the text."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        step = plain(row.get("step", ""))
        for sample in items(row, "samples"):
            answers.setdefault(text(sample, "prompt"), []).append((step, text(sample, "text")))
    return answers


def _tiles(run: Run) -> dict[str, str]:
    """The key figures."""
    tiles: dict[str, str] = {}
    if run.step is not None:
        tiles["steps"] = f"{run.step:,}"
        if run.max_steps and run.max_steps != run.step:
            tiles["steps"] += f" of {run.max_steps:,}"
    tiles |= dict(figures(run.rows))
    peaks = [number(device, "torch_peak_allocated_gib") for device in items(run.report, "telemetry")]
    tiles["peak memory, GiB"] = figure(max((peak for peak in peaks if peak is not None), default=None))
    share = coverage(run.report)
    if share is not None:
        tiles["bytes verified"] = f"{share:g} %"
    if run.report:
        tiles["mismatches"] = f"{mismatches(run.report):,}"
    return {name: value for name, value in tiles.items() if value}


def _compared(runs: Mapping[str, Run]) -> dict[str, list[tuple[str, list[str]]]]:
    """Figures, and the settings that are not the same in all runs: a name, and a value for each run."""
    settings = []
    for run in runs.values():
        chosen = {name: plain(value) for name, value in shown_settings(run.settings).items()}
        chosen["model"] = text(run.settings, "model_name_or_path")
        chosen["dataset"] = text(run.settings, "dataset_name")
        settings.append(chosen)
    differing = [(name, values) for name, values in _side_by_side(settings) if len(set(values)) > 1]
    return {"figures": _side_by_side([_tiles(run) for run in runs.values()]), "settings": differing}


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Each name that any column has, with the value in every column; empty where a column lacks it."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


# ---- curves ---------------------------------------------------------------------------------------------------------

Point = tuple[float, float]
# Title, unit, and the curves by metric.
_PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Loss", "loss", {"loss": "training", "eval_loss": "evaluation"}),
    ("Token accuracy", "share of tokens",
     {"mean_token_accuracy": "training", "eval_mean_token_accuracy": "evaluation"}),
    ("Rewards", "reward", {"reward": "mean", **{f"rewards/{at}": at for at in ("margins", "chosen", "rejected")}}
     | {"eval_rewards/margins": "margins, evaluation"}),
    ("Accuracy of the rewards", "share of pairs",
     {"rewards/accuracies": "training", "eval_rewards/accuracies": "evaluation"}),
    ("Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    ("Gradient norm", "norm before clipping", {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens a second", {"speed/tokens_per_second": "tokens a second"}),
    ("Time of a step", "seconds", {"speed/seconds_per_step": "seconds a step"}),
    ("Memory of the card", "GiB", {"gpu/vram_used_gib": "used on the card"}
     | {f"memory/{what}_gib": f"{what} by torch" for what in ("reserved", "allocated")}),
    ("Temperature", "degrees Celsius", {f"gpu/{at}_c": at for at in ("hotspot", "memory", "edge")}),
    ("Power of the card", "watts", {"gpu/power_w": "power"}),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str  # on the vertical axis
    curves: Mapping[str, Sequence[Point]]  # (step, value) by label; NaN is a gap, and one value of all is finite
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # steps of events, by label


def panels(runs: Mapping[str, Run]) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first; of several runs, one for each metric."""
    drawable: list[Panel] = []
    for title, unit, metrics in _PANELS:
        for name, curves in _pictures(title, metrics, runs).items():
            if any(curves.values()):
                drawable.append(Panel(title=name, unit=unit, curves=curves))
    if len(runs) == 1 and drawable and drawable[0].title == "Loss":
        (run,) = runs.values()
        drawable[0] = replace(drawable[0], marks=_incidents(run.report))
    return drawable


def _pictures(title: str, metrics: Mapping[str, str], runs: Mapping[str, Run]) -> dict[str, dict[str, Sequence[Point]]]:
    """The curves of each picture: of one run all metrics of a panel in one, of several runs one for each metric."""
    if len(runs) > 1:
        return {
            f"{title}, {label}": {name: _drawn(run.rows, key) for name, run in runs.items()}
            for key, label in metrics.items()
        }
    (run,) = runs.values()
    curves = {label: _drawn(run.rows, key) for key, label in metrics.items()}
    return {title: {label: points for label, points in curves.items() if points}}


def loss_panel(run: Run) -> Panel | None:
    """Loss of training and evaluation; None where none was logged."""
    return next((panel for panel in panels({"": run}) if panel.title == "Loss"), None)


def _incidents(report: Mapping[str, Any]) -> dict[str, list[float]]:
    marks: dict[str, list[float]] = {}
    for row in items(report, "incidents"):
        step = number(row, "step")
        if step is not None:
            ended = "recovered" if text(row, "outcome") == "recovered" else "not recovered"
            marks.setdefault(f"incident, {ended}", []).append(step)
    return marks


def _drawn(rows: Sequence[Row], key: str) -> list[Point]:
    """The points of a metric; none unless one of them is finite."""
    points = series(rows, key)
    return points if any(not math.isnan(value) for _, value in points) else []


_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 22, 24


def _drawing(panel: Panel) -> dict[str, Any]:
    """What the template draws: lines, ticks, and strips that show the values of a step."""
    known: dict[str, dict[float, float]] = {}  # of each curve the values that are numbers, by step
    values: list[float] = []
    all_steps: set[float] = set()
    for label, curve in panel.curves.items():
        known[label] = {step: value for step, value in curve if not math.isnan(value)}
        values += known[label].values()
        all_steps |= {step for step, _ in curve}
    steps = sorted(all_steps)
    first = steps[0]
    final = max(steps[-1], first + 1)
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin

    def across(step: float) -> float:
        return round(_LEFT + (step - first) / (final - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def up(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def line(points: Sequence[Point]) -> str:
        """The path of a curve: the pen is moved over gaps, and draws to all other points."""
        path = ""
        pen_is_down = False
        for step, value in points:
            if math.isnan(value):
                pen_is_down = False
                continue
            path += f"{'L' if pen_is_down else 'M'}{across(step)} {up(value)}"
            pen_is_down = True
        return path

    shown = steps[:: 1 + len(steps) // _MOST_STEPS]
    middles = [round((across(a) + across(b)) / 2, 1) for a, b in pairwise(shown)]
    edges = pairwise([_LEFT, *middles, _WIDTH - _RIGHT])
    strips = []
    for step, (left, right) in zip(shown, edges, strict=True):
        words = [f"{label} {points[step]:.4g}" for label, points in known.items() if step in points]
        caption = textwrap.wrap(f"step {step:g}: {' · '.join(words)}", 58)
        strips.append({"left": left, "width": round(right - left, 1), "at": across(step), "words": caption})
    lines: list[dict[str, Any]] = []
    newest = []
    for place, (label, points) in enumerate(known.items()):
        if not points:
            continue
        last = list(points.values())[-1]
        newest.append(f"{label} {last:.4g}")
        dots = []
        if len(points) <= _MOST_DOTS:
            dots = [(across(step), up(value)) for step, value in points.items()]
        path = line(panel.curves[label])
        lines.append({"path": path, "label": label, "last": last, "colour": place % 6, "dots": dots})
    return {
        "panel": panel,
        "size": (_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM),
        "lines": lines,
        "heights": [(up(value), figure(value)) for value in _ticks(low, high, 5)],
        "steps": [_step_label(across(step), f"{step:g}") for step in _ticks(first, final, 6) if step == int(step)],
        "marks": [(label, sorted({across(s) for s in at if first <= s <= final})) for label, at in panel.marks.items()],
        "strips": strips,
        "in_words": f"{panel.title} ({panel.unit}) from step {first:g} to {steps[-1]:g}; newest: {', '.join(newest)}",
    }


_DIGIT = 7.0
"""Width of a digit, in units of the picture, with some room."""


def _step_label(at: float, label: str) -> tuple[float, str, str]:
    """Where a label below the axis stands: centred below its tick, or up to the right edge, which would cut it."""
    if at + len(label) * _DIGIT / 2 > _WIDTH:
        return _WIDTH, label, "end"
    return at, label, "middle"


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between the bounds, at most about so many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= most)
    return [round(step * at, 12) for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def write_png(panel: Panel, path: Path) -> None:
    """Write a panel as a picture of 936 by 520 pixels, for a README.md; a reader sees the old file or the new one.

    Raises:
        UsageError: matplotlib is not installed, or its settings are wrong.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: it would look for a display
        from matplotlib.ticker import MaxNLocator
    except (ImportError, ValueError) as error:  # ValueError: MPLBACKEND or matplotlibrc
        raise UsageError(f"the picture of the loss needs matplotlib ({error}): `pip install matplotlib`") from error
    staging = create_staging(path)  # the next start of a run removes it if this process is killed
    try:
        picture = Figure(figsize=(7.2, 4.0))
        picture.subplots_adjust(left=0.14, right=0.97, bottom=0.12, top=0.92)  # a layout engine draws it twice
        axes = picture.subplots()
        for name, points in panel.curves.items():
            axes.plot(
                *zip(*points, strict=True), label=name, marker="o" if len(points) <= _MOST_DOTS else "", markersize=3
            )
        axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", linewidth=0.5)
        axes.legend()
        # No version and no date: the same curves give the same bytes.
        picture.savefig(staging / path.name, format="png", dpi=130, metadata={"Software": None})
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
