"""Several cards: what each parallel strategy takes, its speed and traffic, a split model, and what to change.

Every figure is an estimate from counted bytes and assumed rates. None was measured on two cards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.streamed import AUTO
from hf_rocm_tune.models.streamed import FLAG as STREAM
from hf_rocm_tune.plan.estimate import (
    GIB,
    LINK,
    NEAR,
    CardMemory,
    Case,
    Counts,
    Estimate,
    Variant,
    Weights,
    estimate,
    fastest,
    roomiest,
)
from hf_rocm_tune.plan.fit import Plan, plan_for
from hf_rocm_tune.plan.grid import grid_of
from hf_rocm_tune.plan.recordings import Recordings

#: Fields of a request that a step of one micro-batch does not depend on.
_SAME_STEP = frozenset({"stream", "cards", "methods"})
#: Assumed: as `LINK` through host memory, with digests, and with gloo for averages.
THROUGH_HOST = 3e9


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One model over several cards, each planned as if it held a smaller one; the first has all that is no layer."""

    option: Estimate  # the case on one card, the source of its speed
    counts: Counts  # layers of each card
    estimates: tuple[Estimate, ...]  # what they take
    cards: tuple[CardMemory, ...]

    @property
    def least_spare(self) -> float:
        """Bytes left over on the fullest card; negative: missing."""
        return min(estimate.spare for estimate in self.estimates)

    @property
    def fits(self) -> bool:
        return self.least_spare >= 0

    def lines(self) -> Iterator[str]:
        held = zip(_ranges(self.counts), self.estimates, self.cards, strict=True)
        for number, ((start, stop), estimated, card) in enumerate(held):
            what = f"layers {start} to {stop - 1}"
            if number == 0:
                what += ", embeddings, head and loss"
            rest = "spare" if estimated.fits else "missing"
            memory = f"{estimated.total / GIB:.1f} of {card.usable / GIB:.1f} GiB"
            yield f"card {number}: {what}: {memory}, {abs(estimated.spare) / GIB:.1f} {rest}"


def split_plan(
    whole: Plan, *, cards: Sequence[CardMemory], counts: Counts | None = None, flights: int = 1
) -> SplitPlan:
    """Splits a plan of one card over several: the fastest case that fits on each, else that with the least missing.

    ``counts``: layers on each card, the last of which may be left out; by default the first card has as many as leave
    most memory on the fullest, and the others share the rest evenly. ``flights``: micro-batches in flight, if a step
    has as many.
    """
    if counts is not None:
        from hf_rocm_tune.models.split import counts_for

        counts = counts_for(counts, whole.layers)
        cards = cards[: len(counts)]
    if whole.layers < len(cards):
        raise UsageError(f"{whole.layers} layers cannot be distributed over {len(cards)} cards")

    # a mix of recomputed layers is what fits one card
    options = [option for option in whole.every if option.case.recompute is None]
    if not options:
        raise UsageError("a mix of recomputed layers is planned for one card only")
    splits: list[SplitPlan] = []
    for option in options:
        if counts is None:
            splits.append(_evenest_split(whole, option, cards, flights))
        else:
            splits.append(_split(whole, option, counts, cards, flights))
    for room in cards[0].rooms:
        roomy = [split for split in splits if split.least_spare >= room]
        if roomy:
            fastest_rate = max(split.option.tokens_per_second for split in roomy)
            nearly = [split for split in roomy if split.option.tokens_per_second >= fastest_rate * (1 - NEAR)]
            return min(nearly, key=lambda split: (split.option.case.micro_batch, -split.least_spare))
    return max(splits, key=lambda split: split.least_spare)


def _split(whole: Plan, option: Estimate, counts: Counts, cards: Sequence[CardMemory], flights: int) -> SplitPlan:
    estimates = parts(whole, option.variant, option.case, counts, cards, flights)
    return SplitPlan(option=option, counts=counts, estimates=estimates, cards=tuple(cards))


