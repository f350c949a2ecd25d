"""Planning a job: records its steps, estimates every case, and chooses the fastest that fits.

plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.streamed import AUTO, FLAG
from hf_rocm_tune.plan.estimate import (
    OPTIMIZERS,
    CardMemory,
    Case,
    Estimate,
    Recorded,
    ShortRows,
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


#: The shortest rows that are recorded in place of long ones.
_SHORTEST_ROWS = 4
#: Operations of a step in short rows; each case takes three recordings.
_MOST_IN_SHORT_ROWS = 20_000


@dataclass
class Recordings:
    """The recorded steps of one method. A case is recorded at its own batch and length when it is first asked for."""

    config: Any  # the model's configuration
    request: PlanRequest
    method: str  # one of the request's
    # by content of the rows, recomputation, and batch and length of the tensors
    recorded: dict[tuple[str, str, int, int], Recorded] = field(default_factory=dict)
    short_rows: int = 0  # the length of the rows that are recorded in place of longer ones; 0: the real length is

    @property
    def _probe(self) -> Case:
        return Case(micro_batch=2, length=self.request.length, checkpointing=False)

    @cached_property
    def sample(self) -> Sample:
        """The model with few layers; with all layers, which takes longer, if its layers depend on their number."""
        from hf_rocm_tune.plan.recorder import LongStepError
        from hf_rocm_tune.plan.sample import build

        sample = build(self.config, self.request, self.method)
        try:
            self._record(sample, self._probe)  # not kept: a first step may cast biases for good and fill caches
        except LongStepError:
            raise
        except UsageError:
            sample = build(self.config, self.request, self.method, whole=True)
            self._record(sample, self._probe)
        return sample

    @property
    def notes(self) -> tuple[str, ...]:
        """For the reader of the plan."""
        if not self.short_rows:
            return self.sample.notes
        note = f"its code loops over tokens: memory is that of as many tokens in rows of up to {self.short_rows}"
        return (*self.sample.notes, note)

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
        held = [weight for weight in self.weights if start == 0 or weight.layer >= 0]
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
        backwards = [layer for role, layer in self._recording(self._probe).keys if role == "backward"]
        if len(backwards) < len(layers):
            return False
        try:
            self._recording(replace(self._probe, checkpointing=True, recompute=(0, len(self.sample.layer_of))))
        except UsageError:  # results that are changed in place cannot be kept
            return False
        return True

    def __call__(self, case: Case) -> Step:
        """The recorded step of a case; a mix of recomputation is a run of layers for each kind."""
        layer_of = self.sample.layer_of
        if case.recompute is None:
            return Step(((self._recording(case), layer_of),))
        whole_until, selective_until = case.recompute[0], sum(case.recompute)
        whole = replace(case, recompute=None)
        selective = replace(case, recompute=(0, len(layer_of)))
        kept = replace(whole, checkpointing=False)
        runs = []
        for alike, layers in (
            (whole, layer_of[:whole_until]),
            (selective, layer_of[whole_until:selective_until]),
            (kept, layer_of[selective_until:]),
        ):
            if layers:
                runs.append((self._recording(alike), layers))
        return Step(tuple(runs))

    def _recording(self, case: Case) -> Recorded:
        """Of a case that recomputes all layers alike."""
        if case.evaluation:
            recomputation = "evaluation"
        elif case.recompute:
            recomputation = "selective"
        elif case.checkpointing:
            recomputation = "whole"
        else:
            recomputation = "none"
        key = (case.content, recomputation, *case.shape)
        if key not in self.recorded:
            self.recorded[key] = self._record(self.sample, case)
        return self.recorded[key]

    def _record(self, sample: Sample, case: Case) -> Recorded:
        """A recorded step, in shorter rows where this model's code loops over tokens."""
        from hf_rocm_tune.plan.recorder import LongStepError, record  # imports torch

        rows, length = case.shape
        if self.short_rows and length > self.short_rows:
            return self._in_short_rows(sample, case)
        try:
            return record(sample, case, rows, length)
        except LongStepError:
            if sample.request.pictures or case.recompute:  # a mix is worth no plan that is less exact
                raise
        self.short_rows = length // 2
        return self._in_short_rows(sample, case)

    def _in_short_rows(self, sample: Sample, case: Case) -> ShortRows:
        """The step of a case from as many tokens in shorter rows, which become shorter until they can be recorded."""
        from hf_rocm_tune.plan.recorder import LongStepError, record

        rows, length = case.shape
        while True:
            tapes: dict[int, Tape] = {}
            try:
                for part in (1, 2, 4):  # the longest first, which takes most operations
                    short = self.short_rows // part
                    tapes[short] = record(sample, case, -(-rows * length // short), short, most=_MOST_IN_SHORT_ROWS)
                break
            except LongStepError:
                if self.short_rows < 8 * _SHORTEST_ROWS:
                    raise
            self.short_rows //= 2
        in_rows = ShortRows(tapes=tapes, length=length)
        if not in_rows.is_plausible:
            name = type(sample.base).__name__
            raise UsageError(f"{name} cannot be planned: its step is too long to be recorded, and shorter ones differ")
        return in_rows


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
        grid: list[Estimate] = []
        for recordings in self.recordings.values():
            grid += grid_of(recordings, self.card, self.request)
        return tuple(grid)

    @property
    def variants(self) -> dict[str, Variant]:
        return {method: recordings.variant for method, recordings in self.recordings.items()}

    @cached_property
    def choice(self) -> Estimate | None:
        """The fastest case that fits, at the wanted length and batch, with its evaluation; None if none fits."""
        option = fastest(self.grid)
        if option is None:
            return None
        return self.with_evaluation(option)

    @cached_property
    def nearest(self) -> Estimate:
        """The choice; where nothing fits, the case that takes least."""
        return self.choice or min(self.grid, key=lambda option: option.total)

    def with_evaluation(self, option: Estimate) -> Estimate:
        """A case with the largest evaluation batch up to TRL's default that needs no more than the training step."""
        if not self.request.evaluates or option.case.eval_batch:
            return option
        for size in (8, 4, 2, 1):
            case = replace(option.case, eval_batch=size)
            with suppress(UsageError):
                evaluating = estimate(self.variants[option.variant], case, self.card)
                if evaluating.moments["evaluation"] <= option.allocated or size == 1:
                    return evaluating
        return option

    def longest(self, method: str) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing; None: none, or too long to record."""
        recordings = self.recordings[method]
        case = replace(_case(self.request, 1, 2), checkpointing=recordings.can_checkpoint)
        if self.nearest.case.streamed:
            case = replace(case, streamed=self.layers)
        if max(len(tape.events) for tape in recordings.recorded.values()) > _MANY_EVENTS:
            return None

        def spare(steps: int) -> float:
            longer = replace(case, length=steps * LENGTH_STEP)
            return estimate(recordings.variant, longer, self.card).spare

        most = max(LENGTH_STEP, longest_position(self.config) or LONGEST)
        known = self.request.length // LENGTH_STEP
        with suppress(UsageError):
            steps = _last_that_fits(spare, most // LENGTH_STEP, known)
            return LENGTH_STEP * steps or None
        return None


def _last_that_fits(spare: Callable[[int], float], most: int, known: int) -> int:
    """The largest number from 1 to ``most`` with memory to spare, which falls as numbers grow; 0: none.

    Each number is recorded, so few are tried: where a line through the two nearest meets zero, as most memory is
    proportional to the length. ``known``: a number that is recorded already.
    """
    tried: dict[int, float] = {}
    low, high = 0, most + 1
    number = 1
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
            first, second = sorted(tried, key=lambda candidate: abs(tried[candidate]))[:2]
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
        if within_limit:
            notes.append(f"{too_long}: planned for {limit}")
            request = replace(request, length=limit)
        else:
            notes.append(too_long)
    recordings: dict[str, Recordings] = {}
    grid: list[Estimate] = []
    refused: dict[str, UsageError] = {}
    for method in request.methods:
        try:
            of_method = (known or {}).get(method) or Recordings(config, request, method)
            try:
                grid += grid_of(of_method, card, request, all_sizes=request.cards > 1)
            except UsageError as error:
                if not request.pictures:
                    raise
                request = replace(request, pictures=())
                of_method = Recordings(config, request, method)
                grid += grid_of(of_method, card, request, all_sizes=request.cards > 1)
                notes.append(f"pictures cannot be counted for this architecture ({error}): only their tokens are")
            recordings[method] = of_method
        except UsageError as error:
            refused[method] = error
    if not recordings:
        first = next(iter(refused.values()))
        if limit is not None and request.length > limit:
            raise UsageError(f"{first}; {too_long}") from first
        raise first
    if not request.triton and request.platform != "cpu":
        notes.append("planned without Triton's kernels, which do not run here: see `hf-rocm-tune doctor`")
    notes += [f"{method}: {error}" for method, error in refused.items()]
    for of_method in recordings.values():
        notes += [note for note in of_method.notes if note not in notes]
    return Plan(request=request, config=config, card=card, grid=tuple(grid), recordings=recordings, notes=tuple(notes))


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
    left = tuple(method for method in request.methods if method != excluded)
    if not left:
        what = "bfloat16 when it is loaded"
        if bits:
            what = f"{bits}-bit in its files: only adapters can be trained"
        raise UsageError(f"model {request.model} is {what}, not --method {excluded}; give --method lora")
    if bits is None:
        return replace(request, methods=left), ["its quantised weights become bfloat16 when they are loaded"]
    if has_mxfp4(config):
        note = "its experts are in 4 bit in its files (MXFP4) and stay so, its other weights in 16"
        return replace(request, methods=("lora",)), [note]
    note = f"its weights are {bits}-bit in its files (bitsandbytes) and planned so, whatever the method"
    method = "qlora" if bits == 4 else "lora"
    return replace(request, methods=(method,)), [note]


def _case(request: PlanRequest, size: int, length: int) -> Case:
    return Case(
        micro_batch=size,
        length=length,
        checkpointing=True,
        packing=request.packing,
        accumulation=max(1, request.per_card // size),
        cards=request.cards,
        trainer=request.trainer,
        eval_batch=request.eval_batch,
    )


def grid_of(
    recordings: Recordings, card: CardMemory, request: PlanRequest, *, all_sizes: bool = True
) -> list[Estimate]:
    """The estimates of every case that the request leaves open: micro-batch, checkpointing, streamed layers.

    ``all_sizes``: also micro-batches that are larger than one that cannot fit; recording them takes time.
    """
    cases = [_case(request, size, request.length) for size in _micro_batches(request)]
    settings = _checkpointing_settings(recordings, request)
    if request.recompute is not None:
        return _grid_of_mix(recordings, card, cases, request.recompute)
    grid = _grid_on_card(recordings, card, request, cases, settings, all_sizes=all_sizes)
    if not request.stream:
        return grid
    if request.stream == AUTO and any(option.fits for option in grid):
        return grid
    checkpointed = [option.case for option in grid if option.case.checkpointing and option.case.recompute is None]
    if recordings.sample.is_one_layer:
        name = type(recordings.sample.base).__name__
        raise UsageError(f"{FLAG}: cannot identify the decoder layers of {name}; leave the flag out")
    return [_streamed(recordings.variant, case, card, request.stream) for case in checkpointed]


def _grid_of_mix(
    recordings: Recordings, card: CardMemory, cases: Sequence[Case], mix: tuple[int, int]
) -> list[Estimate]:
    from hf_rocm_tune.models.recompute import check

    layers = len(recordings.sample.layer_of)
    check(mix, layers if recordings.mixes else 0)
    return [estimate(recordings.variant, replace(case, recompute=mix), card) for case in cases]


def _grid_on_card(
    recordings: Recordings,
    card: CardMemory,
    request: PlanRequest,
    cases: Sequence[Case],
    settings: Sequence[bool],
    *,
    all_sizes: bool,
) -> list[Estimate]:
    """Each case, from the smallest micro-batch up, with these settings of checkpointing, nothing streamed.

    Where the case fits with checkpointing alone, also the best mix of layers that recompute and layers that do not.
    """
    variant = recordings.variant
    layers = len(recordings.sample.layer_of)
    open_settings = list(settings)  # those with which a larger micro-batch may still fit
    grid: list[Estimate] = []
    for case in cases:
        by_setting: dict[bool, Estimate] = {}
        try:
            for checkpointing in open_settings:
                by_setting[checkpointing] = estimate(variant, replace(case, checkpointing=checkpointing), card)
        except UsageError:
            if grid and request.pictures:  # the windows of so many pictures take too many operations to be recorded
                break
            raise
        grid += by_setting.values()
        if request.mixes and request.checkpointing is None and True in by_setting:
            room = _room_for_mix(by_setting.get(False), by_setting[True], card)
            if room is not None and recordings.mixes:
                grid += _best_mix(variant, case, card, layers, room)
        if not all_sizes:
            open_settings = _still_open(by_setting, variant, streams=bool(request.stream))
    return grid


def _still_open(by_setting: Mapping[bool, Estimate], variant: Variant, *, streams: bool) -> list[bool]:
    """The settings of checkpointing to estimate with a larger micro-batch, too.

    ``streams``: with checkpointing every size is needed, however far it is from fitting: streaming starts from it.
    """
    settings = []
    for checkpointing, option in by_setting.items():
        if not _is_hopeless(option, variant) or (checkpointing and streams):
            settings.append(checkpointing)
    return settings


def _micro_batches(request: PlanRequest) -> list[int]:
    """The sizes to plan: the one that is asked for, or all that divide the rows of a card."""
    sizes: Iterable[int] = range(1, request.per_card + 1)
    if request.micro_batch:
        sizes = [request.micro_batch]
    least = 1
    if request.trainer == "kto":  # its KL estimate pairs rows
        least = 2
    return [size for size in sizes if size >= least and request.per_card % size == 0]


def _checkpointing_settings(recordings: Recordings, request: PlanRequest) -> list[bool]:
    """Without checkpointing, with it, or both: what is asked for, where the architecture supports it."""
    settings = [False, True]
    if request.checkpointing is not None:
        settings = [request.checkpointing]
    if not recordings.can_checkpoint:
        settings = [checkpointing for checkpointing in settings if not checkpointing]
    if not settings:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    return settings


def _room_for_mix(kept: Estimate | None, recomputed: Estimate, card: CardMemory) -> float | None:
    """How many bytes of the card should stay free if some layers recompute and others do not; None: no use in that.

    `CardMemory.rooms` has the amounts that should stay free, the best first. A mix is of use for one that stays free if
    all layers recompute, and does not if none does.

    Args:
        kept: the case in which all activations are kept; None: it is known not to fit.
        recomputed: the case in which all layers recompute.
    """
    for room in card.rooms:
        if recomputed.spare >= room and (kept is None or kept.spare < room):
            return room
    return None


def _is_hopeless(option: Estimate, variant: Variant) -> bool:
    """Whether this micro-batch does not fit, and no larger one can.

    A larger micro-batch takes more memory for everything but gradients, which it may save: a step of one micro-batch
    accumulates none. So no larger one fits if more is missing than all gradients take.
    """
    missing_bytes = -option.spare
    return missing_bytes > variant.weights.gradients


def _streamed(variant: Variant, case: Case, card: CardMemory, count: int) -> Estimate:
    """The case with so many layers streamed; `AUTO`: as few as leave the card's room, or else its margin."""

    def at(streamed: int) -> Estimate:
        return estimate(variant, replace(case, streamed=streamed), card)

    def fewest_that_leave(room: float) -> Estimate:
        layers = len(variant.weights.streams)
        counts = range(1, layers + 1)
        position = bisect_left(counts, True, key=lambda streamed: at(streamed).spare >= room)
        return at(min(layers, 1 + position))

    if count != AUTO:
        return at(count)
    option = fewest_that_leave(card.room)  # more layers in host memory leave more of the card, if the host has it
    if option.roomy and not option.host_missing:
        return option
    return fewest_that_leave(card.margin)


def _best_mix(variant: Variant, case: Case, card: CardMemory, layers: int, least: float) -> list[Estimate]:
    """The fastest mix that leaves ``least`` bytes, if any; the more layers whole, the fewer need to be selective."""
    fastest_of: list[Estimate] = []  # for each number of layers that recompute everything
    most_selective = layers
    for whole in range(layers):
        most_selective = min(most_selective, layers - whole)
        best: Estimate | None = None
        for selective in range(most_selective, -1, -1):
            if whole + selective == 0:  # no layer recomputes
                break
            mix = estimate(variant, replace(case, recompute=(whole, selective)), card)
            if mix.spare < least:
                break
            most_selective = selective
            best = mix
        if best is not None:
            fastest_of.append(best)
    return sorted(fastest_of, key=lambda mix: mix.tokens_per_second)[-1:]
