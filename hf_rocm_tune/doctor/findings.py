"""What the doctor says: rows of knowledge in TOML, and the findings that are made of them.

A row is one table in a file of ``knowledge/`` that is not one of ``DATA_FILES``::

    [aer_errors]
    status = "warn"                 # ok | info | warn | fail
    title = "The PCIe link has counted errors"
    says = "{address} counted {counts} errors since boot"
    cure = "reseat the card, or try another slot; read the counter again under load"
    sources = ["kernel documentation of aer_dev_correctable"]
    confidence = "reported"         # documented | reproduced | reported | general
    needs_cards = 2                 # not said with fewer discrete cards
    tested_here = true              # false: the text adds that this project has not tested it
    environ = ["peer_copy_failed"]  # names of findings that the policy of variables is told

Only a row of status ``ok`` may lack a cure, and every row has a source: tests/doctor/test_rows.py holds the rules.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.machine.variables import issue_link, links_of

KNOWLEDGE = Path(__file__).parent / "knowledge"
#: Tables that checks look things up in (`knowledge_data`); all other files hold rows.
DATA_FILES = ("kernels.toml", "versions.toml", "thresholds.toml", "addresses.toml", "checks.toml")
NOT_TESTED_HERE = "not tested by this project"

RowStatus = Literal["ok", "info", "warn", "fail"]
Status = Literal["ok", "info", "warn", "fail", "unknown", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that the doctor can say; ``title``, ``says`` and ``cure`` may hold ``{placeholders}``."""

    name: str
    status: RowStatus
    title: str
    says: str
    sources: tuple[str, ...]
    confidence: str
    cure: str = ""
    needs_cards: int = 0
    tested_here: bool = True
    environ: tuple[str, ...] = ()

    @property
    def placeholders(self) -> frozenset[str]:
        """The names that have to be given a value."""
        parsed = string.Formatter().parse(f"{self.title} {self.says} {self.cure}")
        return frozenset(name for _, name, _, _ in parsed if name is not None)


@cache
def all_rows() -> dict[str, Row]:
    """The rows of the package by name."""
    rows: dict[str, Row] = {}
    for file in sorted(KNOWLEDGE.glob("*.toml")):
        if file.name not in DATA_FILES:
            for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
                assert name not in rows, f"{file.name}: there are two rows {name!r}"
                lists = {key: tuple(table.get(key, ())) for key in ("sources", "environ")}
                rows[name] = Row(name=name, **{**table, **lists})
    return rows


@cache
def knowledge_data(file: str) -> dict[str, Any]:
    """One of ``DATA_FILES`` as it stands."""
    return tomllib.loads((KNOWLEDGE / file).read_text(encoding="utf-8"))


def link_of(source: str) -> str:
    """The address of one source; empty where none is certain."""
    known = knowledge_data("addresses.toml")
    own = issue_link(source, known["repositories"]) or known["pages"].get(source, "")
    return own or next(iter(links_of(source)), "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        check: name of the check that says it; filled in by whoever runs the check.
        row: name of the row that its words are from; ``environ:VARIABLE`` for the policy of variables; empty for
            ``unknown`` and ``skipped``, whose text is the reason and no statement about the machine.
        status: ``unknown`` is what could not be read or measured, ``skipped`` what nobody tried.
        title: in a few words.
        text: one or two sentences.
        evidence: what was read or measured, one line each.
        cure: what to do; empty where there is nothing to do.
        sources: on whose word.
        subject: what it is about where there are several of a kind: a PCI address, a variable, a pair ``0->1``.
        confidence: of the row; empty without one.
        needs_cards: with fewer discrete cards it is not shown.
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """What `to_dict` gave."""
        return cls(**values | {"evidence": tuple(values["evidence"]), "sources": tuple(values["sources"])})


def from_row(
    row_name: str, *, check: str = "", subject: str = "", evidence: Iterable[str] = (), **values: object
) -> Finding:
    """A finding with the words of a row.

    Args:
        row_name: name of the row.
        check, subject, evidence: see `Finding`.
        values: exactly the placeholders of the row; ``address`` and ``device`` are the subject unless given.

    Raises:
        KeyError: there is no such row.
        ValueError: a placeholder has no value, or a value has no placeholder.
    """
    row = all_rows()[row_name]
    values = {name: subject for name in ("address", "device") if name in row.placeholders} | values
    if row.placeholders != values.keys():
        raise ValueError(f"row {row_name!r} takes the values {sorted(row.placeholders)}, got {sorted(values)}")
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


def unknown(reason: str, *, check: str = "", subject: str = "", evidence: Iterable[str] = ()) -> Finding:
    """Something that could not be found out, and why."""
    return Finding(
        check=check,
        row="",
        status="unknown",
        title="could not be found out",
        text=" ".join(reason.split()),
        subject=subject,
        evidence=tuple(evidence),
    )


def skipped(reason: str, *, check: str = "", subject: str = "") -> Finding:
    """Something that was not looked at, and why."""
    text = " ".join(reason.split())
    return Finding(check=check, row="", status="skipped", title="not looked at", text=text, subject=subject)