def _evenest_split(whole: Plan, option: Estimate, cards: Sequence[CardMemory], flights: int) -> SplitPlan:
    """The split that leaves most memory on the fullest card.

    The more layers the first card has, the less it leaves: the best is where it becomes the fullest, or one layer less.
    """
    most_on_first = whole.layers - len(cards) + 1
    cuts = [
        (first, *even_counts(whole.layers - first, len(cards) - 1))  # of layers, for each card
        for first in range(1, most_on_first + 1)
    ]

    def first_is_fullest(cut: Counts) -> bool:
        split = _split(whole, option, cut, cards, flights)
        return split.estimates[0].spare <= split.least_spare

    at = bisect_left(cuts, True, key=first_is_fullest)
    near = [_split(whole, option, cut, cards, flights) for cut in cuts[max(at - 1, 0) : at + 1]]
    return max(near, key=lambda split: split.least_spare)


def parts(
    plan: Plan, method: str, case: Case, counts: Counts, cards: Sequence[CardMemory], flights: int
) -> tuple[Estimate, ...]:
    """What each card takes, with so many micro-batches in flight if a step has as many."""
    case = replace(case, flights=min(flights, case.accumulation))
    recordings = plan.recordings[method]
    estimates = []
    for (start, stop), card in zip(_ranges(counts), cards, strict=True):
        estimates.append(estimate(recordings.part(start, stop), case, card))
    return tuple(estimates)


def _ranges(counts: Counts) -> list[tuple[int, int]]:
    """The first layer of each card, and the one after its last."""
    return list(pairwise(accumulate(counts, initial=0)))


