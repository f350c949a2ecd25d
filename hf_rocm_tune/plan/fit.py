"""Planning a job: records its steps, estimates every case, and chooses the fastest that fits.

    plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
    plan.choice.case.micro_batch, plan.choice.case.checkpointing

Only a configuration is downloaded, nothing is allocated, no GPU is needed. Imports torch when the first step is
recorded. `split_plan` plans one model over several cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import (
    GIB,
    NEAR,
    CardMemory,
    Case,
    Counts,
    Estimate,
    Step,
    StepRecording,
    Tape,
    Variant,
    Weights,
    estimate,
    fastest,
    longest,
    micro_batches,
    optimizer,
)
from hf_rocm_tune.plan.request import (
    DEFAULT_OPTIMIZER,
    PUBLIC_MODELS,
    PlanRequest,
    TooManyOperations,
    config_for,
    config_of,
    longest_position,
)

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

#: Longer sequences are not considered when the configuration sets no limit.
LONGEST = 131072
#: Allocations and releases of a step, above which only the wanted length is planned. Few layers of Llama have 1,600,
#: of Gemma 3 2,800, of Qwen3-Next 8,500, of Gemma 3n 14,000.
_MANY_EVENTS = 5_000
#: Recorded first, to see whether and how this model can be recorded.
_PROBE = Case(micro_batch=2, length=2, checkpointing=False)


# ---- recorded steps ---------------------------------------------------------------------------------------------


@dataclass
class Recordings:
    """The recorded steps of one method. A case is recorded at its own batch and length when it is first asked for."""

    config: Any  # the model's configuration
    request: PlanRequest
    method: str  # one of the request's
    # by content of the rows, recomputation, and batch and length of the tensors
    _recorded: dict[tuple[str, str, int, int], StepRecording] = field(default_factory=dict)
    _events: int = 0  # allocations and releases of the first recorded step

    @cached_property
    def sample(self) -> Sample:
        """The model with few layers; with all layers, which takes longer, if its layers depend on their number."""
        from hf_rocm_tune.plan.sample import KEEPS, build

        refusal, tried = UsageError("no way to keep layers"), ""
        for keep in KEEPS:
            if keep == tried:
                continue
            found = build(self.config, self.request, self.method, keep=keep)
            tried = found.keep
            try:
                # not kept: a first step may cast biases for good and fill caches
                self._events = len(self._record(found, _PROBE, 2, self.request.length).events)
                return found
            except TooManyOperations:
                raise
            except UsageError as error:
                refusal = error
        raise refusal

    @cached_property
    def can_checkpoint(self) -> bool:
        """Whether activations can be recomputed."""
        return bool(self.sample.base.supports_gradient_checkpointing)

    @cached_property
    def variant(self) -> Variant:
        """The model and the method with these steps."""
        return Variant(
            name=self.method,
            weights=Weights.total(self.sample.weights(), self.sample.layer_of),
            trace=self,
            optimizer=optimizer(self.request.optim, on_cpu=self.request.platform == "cpu"),
        )

    def part(self, start: int, stop: int) -> Variant:
        """The part of one card: some of the layers, and on the first card everything outside the layers."""
        weights = (each for each in self.sample.weights() if start == 0 or each.layer >= 0)
        return replace(
            self.variant,
            weights=Weights.total(weights, self.sample.layer_of[start:stop]),
            trace=lambda case: self(case).part(start, stop),
        )

    @property
    def takes_long(self) -> bool:
        """Whether to record a step takes a second rather than a tenth, so that only the wanted length is planned."""
        assert self.sample, "recorded once"
        return self._events > _MANY_EVENTS

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """The ways to recompute single layers: ``whole``, ``selective``; empty if only all layers together can be.

        Also empty if a layer needs no gradient without checkpointing: it keeps nothing then, but everything if a layer
        before it is recomputed, which is not recorded.
        """
        from hf_rocm_tune.models.recompute import layers_of

        layers = list(self.sample.layers)
        if not self.can_checkpoint or layers_of(self.sample.base) != layers:
            return ()
        case = replace(_PROBE, length=self.request.length)
        if self._recording(case).trained_layers < len(layers):
            return ()
        with suppress(UsageError):  # results that are changed in place cannot be kept
            self._recording(replace(case, checkpointing=True, recompute=(0, len(self.sample.layer_of))))
            return "whole", "selective"
        return ("whole",)

    def __call__(self, case: Case) -> Step:
        """The step of a case, or its evaluation's pass."""
        layer_of = self.sample.layer_of
        if case.recompute is None:
            return Step(((self._recording(case), layer_of),))
        whole, some = case.recompute[0], sum(case.recompute)
        plain = replace(case, recompute=None)
        runs = (
            (plain, layer_of[:whole]),
            (replace(case, recompute=(0, len(layer_of))), layer_of[whole:some]),
            (replace(plain, checkpointing=False), layer_of[some:]),
        )
        return Step(tuple((self._recording(each), layers) for each, layers in runs if layers))

    def _recording(self, case: Case) -> StepRecording:
        """Of a case that recomputes all layers alike."""
        how = "selective" if case.recompute else "whole" if case.checkpointing else "none"
        key = (case.content, "evaluation" if case.evaluation else how, *case.shape)
        if key not in self._recorded:
            self._recorded[key] = StepRecording(self._record(self.sample, case, *case.shape))
        return self._recorded[key]

    def _record(self, sample: Sample, case: Case, batch: int, length: int) -> Tape:
        from hf_rocm_tune.plan import recorder

        asked = self.request
        return recorder.record(
            sample, case, batch, length,
            platform=asked.platform, autocast=asked.autocast, one_pass=asked.one_pass_loss,
        )  # fmt: skip


