"""What a check says: a status, words from a row of knowledge, and the evidence that was read or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hf_rocm_tune.doctor.rows import row as find_row

Status = Literal["ok", "info", "warn", "fail", "unknown", "skipped"]

NOT_TESTED_HERE = "not tested by this project"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        check: name of the check that says it.
        row: name of the row that its words are from; ``environ`` rows are named ``environ:VARIABLE``; empty for
            ``unknown`` and ``skipped``, whose text is the reason and no statement about the machine.
        status: ``unknown`` is what could not be read or measured, ``skipped`` what nobody tried.
        title: in a few words.
        text: one or two sentences.
        evidence: what was read or measured, one line each.
        cure: what to do; empty where nothing is to be done.
        sources: on whose word.
        subject: what it is about where there are several of a kind: a PCI address, a variable, a pair ``0->1``.
        confidence: of the row, see ``rows.Row``; empty without a row.
        needs_cards: a finding that needs two cards is not shown on one.
    """

    check: str
    row: str
    status: Status
    title: str
    text: str
    evidence: tuple[str, ...] = ()
    cure: str = ""
    sources: tuple[str, ...] = ()
    subject: str = ""
    confidence: str = ""
    needs_cards: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"evidence": list(self.evidence), "sources": list(self.sources)}


def from_row(
    check: str, row_name: str, *, subject: str = "", evidence: Iterable[str] = (), **values: object
) -> Finding:
    """A finding with the words of a row.

    Args:
        check: name of the check.
        row_name: name of the row.
        subject: see ``Finding``.
        evidence: one line each.
        values: exactly the placeholders of the row.

    Raises:
        KeyError: there is no such row.
        ValueError: a placeholder has no value, or a value has no placeholder.
    """
    row = find_row(row_name)
    if row.placeholders != values.keys():
        wanted, got = sorted(row.placeholders), sorted(values)
        raise ValueError(f"row {row_name!r} takes the values {wanted}, got {got}")
    text = row.says.format(**values)
    return Finding(
        check=check,
        row=row_name,
        status=row.status,
        title=row.title.format(**values),
        text=text if row.tested_here else f"{text} ({NOT_TESTED_HERE})",
        evidence=tuple(evidence),
        cure=row.cure.format(**values),
        sources=row.sources,
        subject=subject,
        confidence=row.confidence,
        needs_cards=row.needs_cards,
    )


def unknown(check: str, reason: str, *, subject: str = "", evidence: Iterable[str] = ()) -> Finding:
    """A check that could not find out, and why."""
    return _without_row(check, "unknown", "could not be found out", reason, subject, evidence)


def skipped(check: str, reason: str, *, subject: str = "") -> Finding:
    """A check that was not made, and why."""
    return _without_row(check, "skipped", "not looked at", reason, subject, ())


def _without_row(
    check: str, status: Literal["unknown", "skipped"], title: str, reason: str, subject: str, evidence: Iterable[str]
) -> Finding:
    assert reason.strip(), "not knowing has a reason"
    text = " ".join(reason.split())
    return Finding(
        check=check, row="", status=status, title=title, text=text, subject=subject, evidence=tuple(evidence)
    )
