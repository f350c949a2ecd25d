"""``hf-rocm-tune report DIR [DIR ...]``: one run, or several side by side, as one HTML page; and the picture on a card.

The page is the template ``page.html.j2``, without scripts and outside requests. Foreign text is escaped; local paths,
names of users and hosts, and secrets are removed, so the page may be published.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import textwrap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.machine.sources import link_of
from hf_rocm_tune.publish import history, say
from hf_rocm_tune.publish.history import Row, RunFiles, count, figure, items, number, plain, series, text
from hf_rocm_tune.redaction import Private, local_paths, scrub_json, scrub_text
from hf_rocm_tune.survive.atomic import create_staging, read_plain, write_text_atomic
from hf_rocm_tune.version import __version__

PAGE_NAME = "report.html"
_MOST_ROWS = 500
_GENERATOR = b'<meta name="generator" content="hf-rocm-tune">'  # as in the template
_LEVELS = {"good": "Verified", "note": "Verified, with remarks", "bad": "Wrong bytes", "unknown": "Not known"}


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = CommandParser(
        prog="hf-rocm-tune report",
        description="A run, its curves, verification and incidents, as one HTML page without scripts or outside "
        "requests; or several runs side by side. Reads the files of runs, finished or not, and says what is missing.",
    )
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+", help="the --output_dir of a run")
    help_out = f"the page (default: {PAGE_NAME} in DIR; of several runs comparison.html in this directory)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_out)
    wanted: argparse.Namespace = parser.parse_args(list(argv))
    runs = [history.collect(directory) for directory in wanted.directories]
    alone = len(runs) == 1
    target: Path = wanted.out or (runs[0].directory / PAGE_NAME if alone else Path("comparison.html"))
    if os.path.isdir(target) or not target.name:  # unlike Path.is_dir, never raises
        raise UsageError(f"--out {target} is a directory; name the file of the page")
    if not os.path.isdir(target.parent):
        raise UsageError(f"--out {target}: there is no directory {target.parent}; create it, or name another file")
    if os.path.lexists(target) and not _is_page(target):
        raise UsageError(
            f"{target} exists and is not of an earlier `hf-rocm-tune report`: move it away, or name another file "
            "with --out"
        )
    try:
        write_text_atomic(target, page_of(runs))
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
    for run in runs:
        before, verdict = "" if alone else f"{run.directory.name}: ", run.verdict
        for line in (f"{verdict.level}: {verdict.headline}", *verdict.notes, *(f"missing: {m}" for m in run.missing)):
            say(before + line)
    print(target)
    return 0


def _is_page(file: Path) -> bool:
    """Whether this command wrote the file."""
    try:
        return _GENERATOR in read_plain(file)
    except (OSError, ValueError):
        return False


def page_of(runs: Sequence[RunFiles]) -> str:
    """The page of runs, without anything private."""
    clean, names = [], []
    for run in runs:
        paths = dict.fromkeys([str(run.directory), *local_paths(run.settings)], "")
        private = Private.of_this_machine(os.environ, paths=paths)
        shown = ("rows", "trained", "report", "settings", "missing")
        clean.append(replace(run, **{name: scrub_json(getattr(run, name), private) for name in shown}))
        names.append(scrub_text(run.directory.absolute().name, private) or "run")
    again = [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, start=1)]
    return build(dict(zip(again, clean, strict=True)))


# ---- the page -------------------------------------------------------------------------------------------------------


def build(runs: Mapping[str, RunFiles]) -> str:
    """The page of one run, or of several by name."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"plain": plain, "figure": figure}
    environment.globals |= {"text": text, "number": number, "count": count, "items": items, "link_of": link_of}
    name, run = next(iter(runs.items()))
    alone = len(runs) == 1
    samples: dict[str, list[tuple[str, str]]] = {}
    for row in run.rows:
        for each in items(row, "samples"):
            samples.setdefault(text(each, "prompt"), []).append((plain(row.get("step", "")), text(each, "text")))
    return environment.get_template("page.html.j2").render(
        most=_MOST_ROWS,
        version=__version__,
        history=history,
        levels=_LEVELS,
        verdicts={each: one.verdict for each, one in runs.items()},
        drawn=[_drawing(panel) for panel in panels(runs)],
        title=(_title(run) or name) if alone else " and ".join(runs),
        about=_about(name, run) if alone else "",
        several=None if alone else list(runs),
        compared=_compared(runs),
        run=run,
        report=run.report,
        tiles=_tiles(run),
        data=[tuple(history.data_row(row).values()) for row in items(run.report, "data")],
        samples=list(samples.items()),
    )


