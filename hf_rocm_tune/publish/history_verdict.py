"""What a transfer report comes to: one verdict, and its counters as rows that people read.

A report is input like any other here: what is missing from it is said to be unknown, never taken for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_rocm_tune.publish.history_values import count, find, items, number, plain, size, table, text
from hf_rocm_tune.publish.upload_refusals import unrecovered

Level = Literal["good", "note", "bad", "unknown"]

_STAGES = {
    "weights": "model weights",
    "batches": "batches",
    "adapter": "adapter weights",
    "optimizer": "optimizer state",
    "activations": "activations between the cards of a split model",
}
# Section: what it is called, the counter of what was looked at, and what one of those is.
_CHECKS = {
    "casts": ("casts of weights", "checked", "checked"),
    "gradients": ("averaged gradients", "buckets", "buckets checked"),
    "frozen": ("frozen weights in memory", "passes", "passes"),
    "replicas": ("equal weights on all ranks", "checks", "comparisons"),
    "files": ("files read back", "verified", "verified"),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be thought of a run.

    Attributes:
        level: "good": finished, all of it verified, nothing wrong was used; "note": something is to be known; "bad":
            wrong bytes are in the result, or the result is not what was written; "unknown": nothing tells.
        headline: one sentence.
        notes: what else is to be known, one sentence each.
    """

    level: Level
    headline: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One kind of check.

    Attributes:
        what: what was checked.
        amount: how much of it, in words.
        mismatches: that were wrong.
        recovered: of these, made right; None where nothing can be recovered.
    """

    what: str
    amount: str
    mismatches: int
    recovered: int | None


def judge(report: Mapping[str, Any], *, finished: bool, damaged: Sequence[str] = ()) -> Verdict:
    """The verdict on a run.

    Args:
        report: the transfer report; empty without one.
        finished: whether the run came to its end.
        damaged: files of the result that are not as they were written.
    """
    notes = _notes(report, finished=finished)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return Verdict(level="bad", headline=f"The result is not what was written: {damaged[0]}{more}.", notes=notes)
    if not report:
        said = "Nothing is known of what was verified: there is no transfer report."
        return Verdict(level="unknown", headline=said, notes=notes)
    try:
        wrong = unrecovered(report)
    except (KeyError, TypeError, AttributeError):
        said = "The transfer report is not of the expected form, so it proves nothing."
        return Verdict(level="unknown", headline=said, notes=notes)
    if wrong:
        said = f"Wrong bytes were found that could not be made right: {'; '.join(wrong[:3])}."
        return Verdict(level="bad", headline=said, notes=notes)
    share, mismatches = coverage(report), sum(row.mismatches for row in counted(report))
    if share is None or text(report, "verify") == "off":
        said = "Transfers were not verified in this run."
        return Verdict(level="unknown", headline=said, notes=notes)
    verified = f"{share:g} % of the bytes on the device were verified"
    if not mismatches:
        said = f"{verified}, and none of them was wrong."
    else:
        times = "once" if mismatches == 1 else f"{mismatches:,} times"
        said = f"{verified}. Something was wrong {times}, was noticed, and was made right before it was used."
    complete = finished and share >= 100 and text(report, "verify") == "full"
    return Verdict(level="good" if complete else "note", headline=said, notes=notes)


def coverage(report: Mapping[str, Any]) -> float | None:
    """Verified bytes of those on the device in percent, never rounded up to 100; None where that is unknown."""
    if number(report, "coverage", "verified_bytes") is None or number(report, "coverage", "device_bytes") is None:
        return None
    # Whole numbers: as floats, all but one byte of an exabyte would be everything.
    verified, there = int(find(report, "coverage", "verified_bytes")), int(find(report, "coverage", "device_bytes"))
    return verified * 10**6 // there / 1e4 if there > 0 else None


def counted(report: Mapping[str, Any]) -> list[Counted]:
    """Every kind of check that looked at something or found something."""
    rows = []
    for name, what in _STAGES.items():
        stage = table(report, name)
        nbytes, verified = number(stage, "bytes") or 0.0, number(stage, "verified_bytes") or 0.0
        amount = f"{count(stage, 'tensors'):,} tensors, {size(nbytes)}"
        if verified < nbytes:
            amount += f" ({size(verified)} verified)"
        rows.append((count(stage, "tensors"), amount, what, stage))
    for name, (what, key, noun) in _CHECKS.items():
        section = table(report, name)
        amount = f"{count(section, key):,} {noun}"
        if name == "frozen":
            amount += f" over {count(section, 'tensors'):,} tensors"
        rows.append((count(section, key), amount, what, section))
    return [
        Counted(
            what=what,
            amount=amount,
            mismatches=count(section, "mismatches"),
            recovered=count(section, "recovered") if "recovered" in section else None,
        )
        for looked_at, amount, what, section in rows
        if looked_at or count(section, "mismatches")
    ]


def unverified(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(tensor, reason) of what the report names as not verified."""
    rows = items(report, "coverage", "unverified")
    return [(text(row, "tensor") or "?", text(row, "reason")) for row in rows]


