"""The parts of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_rocm_tune.publish.card_settings import chosen
from hf_rocm_tune.publish.history import last, series, training_seconds
from hf_rocm_tune.publish.history_read import Left
from hf_rocm_tune.publish.history_values import count, duration, items, number, plain, size, table, text
from hf_rocm_tune.publish.history_verdict import Verdict, counted, coverage, explained, incident, unverified
from hf_rocm_tune.publish.page_html import Html, join, link, pairs, section, tag
from hf_rocm_tune.publish.page_html import table as grid

_MOST_ROWS = 500
_LEVELS = {"good": "Verified", "note": "Verified, but", "bad": "Wrong bytes", "unknown": "Not known"}
_MARKS = {"fail": "bad", "warn": "note", "ok": "good"}


def verdict(found: Verdict) -> Html:
    """The first that a reader sees."""
    notes = tag("ul", *(tag("li", note) for note in found.notes)) if found.notes else None
    said = tag("strong", _LEVELS[found.level])
    return tag("div", said, tag("p", found.headline), notes, class_=f"verdict {found.level}")


def missing(left: Left) -> Html:
    """What could not be read."""
    return section(
        "What is missing here", tag("ul", *(tag("li", line) for line in left.missing)) if left.missing else None
    )


def tiles(left: Left) -> Html:
    """The figures that one looks for first."""
    rows, report = left.rows, left.report
    speeds = sorted(value for _, value in series(rows, "speed/tokens_per_second") if value == value)
    seconds = training_seconds(rows)
    peaks = [number(seen, "torch_peak_allocated_gib") for seen in items(report, "telemetry")]
    share = coverage(report)
    evaluations = [value for _, value in series(rows, "eval_loss") if value == value]
    figures = {
        "steps": _steps(left),
        "training loss, last": _figure(last(rows, "loss")),
        "evaluation loss, last": _figure(evaluations[-1] if evaluations else None),
        "evaluation loss, best": _figure(min(evaluations) if evaluations else None),
        "tokens a second, median": _figure(speeds[len(speeds) // 2] if speeds else None),
        "time of all steps": duration(seconds) if seconds else "",
        "peak memory, GiB": _figure(max((peak for peak in peaks if peak is not None), default=None)),
        "bytes verified": f"{share:g} %" if share is not None else "",
        "mismatches": f"{sum(row.mismatches for row in counted(report)):,}" if report else "",
    }
    shown = [tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in figures.items() if value]
    return tag("div", *shown, class_="tiles") if shown else Html("")


def integrity(report: Mapping[str, Any]) -> Html:
    """What was checked, and how."""
    if not report:
        return Html("")
    share, verified = coverage(report), number(report, "coverage", "verified_bytes") or 0.0
    rate = number(report, "batches", "verify_share_of_step")
    load = number(report, "weights", "load_seconds")
    about = [
        ("verification", text(report, "verify") or "unknown"),
        ("verified", f"{share:g} % of the bytes on the device, {size(verified)}" if share is not None else "unknown"),
        ("its share of step time", f"{100 * rate:.2g} % for batches" if rate is not None else "unknown"),
        ("loading the weights", duration(load) if load is not None else "unknown"),
        ("digests", f"host: {_digest(report, 'host')}; device: {_digest(report, 'device')}"),
        ("files of the base model", _attested(report)),
    ]
    checks = grid(
        ("what was checked", "how much", "wrong", "made right"),
        [
            (r.what, r.amount, f"{r.mismatches:,}", "" if r.recovered is None else f"{r.recovered:,}")
            for r in counted(report)
        ],
        numbers=(2, 3),
    )
    names = unverified(report)
    bare = [
        tag("h3", "Not verified"),
        grid(("tensor", "reason"), names[:_MOST_ROWS]),
        _more(len(names)),
    ]
    bounds = (
        "Not covered: wrong arithmetic on the card (the doctor samples it), memory that was wrong and right again "
        "between two looks, and files that were already wrong and have no recorded digest."
    )
    return section(
        "Integrity",
        pairs(about),
        tag("h3", "Checks"),
        checks,
        *(bare if names else ()),
        tag("p", f"{explained(report)} {bounds}", class_="quiet"),
    )


def incidents(report: Mapping[str, Any]) -> Html:
    """Each time when something was wrong; nothing where nothing was."""
    rows = [incident(row) for row in items(report, "incidents")]
    if not rows:
        return Html("")
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [[_small(row[name]) if name == "details" else row[name] for name in names] for row in rows[:_MOST_ROWS]]
    return section(f"Incidents ({len(rows):,})", grid(names, lines), _more(len(rows)))


def events(left: Left) -> Html:
    """Starts, ends and shortages."""
    report = left.report
    told = []
    if steps := items(report, "survival", "skipped_steps"):
        told.append(("steps left out, because the run died in them", plain(steps)))
    if shortages := count(report, "memory", "shortages"):
        told.append(
            ("shortages of memory", f"{shortages:,}, of these overcome {count(report, 'memory', 'recovered'):,}")
        )
    if (cut := count(report, "memory", "micro_batch_divisor")) > 1:
        told.append(("micro-batches were cut into", f"up to {cut} parts"))
    if unused := count(report, "guard", "skipped_steps"):
        told.append(("steps not used, because they were not finite", f"{unused:,}"))
    if warnings := count(report, "guard", "warnings"):
        told.append(("warnings about loss and gradients", f"{warnings:,}"))
    shown = ("time", "event")
    lines = [
        [text(entry, "time"), text(entry, "event"), _rest(entry, (*shown, "run_id"))]
        for entry in left.journal[:_MOST_ROWS]
    ]
    journal = [tag("h3", "Journal of the supervisor"), grid((*shown, "details"), lines), _more(len(left.journal))]
    return section("What the run met with", pairs(told) if told else None, *(journal if lines else ()))


def findings(report: Mapping[str, Any], link_of: Callable[[str], str]) -> Html:
    """What was found on the machine before the run, the worst first."""
    order = {"fail": 0, "warn": 1, "unknown": 2, "info": 3, "ok": 4, "skipped": 5}
    rows = [row for row in items(report, "findings") if isinstance(row, dict)]
    rows.sort(key=lambda row: order.get(text(row, "status"), 9))
    return section(
        "The machine before the run", *(_finding(row, link_of) for row in rows[:_MOST_ROWS]), _more(len(rows))
    )


def machine(report: Mapping[str, Any]) -> Html:
    """Device, sensors and versions."""
    device = table(report, "device")
    memory = number(device, "memory_bytes")
    about: list[tuple[object, object]] = [(key, plain(value)) for key, value in device.items() if key != "memory_bytes"]
    if memory is not None:
        about.append(("memory", f"{memory / 2**30:.2f} GiB"))
    if device:
        about.append(("processes", f"{count(report, 'ranks')}"))
    sensors = [_sensors(seen) for seen in items(report, "telemetry")]
    versions = [(name, value) for name, value in table(report, "versions").items() if isinstance(value, str)]
    return section(
        "Hardware and software",
        pairs(about) if about else None,
        *(part for part in sensors if part),
        *((tag("h3", "Versions"), pairs(versions)) if versions else ()),
    )


def settings(left: Left) -> Html:
    """What was asked for; all of it folded away."""
    trained = {key: value for key, value in left.trained.items() if value is not None}
    first = chosen(left.settings)
    everything = tag(
        "details",
        tag("summary", f"All {len(left.settings)} settings that decide the result"),
        pairs((name, plain(value)) for name, value in sorted(left.settings.items())),
    )
    return section(
        "Model and settings",
        pairs((key.replace("_", " "), plain(value)) for key, value in trained.items()) if trained else None,
        *((tag("h3", "Settings"), pairs((name, plain(v)) for name, v in first.items())) if first else ()),
        everything if left.settings else None,
    )


def _finding(row: Mapping[str, Any], link_of: Callable[[str], str]) -> Html:
    status = text(row, "status")
    about = " ".join(filter(None, (text(row, "title"), f"({text(row, 'subject')})" if text(row, "subject") else "")))
    evidence = [tag("li", tag("code", plain(line))) for line in items(row, "evidence")]
    sources = [link(plain(source), link_of(plain(source))) for source in items(row, "sources")]
    parts = [
        tag("summary", tag("span", status, class_=f"mark {_MARKS.get(status, 'unknown')}"), about),
        tag("p", text(row, "text")),
        tag("p", tag("b", "What to do: "), text(row, "cure")) if text(row, "cure") else None,
        tag("ul", *evidence, class_="quiet") if evidence else None,
        tag("p", "Source: ", *_separated(sources), class_="quiet") if sources else None,
    ]
    return tag("details", *parts, open="" if status in ("fail", "warn") else None)


def _sensors(seen: Any) -> Html | None:
    """One card's means and greatest values."""
    if not isinstance(seen, dict):
        return None
    rows = [
        (name.replace("_", " "), _figure(number(value, "mean")), _figure(number(value, "max")))
        for name, value in seen.items()
        if isinstance(value, dict) and "mean" in value
    ]
    single = {key: value for key, value in seen.items() if not (isinstance(value, dict) and "mean" in value)}
    wanted = {key: plain(value) for key, value in single.items() if key not in ("rank", "seconds") and value != {}}
    values = grid(("sensor", "mean", "greatest"), rows, numbers=(1, 2)) if rows else None
    rest = pairs((key.replace("_", " "), value) for key, value in wanted.items())
    return join((tag("h3", f"Sensors, rank {count(seen, 'rank')}"), values, rest))


