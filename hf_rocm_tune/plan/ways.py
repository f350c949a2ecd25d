"""Ways to use several cards, compared: what fits, the speed, and the traffic between the cards.

    ddp       each card has the whole model and its share of the batch; gradients are averaged by RCCL
    host      the same, averaged through host memory
    fsdp2     each card has its share of the weights; a layer is gathered when it computes, forward and backward
    split     each card has some of the layers; they compute one after the other
    pipeline  a split whose cards work on different micro-batches
    tensor    the cards compute each layer together; outputs and gradients are summed in each layer

Every figure is an estimate from counted bytes and assumed rates. None was measured on two cards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import GIB, Case, Estimate, Step, Variant, Weights, estimate, fastest
from hf_rocm_tune.plan.fit import Plan, SplitPlan, grid_of, over_cards
from hf_rocm_tune.plan.request import PlanRequest

#: Assumed: bytes a second in one direction of PCIe 4.0 x8, the link of two cards on most AM5 boards; on x16, 28 to 29e9
#: were measured (ROCm/ROCm#2253).
LINK = 13e9
#: Assumed: the same through host memory, with digests, and with gloo for averages.
THROUGH_HOST = 3e9
#: Ways whose estimates differ by less count as equal: the first of them, which sends least, is taken.
CLOSE = 0.05


@dataclass(frozen=True, kw_only=True)
class CardsWay:
    """One way to use the cards."""

    name: str  # ``ddp``, ``host``, ``fsdp2``, ``split``, ``pipeline`` or ``tensor``
    option: Estimate  # the fastest case that fits, else the one with the least memory; the speed is that of all cards
    total: float  # bytes on the fullest card
    fits: bool
    tight: bool  # it fits with less left over than the assumed parts may be wrong
    longest: int | None  # tokens, with micro-batch 1 and checkpointing; None: none fits, or unknown
    crossing: float  # bytes between the cards, or between them and the host, in one optimizer step; sum of all cards
    flags: str  # of ``hf-rocm-tune sft`` that select it


def launcher_flags(cards: int, config: str = "dual_rx7900xt") -> str:
    """The launcher's flags for a process on each card; the configuration is for two."""
    return f"--accelerate_config {config}" + (f" --num_processes {cards}" if cards != 2 else "")


def ways(plan: Plan) -> list[CardsWay]:
    """Estimates of all ways for a plan on several cards, without those that the model does not support."""
    wanted = [each for each in plan.grid if each.case.length == plan.request.length]
    launched = launcher_flags(plan.request.cards)
    found = [
        _replicated(plan, wanted, "ddp", LINK, launched),
        _replicated(plan, wanted, "host", THROUGH_HOST, f"{launched} --grad_sync host"),
        _sharded(plan, wanted),
    ]
    if plan.request.trainer != "sft":  # the other ways refuse these trainers
        return found[:2]
    for way in (_layered, _together):
        with suppress(UsageError):  # fewer layers than cards; weights that cannot be sharded
            found += way(plan)
    return found


def best_of(found: list[CardsWay]) -> CardsWay | None:
    """The fastest that fits, with the card's margin if one does, the first of nearly equal ones; None: none fits."""
    fitting = [each for each in found if each.fits]
    offered = [each for each in fitting if not each.tight] or fitting
    top = max((each.option.tokens_per_second for each in offered), default=0.0)
    return next((each for each in offered if each.option.tokens_per_second >= top * (1 - CLOSE)), None)


def sentence(plan: Plan, found: list[CardsWay]) -> str:
    """The recommended way, one of which fits, and the reason."""
    best = best_of(found)
    assert best is not None, "one fits"
    method, cards = best.option.variant, plan.request.cards
    gib = best.crossing / GIB
    alone = any(each.fits for each in plan.grid if (each.variant, each.case.length) == (method, plan.request.length))
    reason = f"{method} {'is estimated to be faster this way' if alone else 'does not fit on one card'}"
    why = {
        "ddp": f"{method} fits on each card, so {cards} cards compute {cards} batches at once, and only {gib:.2f} GiB "
        "are transferred per step",
        "host": f"{method} fits on each card, and {gib:.2f} GiB of gradients are transferred per step",
        "fsdp2": f"{reason}, and gathering {gib:.1f} GiB of weights per step takes less time "
        "than cards that wait for each other",
        "split": f"{reason}; a second card adds memory, not speed, and {gib:.2f} GiB are transferred per step",
        "pipeline": f"{reason}, the micro-batches of a step keep the cards busy, and "
        f"{gib:.2f} GiB are transferred per step",
        "tensor": f"{reason}, and summing {gib:.1f} GiB per step takes less time than cards that wait for each other",
    }
    return f"{best.name}: {why[best.name]}"


