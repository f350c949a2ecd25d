"""What the driver of the simulated card has counted: every copy between host and card, every wait, and who called."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ENGINE = "engine "


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of ``SIMCARD_LOG``.

    Args:
        process: its id.
        kind: ``to_card``, ``to_host``, ``wait``, ``harm`` (a copy went wrong, on request), or ``context``: the process
            used the card for the first time.
        card: its number.
        nbytes: that crossed.
        caller: ``file:function`` of the innermost Python frame outside torch.
        engine: whether the transfer engine did it.
    """

    process: int
    kind: str
    card: int
    nbytes: int
    caller: str
    engine: bool


class Log:
    """The events of one or more processes, in order.

    Args:
        paths: what was given as ``SIMCARD_LOG``.
    """

    def __init__(self, *paths: Path) -> None:
        self.events = [_event(line) for path in paths for line in path.read_text().splitlines()]

    @property
    def cards(self) -> dict[int, list[int]]:
        """The cards that each process has used."""
        used: dict[int, list[int]] = {}
        for event in self.events:
            if event.kind == "context":
                used.setdefault(event.process, []).append(event.card)
        return used

    def engine_bytes(self, kind: str) -> int:
        """What the transfer engine moved."""
        return sum(event.nbytes for event in self.events if event.kind == kind and event.engine)

    def others(self, kind: str) -> Counter[str]:
        """Bytes that somebody else moved, by caller."""
        found: Counter[str] = Counter()
        for event in self.events:
            if event.kind == kind and not event.engine:
                found[event.caller] += event.nbytes
        return found

    def waits(self) -> Counter[str]:
        """How often the host waited for a card, by caller."""
        return Counter(event.caller for event in self.events if event.kind == "wait")


def _event(line: str) -> Event:
    process, kind, card, nbytes, caller = line.split("\t")
    return Event(
        process=int(process),
        kind=kind,
        card=int(card),
        nbytes=int(nbytes),
        caller=caller.removeprefix(ENGINE),
        engine=caller.startswith(ENGINE),
    )
