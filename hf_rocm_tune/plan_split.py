"""Planning one model over several cards: what each takes, and where to cut. See ``memory.plan_split``.

    plan = split_plan(PlanRequest(model="Qwen/Qwen3-14B"), cards=(card, card))
    plan.counts, plan.estimates

The cards compute one after the other, so a second one makes room and no speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import CardMemory, Estimate, Variant, Weights, estimate
from hf_rocm_tune.memory.plan_choice import NEAR, Option
from hf_rocm_tune.memory.plan_split import Counts, Cut, LayersTrace, best_cut
from hf_rocm_tune.memory.plan_trace import Trace
from hf_rocm_tune.plan_job import Plan, plan_for
from hf_rocm_tune.plan_recordings import Facts, Recordings
from hf_rocm_tune.plan_request import PlanRequest

if TYPE_CHECKING:
    from hf_rocm_tune.models.shapes_model import Sample


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """The answer.

    Args:
        plan: the same question for one card, from which model, cases and speed are.
        option: the case, as one card would have it.
        cut: how the layers are shared out, and what each card takes.
        cards: the memory of each.
    """

    plan: Plan
    option: Option
    cut: Cut
    cards: tuple[CardMemory, ...]

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
    parts = {method: _Parts(variant) for method, variant in whole.variants.items()}
    found = [
        (option, _cut(parts[option.estimate.variant], option, cards, counts, whole.layers)) for option in whole.grid
    ]
    option, cut = _choose(found)
    return SplitPlan(plan=whole, option=option, cut=cut, cards=tuple(cards))


def _cut(parts: _Parts, option: Option, cards: Sequence[CardMemory], counts: Counts | None, layers: int) -> Cut:
    case = option.estimate.case

    def plan(shared: Counts) -> list[Estimate]:
        return [estimate(variant, case, card) for variant, card in zip(parts.variants(shared), cards, strict=True)]

    if counts is not None:
        return Cut(counts=counts, estimates=tuple(plan(counts)))
    return best_cut(plan, layers=layers, cards=cards)


def _choose(found: Sequence[tuple[Option, Cut]]) -> tuple[Option, Cut]:
    """The fastest that fits, of near equals the one that leaves most memory; else the nearest."""
    fitting = [each for each in found if each[1].fits]
    if not fitting:
        return max(found, key=lambda each: each[1].least_spare)
    best = max(option.speed.tokens_per_second for option, _ in fitting)
    equals = [each for each in fitting if each[0].speed.tokens_per_second >= best * (1 - NEAR)]
    return max(equals, key=lambda each: each[1].least_spare)


class _Parts:
    """The variants of a model's parts, each made once."""

    def __init__(self, whole: Variant) -> None:
        self._whole = whole
        self._made: dict[tuple[bool, int, int], Variant] = {}

    def variants(self, counts: Counts) -> list[Variant]:
        """One for each card."""
        found, start = [], 0
        for card, count in enumerate(counts):
            key = (card == 0, start, start + count)
            if key not in self._made:
                self._made[key] = self._variant(*key)
            found.append(self._made[key])
            start += count
        return found

    def _variant(self, first: bool, start: int, stop: int) -> Variant:
        recordings = self._whole.trace
        assert isinstance(recordings, Recordings), "plan_for made it"
        part = (_FirstCard if first else _OtherCard)(
            recordings.config, recordings.request, recordings.method, recordings.lengths, _tapes=recordings._tapes
        )
        part.whole, part.layers = recordings, slice(start, stop)
        return replace(self._whole, weights=part.weights(), trace=part, exact=part.exact)


class _FirstCard(Recordings):
    """The recorded step of some layers and of all that is no layer."""

    whole: Recordings
    layers: slice

    @cached_property
    def sample(self) -> Sample:
        """The same recorded layers."""
        return self.whole.sample

    @cached_property
    def facts(self) -> Facts:
        """They stand for fewer."""
        facts = self.whole.facts
        return replace(facts, layer_of=facts.layer_of[self.layers])


class _OtherCard(_FirstCard):
    """The recorded step of some layers alone."""

    made: ClassVar[type[Trace]] = LayersTrace

    def weights(self) -> Weights:
        """Totals of these layers."""
        return Weights.total((each for each in self.facts.weights if each.layer >= 0), self.facts.layer_of)
