"""Recorded steps of one model and method, made when a case first asks for them. Imports no torch before that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import Case, Weights
from hf_rocm_tune.memory.plan_growth import told_apart
from hf_rocm_tune.memory.plan_trace import Trace
from hf_rocm_tune.plan_request import PlanRequest

if TYPE_CHECKING:
    from hf_rocm_tune.models.shapes_model import Method, Sample, Weight


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan needs to know of a model besides its steps.

    Args:
        architecture: name of the model's class.
        weights: of the recorded layers and of what is outside them.
        layer_of: for each layer of the model, its stand-in among the recorded ones.
        notes: what a reader of the plan should know.
        can_checkpoint: whether transformers can recompute this model's layers.
        events: allocations and releases of its first recorded step.
    """

    architecture: str
    weights: tuple[Weight, ...]
    layer_of: tuple[int, ...]
    notes: tuple[str, ...]
    can_checkpoint: bool
    events: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What recordings have found so far, for others of the same model, perhaps in another process."""

    method: Method
    facts: Facts
    tapes: dict[tuple[str, bool, int, int], Any]
    traces: dict[tuple[str, bool, tuple[int, int]], Trace | None]


@dataclass
class Recordings:
    """Gives the step of a case.

    Args:
        config: the model's configuration.
        request: what the planner is asked.
        method: one of its methods.
        lengths: the lengths that are asked for often, ascending.
    """

    config: Any
    request: PlanRequest
    method: str
    lengths: tuple[int, ...]
    made: ClassVar[type[Trace]] = Trace
    _tapes: dict[tuple[str, bool, int, int], Any] = field(default_factory=dict)
    _traces: dict[tuple[str, bool, tuple[int, int]], Trace | None] = field(default_factory=dict)
    _events_of_first: int = 0

    @cached_property
    def sample(self) -> Sample:
        """The model with few layers; with all of them, which takes longer, where it needs to know how many it has."""
        from hf_rocm_tune.models.shapes_model import KEEPS, build
        from hf_rocm_tune.models.shapes_record import TooManyOperations

        refusal: UsageError | None = None
        tried = ""
        for keep in KEEPS:
            if keep == tried:
                continue
            found = build(self.config, self._method(), keep=keep)
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
        """What is known of the model; asks for no sample where others have found that already."""
        sample = self.sample
        return Facts(
            architecture=type(sample.base).__name__,
            weights=tuple(sample.weights()),
            layer_of=sample.layer_of,
            notes=sample.notes,
            can_checkpoint=bool(sample.base.supports_gradient_checkpointing),
            events=self._events_of_first,
        )

    def kept(self) -> Kept:
        """What has been found so far."""
        return Kept(method=self._method(), facts=self.facts, tapes=dict(self._tapes), traces=dict(self._traces))

    def adopt(self, kept: Kept) -> None:
        """Takes over what others have found, if they asked for the same."""
        if kept.method == self._method():
            self.facts = kept.facts
            self._tapes.update(kept.tapes)
            self._traces.update(kept.traces)

    def weights(self) -> Weights:
        """Totals of the whole model."""
        return Weights.total(self.facts.weights, self.facts.layer_of)

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
        batches = _batches(case, lengths)
        if key not in self._traces and (batches is None or self._differ(case, lengths)):
            self._traces[key] = None
        if batches is not None and key not in self._traces:
            first, second = (self._tape(case, *shape) for shape in zip(batches, lengths, strict=True))
            try:
                self._traces[key] = self.made(first, second, self.facts.layer_of)
            except ValueError:
                self._traces[key] = None
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

    def _tape(self, case: Case, batch: int, length: int) -> Any:
        key = (case.content, case.checkpointing, batch, length)
        if key not in self._tapes:
            self._tapes[key] = self._record(self.sample, case, batch, length)
        return self._tapes[key]

    def _record(self, sample: Sample, case: Case, batch: int, length: int) -> Any:
        from hf_rocm_tune.models.shapes import Step, record

        step = Step(
            batch=batch,
            length=length,
            content=case.content,
            checkpointing=case.checkpointing,
            platform=self.request.platform,
            autocast=self.request.autocast,
        )
        return record(sample, step)

    def _method(self) -> Method:
        from hf_rocm_tune.models.shapes_model import Method

        request = self.request
        return Method(
            lora=self.method != "full",
            four_bit=self.method == "qlora",
            nested=request.nested,
            dtype=request.dtype_of(self.method),
            rank=request.rank,
            alpha=request.alpha,
            dropout=request.adapter_dropout,
            targets=request.targets,
            modules_to_save=request.modules_to_save,
            dora=request.dora,
            rslora=request.rslora,
            attention=request.attention,
        )


def _batches(case: Case, lengths: tuple[int, int]) -> tuple[int, int] | None:
    """Batch sizes that tell, with two lengths, how each storage grows; None where no batch sizes would."""
    pairs = [(2, 3), (2, 4), (2, 6)] if case.content == "padded" else [(1, 1)]
    low, high = lengths
    return next((pair for pair in pairs if told_apart((pair[0], low), (pair[1], high))), None)


#: Allocations and releases of a step. Few layers of Llama have 1,600, of Gemma 3 2,800, of Qwen3-Next 8,500, of
#: Gemma 3n 14,000.
_MANY_EVENTS = 5_000
_MOST_EVENTS = 10_000
#: What is recorded first, to see whether and how this model can be recorded.
_PROBE = Case(micro_batch=2, length=2, checkpointing=False)
