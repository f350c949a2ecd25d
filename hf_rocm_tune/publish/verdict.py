"""The verdict on a run by its transfer report. Missing entries of a report count as unknown, never as good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rich.filesize import decimal as size

from hf_rocm_tune.counters import SECTIONS, Section
from hf_rocm_tune.publish.values import count, find, items, mapping, number, plain, text


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    "good": finished, all of it verified, nothing was wrong; "note": corruption that was recovered, or other remarks;
    "bad": the result contains corruption or differs from what was written; "unknown": no evidence.
    """

    level: Literal["good", "note", "bad", "unknown"]
    headline: str  # one sentence
    notes: tuple[str, ...]  # remarks, one sentence each


def judge(report: Mapping[str, Any], *, finished: bool, damaged: Sequence[str] = ()) -> Verdict:
    """The verdict on a run."""
    verdict = partial(Verdict, notes=_notes(report, finished=finished))
    if damaged:
        more = ""
        if len(damaged) > 1:
            more = f" and {len(damaged) - 1} more"
        return verdict("bad", f"The result differs from what was written: {damaged[0]}{more}.")
    if not report:
        return verdict("unknown", "It is unknown what was verified: there is no transfer report.")
    try:
        wrong = _unrecovered(report)
    except (KeyError, TypeError, AttributeError):
        return verdict("unknown", "The transfer report does not have the expected form, so it is no evidence.")
    if wrong:
        return verdict("bad", f"Wrong bytes were found that could not be recovered: {'; '.join(wrong[:3])}.")
    share = coverage(report)
    if share is None or text(report, "verify") == "off":
        return verdict("unknown", "Transfers were not verified in this run.")
    verified = f"{share:g} % of the bytes on the device were verified"
    times_wrong = mismatches(report)
    if times_wrong:
        recovered = f"Corruption was found {_times(times_wrong)} and recovered before it was used"
        return verdict("note", f"{verified}. {recovered}.")
    remarks = _varies(report) or _differing_layers(report)
    complete = finished and share >= 100 and text(report, "verify") == "full" and not remarks
    return verdict("good" if complete else "note", f"{verified}, and none of them was wrong.")


#: The verdict in a word, at the head of the page and of the closing line of a run.
LEVELS = {"good": "verified", "note": "verified, with remarks", "bad": "wrong bytes", "unknown": "not known"}


def verdict_line(report: Mapping[str, Any]) -> str:
    """The verdict on a finished run and, unless it is good, its reason: the head of the run's closing line."""
    verdict = judge(report, finished=True)
    share = coverage(report)
    if verdict.level == "good":
        return f"{LEVELS['good'].upper()}, nothing was wrong"
    reasons = []
    if verdict.level != "note":
        reasons.append(verdict.headline)
    else:
        times_wrong = mismatches(report)
        if times_wrong:
            reasons.append(f"corruption was found {_times(times_wrong)} and recovered before it was used")
        if share is not None and share < 100:
            reasons.append(f"{share:g} % of the bytes on the device")
        if text(report, "verify") == "sample":
            reasons.append("a sample of the transfers only")
        if _varies(report):
            reasons.append("the same micro-batch gave different gradients")
        layers = _differing_layers(report)
        if layers:
            reasons.append(f"{layers[0]} differs from what the host computes")
    word, comma, rest = LEVELS[verdict.level].partition(",")
    return f"{word.upper()}{comma}{rest} ({'; '.join(reasons).rstrip('.')})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _unrecovered(report: Mapping[str, Any]) -> list[str]:
    """Corruption that a report lists as not recovered; KeyError, TypeError or AttributeError for another form."""
    stopped = []
    for row in report["incidents"]:
        if row.get("outcome") == "stopped":
            what = f"{row['stage']} {row['tensor']}" if "tensor" in row else row["stage"]
            stopped.append(f"{what} at step {row.get('step', '?')}")
    numbers = []
    for name, section in SECTIONS.items():
        if "recovered" not in section.counters or not section.wrong:
            continue
        wrong, recovered = _wrong_and_recovered(report, name, section)
        lost = wrong - recovered
        if lost > 0:
            numbers.append(f"{name}: {lost} of {wrong} {section.wrong}")
    return stopped or numbers