def even_counts(layers: int, cards: int) -> Counts:
    """As many layers on each card; one more on the last ones, as the first has embeddings and head."""
    counts = []
    for card in range(cards):
        has_one_more = card >= cards - layers % cards
        counts.append(layers // cards + has_one_more)
    return tuple(counts)


# ---- the strategies, compared ----------------------------------------------------------------------------------

EstimateOf = Callable[[str, Case], Estimate]  # memory of the fullest card and speed of all, of a method and case


@dataclass(frozen=True, kw_only=True)
class StrategyEstimate:
    """A parallel strategy in the case that suits it best."""

    name: str  # ``ddp``, ``host``, ``fsdp2``, ``split``, ``pipeline`` or ``tensor``
    option: Estimate  # the fastest case that fits, else the least: memory of the fullest card, speed of all cards
    crossing: float  # bytes between the cards, or between them and the host, in one optimizer step; sum of all cards
    flags: str  # of ``hf-rocm-tune sft`` that select it
    lines: tuple[str, ...] = ()  # of a split: each card


def strategies(plan: Plan) -> list[StrategyEstimate]:
    """Estimates of all parallel strategies that the model supports."""
    cards = plan.request.cards
    processes = ""
    if cards != 2:  # the configurations are for two
        processes = f" --num_processes {cards}"
    launched = f"--accelerate_config dual_rx7900xt{processes}"
    # in a ring each card sends the shares of the others, twice; through the host it sends and receives all
    ddp = _data_parallel(plan, "ddp", 2 * (cards - 1) / cards, LINK, launched)
    through_host = _data_parallel(plan, "host", 2.0, THROUGH_HOST, f"{launched} --grad_sync host")
    if plan.request.trainer != "sft":  # the others refuse these trainers
        return [ddp, through_host]
    fsdp2 = _fsdp2(plan, f"--accelerate_config dual_rx7900xt_fsdp2{processes}")
    supported = [ddp, through_host, fsdp2]
    with suppress(UsageError):  # fewer layers than cards
        supported += _split_and_pipeline(plan)
    with suppress(UsageError):  # weights that cannot be sharded
        supported += _tensor_parallel(plan)
    return supported


def best_of(compared: Iterable[StrategyEstimate]) -> StrategyEstimate | None:
    """The fastest that fits, with the card's room or margin if one does; of nearly equal ones the first, which sends
    least. None: none fits."""
    fitting = [strategy for strategy in compared if strategy.option.fits]
    offered = roomiest(fitting, lambda strategy: strategy.option)
    fastest_rate = max((strategy.option.tokens_per_second for strategy in offered), default=0.0)
    for strategy in offered:
        if strategy.option.tokens_per_second >= fastest_rate * (1 - NEAR):
            return strategy
    return None


def explain(plan: Plan, best: StrategyEstimate) -> str:
    """Why this strategy is the choice, and what crosses between the cards."""
    method = best.option.variant
    reason = "does not fit on one card"
    if best.name in ("ddp", "host"):
        reason = f"fits on each card, so {plan.request.cards} batches are computed at once"
    elif any(option.fits and option.variant == method for option in plan.grid):
        reason = "is estimated to be faster this way"
    return f"{best.name}: {method} {reason}; {best.crossing / GIB:.2f} GiB cross in a step"


def _best_case(
    name: str,
    flags: str,
    cases: Iterable[Estimate],
    estimate_of: EstimateOf,
    crossing: Callable[[Estimate], float],
    lines: Iterable[str] = (),
) -> StrategyEstimate:
    """A strategy in the best of these cases, by what ``estimate_of`` says of each on all cards.

    ``crossing``: bytes in a step of the case that is chosen; ``lines``: on each card, for the reader.
    """
    options = [estimate_of(option.variant, option.case) for option in cases]
    best = fastest(options) or min(options, key=lambda option: option.total)
    return StrategyEstimate(name=name, option=best, crossing=crossing(best), flags=flags, lines=tuple(lines))


def _timed(option: Estimate, plan: Plan, *, times: float = 1.0, plus: float = 0.0, least: float = 0.0) -> Estimate:
    """The option with ``times`` the seconds of its step ``plus`` others, at ``least`` that many."""
    tokens = plan.request.effective_batch * option.case.length
    seconds = max(times * tokens / option.tokens_per_second + plus, least)
    return replace(option, tokens_per_second=tokens / seconds)


def _itemsize(plan: Plan, method: str) -> int:
    return 4 if plan.request.dtype_of(method) == "float32" else 2


def _data_parallel(plan: Plan, name: str, times: float, rate: float, flags: str) -> StrategyEstimate:
    """The whole model on each card; each sends its gradients so many times, at so many bytes a second."""

    def sends(method: str) -> float:  # bytes of each card in a step
        return times * plan.variants[method].weights.gradients

    def estimate_of(method: str, case: Case) -> Estimate:
        option = estimate(plan.variants[method], case, plan.card)
        return _timed(option, plan, plus=sends(method) / rate)

    def crossing(best: Estimate) -> float:
        return plan.request.cards * sends(best.variant)

    return _best_case(name, flags, plan.grid, estimate_of, crossing)


def _fsdp2(plan: Plan, flags: str) -> StrategyEstimate:
    """FSDP2 gathers layers and embeddings twice per micro-batch, during computation, and the other weights once."""
    cards = plan.request.cards
    variants: dict[str, Variant] = {}
    gathered: dict[str, float] = {}  # bytes that a card receives in a micro-batch, by method
    for method, recordings in plan.recordings.items():
        variants[method], gathered[method] = _shard_of(recordings, cards)

    def estimate_of(method: str, case: Case) -> Estimate:
        option = replace(estimate(variants[method], replace(case, cards=1), plan.card), case=case)
        option = replace(option, tokens_per_second=cards * option.tokens_per_second)
        return _timed(option, plan, least=case.accumulation * gathered[method] / LINK)

    def crossing(best: Estimate) -> float:
        weights = cards * best.case.accumulation * gathered[best.variant]
        return weights + (cards - 1) * plan.variants[best.variant].weights.gradients

    cases = [option for option in plan.grid if option.case.recompute is None]
    return _best_case("fsdp2", flags, cases, estimate_of, crossing)


def _shard_of(recordings: Recordings, cards: int) -> tuple[Variant, float]:
    """What one of so many cards holds under FSDP2, and the bytes that it receives in a micro-batch."""
    whole, layer_of = recordings.variant, recordings.sample.layer_of
    by_layer = [0] * (1 + max(layer_of))
    for weight in recordings.weights:
        if weight.layer >= 0 and weight.part == "weights":
            by_layer[weight.layer] += weight.nbytes
    layers = sum(by_layer[layer] for layer in layer_of)
    saved = max(0, int(layers * (cards - 1) / cards) - 2 * max(by_layer))  # two layers are gathered at a time
    held = dict(whole.weights.parts)
    held["weights"] -= saved
    held["adapters"] //= cards
    trained = tuple(replace(weight, elements=-(-weight.elements // cards)) for weight in whole.weights.trained)
    loading = 0
    if whole.weights.parts["quantisation constants"]:
        # 4-bit weights are quantised on each card before they are sharded
        loading = whole.weights.loading + saved
    weights = replace(whole.weights, parts=held, trained=trained, loading=loading)
    # all weights once; the layers, the embeddings and the adapters again
    embeddings = recordings.sample.base.get_input_embeddings().weight.nbytes
    gathered = whole.weights.parts["weights"] + layers + embeddings + 2 * whole.weights.parts["adapters"]
    return replace(whole, weights=weights), gathered * (cards - 1) / cards


def _as_one_card(plan: Plan) -> Plan:
    """The plan of cards that work on the same micro-batches, as one card would compute them."""
    request = replace(plan.request, cards=1, mixes=False)
    grid: list[Estimate] = []
    for recordings in plan.recordings.values():
        grid += grid_of(recordings, plan.card, request)
    return replace(plan, request=request, grid=tuple(grid))


def _split_and_pipeline(plan: Plan) -> list[StrategyEstimate]:
    """A split whose cards compute one after the other, and a pipeline.

    The cards of a pipeline idle for (p - 1) / (m + p - 1) of a step. For each micro-batch that `cards.split` has
    in flight, all activations kept for backward are counted, an upper bound.
    """
    from hf_rocm_tune.cards.split import IN_FLIGHT  # imports torch

    cards = plan.request.cards
    plan = _as_one_card(plan)
    split = split_plan(plan, cards=[plan.card] * cards)

    def estimate_of(in_flight: int, method: str, case: Case) -> Estimate:
        """The fullest card; its speed is that of one card with all layers, or of all in a pipeline."""
        on_cards = parts(plan, method, case, split.counts, split.cards, in_flight)
        tokens = case.micro_batch * case.length
        seconds = sum(tokens / option.tokens_per_second for option in on_cards)
        fullest = max(on_cards, key=lambda option: option.total)
        fullest = replace(fullest, case=case, tokens_per_second=tokens / seconds)
        if in_flight == 1:
            return _timed(fullest, plan, plus=crossing(fullest) / THROUGH_HOST)
        times = (case.accumulation + cards - 1) / case.accumulation / cards
        return _timed(fullest, plan, times=times, plus=crossing(fullest) / THROUGH_HOST / cards)

    def crossing(option: Estimate) -> float:
        """Each boundary, and back to the first card; both ways."""
        hidden = option.case.micro_batch * option.case.length * plan.sample.config.hidden_size
        return 2.0 * cards * option.case.accumulation * hidden * _itemsize(plan, option.variant)

    flags = f"--split_layers {','.join(map(str, split.counts))}"
    one_after_the_other = partial(estimate_of, 1)
    estimates = [_best_case("split", flags, [split.option], one_after_the_other, crossing, split.lines())]
    piped = [option for option in plan.grid if option.case.accumulation > 1]
    if piped:
        flags = "--split_layers auto --pipeline auto"
        together = partial(estimate_of, IN_FLIGHT * cards)
        estimates.append(_best_case("pipeline", flags, piped, together, crossing))
    return estimates


def _tensor_parallel(plan: Plan) -> list[StrategyEstimate]:
    """Tensor parallelism: activations are counted unsharded, an upper bound, and no overlap of sums is assumed.

    A card computes its share of the layers' products and all of the output head.
    """
    from hf_rocm_tune.cards.tensor_parallel import RANKS, dims_of, summed  # imports torch

    cards = plan.request.cards
    recordings = plan.recordings.get("lora")
    if cards != RANKS or recordings is None:
        raise UsageError(f"tensor parallelism is for {RANKS} cards and LoRA")
    sample, whole = recordings.sample, recordings.variant
    cut = {name for name, dim in dims_of(sample.model, cards).items() if dim is not None}
    weights = Weights.total(sample.weights(cut, cards), sample.layer_of)
    sharded = replace(whole, weights=weights)
    head = sample.vocabulary * int(sample.config.hidden_size)
    layers = cards * (whole.weights.parameters - weights.parameters) / (cards - 1)
    times_of: dict[int, int] = {}  # how often the real model has a module, by its id
    for number, layer in enumerate(sample.layers):
        for module in layer.modules():
            times_of[id(module)] = sample.layer_of.count(number)

    def sends(option: Estimate) -> float:
        sums = summed(sample.model, cards, recomputed=option.case.checkpointing)
        elements_a_token = sum(times_of[id(module)] * elements for module, elements in sums)
        return float(plan.request.effective_batch * option.case.length * _itemsize(plan, "lora") * elements_a_token)

    def estimate_of(_: str, case: Case) -> Estimate:
        option = estimate(sharded, replace(case, cards=1), plan.card)
        times = (layers / cards + head) / (layers + head)
        return _timed(option, plan, times=times, plus=sends(option) / LINK)

    def crossing(best: Estimate) -> float:
        return cards * sends(best)

    cases = [option for option in _as_one_card(plan).grid if option.variant == "lora"]
    flags = "--accelerate_config dual_rx7900xt --tensor_parallel true"
    return [_best_case("tensor", flags, cases, estimate_of, crossing)]


# ---- advice -----------------------------------------------------------------------------------------------------


class _Change(NamedTuple):
    """A change of a request that may make it fit."""

    words: str  # in the flags of the command
    fields: dict[str, Any]  # of `PlanRequest`


def _changes(plan: Plan, *, training: bool) -> Iterator[_Change]:
    """What could be changed, in the order in which it is proposed."""
    request = plan.request
    is_full = plan.nearest.variant == "full"
    if request.micro_batch is not None or request.checkpointing is not None:
        yield _Change("another micro-batch and checkpointing", {})
    if is_full and "8bit" not in request.optim:
        yield _Change("--optim adamw_8bit", {"optim": "adamw_8bit"})
    if is_full and request.dtype is None:
        yield _Change("--dtype bfloat16", {"dtype": "bfloat16"})
    if request.methods == ("full",):
        yield _Change("--use_peft true" if training else "--method lora", {"methods": ("lora",)})
    if "qlora" not in request.methods:
        yield _Change("--load_in_4bit" if training else "--method qlora", {"methods": ("qlora",)})
    if request.cards == 1 and not is_full and not request.dora:
        yield _Change(f"{STREAM} auto", {"stream": AUTO})
    if request.cards == 1 and not training and request.effective_batch % 2 == 0:
        yield _Change("--cards 2", {"cards": 2, "stream": 0})


def _fits_with(plan: Plan, change: _Change, least: Mapping[str, Any], *, training: bool) -> bool:
    """Whether a job with a change fits in what takes ``least``."""
    changed = replace(plan.request, **{**least, **change.fields})
    known: Mapping[str, Recordings] = {}
    if change.fields.keys() <= _SAME_STEP:
        known = plan.recordings
    other = plan_for(changed, card=plan.card, config=plan.config, known=known)
    if any(option.fits for option in other.grid):
        return True
    return not training and changed.cards > 1 and best_of(strategies(other)) is not None


def advice(plan: Plan, *, training: bool = False) -> str:
    """What would fit where nothing does, each change planned; ``training``: in the flags of a training verb."""
    request = plan.request
    # what takes least, of which a fit is certain before anything else is recorded
    least: dict[str, Any] = {"checkpointing": None, "recompute": None, "mixes": False}
    least["micro_batch"] = 2 if request.trainer == "kto" else 1
    if all(recording.can_checkpoint for recording in plan.recordings.values()):
        least["checkpointing"] = True
    helpful: list[str] = []
    for change in _changes(plan, training=training):
        with suppress(UsageError):
            if _fits_with(plan, change, least, training=training):
                helpful.append(change.words)
    longest = 0
    if request.cards == 1 or training:
        longest = max(plan.longest(method) or 0 for method in plan.recordings)
    if 0 < longest < request.length:
        flag = "--max_length" if training else "--seq"
        helpful.append(f"{flag} {longest}")
    smaller_model = "a smaller model: `hf-rocm-tune plan --largest`"
    if not helpful:
        return f"what would fit: {smaller_model}"
    return f"what would fit: {' | '.join(helpful)}; or {smaller_model}"
