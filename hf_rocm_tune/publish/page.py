"""``hf-rocm-tune report DIR``: a run as one HTML page; and the picture on a card.

The page is the template ``page.html.j2``, without scripts and outside requests. Foreign text is escaped; local paths,
names of users and hosts, and secrets are removed, so the page may be published.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        "requests. Reads the files of a run, finished or not, and says what is missing.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the --output_dir of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the page (default: {PAGE_NAME} in DIR)")
    wanted = parser.parse_args(list(argv))
    run = history.collect(wanted.directory)
    target: Path = wanted.out or run.directory / PAGE_NAME
    if os.path.lexists(target) and not _is_page(target):
        raise UsageError(
            f"{target} exists and is not of an earlier `hf-rocm-tune report`: move it away, or name another file "
            "with --out"
        )
    try:
        write_text_atomic(target, page_of(run))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}; name another file: --out") from error
    verdict = run.verdict
    for line in (f"{verdict.level}: {verdict.headline}", *verdict.notes, *(f"missing: {each}" for each in run.missing)):
        say(line)
    print(target)
    return 0


def _is_page(file: Path) -> bool:
    """Whether this command wrote the file."""
    try:
        return _GENERATOR in read_plain(file)
    except (OSError, ValueError):
        return False


# ---- the page -------------------------------------------------------------------------------------------------------


def page_of(run: RunFiles) -> str:
    """The page of a run, without anything private."""
    paths = dict.fromkeys([str(run.directory), *local_paths(run.settings)], "")
    private = Private.of_this_machine(os.environ, paths=paths)
    shown = ("rows", "trained", "report", "settings", "missing")
    name = scrub_text(run.directory.absolute().name, private) or "run"
    return build(name, replace(run, **{each: scrub_json(getattr(run, each), private) for each in shown}))


def build(name: str, run: RunFiles) -> str:
    """The page of a run whose texts are public."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"plain": plain, "figure": figure}
    environment.globals |= {"text": text, "number": number, "count": count, "items": items, "link_of": link_of}
    samples: dict[str, list[tuple[str, str]]] = {}
    for row in run.rows:
        for each in items(row, "samples"):
            samples.setdefault(text(each, "prompt"), []).append((plain(row.get("step", "")), text(each, "text")))
    found = run.inspection.manifest
    when = f"{found.status}, {found.created[:16].replace('T', ' ')} UTC" if found is not None else ""
    about = [name, text(run.trained, "method"), when, text(run.report, "device", "name"), run.run_id]
    base, data = (Path(text(run.settings, key)).name for key in ("model_name_or_path", "dataset_name"))
    return environment.get_template("page.html.j2").render(
        most=_MOST_ROWS,
        version=__version__,
        history=history,
        levels=_LEVELS,
        verdict=run.verdict,
        drawn=[(panel.in_words, base64.b64encode(draw(panel, "svg")).decode()) for panel in panels(run)],
        title=f"{base} on {data}" if base and data else base or name,
        about=" · ".join(filter(None, about)),
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


# ---- curves ---------------------------------------------------------------------------------------------------------

_EVAL_LOSS = re.compile(r"eval(?:_.+)?_loss")
# Title, unit, and the curves by metric.
_PANELS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Token accuracy",
        "share of tokens",
        {"mean_token_accuracy": "training", "eval_mean_token_accuracy": "evaluation"},
    ),
    ("Rewards", "reward", {"reward": "mean"} | {f"rewards/{at}": at for at in ("chosen", "rejected", "margins")}),
    ("Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    ("Gradient norm", "norm before clipping", {"grad_norm": "gradient norm"}),
    ("Throughput", "tokens a second", {"speed/tokens_per_second": "tokens a second"}),
    ("Time of a step", "seconds", {"speed/seconds_per_step": "seconds a step"}),
    (
        "Memory of the card",
        "GiB",
        {
            "gpu/vram_used_gib": "used on the card",
            "gpu/torch_reserved_gib": "reserved by torch",
            "gpu/torch_allocated_gib": "allocated by torch",
        },
    ),
    ("Temperature", "degrees Celsius", {f"gpu/{at}_c": at for at in ("hotspot", "memory", "edge")}),
    ("Power of the card", "watts", {"gpu/power_w": "power"}),
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str  # on the vertical axis
    curves: Mapping[str, Sequence[tuple[float, float]]]  # (step, value) by label; NaN is a gap, one at least is finite
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # steps of events, by label

    def newest(self, label: str) -> str:
        return f"{label} {next(value for _, value in reversed(self.curves[label]) if not math.isnan(value)):.4g}"

    @property
    def in_words(self) -> str:
        """The picture for those who cannot see it."""
        steps = [step for points in self.curves.values() for step, _ in points]
        newest = ", ".join(map(self.newest, self.curves))
        return f"{self.title} ({self.unit}) from step {min(steps):g} to {max(steps):g}; newest: {newest}"


def panels(run: RunFiles) -> list[Panel]:
    """Every panel for which there is something to draw, the loss first."""
    found = [loss_panel(run.rows, run.report), *(_panel(title, unit, run.rows, keys) for title, unit, keys in _PANELS)]
    return [panel for panel in found if panel is not None]


def loss_panel(rows: Sequence[Row], report: Mapping[str, Any] | None = None) -> Panel | None:
    """Loss of training and of each evaluation; None where none was logged."""
    evaluations = dict.fromkeys(key for row in rows for key in row if _EVAL_LOSS.fullmatch(key))
    named = {key: f"evaluation {at}" for at, key in enumerate(evaluations, 1)}
    named = dict.fromkeys(named, "evaluation") if len(named) == 1 else named
    marks: dict[str, list[float]] = {}
    for row in items(report or {}, "incidents"):
        if (step := number(row, "step")) is not None:
            ended = "recovered" if text(row, "outcome") == "recovered" else "not recovered"
            marks.setdefault(f"incident, {ended}", []).append(step)
    panel = _panel("Loss", "loss", rows, {"loss": "training", **named})
    return replace(panel, marks=marks) if panel else None


def _panel(title: str, unit: str, rows: Sequence[Row], metrics: Mapping[str, str]) -> Panel | None:
    curves = {label: series(rows, key) for key, label in metrics.items()}
    curves = {label: points for label, points in curves.items() if any(not math.isnan(value) for _, value in points)}
    return Panel(title=title, unit=unit, curves=curves) if curves else None


# Told apart by people with any kind of colour vision (Wong, Nature Methods 8, 441, 2011), darkened for a white ground.
_SERIES = ("#2166ac", "#c75b12", "#1b7f5f", "#8e4585", "#6b6b00")


def draw(panel: Panel, kind: str) -> bytes:
    """A panel as "png" of 936 by 520 pixels, or "svg"; the same curves give the same bytes. `UsageError` without it."""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot: it would look for a display
    except (ImportError, ValueError) as error:  # it reads MPLBACKEND and matplotlibrc when it is imported
        raise UsageError(f"matplotlib does not start: {error}; correct its settings, or install it again") from error
    style = {**matplotlib.rcParamsDefault, "font.size": 10.5, "text.parse_math": False}  # not the user's own style
    drawn = io.BytesIO()
    with matplotlib.rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": "0"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its font lacks
        picture = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
        axes = picture.subplots()
        for at, (name, points) in enumerate(panel.curves.items()):
            dots = "o" if len(points) <= 40 else None
            look = {"color": _SERIES[at % len(_SERIES)], "label": _printable(panel.newest(name))}
            axes.plot(*zip(*points, strict=True), linewidth=1.6, marker=dots, markersize=3, **look)
        for label, steps in panel.marks.items():
            look = {"label": label, "color": "#b3261e" if "not" in label else "#9a6700"}
            axes.plot(steps, [0.02] * len(steps), "^", transform=axes.get_xaxis_transform(), **look)
        axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
        axes.grid(axis="y", linewidth=0.5)
        axes.spines[["top", "left", "right"]].set_visible(False)
        picture.legend(loc="outside lower left", ncols=3, frameon=False, fontsize="small")
        unsaid = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # no version and no date
        picture.savefig(drawn, format=kind, dpi=130, metadata=unsaid[kind])
    return drawn.getvalue()


def write_png(panel: Panel, path: Path) -> None:
    """Write a panel as a picture for a card; a reader sees the old file or the new one."""
    content = draw(panel, "png")
    staging = create_staging(path)  # the next start of a run removes it if this process is killed
    try:
        (staging / path.name).write_bytes(content)
        os.replace(staging / path.name, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