def _wrong_and_recovered(report: Mapping[str, Any], name: str, section: Section) -> tuple[int, int]:
    """Two counters of a section; one that every report has must be there."""
    if section.needed:
        counters = report[name]
        return counters[section.wrong], counters["recovered"]
    counters = mapping(report, name)
    return count(counters, section.wrong), count(counters, "recovered")


def _varies(report: Mapping[str, Any]) -> str:
    """That a micro-batch gave different results twice, which faults may hide in; empty where it did not."""
    if find(report, "arithmetic", "deterministic") is not False:
        return ""
    sentence = "The same micro-batch gave different gradients when it was computed again."
    bound = number(report, "arithmetic", "replay_bound")
    if bound:
        sentence += f" Replays were compared within {bound:.2g}, so smaller faults were not seen."
    return sentence


def _differing_layers(report: Mapping[str, Any]) -> list[str]:
    """Layers of which the host has computed something else, each time; the run has gone on."""
    return [text(row, "layer") for row in items(report, "arithmetic", "host_layers") if items(row, "differs_in")]


def coverage(report: Mapping[str, Any]) -> float | None:
    """Verified bytes of those on the device in percent, never rounded up to 100; None where that is unknown."""
    verified, there = (find(report, "coverage", name) for name in ("verified_bytes", "device_bytes"))
    if not isinstance(verified, int) or not isinstance(there, int) or there <= 0:
        return None
    return verified * 10**6 // there / 1e4  # as floats, all but one byte of an exabyte would be everything


def crossed(report: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes that crossed between host and card, and those of them that were verified; None in reports of schema 1."""
    there, verified = (find(report, "coverage", "crossed", name) for name in ("crossed_bytes", "verified_bytes"))
    if not isinstance(verified, int) or not isinstance(there, int):
        return None
    return there, verified


def mismatches(report: Mapping[str, Any]) -> int:
    """How often a check found something wrong: the counters together, or the incidents where these are more."""
    counted = sum(count(report, name, section.wrong) for name, section in SECTIONS.items() if section.wrong)
    return max(counted, len(items(report, "incidents")))


def counted(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Every kind of check that ran: what, how much of it, how often it was wrong, and of these recovered."""
    rows = []
    for name, section in SECTIONS.items():
        if not section.is_check:
            continue
        counters = mapping(report, name)
        wrong = count(counters, section.wrong)
        nbytes = count(counters, "bytes")
        done = [f"{count(counters, key):,} {key}" for key in section.done if count(counters, key)]
        if not done and not wrong:
            continue
        if nbytes:
            done.append(size(nbytes))
        recovered = ""
        if "recovered" in counters:
            recovered = f"{count(counters, 'recovered'):,}"
        rows.append((section.title, ", ".join(done), f"{wrong:,}", recovered))
    return rows


_INJECTED = {
    "Faults": ("fault_injection",),
    "Faults of steps": ("step_fault_injection",),
    "Crashes": ("survival", "crash_injection"),
}


def _notes(report: Mapping[str, Any], *, finished: bool) -> tuple[str, ...]:
    notes = []
    if not finished:
        notes.append("The run has not finished: these are its files so far.")
    for what, path in _INJECTED.items():
        injected = find(report, *path)
        if injected:
            notes.append(f"{what} were injected on request: {plain(injected)}.")
    mode = text(report, "verify")
    share = coverage(report)
    if mode == "sample":
        notes.append("Only a sample of the transfers was verified (--verify sample).")
    elif mode == "full" and share is not None and share < 100:
        notes.append("Not every byte was verified; the run continued with the user's consent.")
    link = crossed(report)
    if mode == "full" and link is not None and link[1] < link[0]:
        names = [text(row, "origin") for row in items(report, "coverage", "crossed", "unverified")]
        notes.append(f"{size(link[0] - link[1])} crossed between host and card unverified: {', '.join(names[:3])}.")
    if _varies(report):
        notes.append(_varies(report))
    layers = _differing_layers(report)
    if layers:
        notes.append(f"{', '.join(layers)}: the host computes something else than the device, by more than rounding.")
    not_attested = items(report, "weights", "not_attested")
    if not_attested:
        notes.append(f"Files of the base model without a recorded digest, so not attested: {len(not_attested)}.")
    return tuple(notes)
