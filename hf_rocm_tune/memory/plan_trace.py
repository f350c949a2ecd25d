"""From the recordings of a few layers to the peak of a whole model, at any batch size and sequence length.

A recording (``hf_rocm_tune.models.shapes``) lists when each storage of one step comes and goes. Two lengths and two
batch sizes tell how the bytes of each storage grow: with the tokens, with the square of the length (attention masks,
eager attention), or not at all. A model of L layers is then the recorded stretches one after the other, those of a
layer as often as the model has layers of that kind; the peak is the highest level that is reached, which is a maximum
over phases and not a sum of parts.

What is exact: everything up to storages whose size is not a product of batch and length (a few shifted by one token).
Pure arithmetic: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_rocm_tune.memory.plan_growth import Counts, Floats, Growth, Integers, TapeLike

LAYER_ROLES = frozenset({"forward", "backward"})


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest level of a step, in bytes above what is there before it.

    Args:
        total: the level.
        role: the stretch in which it is reached: ``start``, ``forward``, ``head``, ``loss``, ``backward``, ``end``.
        layer: the layer of the real model, counted from 0, or -1.
        kept: activations kept for backward when that stretch begins.
        quadratic: of those, what grows with the square of the length: attention masks and scores.
        gradients: gradients of parameters that exist when that stretch begins.
        working: what the stretch itself takes on top.
        by_role: the highest level in each kind of stretch.
        all_gradients: bytes of the gradients when the step is done.
    """

    total: float
    role: str
    layer: int
    kept: float
    quadratic: float
    gradients: float
    working: float
    by_role: dict[str, float]
    all_gradients: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes.

    Args:
        flops: floating point operations of matrix products and attention, recomputation included.
        written: bytes of all tensors that are written.
        launches: operations that write a tensor.
    """

    flops: float
    written: float
    launches: float


class Trace:
    """A step as a function of batch size and sequence length.

    Args:
        first, second: recordings of the same step at two lengths, and at two batch sizes where it is to be known at
            others. At one length only, it is known at that length only.
        layer_of: for each layer of the real model, its stand-in among the recorded layers.

    Raises:
        ValueError: the recordings differ in more than sizes or do not tell how those grow: the step cannot be scaled.
    """

    def __init__(self, first: TapeLike, second: TapeLike, layer_of: Sequence[int]) -> None:
        if second.events != first.events or len(second.segments) != len(first.segments):
            raise ValueError("the step does other things at another length or batch size")
        self._layer_of = tuple(layer_of)
        self._sizes = Growth.fit(first, second)
        self._work = Counts(first, second)
        self._segments = [(segment.role, segment.layer) for segment in first.segments]
        events = np.array(first.events, dtype=np.int64).reshape(-1, 3)
        counts = [self._repeats(*self._segments[owner]) for owner in first.owners]
        self._stretches = [
            _Stretch.cut(events[events[:, 0] == index], counts, inside=role in LAYER_ROLES)
            for index, (role, _) in enumerate(self._segments)
        ]

    def peak(self, batch: int, length: int, *, accumulating: bool = False) -> Peak:
        """The peak of one step.

        Args:
            batch: sequences.
            length: tokens of each.
            accumulating: gradients of earlier micro-batches are there already.
        """
        sizes = self._sizes.at(batch, length)
        levels = {
            key: each.levels(sizes, accumulating) for key, each in zip(self._segments, self._stretches, strict=True)
        }
        squares = self._sizes.quadratic(sizes)
        changes = {key: each.net(squares) for key, each in zip(self._segments, self._stretches, strict=True)}
        all_gradients = sum(levels[key].gradients * self._repeats(*key) for key in levels)
        level, quadratic, gradients = 0.0, 0.0, all_gradients if accumulating else 0.0
        best: Peak | None = None
        by_role: dict[str, float] = {}
        for role, recorded, real in self._timeline():
            found = levels.get((role, recorded))
            if found is None:
                continue
            here = level + gradients + found.peak
            by_role[role] = max(by_role.get(role, 0.0), here)
            if best is None or here > best.total:
                best = Peak(
                    total=here,
                    role=role,
                    layer=real,
                    kept=level,
                    quadratic=quadratic,
                    gradients=gradients,
                    working=found.peak,
                    by_role=by_role,
                    all_gradients=all_gradients,
                )
            level += found.net - found.gradients
            quadratic += changes[role, recorded]
            gradients += 0.0 if accumulating else found.gradients
        assert best is not None, "a step has stretches"
        return best

    def work(self, batch: int, length: int) -> Work:
        """What one step computes, over all layers."""
        times = np.array([self._repeats(*segment) for segment in self._segments], dtype=np.float64)
        flops, written, launches = self._work.at(batch, length)
        return Work(flops=float(flops @ times), written=float(written @ times), launches=float(launches @ times))

    def _timeline(self) -> list[tuple[str, int, int]]:
        """(role, recorded layer, real layer) in order of time."""
        layers = list(enumerate(self._layer_of))
        return [
            ("start", -1, -1),
            *(("forward", recorded, real) for real, recorded in layers),
            ("head", -1, -1),
            ("loss", -1, -1),
            *(("backward", recorded, real) for real, recorded in reversed(layers)),
            ("end", -1, -1),
        ]

    def _repeats(self, role: str, layer: int) -> int:
        return self._layer_of.count(layer) if role in LAYER_ROLES else 1


@dataclass(frozen=True, kw_only=True)
class _Levels:
    net: float
    peak: float
    gradients: float


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Events of one stretch: which storages, by how much each counts, and which have become gradients."""

    storages: Integers
    weights: Floats
    landings: Floats

    @classmethod
    def cut(cls, events: Integers, counts: Sequence[int], *, inside: bool) -> _Stretch:
        """From the events of a stretch.

        What a layer made and a stretch outside the layers ends (a cache of casts at the end of the forward pass) ends
        there for every layer of the real model.
        """
        storages, signs = events[:, 1], events[:, 2].astype(np.float64)
        times = np.ones(len(storages)) if inside else np.array(counts, dtype=np.float64)[storages]
        return cls(storages=storages, weights=signs * times, landings=np.where(signs == 0, times, 0.0))

    def net(self, sizes: Floats) -> float:
        """Change over the stretch, from the bytes of each storage."""
        return float(sizes[self.storages] @ self.weights)

    def levels(self, sizes: Floats, accumulating: bool) -> _Levels:
        """Change, highest level and gradients, from the bytes of each storage.

        A gradient that is added to an earlier one goes when it lands.
        """
        if not len(self.storages):
            return _Levels(net=0.0, peak=0.0, gradients=0.0)
        nbytes = sizes[self.storages]
        landed = nbytes * self.landings
        changes = nbytes * self.weights
        levels = np.cumsum(changes - landed if accumulating else changes)
        return _Levels(net=float(changes.sum()), peak=max(0.0, float(levels.max())), gradients=float(landed.sum()))