# ---- the plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result."""

    request: PlanRequest  # with the choices made during planning
    config: Any  # the model's configuration
    card: CardMemory  # the memory that is planned for
    grid: tuple[Estimate, ...]  # every case, other lengths included
    recordings: dict[str, Recordings]  # by method
    limit: int | None  # tokens that the model was made for, or None
    notes: tuple[str, ...]  # for the reader

    @property
    def sample(self) -> Sample:
        """The model with few layers."""
        return next(iter(self.recordings.values())).sample

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self.sample.base).__name__

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.sample.layer_of)

    @property
    def variants(self) -> dict[str, Variant]:
        """What was planned, by method."""
        return {method: each.variant for method, each in self.recordings.items()}

    @property
    def parameters(self) -> int:
        """Of the model."""
        return next(iter(self.variants.values())).weights.parameters

    @cached_property
    def choice(self) -> Estimate | None:
        """The fastest case that fits, at the wanted length and batch, with its evaluation; None if none fits."""
        found = fastest(self.wanted())
        return found and self.with_evaluation(found)

    @cached_property
    def nearest(self) -> Estimate:
        """The choice, or if nothing fits the case that needs least."""
        return self.choice or min(self.wanted(), key=lambda each: each.total)

    def with_evaluation(self, found: Estimate) -> Estimate:
        """A case with the largest evaluation batch up to TRL's default that needs no more than the training step."""
        if not self.request.evaluates or found.case.eval_batch:
            return found
        for size in (8, 4, 2, 1):
            case = replace(found.case, eval_batch=size)
            with suppress(TooManyOperations):
                other = estimate(self.variants[found.variant], case, self.card)
                if other.moments["evaluation"] <= found.allocated or size == 1:
                    return other
        return found

    @property
    def full_logits(self) -> float:
        """Bytes that TRL's fused loss saves at the loss of the nearest case, at least.

        The logits of all tokens in their dtype, as float32, and their logarithms or gradient as float32.
        """
        case, vocabulary = self.nearest.case, self.recordings[self.nearest.variant].sample.vocabulary
        itemsize = 2 if self.request.autocast else 4
        return float(case.micro_batch * case.length * vocabulary * (itemsize + 8))

    def wanted(self) -> list[Estimate]:
        """The cases of the wanted length."""
        return [each for each in self.grid if each.case.length == self.request.length]

    def longest(self, method: str, fits: Callable[[Case, Callable[[Case], Step]], bool] | None = None) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing, in steps of 128 tokens.

        Whether one does is what ``fits`` says of a case and its recorded step; by default, whether it fits the card.

        None: none fits, or it is not known because a step takes too long to record.
        """
        recordings = self.recordings[method]
        short = replace(_case(self.request, 1, 2), checkpointing=recordings.can_checkpoint)

        def at(length: int) -> bool:
            case = replace(short, length=length)
            return fits(case, recordings) if fits else estimate(recordings.variant, case, self.card).fits

        with suppress(TooManyOperations):
            return None if recordings.takes_long else longest(at, limit=self.limit or LONGEST)
        return None


def plan_for(
    request: PlanRequest, *, card: CardMemory, config: Any = None, grid: bool = True, within_limit: bool = False
) -> Plan:
    """Plans a training job.

    Args:
        request: the job.
        card: its memory, from `card_memory` or ``CardMemory(...)``.
        config: the model's configuration; by default read from ``request.model``.
        grid: plan twice the length as well.
        within_limit: if the model was made for fewer tokens than wanted, plan for its limit.

    Returns:
        The plan. Its ``choice`` is the fastest case by estimate that fits, for the wanted effective batch exactly.

    Raises:
        UsageError: the configuration cannot be read, or this model cannot be planned.
    """
    notes: list[str] = []
    if config is None:
        config, notes = config_for(request)
    request, more = _as_quantised(request, config)
    notes += more
    limit = longest_position(config)
    too_long = limit is not None and request.length > limit
    if too_long and within_limit:
        notes.append(f"the model was made for {limit} tokens: planned for these, not for {request.length}")
        request, too_long = replace(request, length=limit or request.length), False
    elif too_long:
        notes.append(f"the model was made for {limit} tokens; {request.length} are more")
    lengths: tuple[int, ...] = (request.length,)
    if grid and 2 * request.length <= (limit or LONGEST):
        lengths += (2 * request.length,)

    planned: dict[str, tuple[Recordings, list[Estimate]]] = {}
    refused: dict[str, UsageError] = {}
    for method in request.methods:
        try:
            recordings = Recordings(config, request, method)
            wanted = (request.length,) if recordings.takes_long else lengths
            planned[method] = recordings, grid_of(recordings, card, request, wanted)
        except TooManyOperations as error:
            refused[method] = error
            break
        except UsageError as error:
            refused[method] = error
    if not planned:
        first = next(iter(refused.values()))
        if too_long:
            raise UsageError(f"{first}; it was made for {limit} tokens, and {request.length} are more") from first
        raise first
    plan = Plan(
        request=request,
        config=config,
        card=card,
        grid=(),
        recordings={name: each for name, (each, _) in planned.items()},
        limit=limit,
        notes=(),
    )
    notes += [f"{name}: {why}" for name, why in refused.items()]
    notes += dict.fromkeys(note for each in plan.recordings.values() for note in each.sample.notes)
    cases = (each for _, found in planned.values() for each in found)
    return replace(plan, grid=tuple(cases), notes=tuple(notes))


def _as_quantised(request: PlanRequest, config: Any) -> tuple[PlanRequest, list[str]]:
    """The request with the methods that the weights in the files allow; quantised ones take adapters only.

    Raises:
        UsageError: no method is left.
    """
    if getattr(config, "quantization_config", None) is None:
        return request, []
    from hf_rocm_tune.models.quantised import checkpoint_bits

    try:
        bits = checkpoint_bits(config, request.model, on_card=request.platform != "cpu")
    except UsageError as error:
        raise UsageError(str(error).replace("--load_in_4bit", "--method qlora")) from error
    left = tuple(each for each in request.methods if each != ("full" if bits else "qlora"))
    if not left:
        what = "quantised in its files and becomes bfloat16 when loaded: give --method lora or full"
        if bits:
            what = f"{bits}-bit in its files: only adapters can be trained; give --method lora"
        raise UsageError(f"model {request.model} is {what}")
    if bits is None:
        return replace(request, methods=left), ["its quantised weights become bfloat16 when they are loaded"]
    note = f"its weights are {bits}-bit in its files (bitsandbytes) and planned so, whatever the method"
    return replace(request, methods=("qlora" if bits == 4 else "lora",)), [note]


def _case(request: PlanRequest, size: int, length: int) -> Case:
    return Case(
        micro_batch=size,
        length=length,
        checkpointing=True,
        packing=request.packing,
        accumulation=max(1, request.each // size),
        cards=request.cards,
        trainer=request.trainer,
        eval_batch=request.eval_batch,
    )


def grid_of(recordings: Recordings, card: CardMemory, request: PlanRequest, lengths: tuple[int, ...]) -> list[Estimate]:
    """Every length and micro-batch with and without checkpointing; if only checkpointing fits, the best mix, too.

    Mixes are searched at the wanted length. Longer lengths whose step takes too long to record are omitted.
    """
    grid = []
    for length in lengths:
        try:
            grid += _of_length(recordings, card, request, length)
        except TooManyOperations:
            if length <= request.length:
                raise
    return grid


def _of_length(recordings: Recordings, card: CardMemory, request: PlanRequest, length: int) -> list[Estimate]:
    variant, layers = recordings.variant, len(recordings.sample.layer_of)
    sizes = (request.micro_batch,) if request.micro_batch else micro_batches(request.each)
    sizes = tuple(size for size in sizes if size > 1 or request.trainer != "kto")
    ways = [way for way in (False, True) if request.checkpointing in (None, way) and way <= recordings.can_checkpoint]
    if not ways:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    grid = []
    for case in (_case(request, size, length) for size in sizes):
        if request.recompute is not None:
            from hf_rocm_tune.models.recompute import check

            check(request.recompute, layers if recordings.ways else 0)
            grid.append(estimate(variant, replace(case, recompute=request.recompute), card))
            continue
        found = [estimate(variant, replace(case, checkpointing=way), card) for way in ways]
        grid += found
        roomy = [each.spare >= card.margin for each in found]
        mixes = request.mixes and length == request.length and roomy == [False, True]
        if mixes and recordings.ways:
            grid += _mixes(variant, case, card, layers, selective="selective" in recordings.ways)
    return grid


def _mixes(variant: Variant, case: Case, card: CardMemory, layers: int, *, selective: bool) -> list[Estimate]:
    """The fastest mix by estimate of layers recomputed whole and selectively that leaves the card's margin.

    The margin is there because mixes fill the card, and part of its memory is assumed. The more layers are recomputed
    whole, the fewer need to be selectively. Empty if none fits.
    """
    found = []
    fewest = layers if selective else 0
    for whole in range(layers):
        fewest = min(fewest, layers - whole)
        best: Estimate | None = None
        for count in range(fewest, -1, -1):
            each = estimate(variant, replace(case, recompute=(whole, count)), card) if whole + count else None
            if each is None or each.spare < card.margin:
                break
            fewest, best = count, each
        found += [best] if best is not None else []
    return sorted(found, key=lambda each: each.tokens_per_second)[-1:]


def advice(plan: Plan, *, training: bool = False) -> str:
    """What would fit where nothing does, each change planned; ``training``: in the flags of a training verb."""
    request, method = plan.request, plan.nearest.variant
    loose: dict[str, Any] = {"micro_batch": None, "checkpointing": None, "recompute": None}
    bf16, adam8 = {"dtype": "bfloat16"}, {"optim": "adamw_8bit"}
    changes: list[tuple[str, dict[str, Any], bool]] = [
        ("another micro-batch and checkpointing", {}, (request.micro_batch, request.checkpointing) != (None, None)),
        ("--optim adamw_8bit", adam8, method == "full" and request.optim == DEFAULT_OPTIMIZER),
        ("--dtype bfloat16", bf16, method == "full" and request.dtype is None),
        ("--dtype bfloat16 --optim adamw_8bit", bf16 | adam8, method == "full" and request.dtype is None),
        ("--use_peft true" if training else "--method lora", {"methods": ("lora",)}, request.methods == ("full",)),
        ("no --modules_to_save", {"modules_to_save": ()}, bool(request.modules_to_save)),
        (f"--{'lora_r' if training else 'rank'} 16", {"rank": 16}, method != "full" and request.rank > 16),
        ("--load_in_4bit" if training else "--method qlora", {"methods": ("qlora",)}, "qlora" not in request.methods),
        ("--packing false", {"packing": False}, request.packing),
    ]
    found: list[str] = []
    for words, change, applies in changes:
        if applies and not any(each in words for each in found):
            other = replace(request, **(loose | change), mixes=False)
            with suppress(UsageError):
                if plan_for(other, card=plan.card, config=plan.config, grid=False).choice:
                    found.append(words)
    longest = max((plan.longest(each) or 0 for each in plan.recordings), default=0)
    if 0 < longest < request.length:
        found.append(f"--{'max_length' if training else 'seq'} {longest}")
    if request.cards == 1 and not training and request.trainer == "sft":
        with suppress(UsageError):
            if split_plan(replace(request, **loose), cards=[plan.card] * 2, config=plan.config).fits:
                found.append("--cards 2")
    some = f"what would fit: {' | '.join(found)}; or" if found else "what would fit:"
    return f"{some} a smaller model: `hf-rocm-tune plan --largest`"


def largest_models(request: PlanRequest, *, card: CardMemory) -> dict[str, str | None]:
    """By method, the largest public model that fits with one sequence and checkpointing; None if none fits."""
    found: dict[str, str | None] = {}
    for method in request.methods:
        single = replace(request, methods=(method,), micro_batch=1, checkpointing=True)
        models = (
            model.name
            for model in sorted(PUBLIC_MODELS, key=lambda each: -each.billions)
            if plan_for(single, card=card, config=config_of(model.fields), grid=False).choice is not None
        )
        found[method] = next(models, None)
    return found


# ---- one model over several cards -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One model over several cards: what each holds, and where to cut.

    Each card is planned as if it held a smaller model: its layers, and on the first card everything outside the layers.
    A card keeps what its layers need for backward while the others compute; each has its own peak. The other cards hold
    copies of masks, position embeddings and their first input. The cards compute one after the other, so a second one
    adds memory, not speed.
    """

    plan: Plan  # of one card, the source of model, cases and speed
    option: Estimate  # the case on one card
    counts: Counts  # layers of each card
    estimates: tuple[Estimate, ...]  # what they take
    cards: tuple[CardMemory, ...]  # its memory

    @property
    def least_spare(self) -> float:
        """Bytes left over on the fullest card; negative: missing."""
        return min(estimate.spare for estimate in self.estimates)

    @property
    def fits(self) -> bool:
        """Whether it fits on every card."""
        return self.least_spare >= 0


