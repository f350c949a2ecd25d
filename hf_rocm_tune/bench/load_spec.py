"""What the parent of a loading benchmark asks of its children."""

from __future__ import annotations

from dataclasses import dataclass

SIDES = ("stock", "ours")


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What one child loads.

    Args:
        model: checkpoint directory.
        side: ``stock``: ``from_pretrained``; ``ours``: the same through the mover.
        device: where to.
        verify: what ours verifies.
        load_in_4bit: NF4, double quantisation.
    """

    model: str
    side: str
    device: str
    verify: str
    load_in_4bit: bool