def _printable(value: Any) -> Any:
    """Control characters and lone surrogates become a replacement character."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))


def _title(run: RunFiles) -> str:
    """Base model and dataset; empty if unknown."""
    base, data = (Path(text(run.settings, key)).name for key in ("model_name_or_path", "dataset_name"))
    return f"{base} on {data}" if base and data else base


def _about(name: str, run: RunFiles) -> str:
    found = run.inspection.manifest
    when = f"{found.created[:16].replace('T', ' ')} UTC" if found is not None else ""
    parts = [
        name,
        text(run.trained, "method"),
        f"{'finished' if found.status == 'final' else 'checkpoint of'} {when}" if found is not None else "",
        text(run.report, "device", "name"),
        f"run {run.run_id}" if run.run_id else "",
    ]
    return " · ".join(filter(None, parts))


def _tiles(run: RunFiles) -> dict[str, str]:
    """The key figures."""
    report, share = run.report, history.coverage(run.report)
    wanted = f" of {run.max_steps:,}" if run.max_steps and run.max_steps != run.step else ""
    peaks = [number(seen, "torch_peak_allocated_gib") for seen in items(report, "telemetry")]
    tiles = {
        "steps": "" if run.step is None else f"{run.step:,}{wanted}",
        **dict(history.figures(run.rows)),
        "peak memory, GiB": figure(max((peak for peak in peaks if peak is not None), default=None)),
        "bytes verified": f"{share:g} %" if share is not None else "",
        "mismatches": f"{history.mismatches(report):,}" if report else "",
    }
    return {name: value for name, value in tiles.items() if value}


def _compared(runs: Mapping[str, RunFiles]) -> dict[str, list[tuple[str, list[str]]]]:
    """Figures, and the settings that are not the same in all runs, by name, a value for each run."""
    tiles = [_tiles(run) for run in runs.values()]
    names = {"model": "model_name_or_path", "dataset": "dataset_name"}
    shown = [
        history.shown_settings(run.settings) | {name: text(run.settings, key) for name, key in names.items()}
        for run in runs.values()
    ]
    values = {
        name: [plain(each.get(name, "")) for each in shown] for name in dict.fromkeys(n for s in shown for n in s)
    }
    return {
        "figures": [(n, [each.get(n, "") for each in tiles]) for n in dict.fromkeys(n for t in tiles for n in t)],
        "settings": [(name, found) for name, found in values.items() if len(set(found)) > 1],
    }


# ---- curves ---------------------------------------------------------------------------------------------------------

Point = tuple[float, float]
_EVAL_LOSS = re.compile(r"eval(?:_.+)?_loss")
_MOST_STEPS = 150  # whose values are shown under the pointer
# Title, unit, whether the axis begins at 0, and the curves by metric.
_PANELS: tuple[tuple[str, str, bool, Mapping[str, str]], ...] = (
    ("Token accuracy", "share of tokens", False, {"mean_token_accuracy": "training"}
     | {"eval_mean_token_accuracy": "evaluation"}),
    ("Rewards", "reward", False, {"reward": "mean", **{f"rewards/{at}": at for at in ("margins", "chosen", "rejected")}}
     | {"eval_rewards/margins": "margins, evaluation"}),
    ("Accuracy of the rewards", "share of pairs", False, {"rewards/accuracies": "training"}
     | {"eval_rewards/accuracies": "evaluation"}),
    ("Learning rate", "learning rate", False, {"learning_rate": "learning rate"}),
    ("Gradient norm", "norm before clipping", False, {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens a second", True, {"speed/tokens_per_second": "tokens a second"}),
    ("Time of a step", "seconds", True, {"speed/seconds_per_step": "seconds a step"}),
    ("Memory of the card", "GiB", True, {"gpu/vram_used_gib": "used on the card"}
     | {f"memory/{what}_gib": f"{what} by torch" for what in ("reserved", "allocated")}),
    ("Temperature", "degrees Celsius", False, {f"gpu/{at}_c": at for at in ("hotspot", "memory", "edge")}),
    ("Power of the card", "watts", True, {"gpu/power_w": "power"}),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str  # on the vertical axis
    curves: Mapping[str, Sequence[Point]]  # (step, value) by label; NaN is a gap, and one value of all is finite
    from_zero: bool = False  # the axis begins at 0
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # steps of events, by label


def panels(runs: Mapping[str, RunFiles]) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first; of several runs, one metric of each run."""
    alone = len(runs) == 1
    losses = {name: panel for name, run in runs.items() if (panel := loss_panel(run.rows, run.report))}
    found = list(losses.values())
    if not alone and losses:
        named = {f"{name}, {label}": points for name, one in losses.items() for label, points in one.curves.items()}
        first = sorted(named, key=lambda label: not label.endswith(", training"))  # in the colours of the other panels
        found = [Panel(title="Loss", unit="loss", curves={label: named[label] for label in first})]
    for title, unit, from_zero, metrics in _PANELS:
        drawn = {key: {name: line for name, run in runs.items() if (line := _drawn(run.rows, key))} for key in metrics}
        logged = [key for key, curves in drawn.items() if curves]
        if not logged:
            continue
        if alone:
            curves = {metrics[key]: line for key in logged for line in drawn[key].values()}
        else:  # all runs, so that each has its colour
            curves = {name: drawn[logged[0]].get(name, []) for name in runs}
        title += "" if alone or len(metrics) == 1 else f", {metrics[logged[0]]}"
        found.append(Panel(title=title, unit=unit, curves=curves, from_zero=from_zero))
    return found