def _small(value: str) -> Html:
    return tag("span", value, class_="quiet")


def _steps(left: Left) -> str:
    if left.step is None:
        return ""
    return f"{left.step:,}" + (f" of {left.max_steps:,}" if left.max_steps and left.max_steps != left.step else "")


def _digest(report: Mapping[str, Any], where: str) -> str:
    reason = text(report, "digest", where, "reason")
    return (text(report, "digest", where, "name") or "unknown") + (f" ({reason})" if reason else "")


def _attested(report: Mapping[str, Any]) -> str:
    names = [plain(name) for name in items(report, "weights", "not_attested")]
    without = f", {len(names)} without a recorded digest ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
    return f"{count(report, 'weights', 'attested_files')} as recorded{without if names else ''}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.5g}"


def _rest(entry: Mapping[str, Any], shown: Sequence[str]) -> str:
    return "; ".join(f"{key}: {plain(value)}" for key, value in entry.items() if key not in shown)


def _more(there: int) -> Html | None:
    return tag("p", f"{there - _MOST_ROWS:,} more are not shown.", class_="quiet") if there > _MOST_ROWS else None


def _separated(parts: Sequence[Html]) -> list[object]:
    found: list[object] = []
    for part in parts:
        found += ["; ", part] if found else [part]
    return found
