"""Planning a job: records the steps that are asked for, looks at every case, and chooses the fastest that fits.

    plan = plan_for(PlanRequest(model="Qwen/Qwen3-8B"), card=card_memory(name="rx7900xt"))
    plan.choice.case.micro_batch, plan.choice.case.checkpointing

Nothing is downloaded but a configuration, nothing is allocated, no GPU is needed. Imports torch when the first step is
recorded, and not before.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import (
    LENGTH_STEP,
    CardMemory,
    Case,
    Counts,
    Estimate,
    Tape,
    Trace,
    Variant,
    Weight,
    Weights,
    estimate,
    fastest,
    longest,
    micro_batches,
    nearest,
    optimizer,
    told_apart,
)
from hf_rocm_tune.plan.public_models import PUBLIC_MODELS
from hf_rocm_tune.plan.request import PlanRequest, TooManyOperations, config_for, config_of, longest_position

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

T = TypeVar("T")

#: Longer sequences are not considered when the configuration sets no limit.
LONGEST = 131072
#: Allocations and releases of a step. Few layers of Llama have 1,600, of Gemma 3 2,800, of Qwen3-Next 8,500, of
#: Gemma 3n 14,000.
_MANY_EVENTS = 5_000
_MOST_EVENTS = 10_000
#: What is recorded first, to see whether and how this model can be recorded.
_PROBE = Case(micro_batch=2, length=2, checkpointing=False)


# ---- recorded steps ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan needs to know of a model besides its steps."""

    architecture: str  # name of the model's class
    weights: tuple[Weight, ...]  # of the recorded layers and of what is outside them
    layer_of: Counts  # for each layer of the model, its stand-in among the recorded ones
    notes: tuple[str, ...]  # what a reader of the plan should know
    can_checkpoint: bool  # whether transformers can recompute this model's layers
    events: int  # allocations and releases of its first recorded step


