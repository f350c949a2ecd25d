"""A machine, and what the doctor is to find on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.doctor.stacks import stack
from tests.hardware.trees import Built


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine and its diagnosis.

    Attributes:
        recording: what ``doctor --from`` reads.
        finds: rows of a grave or informative status, each with how often; variables as ``environ:NAME=status``.
        unknown: checks that must say that they do not know.
        code: exit code.
    """

    recording: dict[str, Any]
    finds: dict[str, int] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    code: int = 0


def machine(built: Built, *finds: str, unknown: tuple[str, ...] = (), code: int = 0, **sections: Any) -> Machine:
    software = sections.pop("software", stack())
    recording = built.having(software=software, **sections).recording()
    counted = {name: finds.count(name) for name in finds}
    return Machine(recording=recording, finds=counted, unknown=frozenset(unknown), code=code)
