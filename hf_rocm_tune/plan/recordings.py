"""The recorded steps of a job: the model with few layers, and each case when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import OPTIMIZERS, Case, Recorded, ShortRows, Step, Tape, Variant, Weight, Weights
from hf_rocm_tune.plan.request import PlanRequest

if TYPE_CHECKING:
    from hf_rocm_tune.plan.sample import Sample

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
        notes = list(self.sample.notes)
        if self.sample.base.supports_gradient_checkpointing and not self.can_checkpoint:
            notes.append(
                "its code writes into the embeddings' output, as recomputation forbids: train it with "
                "--gradient_checkpointing false"
            )
        if self.short_rows:
            notes.append(
                f"its code loops over tokens: memory is that of as many tokens in rows of up to {self.short_rows}"
            )
        return tuple(notes)

    @cached_property
    def can_checkpoint(self) -> bool:
        """Whether activations can be recomputed; set to False where a recording finds that they cannot."""
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
            if length < 8 * _SHORTEST_ROWS:
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
