"""Rows of knowledge: every word that the doctor says about a problem, with its cure and its source, read from TOML.

One table a row, in any ``knowledge/*.toml`` that is not one of ``DATA_FILES``::

    [aer_errors]
    status = "warn"                 # ok | info | warn | fail
    title = "The PCIe link has counted errors"
    says = "{address} counted {counts} errors since boot"
    cure = "reseat the card, or try another slot; read the counter again under load"
    sources = ["kernel documentation of aer_dev_correctable"]
    confidence = "reported"         # documented | reproduced | reported | general
    needs_cards = 2                 # rows that need two cards never appear on one
    tested_here = true              # false: the output adds that this project has not tested it
    environ = ["peer_copy_failed"]  # what the policy of variables is told where this row was found

Only a row of status ``ok`` may lack a cure. A row that breaks these rules is our bug and raises when rows are loaded.
"""

from __future__ import annotations

import string
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

KNOWLEDGE = Path(__file__).parent / "knowledge"
#: Tables that checks look things up in (``knowledge_data``); their words are rows of the other files.
DATA_FILES = ("kernels.toml", "versions.toml", "thresholds.toml", "addresses.toml")

RowStatus = Literal["ok", "info", "warn", "fail"]
Confidence = Literal["documented", "reproduced", "reported", "general"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that the doctor can say.

    Attributes:
        name: unique among all files.
        status: how grave it is.
        title: what is the case, in a few words; may hold ``{placeholders}``, as ``says`` and ``cure`` may.
        says: the finding in one or two sentences.
        cure: what to do; empty only where nothing is wrong.
        sources: on whose word: issues, documents, source files, or "general knowledge, lower confidence" where there
            is none for a part of what is said.
        confidence: ``documented`` by vendor or source code, ``reproduced`` by several or by a controlled trial,
            ``reported`` by someone, or ``general`` knowledge without a source of its own.
        needs_cards: how many discrete cards must be there before this is said.
        tested_here: False for what this project has no machine of.
        environ: names of findings on which rows of the policy of variables hang (``environ.rules.Row.finding``).
    """

    name: str
    status: RowStatus
    title: str
    says: str
    sources: tuple[str, ...]
    confidence: Confidence
    cure: str = ""
    needs_cards: int = 0
    tested_here: bool = True
    environ: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            f"status is one of {get_args(RowStatus)}": self.status in get_args(RowStatus),
            f"confidence is one of {get_args(Confidence)}": self.confidence in get_args(Confidence),
            "there are a title and words": bool(self.title.strip()) and bool(self.says.strip()),
            "there is a source": bool(self.sources) and all(source.strip() for source in self.sources),
            "there is a cure": bool(self.cure.strip()) or self.status == "ok",
            "needs_cards is a small number": type(self.needs_cards) is int and 0 <= self.needs_cards <= 2,
            "tested_here is true or false": type(self.tested_here) is bool,
        }
        broken = [rule for rule, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"row {self.name!r} breaks: {'; '.join(broken)}")

    @property
    def placeholders(self) -> frozenset[str]:
        """The names that have to be given a value."""
        parsed = string.Formatter().parse(f"{self.title} {self.says} {self.cure}")
        return frozenset(name.partition(".")[0].partition("[")[0] for _, name, _, _ in parsed if name is not None)


def load_rows(directory: Path = KNOWLEDGE) -> dict[str, Row]:
    """All rows of all files of ``directory``.

    Raises:
        ValueError: a file is no TOML, a row breaks a rule, or two rows have one name.
    """
    rows: dict[str, Row] = {}
    for file in sorted(directory.glob("*.toml")):
        if file.name in DATA_FILES:
            continue
        for name, table in _read(file).items():
            if name in rows:
                raise ValueError(f"{file.name}: there are two rows {name!r}")
            rows[name] = _row(file, name, table)
    return rows


def _row(file: Path, name: str, table: Any) -> Row:
    allowed = {field.name for field in fields(Row)} - {"name"}
    unknown = sorted(set(table) - allowed) if isinstance(table, dict) else ["(not a table)"]
    if unknown:
        raise ValueError(f"{file.name}: row {name!r} has {', '.join(unknown)}, which rows do not have")
    lists: dict[str, tuple[str, ...]] = {}
    for key in ("sources", "environ"):
        values = table.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{file.name}: row {name!r} has no list of texts as {key}")
        lists[key] = tuple(values)
    try:
        return Row(name=name, **{**table, **lists})
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file.name}: row {name!r}: {error}") from error


@cache
def all_rows() -> dict[str, Row]:
    """The rows of the package, read once."""
    return load_rows()


def row(name: str) -> Row:
    """One row of the package.

    Raises:
        KeyError: there is none of that name.
    """
    return all_rows()[name]


@cache
def knowledge_data(file: str) -> dict[str, Any]:
    """One of ``DATA_FILES`` as it stands."""
    assert file in DATA_FILES, file
    return _read(KNOWLEDGE / file)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.name}: {error}") from error
