"""``hf-rocm-tune report DIR [DIR ...]``: one run, or several side by side, as one HTML page; and the picture on a card.

The page is the template ``page.html.j2``, without scripts and outside requests, which its content security policy
forbids, too. Foreign text is escaped. Local paths, names of users and hosts, and secrets are removed, so the page may
be published. Curves are SVG in the colours of the reader's theme, and show the values of the step under the pointer.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.machine.sources import link_of
from hf_rocm_tune.publish import history, say
from hf_rocm_tune.publish.history import Row, RunFiles, count, figure, items, number, plain, series, text
from hf_rocm_tune.redaction import Private, scrub_json, scrub_text
from hf_rocm_tune.survive.atomic import create_staging, read_plain, write_text_atomic
from hf_rocm_tune.version import __version__

PAGE_NAME = "report.html"
_MOST_ROWS = 500
_GENERATOR = b'<meta name="generator" content="hf-rocm-tune">'  # as in the template
_LEVELS = {"good": "Verified", "note": "Verified, with remarks", "bad": "Wrong bytes", "unknown": "Not known"}
_MARKS = {"fail": "bad", "warn": "note", "ok": "good"}
_WORST_FIRST = ("fail", "warn", "unknown", "info", "ok", "skipped")


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
        verdict = history.judge(run.report, finished=run.finished, damaged=run.damaged)
        before = "" if alone else f"{run.directory.name}: "
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
        paths = dict.fromkeys([str(run.directory), *_paths(run.settings)], "")
        private = Private.of_this_machine(os.environ, paths=paths)
        clean.append(_clean(run, private))
        names.append(scrub_text(run.directory.absolute().name, private) or "run")
    again = [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, start=1)]
    return build(dict(zip(again, clean, strict=True)))


def _paths(value: Any) -> list[str]:
    """The absolute paths in a plain value, at any depth; those that a run was given are private."""
    if isinstance(value, str):
        return [value] if os.path.isabs(value) else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [path for one in inner for path in _paths(one)]


def _clean(run: RunFiles, private: Private) -> RunFiles:
    return replace(
        run,
        rows=scrub_json(run.rows, private),
        trained=scrub_json(run.trained, private),
        report=scrub_json(run.report, private),
        settings=scrub_json(run.settings, private),
        journal=scrub_json(run.journal, private),
        missing=[scrub_text(line, private) for line in run.missing],
    )


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
    environment.filters["plain"] = plain
    name, run = next(iter(runs.items()))
    verdicts = {
        each: history.judge(one.report, finished=one.finished, damaged=one.damaged) for each, one in runs.items()
    }
    common: dict[str, Any] = {"most": _MOST_ROWS, "version": __version__, "history": history, "levels": _LEVELS}
    common |= {"verdicts": verdicts, "drawn": [_drawing(panel) for panel in panels({n: r.rows for n, r in runs.items()},
               {n: r.report for n, r in runs.items()})]}  # fmt: skip
    if len(runs) > 1:
        return environment.get_template("page.html.j2").render(
            **common, title=" and ".join(runs), about="", several=list(runs), run=None, compared=_compared(runs)
        )
    incidents = [history.incident(row) for row in items(run.report, "incidents")]
    columns = [name for name in (incidents[0] if incidents else ()) if any(row[name] for row in incidents)]
    return environment.get_template("page.html.j2").render(
        **common,
        title=_title(run) or name,
        several=None,
        run=run,
        report=run.report,
        about=_about(name, run),
        tiles=_tiles(run),
        data=[_data(row) for row in items(run.report, "data")],
        samples=_samples(run.rows),
        incident_names=columns,
        incidents=[[row[name] for name in columns] for row in incidents],
        journal=[(text(entry, "time"), text(entry, "event"), _details(entry)) for entry in run.journal],
        findings=_findings(run.report),
        sensors=[_sensors(seen) for seen in items(run.report, "telemetry") if isinstance(seen, dict)],
        versions=[(name, value) for name, value in history.table(run.report, "versions").items() if value],
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
    when = "" if found is None else found.created  # ISO 8601
    when = f"{when[:16].replace('T', ' ')} UTC" if when.endswith("+00:00") else when
    parts = [
        name,
        text(run.trained, "method"),
        f"{'finished' if found.status == 'final' else 'checkpoint of'} {when}" if found is not None else "",
        text(run.report, "device", "name"),
        f"run {run.run_id}" if run.run_id else "",
    ]
    return " · ".join(filter(None, parts))


def _tiles(run: RunFiles) -> list[tuple[str, str]]:
    """The key figures."""
    report, share = run.report, history.coverage(run.report)
    wanted = f" of {run.max_steps:,}" if run.max_steps and run.max_steps != run.step else ""
    peaks = [number(seen, "torch_peak_allocated_gib") for seen in items(report, "telemetry")]
    tiles = [
        ("steps", "" if run.step is None else f"{run.step:,}{wanted}"),
        *history.figures(run.rows),
        ("peak memory, GiB", figure(max((peak for peak in peaks if peak is not None), default=None))),
        ("bytes verified", f"{share:g} %" if share is not None else ""),
        ("mismatches", f"{sum(row.mismatches for row in history.counted(report)):,}" if report else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _compared(runs: Mapping[str, RunFiles]) -> dict[str, list[tuple[str, list[str]]]]:
    """Figures, and the settings that are not the same in all runs, by name, a value for each run."""
    tiles = [dict(_tiles(run)) for run in runs.values()]
    shown = [history.shown_settings(run.settings) | {"model": text(run.settings, "model_name_or_path")}
             | {"dataset": text(run.settings, "dataset_name")} for run in runs.values()]  # fmt: skip
    names = dict.fromkeys(name for each in shown for name in each)
    values = {name: [plain(each.get(name, "")) for each in shown] for name in names}
    figures = dict.fromkeys(name for each in tiles for name in each)
    return {
        "figures": [(name, [each.get(name, "") for each in tiles]) for name in figures],
        "settings": [(name, found) for name, found in values.items() if len(set(found)) > 1],
    }


def _data(row: Any) -> tuple[str, ...]:
    """What one split was trained on, as a row of a table."""
    share = 100 * count(row, "trained") / max(count(row, "kept"), 1)
    names = ("rows", "tokens", "median", "p95", "longest", "cut", "lost", "dropped")
    return (text(row, "split"), *(f"{count(row, name):,}" for name in names), f"{share:.3g} %")


def _samples(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each prompt, the step and text of every answer."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for each in items(row, "samples"):
            found.setdefault(text(each, "prompt"), []).append((plain(row.get("step", "")), text(each, "text")))
    return list(found.items())


def _findings(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Findings on the machine before the run, the worst first."""
    found = []
    for row in items(report, "findings"):
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

