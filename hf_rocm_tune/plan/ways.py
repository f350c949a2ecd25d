"""Several cards: what each way over them takes, its speed and traffic, one model split over them, and what to change.

    ddp       each card has the whole model and its share of the batch; gradients are averaged by RCCL
    host      the same, averaged through host memory
    fsdp2     each card has its share of the weights; a layer is gathered when it computes, forward and backward
    split     each card has some of the layers; they compute one after the other
    pipeline  a split whose cards work on different micro-batches
    tensor    the cards compute each layer together; outputs and gradients are summed in each layer

Every figure is an estimate from counted bytes and assumed rates. None was measured on two cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
    Step,
    Variant,
    Weights,
    estimate,
    fastest,
)
from hf_rocm_tune.plan.fit import Plan, grid_of, plan_for
from hf_rocm_tune.plan.request import PlanRequest

#: Assumed: as `LINK` through host memory, with digests, and with gloo for averages.
THROUGH_HOST = 3e9
#: Ways whose estimates differ by less count as equal: the first of them, which sends least, is taken.
CLOSE = 0.05


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One model over several cards, each planned as if it held a smaller one: its layers, the first also all the rest.

    The cards compute one after the other, so a second one adds memory, not speed.
    """

    plan: Plan  # of one card, the source of model, cases and speed
    option: Estimate  # the case on one card
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
        start = 0
        for number, (count, found, card) in enumerate(zip(self.counts, self.estimates, self.cards, strict=True)):
            beside = ", embeddings, head and loss" if number == 0 else ""
            rest = f"{found.spare / GIB:.1f} spare" if found.fits else f"{-found.spare / GIB:.1f} missing"
            yield (
                f"card {number}: layers {start} to {start + count - 1}{beside}: {found.total / GIB:.1f} of "
                f"{card.usable / GIB:.1f} GiB, {rest}"
            )
            start += count


def split_plan(
    request: PlanRequest,
    *,
    cards: Sequence[CardMemory],
    counts: Counts | None = None,
    config: Any = None,
    flights: int = 1,
) -> SplitPlan:
    """Plans one model over several cards: the fastest case that fits on every card, else that with the least missing.

    ``counts``: layers on each card, the last of which may be left out; by default the cut that leaves most memory on
    the fullest card. ``flights``: micro-batches in flight, if a step has as many.
    """
    assert request.cards == 1, "one process"
    single = replace(request, mixes=False)  # the one that fits one card is not that of several
    whole = plan_for(single, card=cards[0], config=config)
    return over_cards(whole, cards=cards, counts=counts, flights=flights)


def over_cards(
    whole: Plan, *, cards: Sequence[CardMemory], counts: Counts | None = None, flights: int = 1
) -> SplitPlan:
    if counts is not None:
        from hf_rocm_tune.models.split import counts_for

        counts = counts_for(counts, whole.layers)
        cards = cards[: len(counts)]
    if whole.layers < len(cards):
        raise UsageError(f"{whole.layers} layers cannot be distributed over {len(cards)} cards")
    parts: dict[tuple[str, int, int], Variant] = {}

    def split(option: Estimate, shared: Counts) -> SplitPlan:
        found, case = [], replace(option.case, flights=min(flights, option.case.accumulation))
        for (start, stop), card in zip(_ranges(shared), cards, strict=True):
            key = option.variant, start, stop
            part = parts.get(key) or parts.setdefault(key, whole.recordings[option.variant].part(start, stop))
            found.append(estimate(part, case, card))
        return SplitPlan(plan=whole, option=option, counts=shared, estimates=tuple(found), cards=tuple(cards))

    def best(option: Estimate) -> SplitPlan:
        if counts is not None:
            return split(option, counts)
        return best_cut(partial(split, option), even_counts(whole.layers, [card.free for card in cards]))

    found = list(map(best, whole.grid))
    if roomy := [each for each in found if each.least_spare >= cards[0].margin]:
        top = max(each.option.tokens_per_second for each in roomy)
        found = [each for each in roomy if each.option.tokens_per_second >= top * (1 - NEAR)]
    return max(found, key=lambda each: each.least_spare)


def _ranges(counts: Counts) -> list[tuple[int, int]]:
    return [(sum(counts[:card]), sum(counts[: card + 1])) for card in range(len(counts))]


