"""Planning a job: records its steps, estimates every case, and chooses the fastest that fits.

plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.streamed import AUTO
from hf_rocm_tune.plan.estimate import (
    CardMemory,
    Case,
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
from hf_rocm_tune.plan.request import PlanRequest, TooManyOperations, config_for, longest_position

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

#: Longer sequences are not considered when the configuration sets no limit.
LONGEST = 131072
#: Allocations and releases of a step, above which the longest sequence is not searched. Few layers of Llama have 1,600,
#: of Qwen3-Next 8,500.
_MANY_EVENTS = 5_000
#: Recorded first, to see whether and how this model can be recorded.
_PROBE = Case(micro_batch=2, length=2, checkpointing=False)


def _record(sample: Sample, case: Case) -> Tape:
    from hf_rocm_tune.plan import recorder  # imports torch

    return recorder.record(sample, case, *case.shape)


@dataclass
class Recordings:
    """The recorded steps of one method. A case is recorded at its own batch and length when it is first asked for."""

    config: Any  # the model's configuration
    request: PlanRequest
    method: str  # one of the request's
    # by content of the rows, recomputation, and batch and length of the tensors
    _recorded: dict[tuple[str, str, int, int], StepRecording] = field(default_factory=dict)
    _events: int = 0  # allocations and releases of the first recorded step
    _parts: dict[tuple[int, int], Variant] = field(default_factory=dict)

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
                self._events = len(_record(found, replace(_PROBE, length=self.request.length)).events)
                return found
            except TooManyOperations:
                raise
            except UsageError as error:
                refusal = error
        raise refusal

    @cached_property
    def can_checkpoint(self) -> bool:
        return bool(self.sample.base.supports_gradient_checkpointing)

    @cached_property
    def variant(self) -> Variant:
        return Variant(
            name=self.method,
            weights=Weights.total(self.sample.weights(), self.sample.layer_of),
            trace=self,
            optimizer=optimizer(self.request.optim, on_cpu=self.request.platform == "cpu"),
        )

    def part(self, start: int, stop: int) -> Variant:
        """A card of a split: these layers and, if it is the first, all else."""
        if (start, stop) not in self._parts:
            weights = (each for each in self.sample.weights() if start == 0 or each.layer >= 0)
            self._parts[start, stop] = replace(
                self.variant,
                weights=Weights.total(weights, self.sample.layer_of[start:stop]),
                trace=lambda case: self(case).part(start, stop),
            )
        return self._parts[start, stop]

    @property
    def takes_long(self) -> bool:
        assert self.sample, "recorded once"
        return self._events > _MANY_EVENTS

    @cached_property
    def mixes(self) -> tuple[str, ...]:
        """The ways to recompute single layers: ``whole``, ``selective``.

        Empty if only all layers together can be, or if a layer needs no gradient without checkpointing: what it keeps
        then depends on the layers before it.
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
            self._recorded[key] = StepRecording(_record(self.sample, case))
        return self._recorded[key]


