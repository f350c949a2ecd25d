"""Planning one model over several cards: what each holds, and where to cut.

    plan = split_plan(PlanRequest(model="Qwen/Qwen3-14B"), cards=(card, card))
    plan.counts, plan.estimates

Every card is planned like a card with a smaller model: its layers, and on the first card all that is no layer. A card
holds what its own layers keep for backward while the others compute; the peak of each is at a moment of its own. The
other cards hold copies of what their layers are given beside (masks, position embeddings) and of their first input.
The cards compute one after the other, so a second one makes room and no speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import GIB, NEAR, CardMemory, Counts, Estimate, Variant, estimate
from hf_rocm_tune.plan.fit import Plan, Recordings, plan_for
from hf_rocm_tune.plan.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A way to share out the layers."""

    counts: Counts  # layers on each card
    estimates: tuple[Estimate, ...]  # what each card takes

    @property
    def fits(self) -> bool:
        """Whether it fits on every card."""
        return all(estimate.fits for estimate in self.estimates)

    @property
    def least_spare(self) -> float:
        """Bytes left over on the fullest card; negative: missing."""
        return min(estimate.spare for estimate in self.estimates)


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The answer."""

    plan: Plan  # the same question for one card, from which model, cases and speed are
    option: Estimate  # the case, as one card would have it
    cut: Cut  # how the layers are shared out, and what each card takes
    cards: tuple[CardMemory, ...]  # the memory of each

    @property
    def counts(self) -> Counts:
        """Layers on each card."""
        return self.cut.counts

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """What each card takes."""
        return self.cut.estimates


def split_plan(
    request: PlanRequest,
    *,
    cards: Sequence[CardMemory],
    counts: Counts | None = None,
    config: Any = None,
    within_limit: bool = False,
) -> SplitPlan:
    """Plans one model over several cards.

    Args:
        request: the question, of one process: its ``cards`` is 1.
        cards: the memory of each, two or more; one that the counts do not need is left out.
        counts: layers on each card, the last of which may be left out; by default the cut that leaves most memory on
            the fullest card.
        config, within_limit: as for `plan_for`.

    Returns:
        The fastest case by estimate that fits on every card; where none does, the one that misses least.

    Raises:
        UsageError: the model cannot be planned, the counts do not fit it, or it has too few layers.
    """
    assert request.cards == 1, "one process"
    whole = plan_for(request, card=cards[0], config=config, grid=False, within_limit=within_limit)
    return over_cards(whole, cards=cards, counts=counts)


def over_cards(whole: Plan, *, cards: Sequence[CardMemory], counts: Counts | None = None) -> SplitPlan:
    """What `split_plan` gives, from the plan of the same question for one card, without its grid of lengths.

    Raises:
        UsageError: the counts do not fit the model, or it has too few layers.
    """
    if counts is not None:
        from hf_rocm_tune.models.split import counts_for

        counts = counts_for(counts, whole.layers)
        cards = cards[: len(counts)]
    if whole.layers < len(cards):
        raise UsageError(f"{whole.layers} layers cannot be shared out over {len(cards)} cards")

    @cache
    def part(method: str, start: int, stop: int) -> Variant:
        recordings = whole.variants[method].trace
        assert isinstance(recordings, Recordings), "plan_for made it"
        return recordings.part(slice(start, stop), first=start == 0).variant()

    def cut(option: Estimate) -> Cut:
        def plan(shared: Counts) -> list[Estimate]:
            starts = [sum(shared[:card]) for card in range(len(shared))]
            return [
                estimate(part(option.variant, start, start + count), option.case, card)
                for start, count, card in zip(starts, shared, cards, strict=True)
            ]

        if counts is not None:
            return Cut(counts=counts, estimates=tuple(plan(counts)))
        return best_cut(plan, layers=whole.layers, cards=cards)

    option, chosen = _choose([(option, cut(option)) for option in whole.grid])
    return SplitPlan(plan=whole, option=option, cut=chosen, cards=tuple(cards))


def _choose(found: Sequence[tuple[Estimate, Cut]]) -> tuple[Estimate, Cut]:
    """The fastest that fits, of near equals the one that leaves most memory; else the nearest."""
    fitting = [each for each in found if each[1].fits]
    if fitting:
        best = max(option.speed.tokens_per_second for option, _ in fitting)
        found = [each for each in fitting if each[0].speed.tokens_per_second >= best * (1 - NEAR)]
    return max(found, key=lambda each: each[1].least_spare)


def even_counts(layers: int, weights: Sequence[float]) -> Counts:
    """Shares layers out in proportion, at least one to each.

    Args:
        layers: how many; at least as many as cards.
        weights: of the cards.
    """
    left, room = layers, sum(weights)
    counts = []
    for position, weight in enumerate(weights):
        later = len(weights) - position - 1
        share = round(left * weight / room) if room else 1
        counts.append(left if later == 0 else min(max(share, 1), left - later))
        left, room = left - counts[-1], room - weight
    return tuple(counts)


def best_cut(plan: Callable[[Counts], Sequence[Estimate]], *, layers: int, cards: Sequence[CardMemory]) -> Cut:
    """The cut that leaves most memory on the card that has least, found by moving one layer at a time.

    Args:
        plan: plans every card for a number of layers on each.
        layers: of the model; at least as many as cards.
        cards: in the order of the stages.
    """
    counts = even_counts(layers, [card.free for card in cards])
    best = Cut(counts=counts, estimates=tuple(plan(counts)))
    while True:
        nearby = [Cut(counts=each, estimates=tuple(plan(each))) for each in _neighbours(best.counts)]
        better = max(nearby, key=lambda cut: cut.least_spare, default=best)
        if better.least_spare <= best.least_spare:
            return best
        best = better


def _neighbours(counts: Counts) -> Iterator[Counts]:
    """One layer moved from one card to another; those between shift theirs along."""
    for giver in range(len(counts)):
        for taker in range(len(counts)):
            if giver != taker and counts[giver] > 1:
                change = {giver: -1, taker: 1}
                yield tuple(count + change.get(card, 0) for card, count in enumerate(counts))


def memory_lines(counts: Sequence[int], estimates: Sequence[Estimate], cards: Sequence[CardMemory]) -> Iterator[str]:
    """One line for each card: its layers, and how much of it they take."""
    start = 0
    for number, (count, found, card) in enumerate(zip(counts, estimates, cards, strict=True)):
        beside = ", embeddings, head and loss" if number == 0 else ""
        rest = f"{found.spare / GIB:.1f} spare" if found.fits else f"{-found.spare / GIB:.1f} missing"
        yield (
            f"card {number}: layers {start} to {start + count - 1}{beside}: {found.total / GIB:.1f} of "
            f"{card.usable / GIB:.1f} GiB, {rest}"
        )
        start += count
