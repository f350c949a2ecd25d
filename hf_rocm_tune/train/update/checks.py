"""`UpdateChecks`: what the trainer owns to check clipping, learning rates and the optimizer's step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.arithmetic import StepVerdict
from hf_rocm_tune.train.update.clipping import ClippingCheck
from hf_rocm_tune.train.update.comparison import ELEMENTS, TENSORS, TINY, Awaited, Elements, Recomputed, copied
from hf_rocm_tune.train.update.optimizers import BLOCK, SGD, Update, definition_of

if TYPE_CHECKING:
    from hf_rocm_tune.train.update.schedule import Schedule
    from hf_rocm_tune.transfer import TransferReport


_LOSSES = 64  # the last ones of a step that are compared with the scaler's scale
_SCALED, _LARGEST = 1e-6, 1e38  # how far a product in float32 may be off, relative; what it can have


@dataclass(frozen=True, kw_only=True)
class _UpdateSample:
    """Neighbouring elements of one tensor, before a step."""

    name: str
    whole: Tensor
    parameter: Tensor  # this rank's part of it
    begin: int
    length: int
    definition: SGD
    states: tuple[str, ...]  # of the definition's, those that there were; the others are zero
    group: Mapping[str, Any]  # the settings of its group in this step
    step: int  # of this tensor, from 1; 0: it is on the device
    skips_infinite: bool  # whether the step itself leaves out a step whose gradients are infinite
    divides: bool  # whether it divides the gradients by the scaler's scale
    before: list[Tensor] = field(default_factory=list)

    def part_of(self, tensor: Tensor) -> Tensor:
        """The sampled elements of the weight, its gradient or a state, in float64."""
        begin, length = self.begin, self.length
        if tensor.numel() != self.parameter.numel():  # one value of each block
            begin, length = begin // BLOCK, 1
        return copied(tensor.detach().view(-1)[begin : begin + length])


class UpdateChecks:
    """Watches one optimizer and the clipping before it; the trainer owns one.

    Attributes:
        refusal: why updates are not checked; None if they are.
        clip_refusal: likewise of clipping's norm.
        schedule: of the learning rates; None before the training.
        failure: what was wrong, and what to do.
    """

    def __init__(self, report: TransferReport, *, on: bool, elements: int = ELEMENTS) -> None:
        """``elements``: of a sample."""
        self._report = report
        self._on = on
        self._elements = elements
        self._drawn = random.Random(0)  # not torch's or Python's own, which training uses
        self._handles: list[Any] = []
        self._rows: list[tuple[dict[str, Any], Tensor]] = []
        self._samples: list[_UpdateSample] = []
        self._definition: Callable[[Tensor, Mapping[str, Any]], SGD] | None = None
        self._updated: list[Awaited] = []  # of the last update
        self._clipped: list[Awaited] = []  # of this step's clipping
        self._clipping: ClippingCheck | None = None
        self._scaler: Any = None
        self._scaled: list[Tensor] = []  # each loss since the last update, and what fp16's scaler has made of it
        self._names: Mapping[int, str] = {}
        self._repeated = False
        self.failure = ""
        self.schedule: Schedule | None = None
        self.refusal: str | None = "training has not begun"
        self.clip_refusal: str | None = "training has not begun"

    def watch(self, optimizer: Any, names: Mapping[int, str], schedule: Schedule | None = None) -> None:
        """Watch the optimizer of a training; ``names``: of parameters by id."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._updated = []
        self._clipped = []
        self._names = names
        self._repeated = False
        self.schedule = schedule
        while hasattr(optimizer, "optimizer"):  # Accelerate's, around torch's
            optimizer = optimizer.optimizer
        self._rows = []
        for group in optimizer.param_groups:
            self._rows += [(group, parameter) for parameter in group["params"]]
        self._definition = definition_of(optimizer)
        self.refusal = self.clip_refusal = None
        if not self._on:
            self.refusal = self.clip_refusal = "--check_arithmetic off"
            return
        if self._definition is None:
            self.refusal = f"the optimizer is {type(optimizer).__name__}"
        if any(isinstance(parameter, DTensor) for _, parameter in self._rows):
            self.clip_refusal = "the norm of sharded gradients is summed over ranks"
        self._clipping = ClippingCheck(
            self._report, names, self._drawn, self._elements, checks_norm=self.clip_refusal is None
        )
        self._handles = [
            optimizer.register_step_pre_hook(lambda owner, *_: self._before_update(owner)),
            optimizer.register_step_post_hook(lambda owner, *_: self._after_update(owner)),
        ]

    def watch_scaler(self, scaler: Any) -> None:
        """Have each loss that fp16's scaler multiplies compared at the next clipping; None: there is no scaler."""
        if scaler is None or scaler is self._scaler or not self._on:
            return
        self._scaler = scaler
        stock = scaler.scale

        def scale(outputs: Any) -> Any:
            made = stock(outputs)
            if isinstance(outputs, Tensor) and outputs.requires_grad and not outputs.dim():
                self._scaled = self._scaled[1 - _LOSSES :]
                self._scaled.append(torch.stack([outputs.detach().double(), made.detach().double()]))
            return made

        scaler.scale = scale

    def clipping(self, stock: Callable[..., Any], scale: Callable[[], Tensor | None]) -> Callable[..., Any]:
        """``Accelerator.clip_grad_norm_``, watched. ``scale``: what gradients are multiplied with until then."""

        def clip(parameters: Iterable[Tensor], max_norm: float, *arguments: Any, **keywords: Any) -> Any:
            parameters = list(parameters)
            if self._clipping is None or not self._handles or arguments or keywords:
                return stock(parameters, max_norm, *arguments, **keywords)
            with torch.no_grad():
                factor = scale()
                norm, self._clipped = self._clipping.clip(stock, parameters, max_norm, factor)
                scaled = self._scaled
                self._scaled = []
                if factor is not None and scaled and {pair.device for pair in scaled} == {factor.device}:
                    self._clipped.append(Awaited(torch.cat([*scaled, factor.double().reshape(1)]), _wrong_scale))
            return norm

        return clip

    # ---- the update, on the device ------------------------------------------------------------------------------

    def _before_update(self, optimizer: Any) -> None:
        if self.schedule is not None:
            wrong = self.schedule.wrong()
            if wrong is not None:
                self._record("learning rates", wrong, "stopped")
                raise CorruptionError(self.failure)
        self._samples = []
        self._scaled = []
        if self.refusal is not None:
            return
        for group, whole in self._drawn.sample(self._rows, min(TENSORS, len(self._rows))):
            sample = self._sample_of(group, whole, optimizer)
            if sample is not None:
                self._samples.append(sample)

    def _sample_of(self, group: Mapping[str, Any], whole: Tensor, optimizer: Any) -> _UpdateSample | None:
        """A sample of a parameter before its update; None where the definition does not hold for it."""
        if whole.grad is None or whole.grad.is_sparse or group.get("amsgrad") or isinstance(group["lr"], Tensor):
            return None
        state = optimizer.state.get(whole, {})
        parameter = local(whole.detach())
        grad = local(whole.grad)
        definition = self._definition_for(parameter, state)
        states = tuple(name for name in definition.states if state.get(name) is not None)
        read = [parameter, grad, *(local(state[name]) for name in states)]
        if not parameter.numel() or not all(tensor.is_contiguous() for tensor in read):
            return None
        infinite = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        for given in (infinite, scale):
            if given is not None and given.device != parameter.device:
                return None
        done = state.get("step", 0)
        is_on_device = isinstance(done, Tensor) and done.device.type != "cpu"
        begin, length = self._place_in(parameter, definition)
        sample = _UpdateSample(
            name=self._names.get(id(whole), "a parameter"),
            whole=whole,
            parameter=parameter,
            begin=begin,
            length=length,
            definition=definition,
            states=states,
            group={**group, "params": ()},
            step=0 if is_on_device else int(done) + 1,
            skips_infinite=infinite is not None,
            divides=scale is not None,
        )
        sample.before.extend(sample.part_of(tensor) for tensor in read)
        if is_on_device:
            sample.before.append(copied(done.reshape(1)))
        for given in (infinite, scale):
            if given is not None:
                sample.before.append(copied(given.reshape(1)))
        return sample

    def _definition_for(self, parameter: Tensor, state: Mapping[str, Any]) -> SGD:
        assert self._definition is not None
        return self._definition(parameter, state)

    def _place_in(self, parameter: Tensor, definition: SGD) -> tuple[int, int]:
        """Where a sample begins, and its length."""
        most = BLOCK if definition.in_blocks else self._elements
        length = min(most, parameter.numel())
        begin = self._drawn.randrange(parameter.numel() - length + 1)
        if definition.in_blocks:
            begin -= begin % BLOCK
            length = min(BLOCK, parameter.numel() - begin)
        return begin, length

    def _after_update(self, optimizer: Any) -> None:
        self._updated = []
        for sample in self._samples:
            state = optimizer.state[sample.whole]
            definition = sample.definition
            if definition != self._definition_for(sample.parameter, state):
                continue  # its state is of another kind than was expected
            made = [local(state[name]) for name in definition.states if state.get(name) is not None]
            after = [sample.part_of(tensor) for tensor in (sample.parameter, *made)]
            self._updated.append(Awaited(torch.cat([*sample.before, *after]), partial(self._wrong_update, sample)))
        self._samples = []

    def _wrong_update(self, sample: _UpdateSample, numbers: Any) -> str | None:
        """``numbers``: what `_sample_of` and then `_after_update` have copied, in their order."""
        row = Elements(numbers)
        definition, length = sample.definition, sample.length
        sizes = definition.sizes(length)
        weight = row.take(length)
        gradient = row.take(length)
        state: dict[str, Any] = dict.fromkeys(definition.states)
        for name, size in zip(definition.states, sizes, strict=True):
            if name in sample.states:
                state[name] = row.take(size)
        step = sample.step or int(row.take(1)[0]) + 1
        is_skipped = sample.skips_infinite and bool(row.take(1)[0])
        scale = 1.0
        if sample.divides:
            scale = float(row.take(1)[0])
        made_weight = row.take(length)
        made_state = {}
        for name, size in zip(definition.states, sizes, strict=True):
            if row.left:
                made_state[name] = row.take(size)
        self._report.count("arithmetic", updates=1)
        if is_skipped:
            return Recomputed("the weight", made_weight, weight, np.zeros(len(weight))).wrong()
        update = Update(
            dtype=sample.parameter.dtype,
            group=sample.group,
            step=step,
            weight=weight,
            gradient=gradient / scale,
            state=state,
            made_weight=made_weight,
            made_state=made_state,
        )
        for recomputed in definition.compared(update):
            wrong = recomputed.wrong()
            if wrong is not None:
                return f"the optimizer's update of {sample.name} is wrong: {wrong}"
        return None

    # ---- on the host --------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """What `judge` waits for, float64 of shape [n], one of each device."""
        on_devices = _by_device([*self._clipped, *self._updated])
        return [torch.cat([awaited.numbers for awaited in on_device]) for on_device in on_devices]

    def judge(self, rows: Sequence[Sequence[float]], *, can_repeat: bool) -> StepVerdict:
        """Judge the last update and this step's clipping, by what was read of `pending`; `failure` says what is wrong.

        A wrong update has been used: the run ends. Wrong clipping has not: the step is computed again, once.
        """
        clipped, updated = self._clipped, self._updated
        self._clipped = []
        self._updated = []
        read: dict[int, Any] = {}
        for on_device, row in zip(_by_device([*clipped, *updated]), rows, strict=True):
            numbers = Elements(row)
            for awaited in on_device:
                read[id(awaited)] = numbers.take(awaited.numbers.numel())
        wrong = _first_wrong(updated, read)
        if wrong is not None:
            self._record("update", wrong, "stopped")
            return StepVerdict.END
        wrong = _first_wrong(clipped, read)
        was_repeated = self._repeated
        self._repeated = wrong is not None
        if wrong is None:
            if was_repeated:
                self._record("clipping", "it is right now that the step was computed again", "recovered")
            return StepVerdict.GO_ON
        if can_repeat and not was_repeated:
            return StepVerdict.REPEAT
        self._record("clipping", wrong, "stopped")
        return StepVerdict.END

    def check_now(self) -> None:
        """Judge the last update now: before its weights are saved, and at the end."""
        self._clipped = []
        rows = [numbers.tolist() for numbers in self.pending()]
        if self.judge(rows, can_repeat=False) == StepVerdict.END:
            raise CorruptionError(self.failure)

    def describe(self) -> dict[str, Any]:
        """For the report."""
        rate_refusal: str | None = "training has not begun"
        if self.schedule is not None:
            rate_refusal = self.schedule.refusal
        return {"update_refusal": self.refusal, "clip_refusal": self.clip_refusal, "rate_refusal": rate_refusal}

    def _record(self, tensor: str, text: str, outcome: str) -> None:
        row = {"stage": "arithmetic", "tensor": tensor, "kind": "update", "text": text, "outcome": outcome}
        self._report.incident(row)
        self._report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        self.failure = (
            f"{text}. Nothing of it was saved: the same command goes on from the newest checkpoint; if it happens "
            "again, run hf-rocm-tune doctor --full"
        )


def _wrong_scale(numbers: Any) -> str | None:
    """``numbers``: pairs of a loss and what the scaler has made of it, and the scale at the end."""
    scale = float(numbers[-1])
    for loss, made in numbers[:-1].reshape(-1, 2).tolist():
        expected = loss * scale
        if abs(expected) < _LARGEST and not abs(made - expected) <= _SCALED * abs(expected) + TINY:
            return f"fp16's scaler has multiplied a loss of {loss:.6g} to {made:.6g} instead of {expected:.6g}"
    return None


def _by_device(parts: list[Awaited]) -> list[list[Awaited]]:
    by_device: dict[torch.device, list[Awaited]] = defaultdict(list)
    for awaited in parts:
        by_device[awaited.numbers.device].append(awaited)
    return list(by_device.values())


def _first_wrong(parts: list[Awaited], read: Mapping[int, Any]) -> str | None:
    """What is wrong with the first of them that is; ``read``: their numbers by the ids of the parts."""
    for awaited in parts:
        wrong = awaited.wrong(read[id(awaited)])
        if wrong is not None:
            return wrong
    return None