@dataclass(frozen=True, kw_only=True)
class Plan:
    request: PlanRequest  # with the choices made during planning
    config: Any  # the model's configuration
    card: CardMemory  # the memory that is planned for
    grid: tuple[Estimate, ...]  # every case
    recordings: dict[str, Recordings]  # by method
    limit: int | None  # tokens that the model was made for, or None
    notes: tuple[str, ...]  # for the reader

    @property
    def sample(self) -> Sample:
        return next(iter(self.recordings.values())).sample

    @property
    def layers(self) -> int:
        return len(self.sample.layer_of)

    @property
    def variants(self) -> dict[str, Variant]:
        return {method: each.variant for method, each in self.recordings.items()}

    @cached_property
    def choice(self) -> Estimate | None:
        """The fastest case that fits, at the wanted length and batch, with its evaluation; None if none fits."""
        found = fastest(self.grid)
        return found and self.with_evaluation(found)

    @cached_property
    def nearest(self) -> Estimate:
        return self.choice or min(self.grid, key=lambda each: each.total)

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
        """Bytes that TRL's fused loss saves: logits in their dtype, as float32, and their gradient as float32."""
        case, vocabulary = self.nearest.case, self.recordings[self.nearest.variant].sample.vocabulary
        itemsize = 2 if self.request.autocast else 4
        return float(case.micro_batch * case.length * vocabulary * (itemsize + 8))

    def longest(self, method: str, fits: Callable[[Case], bool] | None = None) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing; None: none, or too long to record."""
        recordings = self.recordings[method]
        streamed = self.layers if self.nearest.case.streamed else 0
        short = replace(_case(self.request, 1, 2), checkpointing=recordings.can_checkpoint, streamed=streamed)
        fits = fits or (lambda case: estimate(recordings.variant, case, self.card).fits)
        with suppress(TooManyOperations):
            if not recordings.takes_long:
                return longest(lambda length: fits(replace(short, length=length)), limit=self.limit or LONGEST)
        return None


def plan_for(request: PlanRequest, *, card: CardMemory, config: Any = None, within_limit: bool = False) -> Plan:
    """Plans a training job. Its ``choice`` is the fastest case by estimate that fits, for the wanted effective batch.

    ``config``: the model's, by default read from ``request.model``; ``within_limit``: plan for no more tokens than the
    model was made for. UsageError: the configuration cannot be read, or this model cannot be planned.
    """
    notes: list[str] = []
    if config is None:
        config, notes = config_for(request)
    request, more = _as_quantised(request, config)
    notes += more
    limit = longest_position(config)
    if limit is not None and request.length > limit:
        if within_limit:
            notes.append(f"the model was made for {limit} tokens: planned for these, not for {request.length}")
            request = replace(request, length=limit)
        else:
            notes.append(f"the model was made for {limit} tokens; {request.length} are more")
    recordings: dict[str, Recordings] = {}
    cases: list[Estimate] = []
    refused: dict[str, UsageError] = {}
    for method in request.methods:
        try:
            found = Recordings(config, request, method)
            cases += grid_of(found, card, request)
            recordings[method] = found
        except UsageError as error:
            refused[method] = error
            if isinstance(error, TooManyOperations):
                break
    if not recordings:
        first = next(iter(refused.values()))
        if limit is not None and request.length > limit:
            raise UsageError(f"{first}; it was made for {limit} tokens, and {request.length} are more") from first
        raise first
    if not request.triton and request.platform != "cpu":
        notes.append("planned without Triton's kernels, which do not run here: see `hf-rocm-tune doctor`")
    notes += [f"{name}: {why}" for name, why in refused.items()]
    notes += dict.fromkeys(note for each in recordings.values() for note in each.sample.notes)
    result: dict[str, Any] = {"request": request, "config": config, "card": card, "limit": limit}
    return Plan(**result, grid=tuple(cases), recordings=recordings, notes=tuple(notes))


def _as_quantised(request: PlanRequest, config: Any) -> tuple[PlanRequest, list[str]]:
    """The request with the methods that the weights in the files allow; quantised ones take adapters only."""
    if getattr(config, "quantization_config", None) is None:
        return request, []
    from hf_rocm_tune.models.quantised import checkpoint_bits, has_mxfp4

    try:
        bits = checkpoint_bits(config, request.model, on_card=request.platform != "cpu")
    except UsageError as error:
        raise UsageError(str(error).replace("--load_in_4bit", "--method qlora")) from error
    mxfp4 = has_mxfp4(config)
    left = tuple(each for each in request.methods if each != ("full" if bits else "qlora"))
    if not left:
        what = "quantised in its files and becomes bfloat16 when loaded: give --method lora or full"
        if bits:
            what = f"{bits}-bit in its files: only adapters can be trained; give --method lora"
        raise UsageError(f"model {request.model} is {what}")
    if bits is None:
        return replace(request, methods=left), ["its quantised weights become bfloat16 when they are loaded"]
    note = f"its weights are {bits}-bit in its files (bitsandbytes) and planned so, whatever the method"
    if mxfp4:
        note = "its experts are in 4 bit in its files (MXFP4) and stay so, its other weights in 16"
    return replace(request, methods=("qlora" if bits == 4 and not mxfp4 else "lora",)), [note]


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


def grid_of(recordings: Recordings, card: CardMemory, request: PlanRequest) -> list[Estimate]:
    """Every micro-batch with and without checkpointing; if only checkpointing fits, the best mix, too."""
    variant, layers = recordings.variant, len(recordings.sample.layer_of)
    sizes = (request.micro_batch,) if request.micro_batch else micro_batches(request.each)
    sizes = tuple(size for size in sizes if size > 1 or request.trainer != "kto")
    hows = [how for how in (False, True) if request.checkpointing in (None, how) and how <= recordings.can_checkpoint]
    if not hows:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    grid = []
    for case in (_case(request, size, request.length) for size in sizes):
        if request.recompute is not None:
            from hf_rocm_tune.models.recompute import check

            check(request.recompute, layers if recordings.mixes else 0)
            grid.append(estimate(variant, replace(case, recompute=request.recompute), card))
            continue
        found = [estimate(variant, replace(case, checkpointing=how), card) for how in hows]
        grid += found
        if request.mixes and recordings.mixes and [each.spare >= card.margin for each in found] == [False, True]:
            grid += _best_mix(variant, case, card, layers, selective="selective" in recordings.mixes)
    if request.stream and not (request.stream == AUTO and any(each.fits for each in grid)):
        cases = [each.case for each in grid if each.case.checkpointing and each.case.recompute is None]
        grid = [_streamed(variant, case, card, request.stream) for case in cases]
    return grid


def _streamed(variant: Variant, case: Case, card: CardMemory, count: int) -> Estimate:
    layers = len(variant.weights.streams)

    def at(streamed: int) -> Estimate:
        return estimate(variant, replace(case, streamed=streamed), card)

    if count == AUTO:
        count = min(layers, 1 + bisect_left(range(1, layers + 1), True, key=lambda n: at(n).spare >= card.margin))
    return at(count)


def _best_mix(variant: Variant, case: Case, card: CardMemory, layers: int, *, selective: bool) -> list[Estimate]:
    """The fastest mix that leaves the card's margin, if any; the more layers whole, the fewer need to be selective."""
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