def _at(plan: Plan, option: Estimate, *, times: float = 1.0, plus: float = 0.0, least: float = 0.0) -> Estimate:
    """The option with ``times`` the seconds of its step ``plus`` others, at ``least`` that many."""
    tokens = plan.request.effective_batch * option.case.length
    seconds = max(times * tokens / option.tokens_per_second + plus, least)
    return replace(option, tokens_per_second=tokens / seconds)


def _best(options: list[Estimate]) -> Estimate:
    return fastest(options) or min(options, key=lambda each: each.total)


def _way(
    plan: Plan,
    name: str,
    best: Estimate,
    crossing: float,
    flags: str,
    fits: Callable[[Case, Callable[[Case], Step]], bool] | None = None,
) -> CardsWay:
    """The way of a case whose estimate is that of the fullest card; ``fits`` as for `Plan.longest`."""
    longest = plan.longest(best.variant, fits)
    return CardsWay(
        name=name,
        option=best,
        total=best.total,
        fits=best.fits,
        tight=best.tight,
        longest=longest,
        crossing=crossing,
        flags=flags,
    )


def _gradients(variant: Variant) -> float:
    return float(sum(each.nbytes for each in variant.weights.trained))


def _replicated(plan: Plan, wanted: list[Estimate], name: str, rate: float, flags: str) -> CardsWay:
    """In a ring each card sends the shares of the other cards, twice; through the host it sends and receives all.

    No overlap with computation is assumed.
    """
    cards = plan.request.cards
    times = 2.0 if name == "host" else 2 * (cards - 1) / cards
    each_sends = {method: times * _gradients(variant) for method, variant in plan.variants.items()}
    best = _best([_at(plan, one, plus=each_sends[one.variant] / rate) for one in wanted])
    return _way(plan, name, best, cards * each_sends[best.variant], flags)


def _sharded(plan: Plan, wanted: list[Estimate]) -> CardsWay:
    """FSDP2 gathers layers and embeddings twice per micro-batch, during computation, and the other weights once.

    The memory includes weights outside the layers unsharded. If all weights are trained, their gradients are counted
    unsharded, which overestimates.
    """
    cards = plan.request.cards
    wanted = [each for each in wanted if each.case.recompute is None]  # it does not support mixes of recomputation
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
        largest = whole.weights.largest + saved if whole.weights.largest else 0
        weights = replace(whole.weights, parts=parts, trained=trained, largest=largest)
        variants[method] = replace(whole, weights=weights)
        # all weights outside the layers once, the embeddings again
        every = whole.weights.parts["weights"] + layers + embeddings + 2 * whole.weights.parts["adapters"]
        gathered[method] = every * (cards - 1) / cards

    def alone(case: Case, variant: Variant) -> Estimate:
        return replace(estimate(variant, replace(case, cards=1), plan.card), case=case)

    options = []
    for one in wanted:
        here = alone(one.case, variants[one.variant])
        here = replace(here, tokens_per_second=cards * here.tokens_per_second)
        options.append(_at(plan, here, least=one.case.accumulation * gathered[one.variant] / LINK))
    best = _best(options)
    crossing = cards * best.case.accumulation * gathered[best.variant]
    crossing += (cards - 1) * _gradients(plan.variants[best.variant])

    def fits(case: Case, trace: Callable[[Case], Step]) -> bool:
        return alone(case, replace(variants[best.variant], trace=trace)).fits

    return _way(plan, "fsdp2", best, crossing, launcher_flags(cards, "dual_rx7900xt_fsdp2"), fits)