_EVAL_LOSS = re.compile(r"eval(?:_.+)?_loss")
_LOG_SCALE_FROM = 200.0
_MEAN_FROM = 100
_MOST_STEPS = 150  # whose values are shown under the pointer

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel."""

    label: str
    points: Sequence[Point]  # (step, value) in the order of the steps; NaN is a gap
    exact: bool = False  # a setting, not a measurement: no running mean

    @property
    def last(self) -> float:
        """The newest finite value."""
        return next(value for _, value in reversed(self.points) if not math.isnan(value))

    def running_mean(self) -> list[Point]:
        """The mean over about a fiftieth of the curve around each point; empty for a short or exact curve."""
        if self.exact or len(self.points) < _MEAN_FROM:
            return []
        steps, values = np.array(self.points).T
        window = np.ones(2 * max(2, len(values) // 100) + 1)
        gaps = np.isnan(values)
        counts = np.convolve(~gaps, window, "same")
        sums = np.convolve(np.where(gaps, 0.0, values), window, "same")
        means = np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)
        return list(zip(steps.tolist(), means.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str  # on the vertical axis
    curves: Sequence[Curve]  # at least one, each with a finite value
    from_zero: bool = False  # the axis begins at 0
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # steps of events, by label

    @property
    def values(self) -> list[float]:
        """All finite values, sorted."""
        return sorted(value for curve in self.curves for _, value in curve.points if not math.isnan(value))

    @property
    def logarithmic(self) -> bool:
        """Whether the measured values need a logarithmic axis."""
        values = [] if self.from_zero or all(curve.exact for curve in self.curves) else self.values
        return bool(values) and values[0] > 0 and values[-1] / values[0] >= _LOG_SCALE_FROM


# Title, unit, whether the axis begins at 0, and the curves by metric.
_PANELS: tuple[tuple[str, str, bool, Mapping[str, str]], ...] = (
    ("Token accuracy", "share of tokens", False, {"mean_token_accuracy": "training"}
     | {"eval_mean_token_accuracy": "evaluation"}),
    ("Rewards", "reward", False, {"reward": "mean"}
     | {f"rewards/{at}": at for at in ("chosen", "rejected", "margins")}),
    ("Learning rate", "learning rate", False, {"learning_rate": "learning rate"}),
    ("Gradient norm", "norm before clipping", False, {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens a second", True, {"speed/tokens_per_second": "tokens a second"}),
    ("Time of a step", "seconds", True, {"speed/seconds_per_step": "seconds a step"}),
    ("Memory of the card", "GiB", True, {"gpu/vram_used_gib": "used on the card"}
     | {f"gpu/torch_{what}_gib": f"{what} by torch" for what in ("reserved", "allocated")}),
    ("Temperature", "degrees Celsius", False, {f"gpu/{at}_c": at for at in ("hotspot", "memory", "edge")}),
    ("Power of the card", "watts", True, {"gpu/power_w": "power"}),
)  # fmt: skip


def panels(rows: Mapping[str, Sequence[Row]], reports: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first; of several runs, one metric of each run."""
    alone, losses = len(rows) == 1, {}
    for name, logged in rows.items():
        if panel := loss_panel(logged, reports.get(name)):
            losses[name] = panel
    found = list(losses.values())
    if not alone and losses:
        curves = [replace(one, label=f"{name}, {one.label}") for name, each in losses.items() for one in each.curves]
        found = [Panel(title="Loss", unit="loss", curves=curves)]
    for title, unit, from_zero, metrics in _PANELS:
        curves = []
        for name, logged in rows.items():
            drawn = [(label, points) for key, label in metrics.items() if (points := _drawn(logged, key))]
            exact = title == "Learning rate"
            curves += [
                Curve(label=label if alone else name, points=points, exact=exact)
                for label, points in drawn[: None if alone else 1]
            ]
        if curves:
            found.append(Panel(title=title, unit=unit, curves=curves, from_zero=from_zero))
    return found


