"""``hf-rocm-tune report DIR``: plots of a run as PNG files, and its report as one HTML page.

The page is the template ``page.html.j2``: no script, no request to anywhere, light and dark, readable on a phone.
Everything foreign is escaped, and should that fail, the page's own policy lets no script run and nothing be fetched.
Local paths, names of users and hosts and secrets are taken out, so that the page may be shown to others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hf_rocm_tune.errors import CommandParser, UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish import history, say
from hf_rocm_tune.publish.history import Left, count, figure, figures, items, number, plain, text
from hf_rocm_tune.publish.plots import Panel, panels, svg, write_png
from hf_rocm_tune.redaction import Private, scrub_json, scrub_text
from hf_rocm_tune.version import __version__

_MOST_ROWS = 500
_LEVELS = {"good": "Verified", "note": "Verified, but", "bad": "Wrong bytes", "unknown": "Not known"}
_MARKS = {"fail": "bad", "warn": "note", "ok": "good"}
_WORST_FIRST = ("fail", "warn", "unknown", "info", "ok", "skipped")


# ---- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str], *, link_of: Callable[[str], str] = lambda _: "") -> int:
    """Run the command."""
    wanted = _parser().parse_args(list(argv))
    left = history.collect(wanted.directory)
    target: Path = wanted.out or wanted.directory / "report.html"
    if os.path.isdir(target) or not target.name:  # unlike Path.is_dir, never raises
        raise UsageError(f"--out {target} is a directory; name the file of the page")
    if not os.path.isdir(target.parent):
        raise UsageError(f"--out {target}: there is no directory {target.parent}; make it, or name another file")
    shown = panels(left.rows, left.report)
    drawn = [(panel, svg(panel)) for panel in shown]
    private = Private.of_this_machine(
        os.environ, paths=dict.fromkeys([str(left.directory), *_paths(left.settings)], "")
    )
    title = scrub_text(wanted.directory.absolute().name, private) or "run"
    content = build(_clean(left, private), drawn, title=title, link_of=link_of)
    try:
        pictures = _write_pictures(shown, target.with_name(f"{target.stem}_plots"))
        write_text_atomic(target, content)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
    verdict = history.judge(left.report, finished=left.finished, damaged=left.damaged)
    for line in (
        f"{verdict.level}: {verdict.headline}",
        *verdict.notes,
        *(f"missing: {line}" for line in left.missing),
    ):
        say(line)
    print(*[target, *pictures], sep="\n")
    return 0


def _write_pictures(shown: Sequence[Panel], folder: Path) -> list[Path]:
    if shown:
        folder.mkdir(exist_ok=True)
    written = [folder / f"{panel.name}.png" for panel in shown]
    for panel, path in zip(shown, written, strict=True):
        write_png(panel, path)
    return written


def _paths(value: Any) -> list[str]:
    """The absolute paths in a plain value, at any depth: those that a run was given are private wherever they lie."""
    if isinstance(value, str):
        return [value] if os.path.isabs(value) else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [path for one in inner for path in _paths(one)]


def _clean(left: Left, private: Private) -> Left:
    """What is left of a run without what is private on this machine."""
    return replace(
        left,
        trained=scrub_json(left.trained, private),
        report=scrub_json(left.report, private),
        settings=scrub_json(left.settings, private),
        journal=scrub_json(left.journal, private),
        missing=[scrub_text(line, private) for line in left.missing],
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-rocm-tune report",
        description="Plots of a run as PNG files, and its report as one HTML page without scripts or outside requests. "
        "Reads whatever a run left, finished or not, and says what is missing.",
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


def build(
    left: Left, drawn: Sequence[tuple[Panel, str]], *, title: str, link_of: Callable[[str], str] = lambda _: ""
) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["plain"] = plain
    verdict = history.judge(left.report, finished=left.finished, damaged=left.damaged)
    incidents = [history.incident(row) for row in items(left.report, "incidents")]
    names = [name for name in (incidents[0] if incidents else ()) if any(row[name] for row in incidents)]
    return environment.get_template("page.html.j2").render(
        title=title,
        most=_MOST_ROWS,
        version=__version__,
        left=left,
        report=left.report,
        history=history,
        about=_about(left),
        verdict=verdict,
        level=_LEVELS[verdict.level],
        tiles=_tiles(left),
        drawn=drawn,
        incident_names=names,
        incidents=[[row[name] for name in names] for row in incidents],
        journal=[(text(entry, "time"), text(entry, "event"), _details(entry)) for entry in left.journal],
        findings=_findings(left.report, link_of),
        sensors=[_sensors(seen) for seen in items(left.report, "telemetry") if isinstance(seen, dict)],
        versions=[(name, value) for name, value in history.table(left.report, "versions").items() if value],
    )


def _printable(value: Any) -> Any:
    """What no document may hold (control characters, half surrogates) becomes a mark."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))


def _about(left: Left) -> str:
    found = left.inspection.manifest
    when = "" if found is None else found.created  # ISO 8601
    when = f"{when[:16].replace('T', ' ')} UTC" if when.endswith("+00:00") else when
    said = [
        f"run {left.run_id}" if left.run_id else "",
        f"{'finished' if found.status == 'final' else 'checkpoint of'} {when}" if found is not None else "",
        text(left.report, "device", "name"),
        text(left.trained, "method"),
    ]
    return ", ".join(filter(None, said))


def _tiles(left: Left) -> list[tuple[str, str]]:
    """The figures that one looks for first."""
    report, share = left.report, history.coverage(left.report)
    wanted = f" of {left.max_steps:,}" if left.max_steps and left.max_steps != left.step else ""
    peaks = [number(seen, "torch_peak_allocated_gib") for seen in items(report, "telemetry")]
    tiles = [
        ("steps", "" if left.step is None else f"{left.step:,}{wanted}"),
        *figures(left.rows),
        ("peak memory, GiB", figure(max((peak for peak in peaks if peak is not None), default=None))),
        ("bytes verified", f"{share:g} %" if share is not None else ""),
        ("mismatches", f"{sum(row.mismatches for row in history.counted(report)):,}" if report else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _findings(report: Mapping[str, Any], link_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """What was found on the machine before the run, the worst first."""
    found = []
    for row in items(report, "findings"):
        if not isinstance(row, dict):
            continue
        status, subject = text(row, "status"), text(row, "subject")
        sources = [(source, link_of(source)) for source in map(plain, items(row, "sources"))]
        found.append(
            {
                "status": status,
                "mark": _MARKS.get(status, "unknown"),
                "about": " ".join(filter(None, (text(row, "title"), f"({subject})" if subject else ""))),
                "text": text(row, "text"),
                "cure": text(row, "cure"),
                "evidence": [plain(line) for line in items(row, "evidence")],
                # Only addresses of the web become links.
                "sources": [(name, link if link.startswith(("https://", "http://")) else "") for name, link in sources],
            }
        )
    rank = {status: at for at, status in enumerate(_WORST_FIRST)}
    return sorted(found, key=lambda row: rank.get(row["status"], len(rank)))


def _sensors(seen: Mapping[str, Any]) -> dict[str, Any]:
    """One card's means and greatest values, and what else is known of it."""
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
    """The rest of an entry of the supervisor's journal."""
    shown = ("time", "event", "run_id")
    return "; ".join(f"{key}: {plain(value)}" for key, value in entry.items() if key not in shown)