@dataclass
class Recordings:
    """Gives the step of a case, recorded when a case first asks for it."""

    config: Any  # the model's configuration
    request: PlanRequest  # what the planner is asked
    method: str  # one of its methods
    lengths: tuple[int, ...]  # the lengths that are asked for often, ascending
    layers_only: bool = False  # see `Trace`
    _tapes: dict[tuple[str, bool, int, int], Tape] = field(default_factory=dict)
    _traces: dict[tuple[str, bool, tuple[int, int]], Trace | None] = field(default_factory=dict)
    _events_of_first: int = 0

    @cached_property
    def sample(self) -> Sample:
        """The model with few layers; with all of them, which takes longer, where it needs to know how many it has."""
        from hf_rocm_tune.plan.sample import KEEPS, build

        refusal: UsageError | None = None
        tried = ""
        for keep in KEEPS:
            if keep == tried:
                continue
            found = build(self.config, self.request, self.method, keep=keep)
            tried = found.keep
            try:
                # A first step may do what later ones do not: cast biases for good, fill caches. So it is not kept.
                self._events_of_first = len(self._record(found, _PROBE, 2, self.lengths[0]).events)
                return found
            except TooManyOperations:
                raise
            except UsageError as error:
                refusal = error
        assert refusal is not None, "there is a way to keep layers"
        raise refusal

    @cached_property
    def facts(self) -> Facts:
        """What is known of the model."""
        sample = self.sample
        return Facts(
            architecture=type(sample.base).__name__,
            weights=tuple(sample.weights()),
            layer_of=sample.layer_of,
            notes=sample.notes,
            can_checkpoint=bool(sample.base.supports_gradient_checkpointing),
            events=self._events_of_first,
        )

    def variant(self) -> Variant:
        """The model and the method with these steps."""
        return Variant(
            name=self.method,
            weights=Weights.total(self.facts.weights, self.facts.layer_of),
            trace=self,
            exact=self.exact,
            optimizer=optimizer(self.request.optim, on_cpu=self.request.platform == "cpu"),
            can_checkpoint=self.facts.can_checkpoint,
        )

    def part(self, layers: slice, *, first: bool) -> Recordings:
        """The same steps as a card sees them that has some of the layers, and if it is the first, what is no layer."""
        found, facts = copy(self), self.facts
        found._traces, found.layers_only = {}, not first
        weights = tuple(each for each in facts.weights if first or each.layer >= 0)
        found.facts = replace(facts, layer_of=facts.layer_of[layers], weights=weights)
        return found

    @cached_property
    def fixed_length(self) -> bool:
        """Whether the step is known at each length for itself only.

        It does other things at each, as loops over pieces of the sequence do, or to record it twice takes too long.
        """
        if self.facts.events > _MOST_EVENTS:
            return True
        length = self.request.length
        near = (3 * length // 4, length)
        wide = [self._widest(_PROBE), (self.lengths[0], length), (length, self.lengths[-1])]
        pairs = [near] if self.takes_long else [*wide, near]
        return not any(self._scaled(_PROBE, (low, high)) for low, high in pairs if low < high)

    @property
    def takes_long(self) -> bool:
        """Whether a step has so many operations that to record it takes a second rather than a tenth."""
        return self.facts.events > _MANY_EVENTS

    def __call__(self, case: Case) -> Trace:
        """The step of a case, scaled to its batch and length where that can be; else recorded at its own length."""
        if not self.fixed_length:
            for lengths in self._around(case):
                if found := self._scaled(case, lengths):
                    return found
        return self.exact(case)

    def exact(self, case: Case) -> Trace:
        """The step of a case, recorded at its own length."""
        found = self._scaled(case, (case.shape[1], case.shape[1]))
        assert found is not None, "at one length a step is the same for every batch size"
        return found

    def _around(self, case: Case) -> Iterator[tuple[int, int]]:
        """Pairs of lengths between which that of a case is, those first that ask for no recording.

        Attention may change its ways between two lengths, at a window's width for example, but not twice.
        """
        length, kind = case.shape[1], (case.content, case.checkpointing)
        for (content, checkpointing, (low, high)), found in list(self._traces.items()):
            if (content, checkpointing) == kind and found and low < high and low <= length <= high:
                yield low, high
        low, high = self._widest(case)
        if low <= length <= high:
            yield low, high
        usual = {low, *self.lengths, high, *(each[3] for each in self._tapes if each[:2] == kind)}
        above = [each for each in usual if each > length]
        below = [each for each in usual if each < length]
        if above:
            yield length, min(above)
        if below:
            yield max(below), length

    def _widest(self, case: Case) -> tuple[int, int]:
        """Shortest and longest rows that are asked for often."""
        rows = self.request.each if case.packing else 1
        low, high = self.lengths[0], self.lengths[-1] * rows
        return (low, high) if low < high else (max(2, low // 2), high)

    def _scaled(self, case: Case, lengths: tuple[int, int]) -> Trace | None:
        """The step between two lengths, or None where it does other things at each."""
        key = (case.content, case.checkpointing, lengths)
        if key not in self._traces:
            self._traces[key] = None
            batches = _batches(case, lengths)
            if batches is not None and not self._differ(case, lengths):
                first, second = (self._tape(case, *shape) for shape in zip(batches, lengths, strict=True))
                with suppress(ValueError):
                    self._traces[key] = Trace(first, second, self.facts.layer_of, layers_only=self.layers_only)
        return self._traces[key]

    def _differ(self, case: Case, lengths: tuple[int, int]) -> bool:
        """Whether what is recorded already tells that the step does other things at each of two lengths.

        What it does depends on the length alone, not on the batch size.
        """
        kind = (case.content, case.checkpointing)
        low, high = (
            next((tape for key, tape in self._tapes.items() if (key[:2], key[3]) == (kind, length)), None)
            for length in lengths
        )
        return bool(low and high and low.events != high.events)

    def _tape(self, case: Case, batch: int, length: int) -> Tape:
        key = (case.content, case.checkpointing, batch, length)
        if key not in self._tapes:
            self._tapes[key] = self._record(self.sample, case, batch, length)
        return self._tapes[key]

    def _record(self, sample: Sample, case: Case, batch: int, length: int) -> Tape:
        from hf_rocm_tune.plan import recorder

        platform, autocast = self.request.platform, self.request.autocast
        return recorder.record(sample, case, batch, length, platform=platform, autocast=autocast)


def _batches(case: Case, lengths: tuple[int, int]) -> tuple[int, int] | None:
    """Batch sizes that tell, with two lengths, how each storage grows; None where no batch sizes would."""
    pairs = [(2, 3), (2, 4), (2, 6)] if case.content == "padded" else [(1, 1)]
    low, high = lengths
    return next((pair for pair in pairs if told_apart((pair[0], low), (pair[1], high))), None)


# ---- the plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer."""

    request: PlanRequest  # the question, with what was settled on the way
    architecture: str  # name of the model's class
    layers: int  # of the model
    card: CardMemory  # the memory that is planned for
    grid: tuple[Estimate, ...]  # every case that was considered, other lengths included
    variants: dict[str, Variant]  # by method, for what else one may ask
    limit: int | None  # tokens that the model was made for, or None
    scales: bool  # whether the step is known at other lengths than the wanted one
    notes: tuple[str, ...]  # what a reader should know
    found_longest: dict[str, int | None] = field(default_factory=dict)  # by method, what ``longest`` has said already

    @property
    def parameters(self) -> int:
        """Of the model."""
        return next(iter(self.variants.values())).weights.parameters

    @cached_property
    def choice(self) -> Estimate | None:
        """The fastest that fits, at the wanted length and effective batch; None where none does."""
        return fastest(self._wanted())

    @property
    def nearest(self) -> Estimate:
        """The choice, or where nothing fits the case that needs least."""
        return self.choice or nearest(self._wanted())

    def _wanted(self) -> list[Estimate]:
        return [each for each in self.grid if each.case.length == self.request.length]

    def longest(self, method: str) -> int | None:
        """The longest sequence that fits with micro-batch 1 and checkpointing, in steps of 128 tokens; None: none.

        The last step is recorded at that very length, because attention may change its ways on the road to it. None
        also where the step does not scale, and each length would have to be recorded.
        """
        if method not in self.found_longest:
            self.found_longest[method] = self._find_longest(self.variants[method])
        return self.found_longest[method]

    def _find_longest(self, variant: Variant) -> int | None:
        if not self.scales or sum(variant.weights.parts.values()) > self.card.free:
            return None
        request = self.request
        short = Case(
            micro_batch=1,
            length=2,
            checkpointing=variant.can_checkpoint,
            packing=request.packing,
            accumulation=request.each,
            cards=request.cards,
        )
        exact = replace(variant, trace=variant.exact)

        def fits(length: int, variant: Variant = variant) -> bool:
            return estimate(variant, replace(short, length=length), self.card).fits

        found = longest(fits, limit=self.limit or LONGEST)
        while found and not fits(found, exact):
            found = longest(fits, limit=found - LENGTH_STEP) if found > LENGTH_STEP else None
        return found


def plan_for(
    request: PlanRequest,
    *,
    card: CardMemory,
    config: Any = None,
    grid: bool = True,
    within_limit: bool = False,
    at_once: bool = False,
) -> Plan:
    """Plans a training job.

    Args:
        request: the question.
        card: the memory of the card, from `card_memory` or ``CardMemory(...)``.
        config: the model's configuration where it is at hand; else ``request.model`` is asked for it.
        grid: consider half and twice the length as well; auto-fit does not need them.
        within_limit: where the model was made for fewer tokens than wanted, plan for those.
        at_once: record several methods at once, in forked processes; see `worthwhile`.

    Returns:
        The plan. Its ``choice`` is the fastest case by estimate that fits, for the wanted effective batch exactly.

    Raises:
        UsageError: the configuration cannot be read, or this model cannot be planned.
    """
    notes: list[str] = []
    if config is None:
        config, notes = config_for(request)
    limit = longest_position(config)
    too_long = limit is not None and request.length > limit
    if too_long and within_limit:
        notes.append(f"the model was made for {limit} tokens, so they are planned, not {request.length}")
        request, too_long = replace(request, length=limit or request.length), False
    elif too_long:
        notes.append(f"the model was made for {limit} tokens; {request.length} are more")

    def one(method: str) -> Plan | UsageError:
        try:
            return _plan_method(request, method, card, config, limit, grid)
        except UsageError as error:
            return error

    ready: dict[str, Plan | UsageError] = {}
    if at_once and len(request.methods) > 1:
        ready = in_processes(lambda method: _to_send(one(method)), request.methods)
    plans: dict[str, Plan] = {}
    refused: dict[str, UsageError] = {}
    for method in request.methods:
        if method not in ready and (slow := next((name for name, plan in plans.items() if _slow(plan)), None)):
            refused[method] = UsageError(
                f"not planned beside {slow}, because it takes long to record a step of this model; --method {method} "
                "plans it"
            )
            continue
        answer = ready[method] if method in ready else one(method)
        if isinstance(answer, Plan):
            plans[method] = answer
            continue
        refused[method] = answer
        if isinstance(answer, TooManyOperations):
            break
    if not plans:
        error = next(iter(refused.values()))
        raise (
            UsageError(f"{error}; it was made for {limit} tokens, and {request.length} are more") if too_long else error
        )
    return _joined(request, list(plans.values()), (*notes, *(f"{name}: {why}" for name, why in refused.items())))


def _plan_method(
    request: PlanRequest, method: str, card: CardMemory, config: Any, limit: int | None, grid: bool
) -> Plan:
    """The plan of one method; without dropout where PEFT refuses it and nobody asked for it."""
    request = replace(request, methods=(method,))
    lengths: tuple[int, ...] = (request.length,)
    if grid:  # half, once and twice the wanted length, as far as the model goes
        wanted = {max(2, request.length // 2), request.length, 2 * request.length}
        lengths = tuple(sorted(each for each in wanted if each <= max(limit or LONGEST, request.length)))
    recordings = Recordings(config, request, method, lengths)
    notes: tuple[str, ...] = ()
    try:
        facts = recordings.facts
    except UsageError as error:
        if request.dropout is not None or "dropout" not in str(error):
            raise
        request = replace(request, dropout=0.0)
        recordings = Recordings(config, request, method, lengths)
        facts = recordings.facts
        notes = ("without dropout, because PEFT refuses it for these adapters: --dropout 0",)
    variant = recordings.variant()
    if recordings.fixed_length:
        lengths = (request.length,)
    return Plan(
        request=request,
        architecture=facts.architecture,
        layers=len(facts.layer_of),
        card=card,
        grid=tuple(estimate(variant, case, card) for length in lengths for case in _cases(request, variant, length)),
        variants={method: variant},
        limit=limit,
        scales=not recordings.fixed_length,
        notes=notes + facts.notes,
    )


def _cases(request: PlanRequest, variant: Variant, length: int) -> Iterator[Case]:
    ways = [way for way in (False, True) if request.checkpointing in (None, way) and way <= variant.can_checkpoint]
    if not ways:
        raise UsageError("this architecture does not support checkpointing: leave it off")
    sizes = (request.micro_batch,) if request.micro_batch else micro_batches(request.effective_batch, request.cards)
    for checkpointing in ways:
        for size in sizes:
            yield Case(
                micro_batch=size,
                length=length,
                checkpointing=checkpointing,
                packing=request.packing,
                accumulation=max(1, request.each // size),
                cards=request.cards,
            )


def _joined(request: PlanRequest, plans: Sequence[Plan], notes: Sequence[str]) -> Plan:
    """The plan of several methods, from those of each."""
    scales = all(plan.scales for plan in plans)
    if not scales:
        notes = (*notes, "its step does other things at each length, or is long: only the wanted length was planned")
    grid = (each for plan in plans for each in plan.grid)
    return replace(
        plans[0],
        request=replace(plans[0].request, methods=request.methods),
        grid=tuple(each for each in grid if scales or each.case.length == plans[0].request.length),
        variants={name: variant for plan in plans for name, variant in plan.variants.items()},
        scales=scales,
        notes=(*notes, *dict.fromkeys(note for plan in plans for note in plan.notes)),
        found_longest={m: found for plan in plans for m, found in plan.found_longest.items()} if scales else {},
    )


def _slow(plan: Plan) -> bool:
    """Whether to record a step took so long that no further method is tried after it."""
    (variant,) = plan.variants.values()
    return not plan.scales and isinstance(variant.trace, Recordings) and variant.trace.takes_long


def _to_send(answer: Plan | UsageError) -> Plan | UsageError:
    """With what the text will ask for, and without the model itself."""
    if isinstance(answer, Plan):
        for method, variant in answer.variants.items():
            answer.longest(method)
            vars(variant.trace).pop("sample", None)
    return answer


def largest_models(request: PlanRequest, *, card: CardMemory) -> dict[str, str | None]:
    """By method, the largest public model of which one sequence fits, checkpointed; None where none does."""
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


# ---- several processes ------------------------------------------------------------------------------------------


def worthwhile() -> bool:
    """Whether a second process has a core to run on, and this process can be forked. Imports torch.

    Where torch sees a GPU it cannot: the runtime of HIP or CUDA does not survive that, and autograd starts a thread for
    each GPU, whatever it is asked for.
    """
    import torch

    return len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_available()


def in_processes(work: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
    """What ``work`` gives for each name: the first in this process, each other in a forked one of its own.

    Args:
        work: gives something that can be pickled. It must start no threads.
        names: one piece of work each.

    Returns:
        By name. One whose process failed, whatever for, is left out: whoever does it here meets the error itself.

    Raises:
        Exception: what the first raises.
    """
    context = multiprocessing.get_context("fork")
    first, *others = names
    started = []
    for name in others:
        answers, answer = context.Pipe(duplex=False)
        process = context.Process(target=_do, args=(work, name, answer), daemon=True)
        process.start()
        answer.close()
        started.append((name, process, answers))
    try:
        found = {first: work(first)}
        for name, _, answers in started:
            with suppress(EOFError):
                found[name] = answers.recv()
        return found
    finally:
        for _, process, answers in started:
            answers.close()
            process.kill()
            process.join()


def _do(work: Callable[[str], T], name: str, answer: Connection) -> None:
    with suppress(Exception, KeyboardInterrupt), answer:
        answer.send(work(name))