def loss_panel(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> Panel | None:
    """Loss of training and of each evaluation; None where none was logged."""
    evaluations = dict.fromkeys(key for row in rows for key in row if _EVAL_LOSS.fullmatch(key))
    named = {"loss": "training"} | {
        key: "evaluation" if len(evaluations) == 1 else f"evaluation {at}" for at, key in enumerate(evaluations, 1)
    }
    curves = [Curve(label=label, points=points) for key, label in named.items() if (points := _drawn(rows, key))]
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
    steps = sorted({step for curve in panel.curves for step, _ in curve.points})
    first, final = steps[0], max(steps[-1], steps[0] + 1)
    low, high = panel.values[0], panel.values[-1]
    low = min(low, 0.0) if panel.from_zero else low
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    bounds = (low - (0 if panel.from_zero else margin), high + margin)
    if panel.logarithmic:
        bounds = (math.log10(low) - 0.05, math.log10(high) + 0.05)

    def across(step: float) -> float:
        return round(_LEFT + (step - first) / (final - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def up(value: float) -> float:
        share = ((math.log10(value) if panel.logarithmic else value) - bounds[0]) / (bounds[1] - bounds[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def line(points: Sequence[Point]) -> str:
        pieces, pen = [], "M"
        for step, value in points:
            if math.isnan(value):
                pen = "M"
                continue
            pieces.append(f"{pen}{across(step)} {up(value)}")
            pen = "L"
        return "".join(pieces)

    decades = range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1) if panel.logarithmic else ()
    heights = [10.0**power for power in decades] or ([low, high] if panel.logarithmic else _ticks(*bounds, 5))
    shown = steps[:: 1 + len(steps) // _MOST_STEPS]
    words: dict[float, list[str]] = {step: [] for step in shown}
    for curve in panel.curves:
        known = [(step, value) for step, value in curve.points if not math.isnan(value)]
        for step in shown:  # the value at the step, or the newest before it
            if at := bisect_right(known, (step, math.inf)):
                words[step].append(f"{curve.label} {known[at - 1][1]:.4g}")
    edges = [_LEFT, *(round((across(a) + across(b)) / 2, 1) for a, b in pairwise(shown))]
    edges.append(_WIDTH - _RIGHT)
    return {
        "panel": panel,
        "size": (_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM),
        "lines": [
            {"raw": line(curve.points), "mean": line(curve.running_mean()), "label": curve.label, "last": curve.last}
            | {"dots": [(across(s), up(v)) for s, v in curve.points if not math.isnan(v)]
               if len(curve.points) <= 40 else []}
            for curve in panel.curves
        ],
        "heights": [(up(value), _short(value)) for value in heights],
        "steps": [(across(step), f"{step:g}") for step in _ticks(first, final, 6) if step == int(step)],
        "marks": [(label, sorted({across(s) for s in at if first <= s <= final})) for label, at in panel.marks.items()],
        "strips": [
            {"left": left, "width": round(right - left, 1), "at": across(step)}
            | {"words": f"step {step:g}: {', '.join(words[step])}"}
            for step, (left, right) in zip(shown, pairwise(edges), strict=True)
        ],
        "in_words": f"{panel.title} ({panel.unit}) from step {first:g} to {steps[-1]:g}; newest: "
        + ", ".join(f"{curve.label} {curve.last:.4g}" for curve in panel.curves),
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
            for at, curve in enumerate(panel.curves):
                style: dict[str, Any] = {"color": _SERIES[at % len(_SERIES)]}
                if mean := curve.running_mean():
                    axes.plot(*zip(*curve.points, strict=True), linewidth=0.7, alpha=0.35, **style)
                style |= {"marker": "o", "markersize": 3} if len(curve.points) <= 40 else {}
                label = f"{curve.label}, {curve.last:.4g} at the end"
                axes.plot(*zip(*(mean or curve.points), strict=True), linewidth=1.6, label=label, **style)
            axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
            axes.set_yscale("log" if panel.logarithmic else "linear")
            axes.grid(axis="y", linewidth=0.5)
            axes.spines[["top", "left", "right"]].set_visible(False)
            picture.legend(loc="outside lower left", ncols=3, frameon=False, fontsize="small")
            # No version and no date: the same curves give the same bytes.
            picture.savefig(staging / path.name, format="png", dpi=130, metadata={"Software": None})
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
