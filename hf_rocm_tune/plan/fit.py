"""Planning a job: records its steps, estimates every case, and chooses the fastest that fits.

plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import CardMemory, Estimate, Variant, estimate, fastest
from hf_rocm_tune.plan.grid import case_of, grid_of
from hf_rocm_tune.plan.recordings import Recordings
from hf_rocm_tune.plan.request import PlanRequest, config_for, longest_position

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

#: Longer sequences are not considered when the configuration sets no limit; lengths are searched in steps.
LONGEST, LENGTH_STEP = 131072, 128
#: Allocations and releases of a step, above which the longest sequence is not searched. Few layers of Llama have 1,900,
#: of Gemma 3 with DoRA 6,400, of Qwen3.5 8,500.
_MANY_EVENTS = 8_000


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
        case = replace(case_of(self.request, 1, 2), checkpointing=recordings.can_checkpoint)
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
