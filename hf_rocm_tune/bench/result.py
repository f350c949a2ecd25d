"""What every benchmark leaves: a table, then one JSON object as the last line, and the same in a file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.bench import machine as machines
from hf_rocm_tune.errors import UsageError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished benchmark.

    Args:
        bench: ``transfer``, ``load``, ``step`` or ``comm``.
        command: the command line that was given.
        machine: see `machine.describe`.
        settings: everything that was chosen, by the user or by default.
        rows: the figures, one flat or nested JSON object each.
        notes: what a reader must know, one sentence each.
        left_out: what was not measured, with the reason.
    """

    bench: str
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def check_writable(path: Path | None, flag: str) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        UsageError: its directory does not exist, or it is a directory.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{flag} {path}: give a file in a directory that exists")


def progress(text: str) -> None:
    """Say on stderr where the benchmark is: stdout holds the result."""
    print(text, file=sys.stderr, flush=True)


def publish(result: Result, table: str, json_file: Path | None) -> None:
    """Print machine, table, notes and, as the last line, the JSON object; write it to `json_file` too."""
    print(f"{result.command}\n{machines.summary(result.machine)}\n\n{table}\n")
    for note in result.notes:
        print(f"note: {note}")
    for row in result.left_out:
        print(f"left out: {row['what']}: {row['reason']}")
    text = result.to_json()
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