def even_counts(layers: int, weights: Sequence[float]) -> Counts:
    """Distributes layers in proportion to the weights of the cards, at least one to each."""
    left, room = layers, sum(weights)
    counts = []
    for position, weight in enumerate(weights):
        later = len(weights) - position - 1
        share = round(left * weight / room) if room else 1
        counts.append(left if later == 0 else min(max(share, 1), left - later))
        left, room = left - counts[-1], room - weight
    return tuple(counts)


def best_cut(plan: Callable[[Counts], SplitPlan], counts: Counts) -> SplitPlan:
    """The cut that leaves most memory on the fullest card, found by moving one layer at a time from ``counts``."""
    best, cards = plan(counts), range(len(counts))
    while True:
        moves = [
            tuple(count + (card == taker) - (card == giver) for card, count in enumerate(best.counts))
            for giver in cards
            for taker in cards
            if giver != taker and best.counts[giver] > 1
        ]
        better = max(map(plan, moves), key=lambda each: each.least_spare, default=best)
        if better.least_spare <= best.least_spare:
            return best
        best = better


# ---- the ways, compared -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CardsWay:
    name: str  # ``ddp``, ``host``, ``fsdp2``, ``split``, ``pipeline`` or ``tensor``
    option: Estimate  # the fastest case that fits, else the least: memory of the fullest card, speed of all cards
    longest: int | None  # tokens, with micro-batch 1 and checkpointing; None: none fits, or unknown
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
    """The fastest that fits, with the card's margin if one does, the first of nearly equal ones; None: none fits."""
    fitting = [each for each in found if each.option.fits]
    offered = [each for each in fitting if not each.option.tight] or fitting
    top = max((each.option.tokens_per_second for each in offered), default=0.0)
    return next((each for each in offered if each.option.tokens_per_second >= top * (1 - CLOSE)), None)


def sentence(plan: Plan, best: CardsWay) -> str:
    method, crossing = best.option.variant, f"{best.crossing / GIB:.2f} GiB cross in a step"
    if best.name in ("ddp", "host"):
        return (
            f"{best.name}: {method} fits on each card, so {plan.request.cards} batches are computed at once; {crossing}"
        )
    alone = any(each.fits and each.variant == method for each in plan.grid)
    reason = "is estimated to be faster this way" if alone else "does not fit on one card"
    slow = ", and a second card adds memory, not speed" if best.name == "split" else ""
    return f"{best.name}: {method} {reason}{slow}; {crossing}"


def _at(option: Estimate, plan: Plan, *, times: float = 1.0, plus: float = 0.0, least: float = 0.0) -> Estimate:
    """The option with ``times`` the seconds of its step ``plus`` others, at ``least`` that many."""
    tokens = plan.request.effective_batch * option.case.length
    seconds = max(times * tokens / option.tokens_per_second + plus, least)
    return replace(option, tokens_per_second=tokens / seconds)


def _way(
    plan: Plan,
    name: str,
    flags: str,
    options: list[Estimate],
    fits: Callable[[str, Case], bool],
    crossing: Callable[[Estimate], float],
    lines: Iterable[str] = (),
) -> CardsWay:
    """The best of a way's cases; ``fits`` is asked of method and case."""
    best = fastest(options) or min(options, key=lambda each: each.total)
    longest = plan.longest(best.variant, partial(fits, best.variant))
    return CardsWay(name=name, option=best, longest=longest, crossing=crossing(best), flags=flags, lines=tuple(lines))


def _gradients(variant: Variant) -> float:
    return float(sum(each.nbytes for each in variant.weights.trained))


def _replicated(plan: Plan, name: str, times: float, rate: float, flags: str) -> CardsWay:
    """In a ring each card sends the shares of the others, twice; through the host it sends and receives all."""
    sends = {method: times * _gradients(variant) for method, variant in plan.variants.items()}
    options = [_at(one, plan, plus=sends[one.variant] / rate) for one in plan.grid]

    def fits(method: str, case: Case) -> bool:
        return estimate(plan.variants[method], case, plan.card).fits

    return _way(plan, name, flags, options, fits, lambda one: plan.request.cards * sends[one.variant])


