"""Tapes written by hand, for the arithmetic of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Segment:
    """As ``models.shapes_record.Segment``."""

    role: str
    layer: int = -1
    flops: int = 0
    written: int = 0
    launches: int = 0


@dataclass(frozen=True, kw_only=True)
class Tape:
    """As ``models.shapes_record.Tape``."""

    batch: int
    length: int
    segments: Sequence[Segment]
    events: Sequence[tuple[int, int, int]]
    sizes: Sequence[int]
    owners: Sequence[int]
    tiles: frozenset[int] = frozenset()
    tile_tokens: int = 4096


STEP = (
    Segment(role="start"),
    Segment(role="forward", layer=0),
    Segment(role="forward", layer=1),
    Segment(role="forward", layer=2),
    Segment(role="head"),
    Segment(role="loss"),
    Segment(role="backward", layer=2),
    Segment(role="backward", layer=1),
    Segment(role="backward", layer=0),
)
LAYER_OF = (0, 1, 1, 1, 1, 2)  # six layers: the first, four of a kind, the last


def written_down(batch: int, length: int) -> Tape:
    """A step whose levels can be added up by hand, in units of tokens.

    Each layer keeps 10 a token and takes 4 more while it runs in either direction; it also makes a cast of 1000 bytes
    that lives until the head begins. The loss takes 50 a token. Each layer's gradient has 300 bytes.
    """
    tokens = batch * length
    events: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    owners: list[int] = []

    def new(segment: int, nbytes: int) -> int:
        events.append((segment, len(sizes), 1))
        sizes.append(nbytes)
        owners.append(segment)
        return len(sizes) - 1

    def passing(segment: int, nbytes: int) -> None:
        events.append((segment, new(segment, nbytes), -1))

    kept, casts = [], []
    for segment in (1, 2, 3):
        kept.append(new(segment, 10 * tokens))
        casts.append(new(segment, 1000))
        passing(segment, 4 * tokens)
    for cast in casts:
        events.append((4, cast, -1))
    passing(4, 2 * tokens)
    passing(5, 50 * tokens)
    for segment, storage in zip((6, 7, 8), reversed(kept), strict=True):
        passing(segment, 4 * tokens)
        gradient = new(segment, 300)
        events.append((segment, gradient, 0))
        events.append((segment, storage, -1))
    return Tape(batch=batch, length=length, segments=STEP, events=events, sizes=sizes, owners=owners)
