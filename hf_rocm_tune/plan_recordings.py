"""Recorded steps of one model and method, made when a case first asks for them. Imports no torch before that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import Case, Weights
from hf_rocm_tune.memory.plan_trace import Trace
from hf_rocm_tune.plan_request import PlanRequest

if TYPE_CHECKING:
    from hf_rocm_tune.models.shapes_model import Sample


@dataclass
class Recordings:
    """Gives the step of a case.

    Args:
        config: the model's configuration.
        request: what the planner is asked.
        method: one of its methods.
        lengths: shortest to longest sequence that is asked for often.
    """

    config: Any
    request: PlanRequest
    method: str
    lengths: tuple[int, ...]
    _sample: Sample | None = None
    _whole: bool = False
    _traces: dict[tuple[Any, ...], Trace] = field(default_factory=dict)

    @property
    def sample(self) -> Sample:
        """The model with few layers, built once."""
        if self._sample is None:
            try:
                self._sample = self._build()
            except UsageError:
                if self._whole:
                    raise
                self._whole = True
                self._sample = self._build()
        return self._sample

    def weights(self) -> Weights:
        """Totals of the whole model."""
        return Weights.total(self.sample.weights(), self.sample.layer_of)

    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know."""
        return self.sample.notes

    @property
    def can_checkpoint(self) -> bool:
        """Whether transformers can recompute this model's layers."""
        return bool(self.sample.base.supports_gradient_checkpointing)

    def __call__(self, case: Case) -> Trace:
        """The step of a case, as a function of batch and length where that can be; else at its own length."""
        key = (case.content, case.checkpointing)
        if key not in self._traces and (*key, case.length) not in self._traces:
            try:
                self._traces[key] = self._trace(case, self._range(case))
            except ValueError:  # the step does other things at another length
                return self.exact(case)
        return self._traces.get(key) or self.exact(case)

    def exact(self, case: Case) -> Trace:
        """The step of a case, recorded at its own length."""
        key = (case.content, case.checkpointing, case.shape[1])
        if key not in self._traces:
            self._traces[key] = self._trace(case, (case.shape[1], case.shape[1]))
        return self._traces[key]

    def _range(self, case: Case) -> tuple[int, int]:
        """Shortest and longest rows that may be asked for."""
        rows = self.request.each if self.request.packing else 1
        low, high = self.lengths[0], self.lengths[-1] * rows
        return (low, high) if low < high else (max(2, low // 2), high)

    def _trace(self, case: Case, lengths: tuple[int, int]) -> Trace:
        batches = (2, 3) if case.content == "padded" else (1, 1)
        first = self._record(case, batches[0], lengths[0])
        again = (batches[1], lengths[1]) == (batches[0], lengths[0])
        second = first if again else self._record(case, batches[1], lengths[1])
        return Trace(first, second, self.sample.layer_of)

    def _record(self, case: Case, batch: int, length: int) -> Any:
        from hf_rocm_tune.models.shapes import Step, record

        step = Step(
            batch=batch,
            length=length,
            content=case.content,
            checkpointing=case.checkpointing,
            platform=self.request.platform,
            autocast=self.request.autocast,
        )
        try:
            return record(self.sample, step)
        except UsageError:
            if self._whole:
                raise
        # Some models need to know how many layers they have: then all of them are recorded, which takes longer.
        self._whole, self._sample = True, None
        self._traces.clear()
        return record(self.sample, step)

    def _build(self) -> Sample:
        from hf_rocm_tune.models.shapes_model import Method, build

        request = self.request
        method = Method(
            lora=self.method != "full",
            four_bit=self.method == "qlora",
            nested=request.nested,
            dtype=request.dtype_of(self.method),
            rank=request.rank,
            alpha=request.alpha,
            dropout=request.dropout,
            targets=request.targets,
            modules_to_save=request.modules_to_save,
            dora=request.dora,
            rslora=request.rslora,
            attention=request.attention,
        )
        return build(self.config, method, whole=self._whole)
