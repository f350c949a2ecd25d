"""Checks of the optimizer's own arithmetic: in each step a few elements of what it made are computed again on the host.

Before the step a run of at most `ELEMENTS` neighbours of at most `TENSORS` trained tensors, their gradients and moments
are copied on the device, after it what has become of them; both are read with the numbers of the next step, so that
nothing waits. The host computes Adam's formulas (Kingma and Ba, arXiv:1412.6980; decoupled decay: Loshchilov and
Hutter, arXiv:1711.05101) in float64. The bounds are those of rounding in the dtypes that are stored and computed in.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_rocm_tune.errors import CorruptionError

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import TransferReport

TENSORS = 4
ELEMENTS = 32
_SINGLE = float(torch.finfo(torch.float32).eps)
_TINY = 1e-37  # what float32 may flush to zero
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Neighbouring elements of one tensor, before a step."""

    name: str
    parameter: Tensor
    begin: int
    length: int
    has_moments: bool  # else they are zero, and this is the first step
    group: Mapping[str, Any]  # the settings of its group in this step
    step: int  # of this tensor, from 1


class UpdateChecks:
    """Watches one optimizer; the trainer owns one.

    Attributes:
        refusal: why updates are not checked; None if they are.
        failure: what was wrong with an update, and what to do.
    """

    def __init__(self, report: TransferReport, *, on: bool) -> None:
        self._report, self._on = report, on
        self._drawn = random.Random(0)  # not torch's or Python's own, which training uses
        self._handles: list[Any] = []
        self._rows: list[tuple[dict[str, Any], Tensor]] = []
        self._samples: list[_Sample] = []
        self._before: list[Tensor] = []
        self._pending: tuple[list[_Sample], Tensor, int] | None = None
        self.failure = ""
        self.refusal: str | None = "training has not begun"

    def watch(self, optimizer: Any, names: Mapping[int, str], *, scaled: bool) -> None:
        """Watch the optimizer of a training; ``names``: of parameters by id, ``scaled``: gradients by a loss scaler."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._pending, self._names = [], None, names
        while hasattr(optimizer, "optimizer"):  # Accelerate's, around torch's
            optimizer = optimizer.optimizer
        reasons = {
            "--check_arithmetic off": not self._on,
            f"the optimizer is {type(optimizer).__name__}": type(optimizer)
            not in (torch.optim.AdamW, torch.optim.Adam),
            "gradients are scaled (--fp16)": scaled,
        }
        self.refusal = next((reason for reason, holds in reasons.items() if holds), None)
        if self.refusal is not None:
            return
        self._rows = [(group, each) for group in optimizer.param_groups for each in group["params"]]
        if any(isinstance(each, DTensor) for _, each in self._rows):
            self.refusal = "the weights are sharded over ranks"
            return
        if len({each.device for _, each in self._rows}) > 1:
            self.refusal = "the weights are on several cards"
            return
        self._handles = [
            optimizer.register_step_pre_hook(lambda owner, *_: self._look_before(owner)),
            optimizer.register_step_post_hook(lambda owner, *_: self._look_after(owner)),
        ]

    # ---- on the device ------------------------------------------------------------------------------------------

    def _look_before(self, optimizer: Any) -> None:
        self._samples, self._before = [], []
        for group, parameter in self._drawn.sample(self._rows, min(TENSORS, len(self._rows))):
            grad, state = parameter.grad, optimizer.state.get(parameter, {})
            read = [each for each in (parameter, grad, *(state.get(name) for name in _MOMENTS)) if each is not None]
            is_plain = grad is not None and not grad.is_sparse and all(each.is_contiguous() for each in read)
            if not is_plain or not parameter.numel():
                continue
            if group.get("amsgrad") or isinstance(group["lr"], Tensor):
                continue
            done = state.get("step", 0)
            if isinstance(done, Tensor) and done.device.type != "cpu":
                done = None  # it stays on the device: it is copied beside the elements
            length = min(ELEMENTS, parameter.numel())
            sample = _Sample(
                name=self._names.get(id(parameter), "a parameter"),
                parameter=parameter,
                begin=self._drawn.randrange(parameter.numel() - length + 1),
                length=length,
                has_moments=bool(state),
                group={**group, "params": ()},
                step=-1 if done is None else int(done) + 1,
            )
            self._samples.append(sample)
            values = [parameter, grad, *([state[name] for name in _MOMENTS] if state else [])]
            self._before += [_part(each, sample) for each in values]
            if done is None:
                self._before.append(_copied(state["step"].reshape(1)))

    def _look_after(self, optimizer: Any) -> None:
        if not self._samples:
            return
        after = [
            _part(each, sample)
            for sample in self._samples
            for each in (sample.parameter, *(optimizer.state[sample.parameter][name] for name in _MOMENTS))
        ]
        count = sum(each.numel() for each in self._before)
        self._pending = self._samples, torch.cat([*self._before, *after]), count
        self._samples, self._before = [], []

    # ---- on the host --------------------------------------------------------------------------------------------

    def pending(self) -> list[Tensor]:
        """What `judge` waits for, float64 of shape [n]; nothing where there was no update since."""
        return [] if self._pending is None else [self._pending[1]]

    def settle(self) -> None:
        """Judge the last update now: before its weights are saved, and at the end."""
        for numbers in self.pending():
            if not self.is_right(numbers.tolist()):
                raise CorruptionError(self.failure)

    def is_right(self, numbers: list[float]) -> bool:
        """Compare the last update with Adam's formulas; `failure` says what is wrong."""
        if self._pending is None:
            return True
        (samples, _, count), self._pending = self._pending, None
        before, after = _Elements(numbers[:count]), _Elements(numbers[count:])
        for sample in samples:
            p, g = before.take(sample.length), before.take(sample.length)
            zero = np.zeros(sample.length)
            m, v = (before.take(sample.length) if sample.has_moments else zero for _ in _MOMENTS)
            step = int(before.take(1)[0]) + 1 if sample.step < 0 else sample.step
            made = [after.take(sample.length) for _ in range(3)]
            self._report.count("arithmetic", updates=1)
            for what, found, wanted, bound in _adam(sample, step, p, g, m, v, made):
                with np.errstate(invalid="ignore"):
                    wrong = ~(np.abs(found - wanted) <= bound)
                if wrong.any():
                    at = int(np.argmax(wrong))
                    self._tell(sample, f"{what} is {found[at]:.6g} instead of {wanted[at]:.6g}")
                    return False
        return True

    def _tell(self, sample: _Sample, text: str) -> None:
        row = {"stage": "arithmetic", "tensor": sample.name, "kind": "update", "text": text, "outcome": "stopped"}
        self._report.incident(row)
        self._report.count("arithmetic", disagreements=1)
        self.failure = (
            f"the optimizer's update of {sample.name} is wrong: {text}. Nothing of it was saved: the same command goes "
            "on from the newest checkpoint; if it happens again, run hf-rocm-tune doctor --full"
        )