def _layered(plan: Plan) -> list[CardsWay]:
    """A split whose cards compute one after the other, and a pipeline.

    The cards of a pipeline idle for (p - 1) / (m + p - 1) of a step. For each micro-batch that `cards.pipeline` has
    in flight, all activations kept for backward are counted, an upper bound.
    """
    cards = plan.request.cards
    request, grid = _one_batch_for_all(plan)
    found: SplitPlan = over_cards(replace(plan, request=request, grid=tuple(grid)), cards=[plan.card] * cards)
    stops = [sum(found.counts[: card + 1]) for card in range(cards)]
    parts = [(stop - count, stop) for count, stop in zip(found.counts, stops, strict=True)]

    def takes(case: Case, method: str, trace: Callable[[Case], Step], flights: int) -> float:
        """Bytes on the fullest card with that many micro-batches in flight."""
        step, case = trace(case), replace(case, flights=flights)
        each = (replace(plan.recordings[method].part(*at), trace=partial(_part_of, step, *at)) for at in parts)
        return max(estimate(part, case, plan.card).total for part in each)

    def way(name: str, option: Estimate, *, flights: int, turns: bool, flags: str) -> CardsWay:
        case, method = option.case, option.variant
        wide = 4 if request.dtype_of(method) == "float32" else 2
        hidden = case.micro_batch * case.length * plan.recordings[method].sample.config.hidden_size * wide
        crossing = 2.0 * cards * case.accumulation * hidden  # each boundary, and back to the first card; both ways
        times = 1.0 if turns else (case.accumulation + cards - 1) / case.accumulation / cards
        total = takes(case, method, plan.variants[method].trace, flights)
        return CardsWay(
            name=name,
            option=_at(plan, option, times=times, plus=crossing / THROUGH_HOST / (1 if turns else cards)),
            total=total,
            fits=total <= plan.card.usable,
            tight=0 <= plan.card.usable - total < plan.card.margin,
            longest=plan.longest(method, lambda case, trace: takes(case, method, trace, flights) <= plan.card.usable),
            crossing=crossing,
            flags=flags,
        )

    from hf_rocm_tune.cards.pipeline import IN_FLIGHT  # imports torch

    split = way("split", found.option, flights=1, turns=True, flags="--split_layers auto")
    piped = [
        way("pipeline", one, flights=flights, turns=False, flags="--split_layers auto --pipeline auto")
        for one in grid
        if (flights := min(IN_FLIGHT * cards, one.case.accumulation)) > 1
    ]
    return [split, *sorted(piped, key=lambda each: (not each.fits, each.tight, -each.option.tokens_per_second))[:1]]


def _one_batch_for_all(plan: Plan) -> tuple[PlanRequest, list[Estimate]]:
    """The request of cards that work on the same micro-batches, and its cases as one card would compute them."""
    request = replace(plan.request, cards=1, mixes=False)
    grids = (grid_of(each, plan.card, request, (request.length,)) for each in plan.recordings.values())
    return request, [one for grid in grids for one in grid]


def _together(plan: Plan) -> list[CardsWay]:
    """Tensor parallelism: activations are counted unsharded, an upper bound.

    A card computes its share of the layers' products and all of the output head; no overlap of sums is assumed.

    Raises:
        UsageError: transformers has no tensor parallel plan for this model, or the method is not LoRA.
    """
    from hf_rocm_tune.cards.tensor_parallel import RANKS, dims_of, summed  # imports torch

    cards = plan.request.cards
    if cards != RANKS:
        raise UsageError(f"tensor parallelism is for {RANKS} cards")
    variants, sent, times = {}, {}, {}
    for method, recordings in plan.recordings.items():
        if method != "lora":
            continue
        sample = recordings.sample
        cut = {name for name, dim in dims_of(sample.model, cards).items() if dim is not None}
        weights = Weights.total(sample.weights(cut, cards), sample.layer_of)
        variants[method] = replace(recordings.variant, weights=weights)
        head = sample.vocabulary * int(sample.config.hidden_size)
        layers = cards * (recordings.variant.weights.parameters - weights.parameters) / (cards - 1)
        times[method] = (layers / cards + head) / (layers + head)
        counts = {
            id(module): sample.layer_of.count(number)
            for number, layer in enumerate(sample.layers)
            for module in layer.modules()
        }
        for recomputed in (False, True):
            sums = summed(sample.model, cards, recomputed=recomputed)
            sent[method, recomputed] = sum(counts[id(module)] * elements for module, elements in sums)
    if not variants:
        raise UsageError("tensor parallelism supports LoRA only")

    def crosses(option: Estimate) -> float:
        """Bytes that each card sends in a step."""
        wide = 4 if plan.request.dtype_of(option.variant) == "float32" else 2
        tokens = plan.request.effective_batch * option.case.length
        return float(tokens * wide * sent[option.variant, option.case.checkpointing])

    options = [
        _at(
            plan,
            estimate(variants[one.variant], one.case, plan.card),
            times=times[one.variant],
            plus=crosses(one) / LINK,
        )
        for one in _one_batch_for_all(plan)[1]
        if one.variant in variants
    ]
    best = _best(options)

    def fits(case: Case, trace: Callable[[Case], Step]) -> bool:
        return estimate(replace(variants[best.variant], trace=trace), replace(case, cards=1), plan.card).fits

    flags = "--accelerate_config dual_rx7900xt --tensor_parallel true"
    return [_way(plan, "tensor", best, cards * crosses(best), flags, fits)]


def _part_of(step: Step, start: int, stop: int, case: Case) -> Step:
    return step.part(start, stop)
