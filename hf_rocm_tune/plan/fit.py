"""Planning a job: records its steps, estimates every case, and chooses the fastest that fits.

plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.streamed import AUTO
from hf_rocm_tune.plan.estimate import (
    OPTIMIZERS,
    CardMemory,
    Case,
    Estimate,
    Step,
    Tape,
    Variant,
    Weight,
    Weights,
    estimate,
    fastest,
)
from hf_rocm_tune.plan.request import PlanRequest, config_for, longest_position

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

#: Longer sequences are not considered when the configuration sets no limit; lengths are searched in steps.
LONGEST, LENGTH_STEP = 131072, 128
#: Allocations and releases of a step, above which the longest sequence is not searched. Few layers of Llama have 1,900,
#: of Gemma 3 with DoRA 6,400, of Qwen3.5 8,500.
_MANY_EVENTS = 8_000


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
    recorded: dict[tuple[str, str, int, int], Tape] = field(default_factory=dict)

    @property
    def _probe(self) -> Case:
        return Case(micro_batch=2, length=self.request.length, checkpointing=False)

    @cached_property
    def sample(self) -> Sample:
        """The model with few layers; with all layers, which takes longer, if its layers depend on their number."""
        from hf_rocm_tune.plan.sample import build

        found = build(self.config, self.request, self.method)
        try:
            _record(found, self._probe)  # not kept: a first step may cast biases for good and fill caches
        except UsageError:
            found = build(self.config, self.request, self.method, whole=True)
            _record(found, self._probe)
        return found

    @cached_property
    def can_checkpoint(self) -> bool:
        return bool(self.sample.base.supports_gradient_checkpointing)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(self.sample.weights())

    @cached_property
    def variant(self) -> Variant:
        optimizer = replace(OPTIMIZERS[self.request.optim], on_cpu=self.request.platform == "cpu")
        weights = Weights.total(self.weights, self.sample.layer_of)
        return Variant(name=self.method, weights=weights, trace=self, optimizer=optimizer)

    def part(self, start: int, stop: int) -> Variant:
        """A card of a split: these layers and, if it is the first, all else."""
        held = (each for each in self.weights if start == 0 or each.layer >= 0)
        weights = Weights.total(held, self.sample.layer_of[start:stop])
        return replace(self.variant, weights=weights, trace=lambda case: self(case).part(start, stop))

    @cached_property
    def mixes(self) -> bool:
        """Whether single layers can be recomputed, wholly or selectively.

        Not where a layer needs no gradient without checkpointing: what it keeps then depends on the layers before it.
        """
        from hf_rocm_tune.models.recompute import layers_of

        layers = list(self.sample.layers)
        if not self.can_checkpoint or layers_of(self.sample.base) != layers:
            return False
        if sum(role == "backward" for role, _ in self._recording(self._probe).keys) < len(layers):
            return False
        with suppress(UsageError):  # results that are changed in place cannot be kept
            self._recording(replace(self._probe, checkpointing=True, recompute=(0, len(self.sample.layer_of))))
            return True
        return False

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

    def _recording(self, case: Case) -> Tape:
        """Of a case that recomputes all layers alike."""
        how = "selective" if case.recompute else "whole" if case.checkpointing else "none"
        key = (case.content, "evaluation" if case.evaluation else how, *case.shape)
        if key not in self.recorded:
            self.recorded[key] = _record(self.sample, case)
        return self.recorded[key]


@dataclass(frozen=True, kw_only=True)
class Plan:
    request: PlanRequest  # with the choices made during planning
    config: Any  # the model's configuration
    card: CardMemory  # the memory that is planned for
    grid: tuple[Estimate, ...]  # every case, but on one card for those that are certain not to fit
    recordings: dict[str, Recordings]  # by method
    notes: tuple[str, ...]  # for the reader

    @property
    def sample(self) -> Sample:
        return next(iter(self.recordings.values())).sample

    @property
    def layers(self) -> int:
        return len(self.sample.layer_of)

    @cached_property
    def every(self) -> tuple[Estimate, ...]:
        """Every case, also those that cannot fit this card: a part of their layers may."""
        grids = (grid_of(each, self.card, self.request) for each in self.recordings.values())
        return tuple(one for grid in grids for one in grid)

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
            with suppress(UsageError):
                other = estimate(self.variants[found.variant], case, self.card)
                if other.moments["evaluation"] <= found.allocated or size == 1:
                    return other
        return found

    def longest(self, method: str) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing; None: none, or too long to record."""
        recordings = self.recordings[method]
        streamed = self.layers if self.nearest.case.streamed else 0
        short = replace(_case(self.request, 1, 2), checkpointing=recordings.can_checkpoint, streamed=streamed)

        def spare(length: int) -> float:
            return estimate(recordings.variant, replace(short, length=length), self.card).spare

        if max(len(each.events) for each in recordings.recorded.values()) > _MANY_EVENTS:
            return None
        with suppress(UsageError):
            most = max(LENGTH_STEP, longest_position(self.config) or LONGEST)
            known = self.request.length // LENGTH_STEP
            found = _last_that_fits(lambda number: spare(number * LENGTH_STEP), most // LENGTH_STEP, known)
            return LENGTH_STEP * found or None
        return None


def _last_that_fits(spare: Callable[[int], float], most: int, known: int) -> int:
    """The largest number from 1 to ``most`` with memory to spare, which falls as numbers grow; 0: none.

    Each number is recorded, so few are tried: where a line through the two nearest meets zero, as most memory is
    proportional to the length. ``known``: a number that is recorded already.
    """
    tried: dict[int, float] = {}
    low, high, number = 0, most + 1, 1
    while high - low > 1:
        tried[number] = spare(number)
        if tried[number] >= 0:
            low = number
        else:
            high = number
        number = (low + high) // 2
        if low < known < high and known not in tried:
            number = known
        elif len(tried) > 1 and len(tried) % 3:  # else by halves, should the line mislead
            first, second = sorted(tried, key=lambda each: abs(tried[each]))[:2]
            slope = (tried[second] - tried[first]) / (second - first)
            if slope < 0:
                number = int(first - tried[first] / slope)
        number = min(max(number, low + 1), high - 1)
    return low


def plan_for(
    request: PlanRequest,
    *,
    card: CardMemory,
    config: Any = None,
    within_limit: bool = False,
    known: Mapping[str, Recordings] | None = None,
) -> Plan:
    """Plans a training job. Its ``choice`` is the fastest case by estimate that fits, for the wanted effective batch.

    ``config``: the model's, by default read from ``request.model``; ``within_limit``: plan for no more tokens than the
    model was made for; ``known``: by method, recordings of the same step.
    UsageError: the configuration cannot be read, or this model cannot be planned.
    """
    notes: list[str] = []
    if config is None:
        config, notes = config_for(request)
    request, more = _as_quantised(request, config)
    notes += more
    limit = longest_position(config)
    too_long = f"the model was made for {limit} tokens; {request.length} are more"
    if limit is not None and request.length > limit:
        notes.append(f"{too_long}: planned for {limit}" if within_limit else too_long)
        request = replace(request, length=limit) if within_limit else request
    recordings: dict[str, Recordings] = {}
    cases: list[Estimate] = []
    refused: dict[str, UsageError] = {}
    for method in request.methods:
        try:
            found = (known or {}).get(method) or Recordings(config, request, method)
            try:
                cases += grid_of(found, card, request, hopeless=request.cards > 1)
            except UsageError as error:
                if not request.pictures:
                    raise
                request = replace(request, pictures=())
                found = Recordings(config, request, method)
                cases += grid_of(found, card, request, hopeless=request.cards > 1)
                notes.append(f"pictures cannot be counted for this architecture ({error}): only their tokens are")
            recordings[method] = found
        except UsageError as error:
            refused[method] = error
    if not recordings:
        first = next(iter(refused.values()))
        if limit is not None and request.length > limit:
            raise UsageError(f"{first}; {too_long}") from first
        raise first
    if not request.triton and request.platform != "cpu":
        notes.append("planned without Triton's kernels, which do not run here: see `hf-rocm-tune doctor`")
    notes += [f"{name}: {why}" for name, why in refused.items()]
    notes += dict.fromkeys(note for each in recordings.values() for note in each.sample.notes)
    made: dict[str, Any] = {"request": request, "config": config, "card": card, "recordings": recordings}
    return Plan(grid=tuple(cases), notes=tuple(notes), **made)


def _as_quantised(request: PlanRequest, config: Any) -> tuple[PlanRequest, list[str]]:
    """The request with the methods that the weights in the files allow; quantised ones take adapters only."""
    if getattr(config, "quantization_config", None) is None:
        return request, []
    from hf_rocm_tune.models.quantised import checkpoint_bits, has_mxfp4

    try:
        bits = checkpoint_bits(config, request.model, on_card=request.platform != "cpu")
    except UsageError as error:
        raise UsageError(str(error).replace("--load_in_4bit", "--method qlora")) from error
    excluded = "full" if bits else "qlora"
    left = tuple(each for each in request.methods if each != excluded)
    if not left:
        what = f"{bits}-bit in its files: only adapters can be trained" if bits else "bfloat16 when it is loaded"
        raise UsageError(f"model {request.model} is {what}, not --method {excluded}; give --method lora")
    if bits is None:
        return replace(request, methods=left), ["its quantised weights become bfloat16 when they are loaded"]
    if has_mxfp4(config):
        note = "its experts are in 4 bit in its files (MXFP4) and stay so, its other weights in 16"
        return replace(request, methods=("lora",)), [note]
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


def grid_of(recordings: Recordings, card: CardMemory, request: PlanRequest, *, hopeless: bool = True) -> list[Estimate]:
    """Every micro-batch with and without checkpointing; if only checkpointing fits, the best mix, too.

    ``hopeless``: those too of which a smaller micro-batch is certain not to fit; recording them takes time.
    """
    variant, layers = recordings.variant, len(recordings.sample.layer_of)
    every = [request.micro_batch] if request.micro_batch else range(1, request.each + 1)
    least = 2 if request.trainer == "kto" else 1  # its KL estimate pairs rows
    sizes = [size for size in every if size >= least and request.each % size == 0]
    hows = [how for how in (False, True) if request.checkpointing in (None, how) and how <= recordings.can_checkpoint]
    if not hows:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    grid: list[Estimate] = []
    cases = [_case(request, size, request.length) for size in sizes]
    if request.recompute is not None:
        from hf_rocm_tune.models.recompute import check

        check(request.recompute, layers if recordings.mixes else 0)
        return [estimate(variant, replace(case, recompute=request.recompute), card) for case in cases]
    left = list(hows)
    for case in cases:
        try:
            found = {how: estimate(variant, replace(case, checkpointing=how), card) for how in left}
        except UsageError:
            if grid and request.pictures:  # the windows of so many pictures take too many operations to be recorded
                break
            raise
        grid += found.values()
        if request.mixes and hows == [False, True] and True in found:
            rooms = [room for room in card.rooms if found[True].spare >= room]
            rooms = [room for room in rooms if False not in found or found[False].spare < room]
            if rooms and recordings.mixes:
                grid += _best_mix(variant, case, card, layers, rooms[0])
        if not hopeless:
            left = [how for how in left if not _is_far(found[how], variant) or (how and request.stream)]
    if request.stream and not (request.stream == AUTO and any(each.fits for each in grid)):
        cases = [each.case for each in grid if each.case.checkpointing and each.case.recompute is None]
        return [_streamed(variant, case, card, request.stream) for case in cases]
    return grid


def _is_far(option: Estimate, variant: Variant) -> bool:
    """Whether no larger micro-batch can fit: it may need no gradients beside those of earlier ones, but all else."""
    return -option.spare > variant.weights.gradients


def _streamed(variant: Variant, case: Case, card: CardMemory, count: int) -> Estimate:
    def at(streamed: int) -> Estimate:
        return estimate(variant, replace(case, streamed=streamed), card)

    if count != AUTO:
        return at(count)
    every = range(1, len(variant.weights.streams) + 1)

    def leaving(room: float) -> Estimate:
        return at(min(len(every), 1 + bisect_left(every, True, key=lambda n: at(n).spare >= room)))

    found = leaving(card.room)  # more layers in host memory leave more of the card, if the host has it
    return found if found.roomy and not found.host_missing else leaving(card.margin)


def _best_mix(variant: Variant, case: Case, card: CardMemory, layers: int, least: float) -> list[Estimate]:
    """The fastest mix that leaves ``least`` bytes, if any; the more layers whole, the fewer need to be selective."""
    found, fewest = [], layers
    for whole in range(layers):
        fewest = min(fewest, layers - whole)
        best: Estimate | None = None
        for count in range(fewest, -1, -1):
            each = estimate(variant, replace(case, recompute=(whole, count)), card) if whole + count else None
            if each is None or each.spare < least:
                break
            fewest, best = count, each
        found += [best] if best is not None else []
    return sorted(found, key=lambda each: each.tokens_per_second)[-1:]
