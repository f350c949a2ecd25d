"""Several cards: what each way over them takes, its speed and traffic, one model split over them, and what to change.

Every figure is an estimate from counted bytes and assumed rates. None was measured on two cards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
    Weights,
    estimate,
    fastest,
    roomiest,
)
from hf_rocm_tune.plan.fit import Plan, grid_of, plan_for

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
        each = zip(_ranges(self.counts), self.estimates, self.cards, strict=True)
        for number, ((start, stop), found, card) in enumerate(each):
            beside = ", embeddings, head and loss" if number == 0 else ""
            rest = f"{abs(found.spare) / GIB:.1f} {'spare' if found.fits else 'missing'}"
            of = f"{found.total / GIB:.1f} of {card.usable / GIB:.1f} GiB"
            yield f"card {number}: layers {start} to {stop - 1}{beside}: {of}, {rest}"


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

    def split(option: Estimate, shared: Counts) -> SplitPlan:
        found = parts(whole, option.variant, option.case, shared, cards, flights)
        return SplitPlan(option=option, counts=shared, estimates=found, cards=tuple(cards))

    def best(option: Estimate) -> SplitPlan:
        if counts is not None:
            return split(option, counts)
        firsts = range(1, whole.layers - len(cards) + 2)
        cuts = [(first, *even_counts(whole.layers - first, len(cards) - 1)) for first in firsts]

        def first_is_fullest(cut: Counts) -> bool:
            found = split(option, cut)
            return found.estimates[0].spare <= found.least_spare

        at = bisect_left(cuts, True, key=first_is_fullest)
        near = [split(option, cut) for cut in cuts[max(at - 1, 0) : at + 1]]
        return max(near, key=lambda each: each.least_spare)

    found = [best(option) for option in whole.every if option.case.recompute is None]  # a mix is what fits one card
    if not found:
        raise UsageError("a mix of recomputed layers is planned for one card only")
    for least in cards[0].rooms:
        if roomy := [each for each in found if each.least_spare >= least]:
            top = max(each.option.tokens_per_second for each in roomy)
            equals = [each for each in roomy if each.option.tokens_per_second >= top * (1 - NEAR)]
            return min(equals, key=lambda each: (each.option.case.micro_batch, -each.least_spare))
    return max(found, key=lambda each: each.least_spare)


def parts(
    plan: Plan, method: str, case: Case, counts: Counts, cards: Sequence[CardMemory], flights: int
) -> tuple[Estimate, ...]:
    """What each card takes, with so many micro-batches in flight if a step has as many."""
    case, recordings = replace(case, flights=min(flights, case.accumulation)), plan.recordings[method]
    ranges = zip(_ranges(counts), cards, strict=True)
    return tuple(estimate(recordings.part(start, stop), case, card) for (start, stop), card in ranges)


def _ranges(counts: Counts) -> list[tuple[int, int]]:
    return [(sum(counts[:card]), sum(counts[: card + 1])) for card in range(len(counts))]


def even_counts(layers: int, cards: int) -> Counts:
    """As many layers on each card; one more on the last ones, as the first has embeddings and head."""
    return tuple(layers // cards + (card >= cards - layers % cards) for card in range(cards))


# ---- the ways, compared -----------------------------------------------------------------------------------------

At = Callable[[str, Case], Estimate]  # memory of the fullest card and speed of all, of a method and case


@dataclass(frozen=True, kw_only=True)
class CardsWay:
    name: str  # ``ddp``, ``host``, ``fsdp2``, ``split``, ``pipeline`` or ``tensor``
    option: Estimate  # the fastest case that fits, else the least: memory of the fullest card, speed of all cards
    crossing: float  # bytes between the cards, or between them and the host, in one optimizer step; sum of all cards
    flags: str  # of ``hf-rocm-tune sft`` that select it
    lines: tuple[str, ...] = ()  # of a split: each card


def ways(plan: Plan) -> list[CardsWay]:
    """Estimates of all ways that the model supports."""
    cards = plan.request.cards
    more = f" --num_processes {cards}" if cards != 2 else ""  # the configurations are for two
    launched = f"--accelerate_config dual_rx7900xt{more}"
    found = [
        _replicated(plan, "ddp", 2 * (cards - 1) / cards, LINK, launched),
        _replicated(plan, "host", 2.0, THROUGH_HOST, f"{launched} --grad_sync host"),
    ]
    if plan.request.trainer != "sft":  # the other ways refuse these trainers
        return found
    found.append(_sharded(plan, f"--accelerate_config dual_rx7900xt_fsdp2{more}"))
    for way in (_layered, _together):
        with suppress(UsageError):  # fewer layers than cards; weights that cannot be sharded
            found += way(plan)
    return found


def best_of(found: Iterable[CardsWay]) -> CardsWay | None:
    """The fastest that fits, with the card's room or margin if one does; of nearly equal ones the first, which sends
    least. None: none fits."""
    offered = roomiest([each for each in found if each.option.fits], lambda each: each.option)
    top = max((each.option.tokens_per_second for each in offered), default=0.0)
    return next((each for each in offered if each.option.tokens_per_second >= top * (1 - NEAR)), None)


def sentence(plan: Plan, best: CardsWay) -> str:
    method = best.option.variant
    reason = "does not fit on one card"
    if best.name in ("ddp", "host"):
        reason = f"fits on each card, so {plan.request.cards} batches are computed at once"
    elif any(each.fits and each.variant == method for each in plan.grid):
        reason = "is estimated to be faster this way"
    return f"{best.name}: {method} {reason}; {best.crossing / GIB:.2f} GiB cross in a step"


def _way(
    plan: Plan,
    name: str,
    flags: str,
    cases: Iterable[Estimate],
    at: At,
    crossing: Callable[[Estimate], float],
    lines: Iterable[str] = (),
) -> CardsWay:
    """The best of these cases of one card."""
    options = [at(one.variant, one.case) for one in cases]
    best = fastest(options) or min(options, key=lambda each: each.total)
    return CardsWay(name=name, option=best, crossing=crossing(best), flags=flags, lines=tuple(lines))


def _timed(option: Estimate, plan: Plan, *, times: float = 1.0, plus: float = 0.0, least: float = 0.0) -> Estimate:
    """The option with ``times`` the seconds of its step ``plus`` others, at ``least`` that many."""
    tokens = plan.request.effective_batch * option.case.length
    seconds = max(times * tokens / option.tokens_per_second + plus, least)
    return replace(option, tokens_per_second=tokens / seconds)


def _itemsize(plan: Plan, method: str) -> int:
    return 4 if plan.request.dtype_of(method) == "float32" else 2


def _replicated(plan: Plan, name: str, times: float, rate: float, flags: str) -> CardsWay:
    """In a ring each card sends the shares of the others, twice; through the host it sends and receives all."""

    def sends(method: str) -> float:
        return times * plan.variants[method].weights.gradients

    def at(method: str, case: Case) -> Estimate:
        return _timed(estimate(plan.variants[method], case, plan.card), plan, plus=sends(method) / rate)

    return _way(plan, name, flags, plan.grid, at, lambda one: plan.request.cards * sends(one.variant))


def _sharded(plan: Plan, flags: str) -> CardsWay:
    """FSDP2 gathers layers and embeddings twice per micro-batch, during computation, and the other weights once."""
    cards = plan.request.cards
    variants, gathered = {}, {}
    for method, recordings in plan.recordings.items():
        whole, layer_of = recordings.variant, recordings.sample.layer_of
        by_layer = [0] * (1 + max(layer_of))
        for weight in recordings.weights:
            if weight.layer >= 0 and weight.part == "weights":
                by_layer[weight.layer] += weight.nbytes
        layers = sum(by_layer[layer] for layer in layer_of)
        embeddings = recordings.sample.base.get_input_embeddings().weight.nbytes
        saved = max(0, int(layers * (cards - 1) / cards) - 2 * max(by_layer))  # two layers are gathered at a time
        held = dict(whole.weights.parts)
        held |= {"weights": held["weights"] - saved, "adapters": held["adapters"] // cards}
        trained = tuple(replace(each, elements=-(-each.elements // cards)) for each in whole.weights.trained)
        # 4-bit weights are quantised on each card before they are sharded
        loading = whole.weights.loading + saved if whole.weights.parts["quantisation constants"] else 0
        variants[method] = replace(whole, weights=replace(whole.weights, parts=held, trained=trained, loading=loading))
        # all weights outside the layers once, the embeddings again
        every = whole.weights.parts["weights"] + layers + embeddings + 2 * whole.weights.parts["adapters"]
        gathered[method] = every * (cards - 1) / cards

    def at(method: str, case: Case) -> Estimate:
        found = replace(estimate(variants[method], replace(case, cards=1), plan.card), case=case)
        found = replace(found, tokens_per_second=cards * found.tokens_per_second)
        return _timed(found, plan, least=case.accumulation * gathered[method] / LINK)

    def crossing(best: Estimate) -> float:
        weights = cards * best.case.accumulation * gathered[best.variant]
        return weights + (cards - 1) * plan.variants[best.variant].weights.gradients

    return _way(plan, "fsdp2", flags, (one for one in plan.grid if one.case.recompute is None), at, crossing)


def _for_all(plan: Plan) -> Plan:
    """The plan of cards that work on the same micro-batches, as one card would compute them."""
    request = replace(plan.request, cards=1, mixes=False)
    grids = (grid_of(each, plan.card, request) for each in plan.recordings.values())
    return replace(plan, request=request, grid=tuple(one for grid in grids for one in grid))


def _layered(plan: Plan) -> list[CardsWay]:
    """A split whose cards compute one after the other, and a pipeline.

    The cards of a pipeline idle for (p - 1) / (m + p - 1) of a step. For each micro-batch that `cards.split` has
    in flight, all activations kept for backward are counted, an upper bound.
    """
    from hf_rocm_tune.cards.split import IN_FLIGHT  # imports torch

    cards, plan = plan.request.cards, _for_all(plan)
    found = split_plan(plan, cards=[plan.card] * cards)

    def at(in_flight: int, method: str, case: Case) -> Estimate:
        """The fullest card; its speed is that of one card with all layers, or of all in a pipeline."""
        each = parts(plan, method, case, found.counts, found.cards, in_flight)
        seconds = sum(case.micro_batch * case.length / one.tokens_per_second for one in each)
        fullest = replace(max(each, key=lambda one: one.total), case=case)
        fullest = replace(fullest, tokens_per_second=case.micro_batch * case.length / seconds)
        steps = case.accumulation
        times, sides = (1.0, 1) if in_flight == 1 else ((steps + cards - 1) / steps / cards, cards)
        return _timed(fullest, plan, times=times, plus=crossing(fullest) / THROUGH_HOST / sides)

    def crossing(option: Estimate) -> float:
        """Each boundary, and back to the first card; both ways."""
        hidden = option.case.micro_batch * option.case.length * plan.sample.config.hidden_size
        return 2.0 * cards * option.case.accumulation * hidden * _itemsize(plan, option.variant)

    flags = f"--split_layers {','.join(map(str, found.counts))}"
    made = [_way(plan, "split", flags, [found.option], partial(at, 1), crossing, found.lines())]
    if piped := [each for each in plan.grid if each.case.accumulation > 1]:
        flags = "--split_layers auto --pipeline auto"
        made.append(_way(plan, "pipeline", flags, piped, partial(at, IN_FLIGHT * cards), crossing))
    return made


def _together(plan: Plan) -> list[CardsWay]:
    """Tensor parallelism: activations are counted unsharded, an upper bound, and no overlap of sums is assumed.

    A card computes its share of the layers' products and all of the output head.
    """
    from hf_rocm_tune.cards.tensor_parallel import RANKS, dims_of, summed  # imports torch

    cards, recordings = plan.request.cards, plan.recordings.get("lora")
    if cards != RANKS or recordings is None:
        raise UsageError(f"tensor parallelism is for {RANKS} cards and LoRA")
    sample, whole = recordings.sample, recordings.variant
    cut = {name for name, dim in dims_of(sample.model, cards).items() if dim is not None}
    weights = Weights.total(sample.weights(cut, cards), sample.layer_of)
    sharded = replace(whole, weights=weights)
    head = sample.vocabulary * int(sample.config.hidden_size)
    layers = cards * (whole.weights.parameters - weights.parameters) / (cards - 1)
    times_of = {
        id(module): sample.layer_of.count(number)
        for number, layer in enumerate(sample.layers)
        for module in layer.modules()
    }

    def crossing(option: Estimate) -> float:
        sums = summed(sample.model, cards, recomputed=option.case.checkpointing)
        sent = sum(times_of[id(module)] * elements for module, elements in sums)
        return float(plan.request.effective_batch * option.case.length * _itemsize(plan, "lora") * sent)

    def at(_: str, case: Case) -> Estimate:
        found = estimate(sharded, replace(case, cards=1), plan.card)
        return _timed(found, plan, times=(layers / cards + head) / (layers + head), plus=crossing(found) / LINK)

    cases = [one for one in _for_all(plan).grid if one.variant == "lora"]
    flags = "--accelerate_config dual_rx7900xt --tensor_parallel true"
    return [_way(plan, "tensor", flags, cases, at, lambda one: cards * crossing(one))]


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
    known = plan.recordings if change.fields.keys() <= _SAME_STEP else {}
    other = plan_for(changed, card=plan.card, config=plan.config, known=known)
    if any(option.fits for option in other.grid):
        return True
    return not training and changed.cards > 1 and best_of(ways(other)) is not None


def advice(plan: Plan, *, training: bool = False) -> str:
    """What would fit where nothing does, each change planned; ``training``: in the flags of a training verb."""
    request = plan.request
    # what takes least, of which a fit is certain before anything else is recorded
    least: dict[str, Any] = {"checkpointing": None, "recompute": None, "mixes": False}
    least["micro_batch"] = 2 if request.trainer == "kto" else 1
    if all(recording.can_checkpoint for recording in plan.recordings.values()):
        least["checkpointing"] = True
    found: list[str] = []
    for change in _changes(plan, training=training):
        with suppress(UsageError):
            if _fits_with(plan, change, least, training=training):
                found.append(change.words)
    longest = 0
    if request.cards == 1 or training:
        longest = max(plan.longest(method) or 0 for method in plan.recordings)
    if 0 < longest < request.length:
        found.append(f"--{'max_length' if training else 'seq'} {longest}")
    some = f"what would fit: {' | '.join(found)}; or" if found else "what would fit:"
    return f"{some} a smaller model: `hf-rocm-tune plan --largest`"
