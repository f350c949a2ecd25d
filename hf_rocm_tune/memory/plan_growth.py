"""How the bytes and the work of a recorded step grow with batch size and sequence length. Pure arithmetic: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"
Integers: TypeAlias = "npt.NDArray[np.int64]"


class SegmentLike(Protocol):
    """A stretch of a recorded step; see ``models.shapes_record.Segment``."""

    @property
    def role(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def launches(self) -> int: ...


class TapeLike(Protocol):
    """A recorded step; see ``models.shapes_record.Tape``."""

    @property
    def batch(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def segments(self) -> Sequence[SegmentLike]: ...
    @property
    def events(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def owners(self) -> Sequence[int]: ...
    @property
    def tiles(self) -> frozenset[int]: ...
    @property
    def tile_tokens(self) -> int: ...


#: Powers of batch and length with which a storage can grow.
_POWERS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
#: Two ways to grow are told apart from two recordings where their sizes would differ by more than this factor.
_APART = 1.1


def told_apart(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the sizes at two shapes (batch, length) tell how a storage grows.

    They do not where twice the length is as much more as half again the batch, for example: from 2 x 1024 to 3 x 1536
    whatever grows with the tokens grows as the square of the length does. A batch or a length that is the same in both
    is not asked for.
    """
    powers = {(i * (first[0] != second[0]), j * (first[1] != second[1])) for i, j in _POWERS}
    growths = np.sort(_growths(first, second, sorted(powers)))
    return bool(np.diff(growths).min(initial=np.inf) > np.log(_APART))


def _growths(first: tuple[int, int], second: tuple[int, int], powers: Sequence[tuple[int, int]]) -> Floats:
    """For each pair of powers the logarithm of the factor between two shapes (batch, length)."""
    batch, length = (np.log(after / before) for before, after in zip(first, second, strict=True))
    return np.array([i * batch + j * length for i, j in powers])


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Bytes of each storage: ``fixed + slope * batch ** i * length ** j``, or those of a tile.

    Args:
        fixed, slope, batch_power, length_power: one value a storage.
        tile: bytes a token of a storage that stops growing at ``tile_tokens`` tokens; 0 for others.
    """

    fixed: Floats
    slope: Floats
    batch_power: Floats
    length_power: Floats
    tile: Floats
    tile_tokens: int

    @classmethod
    def fit(cls, first: TapeLike, second: TapeLike) -> Growth:
        """From two recordings of the same step, which may differ in batch, in length, in both or not at all.

        The powers are those whose ratio is nearest to that of the two sizes. With them both sizes are met exactly, also
        where a storage is a token or a few shorter than the sequence.

        Raises:
            ValueError: the two shapes do not tell; see `told_apart`.
        """
        shapes = (first.batch, first.length), (second.batch, second.length)
        if not told_apart(*shapes):
            raise ValueError(f"two recordings, {shapes[0]} and {shapes[1]}, that do not tell how sizes grow")
        sizes, others = (np.array(tape.sizes, dtype=np.float64) for tape in (first, second))
        known = (sizes > 0) & (others > 0)
        ratios = np.log(np.where(known, others, 1.0)) - np.log(np.where(known, sizes, 1.0))
        growths = _growths(*shapes, _POWERS)
        nearest = np.abs(ratios[:, None] - growths[None, :]).argmin(axis=1)
        batch_power, length_power = np.array(_POWERS, dtype=np.float64)[nearest].T
        before = first.batch**batch_power * first.length**length_power
        after = second.batch**batch_power * second.length**length_power
        grows = after > before
        slope = np.where(grows, (others - sizes) / np.where(grows, after - before, 1.0), 0.0)
        tile = np.zeros_like(sizes)
        marked = list(first.tiles)
        tile[marked] = np.maximum(*(_a_token(tape)[marked] for tape in (first, second)))
        return cls(
            fixed=sizes - slope * before,
            slope=slope,
            batch_power=batch_power,
            length_power=length_power,
            tile=tile,
            tile_tokens=first.tile_tokens,
        )

    def quadratic(self, sizes: Floats) -> Floats:
        """Of the bytes of each storage those that grow with the square of the length: masks and attention scores."""
        return np.where((self.length_power == 2) & (self.slope > 0), sizes, 0.0)

    def at(self, batch: int, length: int) -> Floats:
        """Bytes of each storage, never negative."""
        grown = self.fixed + self.slope * float(batch) ** self.batch_power * float(length) ** self.length_power
        tiled = self.tile * min(batch * length, self.tile_tokens)
        found: Floats = np.maximum(np.where(self.tile > 0, tiled, grown), 0.0)
        return found


def _a_token(tape: TapeLike) -> Floats:
    """Bytes a token of each storage, were it a tile; slightly less where the last token of a sequence has no part."""
    return np.array(tape.sizes, dtype=np.float64) / min(tape.batch * tape.length, tape.tile_tokens)


class Counts:
    """Operations, bytes written and launches of each stretch, from the same two recordings."""

    def __init__(self, first: TapeLike, second: TapeLike) -> None:
        flops, written = _columns(first)
        more_flops, more_written = _columns(second)
        tokens, more_tokens = (tape.batch * tape.length for tape in (first, second))
        if first.length == second.length:
            self._flops = np.array([flops / tokens, np.zeros_like(flops)])
        else:  # one term with the tokens, one with the square of the length
            squares = [[tape.batch * tape.length, tape.batch * tape.length**2] for tape in (first, second)]
            self._flops = np.linalg.solve(np.array(squares, dtype=np.float64), np.array([flops, more_flops]))
        grows = more_tokens > tokens
        self._per_token = (more_written - written) / (more_tokens - tokens) if grows else written / tokens
        self._fixed = written - self._per_token * tokens
        self._launches = np.array([segment.launches for segment in first.segments], dtype=np.float64)

    def at(self, batch: int, length: int) -> tuple[Floats, Floats, Floats]:
        """Operations, bytes written and launches, one number a stretch each."""
        flops = batch * length * (self._flops[0] + self._flops[1] * length)
        written = self._fixed + self._per_token * batch * length
        return np.maximum(flops, 0.0), np.maximum(written, 0.0), self._launches


def _columns(tape: TapeLike) -> tuple[Floats, Floats]:
    """Operations and bytes written of each stretch."""
    flops = np.array([segment.flops for segment in tape.segments], dtype=np.float64)
    return flops, np.array([segment.written for segment in tape.segments], dtype=np.float64)