def _sharded(plan: Plan, flags: str) -> CardsWay:
    """FSDP2 gathers layers and embeddings twice per micro-batch, during computation, and the other weights once."""
    cards = plan.request.cards
    variants, gathered = {}, {}
    for method, recordings in plan.recordings.items():
        whole, layer_of = recordings.variant, recordings.sample.layer_of
        by_layer = [0] * (1 + max(layer_of))
        for weight in recordings.sample.weights():
            if weight.layer >= 0 and weight.part == "weights":
                by_layer[weight.layer] += weight.nbytes
        layers = sum(by_layer[layer] for layer in layer_of)
        embeddings = recordings.sample.base.get_input_embeddings().weight.nbytes
        saved = max(0, int(layers * (cards - 1) / cards) - 2 * max(by_layer))  # two layers are gathered at a time
        parts = dict(whole.weights.parts)
        parts |= {"weights": parts["weights"] - saved, "adapters": parts["adapters"] // cards}
        trained = tuple(replace(each, elements=-(-each.elements // cards)) for each in whole.weights.trained)
        # 4-bit weights are quantised on each card before they are sharded
        loading = whole.weights.loading + saved if whole.weights.parts["quantisation constants"] else 0
        weights = replace(whole.weights, parts=parts, trained=trained, loading=loading)
        variants[method] = replace(whole, weights=weights)
        # all weights outside the layers once, the embeddings again
        every = whole.weights.parts["weights"] + layers + embeddings + 2 * whole.weights.parts["adapters"]
        gathered[method] = every * (cards - 1) / cards

    def at(method: str, case: Case) -> Estimate:
        found = replace(estimate(variants[method], replace(case, cards=1), plan.card), case=case)
        found = replace(found, tokens_per_second=cards * found.tokens_per_second)
        return _at(found, plan, least=case.accumulation * gathered[method] / LINK)

    def crossing(best: Estimate) -> float:
        weights = cards * best.case.accumulation * gathered[best.variant]
        return weights + (cards - 1) * _gradients(plan.variants[best.variant])

    options = [at(one.variant, one.case) for one in plan.grid if one.case.recompute is None]
    return _way(plan, "fsdp2", flags, options, lambda method, case: at(method, case).fits, crossing)


def _for_all(plan: Plan) -> Plan:
    """The plan of cards that work on the same micro-batches, as one card would compute them."""
    request = replace(plan.request, cards=1, mixes=False)
    grids = (grid_of(each, plan.card, request) for each in plan.recordings.values())
    return replace(plan, request=request, grid=tuple(one for grid in grids for one in grid))


def _layered(plan: Plan) -> list[CardsWay]:
    """A split whose cards compute one after the other, and a pipeline.

    The cards of a pipeline idle for (p - 1) / (m + p - 1) of a step. For each micro-batch that `cards.pipeline` has
    in flight, all activations kept for backward are counted, an upper bound.
    """
    from hf_rocm_tune.cards.pipeline import IN_FLIGHT  # imports torch

    cards, plan = plan.request.cards, _for_all(plan)
    found = over_cards(plan, cards=[plan.card] * cards)

    def same(step: Step, _: Case) -> Step:
        return step

    def at(method: str, case: Case, in_flight: int) -> Estimate:
        """The fullest card, with so many micro-batches in flight; its speed is that of one card with all layers."""
        recordings, flights = plan.recordings[method], min(in_flight, case.accumulation)
        step = recordings(case)
        each = []
        for start, stop in _ranges(found.counts):
            part = replace(recordings.part(start, stop), trace=partial(same, step.part(start, stop)))
            each.append(estimate(part, replace(case, flights=flights), plan.card))
        fullest = max(each, key=lambda one: one.total)
        seconds = sum(case.micro_batch * case.length / one.tokens_per_second for one in each)
        return replace(fullest, case=case, tokens_per_second=case.micro_batch * case.length / seconds)

    def crossing(option: Estimate) -> float:
        """Each boundary, and back to the first card; both ways."""
        wide = 4 if plan.request.dtype_of(option.variant) == "float32" else 2
        hidden = option.case.micro_batch * option.case.length * plan.sample.config.hidden_size * wide
        return 2.0 * cards * option.case.accumulation * hidden

    def way(name: str, options: list[Estimate], in_flight: int, flags: str, lines: Iterable[str] = ()) -> CardsWay:
        made = []
        for one in (at(each.variant, each.case, in_flight) for each in options):
            steps = one.case.accumulation
            times, sides = (1.0, 1) if in_flight == 1 else ((steps + cards - 1) / steps / cards, cards)
            made.append(_at(one, plan, times=times, plus=crossing(one) / THROUGH_HOST / sides))
        fits = lambda method, case: at(method, case, in_flight).fits  # noqa: E731
        return _way(plan, name, flags, made, fits, crossing, lines)

    split = way("split", [found.option], 1, f"--split_layers {','.join(map(str, found.counts))}", found.lines())
    piped = [each for each in plan.grid if each.case.accumulation > 1]
    flags = "--split_layers auto --pipeline auto"
    return [split, *([way("pipeline", piped, IN_FLIGHT * cards, flags)] if piped else [])]


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
    counts = {
        id(module): sample.layer_of.count(number)
        for number, layer in enumerate(sample.layers)
        for module in layer.modules()
    }
    sent = {
        recomputed: sum(
            counts[id(module)] * elements for module, elements in summed(sample.model, cards, recomputed=recomputed)
        )
        for recomputed in (False, True)
    }
    wide = 4 if plan.request.dtype_of("lora") == "float32" else 2

    def crossing(option: Estimate) -> float:
        return float(plan.request.effective_batch * option.case.length * wide * sent[option.case.checkpointing])

    def at(case: Case) -> Estimate:
        found = estimate(sharded, replace(case, cards=1), plan.card)
        return _at(found, plan, times=(layers / cards + head) / (layers + head), plus=crossing(found) / LINK)

    options = [at(one.case) for one in _for_all(plan).grid if one.variant == "lora"]
    flags = "--accelerate_config dual_rx7900xt --tensor_parallel true"
    return [_way(plan, "tensor", flags, options, lambda _, case: at(case).fits, lambda one: cards * crossing(one))]


def advice(plan: Plan, *, training: bool = False) -> str:
    """What would fit where nothing does, each change planned; ``training``: in the flags of a training verb."""
    request, method = plan.request, plan.nearest.variant
    loose: dict[str, Any] = {"micro_batch": None, "checkpointing": None, "recompute": None, "mixes": False}
    bf16, adam8 = {"dtype": "bfloat16"}, {"optim": "adamw_8bit"}
    full32 = method == "full" and request.dtype is None
    changes: list[tuple[str, dict[str, Any], bool]] = [
        ("another micro-batch and checkpointing", {}, (request.micro_batch, request.checkpointing) != (None, None)),
        ("--optim adamw_8bit", adam8, method == "full" and "8bit" not in request.optim),
        ("--dtype bfloat16", bf16, full32),
        ("--dtype bfloat16 --optim adamw_8bit", bf16 | adam8, full32),
        ("--use_peft true" if training else "--method lora", {"methods": ("lora",)}, request.methods == ("full",)),
        ("no --modules_to_save", {"modules_to_save": ()}, bool(request.modules_to_save)),
        (f"--{'lora_r' if training else 'rank'} 16", {"rank": 16}, method != "full" and request.rank > 16),
        ("--load_in_4bit" if training else "--method qlora", {"methods": ("qlora",)}, "qlora" not in request.methods),
        ("--packing false", {"packing": False}, request.packing),
        (f"{STREAM} auto", {"stream": AUTO}, method != "full" and not request.dora and request.cards == 1),
        (
            "--cards 2",
            {"cards": 2, "stream": 0},
            request.cards == 1 and not training and not request.effective_batch % 2,
        ),
    ]
    found: list[str] = []
    for words, change, applies in changes:
        if applies and not any(each in words for each in found):
            with suppress(UsageError):
                other = plan_for(replace(request, **(loose | change)), card=plan.card, config=plan.config)
                if other.choice or (not training and other.request.cards > 1 and best_of(ways(other))):
                    found.append(words)
    several = request.cards > 1 and not training
    lengths = [each.longest for each in ways(plan)] if several else map(plan.longest, plan.recordings)
    longest = max((each or 0 for each in lengths), default=0)
    if 0 < longest < request.length:
        found.insert(-1 if "--cards 2" in found else len(found), f"--{'max_length' if training else 'seq'} {longest}")
    some = f"what would fit: {' | '.join(found)}; or" if found else "what would fit:"
    return f"{some} a smaller model: `hf-rocm-tune plan --largest`"
