"""A machine, what is installed on it and set, and what the doctor is to find there.

The expectations are written from the reports and documents that the sources name, not from the doctor's code: where the
two differ, one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.machine.trees import Built
from tests.machines.installs import stack

STATUSES = ("fail", "warn", "info")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One machine and its diagnosis.

    Attributes:
        recording: what ``doctor --from`` reads; its ``source`` says what the machine follows.
        fail, warn, note: names of rows with that status (``note`` is ``info``), each as often as it is found; as
            ``name subject`` where it matters what it is about. All of them, no more and no fewer.
        fine: some rows of status ``ok`` that must be there.
        unknown: names of the checks that must say that they do not know; all of them.
        says: texts that must stand in the findings: a cure, a line to paste, a figure.
        never: texts that must stand nowhere in the output.
    """

    recording: dict[str, Any]
    fail: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    fine: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Exit code: 2 with a failure, 1 with a warning, else 0."""
        return 2 if self.fail else 1 if self.warn else 0

    @property
    def expected(self) -> dict[str, list[str]]:
        """Status to rows, sorted; those of status ``ok`` are not among them."""
        return {status: sorted(rows) for status, rows in zip(STATUSES, (self.fail, self.warn, self.note), strict=True)}

    @property
    def cards(self) -> int:
        """How many discrete cards the recording was built with, by the addresses of their own switches."""
        ids = [text for path, text in self.recording.get("files", {}).items() if path.endswith("/device")]
        return sum(text.strip() == "0x1479" for text in ids)


def case(
    built: Built,
    *,
    software: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **expected: Sequence[str],
) -> Case:
    """A machine with a good installation for one 7900 XT, unless ``software`` is another."""
    sections = {"software": dict(stack() if software is None else software), "environ": dict(environ or {})}
    wanted = {name: tuple(rows) for name, rows in expected.items()}
    return Case(recording=built.having(**sections).recording(), **wanted)