def _part(tensor: Tensor, sample: _Sample) -> Tensor:
    return _copied(tensor.detach().view(-1)[sample.begin : sample.begin + sample.length])


def _copied(tensor: Tensor) -> Tensor:
    """In float64, and never the same memory."""
    return tensor.clone() if tensor.dtype == torch.float64 else tensor.double()


class _Elements:
    """Takes the numbers of a row one part after another."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers, self._at = np.asarray(numbers, dtype=np.float64), 0

    def take(self, length: int) -> Any:
        self._at += length
        return self._numbers[self._at - length : self._at]


def _adam(
    sample: _Sample, step: int, p: Any, g: Any, m: Any, v: Any, made: list[Any]
) -> list[tuple[str, Any, Any, Any]]:
    """What was computed, what it should be and the bound of their difference, for both moments and the weight.

    One step of Adam is a few roundings of the stored dtype and, unless the kernel is fused, of every operation.
    """
    group, dtype = sample.group, sample.parameter.dtype
    stored = float(torch.finfo(dtype).eps)
    computed = max(_SINGLE, 0.0 if group.get("fused") else stored)
    lr, (first, second), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    g = -g if group["maximize"] else g
    decoupled = group.get("decoupled_weight_decay", True)
    if not decoupled:
        g = g + decay * p
    size = np.abs(m) + np.abs(g) + (0 if decoupled else abs(decay) * np.abs(p))
    new_m = first * m + (1 - first) * g
    new_v = second * v + (1 - second) * g * g
    root = np.sqrt(new_v / (1 - second**step)) + group["eps"]
    rate = lr / (1 - first**step)
    change = rate * new_m / root
    kept = p * (1 - lr * decay) if decoupled else p
    rounding = 16 * computed * (np.abs(change) + lr * abs(decay) * np.abs(p)) + 8 * computed * rate * size / root
    made_p, made_m, made_v = made
    return [
        ("its first moment", made_m, new_m, (2 * stored + 8 * computed) * size + _TINY),
        ("its second moment", made_v, new_v, (4 * stored + 16 * computed) * new_v + _TINY),
        ("the weight", made_p, kept - change, 2 * stored * (np.abs(p) + np.abs(kept - change)) + rounding + _TINY),
    ]