def split_plan(
    request: PlanRequest,
    *,
    cards: Sequence[CardMemory],
    counts: Counts | None = None,
    config: Any = None,
    within_limit: bool = False,
    flights: int = 1,
) -> SplitPlan:
    """Plans one model over several cards.

    Args:
        request: the job, of one process: its ``cards`` is 1.
        cards: the memory of each, two or more; those beyond the counts are dropped.
        counts: layers on each card, the last of which may be left out; by default the cut that leaves most memory on
            the fullest card.
        config, within_limit: as for `plan_for`.
        flights: micro-batches in flight, if a step has as many.

    Returns:
        The fastest case by estimate that fits on every card; if none fits, the one with the least memory missing.

    Raises:
        UsageError: the model cannot be planned, the counts do not fit it, or it has too few layers.
    """
    assert request.cards == 1, "one process"
    single = replace(request, mixes=False)  # the one that fits one card is not that of several
    whole = plan_for(single, card=cards[0], config=config, grid=False, within_limit=within_limit)
    return over_cards(whole, cards=cards, counts=counts, flights=flights)


def over_cards(
    whole: Plan, *, cards: Sequence[CardMemory], counts: Counts | None = None, flights: int = 1
) -> SplitPlan:
    """`split_plan` from the plan for one card, without its grid of lengths.

    Raises:
        UsageError: the counts do not fit the model, or it has too few layers.
    """
    if counts is not None:
        from hf_rocm_tune.models.split import counts_for

        counts = counts_for(counts, whole.layers)
        cards = cards[: len(counts)]
    if whole.layers < len(cards):
        raise UsageError(f"{whole.layers} layers cannot be distributed over {len(cards)} cards")

    @cache
    def part(method: str, start: int, stop: int) -> Variant:
        return whole.recordings[method].part(start, stop)

    def split(option: Estimate) -> SplitPlan:
        def at(shared: Counts) -> SplitPlan:
            stops = [sum(shared[: card + 1]) for card in range(len(shared))]
            each = zip(shared, stops, cards, strict=True)
            case = replace(option.case, flights=min(flights, option.case.accumulation))
            found = (estimate(part(option.variant, end - count, end), case, card) for count, end, card in each)
            return SplitPlan(plan=whole, option=option, counts=shared, estimates=tuple(found), cards=tuple(cards))

        return at(counts) if counts is not None else best_cut(at, even_counts(whole.layers, [c.free for c in cards]))

    found = [split(option) for option in whole.grid]
    if roomy := [each for each in found if each.least_spare >= cards[0].margin]:
        best = max(each.option.tokens_per_second for each in roomy)
        found = [each for each in roomy if each.option.tokens_per_second >= best * (1 - NEAR)]
    return max(found, key=lambda each: each.least_spare)


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
    """The cut that leaves most memory on the card that has least, found by moving one layer at a time from ``counts``.

    Layers of cards between giver and taker shift along.
    """
    best = plan(counts)
    while True:
        moves = [
            tuple(count + (card == taker) - (card == giver) for card, count in enumerate(best.counts))
            for giver in range(len(counts))
            for taker in range(len(counts))
            if giver != taker and best.counts[giver] > 1
        ]
        better = max((plan(each) for each in moves), key=lambda each: each.least_spare, default=best)
        if better.least_spare <= best.least_spare:
            return best
        best = better


def memory_lines(plan: SplitPlan) -> Iterator[str]:
    """One line for each card: its layers, and how much of it they take."""
    start = 0
    for number, (count, found, card) in enumerate(zip(plan.counts, plan.estimates, plan.cards, strict=True)):
        beside = ", embeddings, head and loss" if number == 0 else ""
        rest = f"{found.spare / GIB:.1f} spare" if found.fits else f"{-found.spare / GIB:.1f} missing"
        yield (
            f"card {number}: layers {start} to {start + count - 1}{beside}: {found.total / GIB:.1f} of "
            f"{card.usable / GIB:.1f} GiB, {rest}"
        )
        start += count