def injected(report: Mapping[str, Any]) -> list[str]:
    """What was broken on request, one sentence each."""
    said = []
    for key, what in (("fault_injection", "Faults"), ("step_fault_injection", "Faults of steps")):
        asked = find(report, key)
        if asked:
            said.append(f"{what} were injected on request: {plain(asked)}.")
    if crashes := find(report, "survival", "crash_injection"):
        said.append(f"Crashes were injected on request: {plain(crashes)}.")
    return said


def incident(row: Any) -> dict[str, str]:
    """One incident as columns: step, rank, stage, tensor, kind, where, found, way and outcome; the rest as details."""
    row = row if isinstance(row, dict) else {"kind": plain(row)}
    begins, length = number(row, "first_offset"), number(row, "length")
    where = "" if begins is None or length is None else f"{length:,.0f} bytes from byte {begins:,.0f}"
    columns = {name: "" if row.get(name) is None else plain(row[name]) for name in ("step", "rank", "stage", "tensor")}
    columns |= {"kind": plain(row.get("kind", "")).replace("_", " "), "where": where}
    columns |= {"made right by": plain(row.get("rung", "")).replace("_", " "), "outcome": plain(row.get("outcome", ""))}
    shown = {*columns, "rung", "first_offset", "length"}
    rest = {key: value for key, value in row.items() if key not in shown and value not in (None, "", [])}
    return columns | {"details": "; ".join(f"{key}: {plain(value)}" for key, value in rest.items())}


def explained(report: Mapping[str, Any]) -> str:
    """What verifying meant in this run; empty where nothing was verified."""
    what = {"full": "Every byte is", "sample": "Of a sample of the transfers, every byte is"}
    begin = what.get(text(report, "verify"))
    if begin is None:
        return ""
    said = f"{begin} digested where it comes from and again on the device, and both are compared before it is used."
    if count(report, "frozen", "passes"):
        said += " Frozen weights are digested again while the training goes on and before each save."
    return f"{said} Files are read back and compared with the live tensors."


def _notes(report: Mapping[str, Any], *, finished: bool) -> tuple[str, ...]:
    notes = [] if finished else ["The run has not come to its end: this is what is there so far."]
    notes += injected(report)
    mode, share = text(report, "verify"), coverage(report)
    if mode == "sample":
        notes.append("Only a sample of the transfers was verified (--verify sample).")
    elif mode == "full" and share is not None and share < 100:
        notes.append("Not every byte was verified; the run went on with the user's consent.")
    if names := items(report, "weights", "not_attested"):
        files = f"{len(names)} file{'s' if len(names) > 1 else ''}"
        notes.append(f"Of {files} of the base model no digest was recorded, so what was in them is not attested.")
    return tuple(notes)
