"""What a check is: a name, a group, and a function from evidence to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding

#: Groups in the order in which they run and are shown. What explains most comes first: variables and the wheel before
#: copies to one card, those before its memory, that before copies between cards, and arithmetic after all copies.
GROUPS: Mapping[str, str] = {
    "access": "Cards and access to them",
    "variables": "Environment variables",
    "software": "Software",
    "kernel": "Kernel and firmware settings",
    "links": "PCI Express",
    "host": "Memory and temperature",
    "transfers": "Measured: transfers",
    "memory": "Measured: the card's memory",
    "pairs": "Measured: between cards",
    "compute": "Measured: arithmetic",
    "after": "After measuring",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: for ``--only`` and ``--skip``.
        group: a key of ``GROUPS``.
        about: what it finds out, one line.
        run: gives findings, ``ok`` with its evidence included, and none where there is nothing to look at; does not
            raise for anything that it finds.
        measured: it runs something; not possible on a recording.
        full: it takes long, and only ``--full`` runs it.
        needs_gpu: it measures on an accelerator that torch sees.
        needs_cards: with fewer discrete cards it does not exist.
        seconds: how long it takes as a rule.
    """

    name: str
    group: str
    about: str
    run: Callable[[Evidence], Iterable[Finding]]
    measured: bool = False
    full: bool = False
    needs_gpu: bool = False
    needs_cards: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.group in GROUPS, self.group
        assert self.measured or not (self.full or self.needs_gpu), "a check that only reads is quick and runs anywhere"
