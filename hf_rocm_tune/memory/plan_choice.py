"""Which case to run: the grid of cases, the fastest that fits, and the questions in reverse. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hf_rocm_tune.memory.plan import CardMemory, Case, Estimate, Variant, estimate
from hf_rocm_tune.memory.plan_speed import Speed, speed

#: Lengths are asked for in steps of this many tokens.
LENGTH_STEP = 128
#: Estimates of speed that differ by less are taken as equal.
NEAR = 0.02


@dataclass(frozen=True, kw_only=True)
class Option:
    """A case with what it takes and how fast it is estimated to be."""

    estimate: Estimate
    speed: Speed

    @property
    def fits(self) -> bool:
        """Whether it fits the card."""
        return self.estimate.fits


def micro_batches(effective_batch: int, cards: int) -> tuple[int, ...]:
    """Micro-batches with which an effective batch can be reached exactly, from 1 up.

    Args:
        effective_batch: sequences to one optimizer step, over all cards; a multiple of ``cards``.
        cards: how many.
    """
    each = effective_batch // cards
    return tuple(size for size in range(1, each + 1) if each % size == 0)


def option(
    variant: Variant,
    card: CardMemory,
    *,
    micro_batch: int,
    length: int,
    checkpointing: bool,
    effective_batch: int,
    cards: int = 1,
    packing: bool = False,
) -> Option:
    """One case, planned."""
    case = Case(
        micro_batch=micro_batch,
        length=length,
        checkpointing=checkpointing,
        packing=packing,
        accumulation=max(1, effective_batch // (cards * micro_batch)),
        cards=cards,
    )
    found = estimate(variant, case, card)
    return Option(estimate=found, speed=speed(found, card))


def fastest(options: Iterable[Option]) -> Option | None:
    """The one with the most tokens a second of those that fit; of near equals the one that leaves most memory."""
    fitting = [each for each in options if each.fits]
    best = max((each.speed.tokens_per_second for each in fitting), default=0.0)
    equals = [each for each in fitting if each.speed.tokens_per_second >= best * (1 - NEAR)]
    return max(equals, key=lambda each: each.estimate.spare, default=None)


def nearest(options: Sequence[Option]) -> Option:
    """The one that needs least memory, where none fits."""
    return min(options, key=lambda each: each.estimate.total)


def longest(plan: Callable[[int], Estimate], *, limit: int) -> int | None:
    """The greatest length that fits, a multiple of ``LENGTH_STEP``, or None where the shortest does not.

    Args:
        plan: plans one length; what it takes grows with the length.
        limit: the greatest length to consider.
    """
    low, high = 0, max(1, limit // LENGTH_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(middle * LENGTH_STEP).fits else (low, middle - 1)
    return low * LENGTH_STEP or None