def loss_panel(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> Panel | None:
    """Loss of training and of each evaluation; None where none was logged."""
    evaluations = dict.fromkeys(key for row in rows for key in row if _EVAL_LOSS.fullmatch(key))
    named = {"loss": "training"} | {
        key: "evaluation" if len(evaluations) == 1 else f"evaluation {at}" for at, key in enumerate(evaluations, 1)
    }
    curves = {label: points for key, label in named.items() if (points := _drawn(rows, key))}
    marks: dict[str, list[float]] = {}
    for row in items(report or {}, "incidents"):
        if (step := number(row, "step")) is not None:
            ended = "recovered" if text(row, "outcome") == "recovered" else "not recovered"
            marks.setdefault(f"incident, {ended}", []).append(step)
    return Panel(title="Loss", unit="loss", curves=curves, marks=marks) if curves else None


def _drawn(rows: Sequence[Row], key: str) -> list[Point]:
    """The points of a metric; none unless one of them is finite."""
    points = series(rows, key)
    return points if any(not math.isnan(value) for _, value in points) else []


_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 22, 24


def _drawing(panel: Panel) -> dict[str, Any]:
    """What the template draws: lines, ticks, and strips that show the values of a step."""
    known = {label: [one for one in points if not math.isnan(one[1])] for label, points in panel.curves.items()}
    values = [value for points in known.values() for _, value in points]
    steps = sorted({step for points in panel.curves.values() for step, _ in points})
    first, final = steps[0], max(steps[-1], steps[0] + 1)
    low, high = min(values + [0.0] * panel.from_zero), max(values)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, top = low - (0 if panel.from_zero else margin), high + margin

    def across(step: float) -> float:
        return round(_LEFT + (step - first) / (final - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def up(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def line(points: Sequence[Point]) -> str:
        """Gaps are moves of the pen."""
        drawn = ["" if math.isnan(value) else f"{across(step)} {up(value)}" for step, value in points]
        return "".join(f"{'L' if before else 'M'}{at}" for before, at in pairwise(["", *drawn]) if at)

    shown = steps[:: 1 + len(steps) // _MOST_STEPS]
    words: dict[float, list[str]] = {step: [] for step in shown}
    for label, points in known.items():
        for step in shown:  # the value at the step, or the newest before it
            if at := bisect_right(points, (step, math.inf)):
                words[step].append(f"{label} {points[at - 1][1]:.4g}")
    middles = [round((across(a) + across(b)) / 2, 1) for a, b in pairwise(shown)]
    edges = pairwise([_LEFT, *middles, _WIDTH - _RIGHT])
    newest = ", ".join(f"{label} {points[-1][1]:.4g}" for label, points in known.items() if points)
    return {
        "panel": panel,
        "size": (_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM),
        "lines": [
            {"path": line(panel.curves[label]), "label": label, "last": points[-1][1], "colour": at % 6}
            | {"dots": [(across(s), up(v)) for s, v in points] if len(points) <= 40 else []}
            for at, (label, points) in enumerate(known.items())
            if points
        ],
        "heights": [(up(value), _short(value)) for value in _ticks(bottom, top, 5)],
        "steps": [(across(step), f"{step:g}") for step in _ticks(first, final, 6) if step == int(step)],
        "marks": [(label, sorted({across(s) for s in at if first <= s <= final})) for label, at in panel.marks.items()],
        "strips": [
            {"left": left, "width": round(right - left, 1), "at": across(step)}
            | {"words": textwrap.wrap(f"step {step:g}: {' · '.join(words[step])}", 58)}
            for step, (left, right) in zip(shown, edges, strict=True)
        ],
        "in_words": f"{panel.title} ({panel.unit}) from step {first:g} to {steps[-1]:g}; newest: {newest}",
    }  # fmt: skip


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between the bounds, at most about so many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= most)
    return [round(step * at, 12) for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    """The label of a value on an axis: "0.25", "1500", "1.5e-4"."""
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.6g}"


# Told apart by people with any kind of colour vision (Wong, Nature Methods 8, 441, 2011), darkened for a white ground.
_SERIES = ("#2166ac", "#c75b12", "#1b7f5f", "#8e4585", "#6b6b00")


def write_png(panel: Panel, path: Path) -> None:
    """Write a panel as a picture of 936 by 520 pixels, for a card; a reader sees the old file or the new one.

    Raises:
        UsageError: matplotlib is not installed or does not start.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot: it would look for a display
    except ImportError as error:
        raise UsageError(f"the picture of the loss needs matplotlib ({error}): `pip install matplotlib`") from error
    except ValueError as error:  # it reads its settings when it is imported
        raise UsageError(f"matplotlib does not start: {error}; correct MPLBACKEND or matplotlibrc") from error
    staging = create_staging(path)  # the next start of a run removes it if this process is killed
    try:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, "font.size": 10.5}):  # not the user's own style
            picture = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
            axes = picture.subplots()
            for at, (name, points) in enumerate(panel.curves.items()):
                last = next(value for _, value in reversed(points) if not math.isnan(value))
                style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(points) <= 40 else {}
                style |= {"color": _SERIES[at % len(_SERIES)], "label": f"{name}, {last:.4g} at the end"}
                axes.plot(*zip(*points, strict=True), linewidth=1.6, **style)
            axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
            axes.grid(axis="y", linewidth=0.5)
            axes.spines[["top", "left", "right"]].set_visible(False)
            picture.legend(loc="outside lower left", ncols=3, frameon=False, fontsize="small")
            # No version and no date: the same curves give the same bytes.
            picture.savefig(staging / path.name, format="png", dpi=130, metadata={"Software": None})
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
