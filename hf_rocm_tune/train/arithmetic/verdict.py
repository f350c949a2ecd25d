"""What is done when a product may be wrong: it is held, computed on the host in float64, and the step is judged.

A residual above the level accuses nobody: the step is repeated, and the worst rows are computed on the host. Only a
product that differs from them by more than its own rounding is called wrong; else the level rises. A product that is
wrong each time is computed with another BLAS library; where none is right, the run ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from hf_rocm_tune.models import products
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.arithmetic.bounds import roundoff, weight_residuals
from hf_rocm_tune.train.arithmetic.checksums import HostWeights
from hf_rocm_tune.train.arithmetic.products import HeldProduct, Product, Side
from hf_rocm_tune.transfer import Mover, TransferReport, host_copy

logger = logging.getLogger(__name__)

ROWS = 8
"""Of a product, computed on the host when it is judged."""
_ATTEMPTS = 5


class StepVerdict(IntEnum):
    """What is to be done with a step, from the lightest on: ranks agree on the highest."""

    GO_ON = 0
    REPEAT = 1
    SKIP = 2
    END = 3


class StepCheck(Protocol):
    """A check of an optimizer step before it is used; `train.guard.TrainingGuard` asks all of them.

    Attributes:
        failure: the sentence on what ended the run; empty before.
    """

    @property
    def failure(self) -> str: ...

    def pending(self) -> list[Tensor]:
        """What `judge` needs of the device: shape [n], float32 or float64, one tensor of each device."""
        ...

    def judge(self, figures: Sequence[Sequence[float]], /, *, can_repeat: bool) -> StepVerdict:
        """What to do with the step on this rank; ``figures``: a row for each tensor of `pending`."""
        ...


def record_disagreement(report: TransferReport, step: int, tensor: str, *, kind: str, outcome: str, text: str) -> None:
    """An incident in the report, and its counts. ``kind``: "transient", "repeatable" or "unknown"."""
    row = {"step": step, "stage": "arithmetic", "tensor": tensor, "kind": kind, "text": text, "outcome": outcome}
    report.incident(row)
    report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))


class ProductVerdicts:
    """Judges products whose residuals are above their level; `checks.ArithmeticChecks` owns one.

    Attributes:
        holding: whether products above their level are to be kept until they are judged: the step is computed again.
        failure: the sentence on the product that ended the run.
    """

    def __init__(self, mover: Mover, weights: HostWeights) -> None:
        self._mover = mover
        self._report = mover.report
        self._weights = weights
        self._step = 0
        self._attempt = 0
        self._suspects: list[tuple[Product, Side]] = []
        self._skipped = False
        self.holding = False
        self.failure = ""

    def begin_step(self, step: int) -> None:
        self._step = step
        self._attempt = 0
        self.holding = self._skipped  # the step that was skipped is not computed again: this one's products are held
        self._skipped = False

    def clear(self) -> StepVerdict:
        """Nothing is wrong now: what made the step be repeated was a fault that has passed."""
        for layer, side in self._suspects:
            self._record_wrong(layer, side, "transient", "recovered", "the step was computed again, and is right now")
        self._suspects.clear()
        return StepVerdict.GO_ON

    def accuse(self, flagged: list[tuple[Product, Side]], again: StepVerdict) -> StepVerdict:
        """Judge products whose operands are held, and have the others computed again, in a step that holds them.

        ``again``: the verdict on a step that is not to be used: to be computed again, or skipped.
        """
        self.holding = True
        self._attempt += 1
        wrong: list[tuple[Product, Side]] = []
        unknown: list[tuple[Product, Side]] = []
        current = products.current_library(self._mover.device)
        chosen: str | None = current
        for layer, side in flagged:
            checked = layer.sides[side]
            held = checked.held
            checked.held = None
            if held is None:
                unknown.append((layer, side))
            elif self._is_wrong(layer, side, held):
                wrong.append((layer, side))
                if chosen == current:
                    chosen = self._library_for(layer, side, held)
            else:
                checked.learn(checked.flagged, cleared=True)
                self._report.count("arithmetic", cleared=1)
                if (layer, side) in self._suspects:
                    self._suspects.remove((layer, side))
        if not wrong and not unknown:
            return self.clear()
        if wrong and (chosen is None or self._attempt > _ATTEMPTS):
            self._end(wrong, no_library=chosen is None)
            return StepVerdict.END
        if chosen is not None and chosen != current:
            products.use_library(self._mover.device, chosen)
            why = f"{current} computes it so: {chosen} is used from now on"
            for layer, side in wrong:
                self._record_wrong(layer, side, "one library", "recovered", why)
            self._suspects = [suspect for suspect in self._suspects if suspect not in wrong]
        else:
            self._suspects += [suspect for suspect in (*unknown, *wrong) if suspect not in self._suspects]
        if again is StepVerdict.SKIP:
            self._skipped = True
        return again

    def _end(self, wrong: list[tuple[Product, Side]], *, no_library: bool) -> None:
        if no_library:
            why = "no library computes it right"
        else:
            why = f"so it was in {self._attempt} attempts"
        sentences = [self._record_wrong(layer, side, "repeatable", "stopped", why) for layer, side in wrong]
        self.failure = sentences[0]

    def _record_wrong(self, layer: Product, side: Side, kind: str, outcome: str, text: str) -> str:
        """An incident in the report, and a warning; returns the sentence."""
        checked = layer.sides[side]
        what = "weight" if side == "dequantised" else "product"
        how = f"{checked.flagged:.3g} times what rounding explains"
        if checked.where:
            how += f", {checked.where}"
        sentence = f"step {self._step}: the {side} {what} of {layer.name} is wrong ({how}): {text}"
        row = {"step": self._step, "stage": "arithmetic", "tensor": layer.name, "side": side, "kind": kind}
        row |= {"residual": checked.flagged, "where": checked.where, "text": text, "outcome": outcome}
        self._report.incident(row)
        self._report.count("arithmetic", disagreements=1, recovered=int(outcome == "recovered"))
        logger.warning("%s", sentence)
        return sentence

    # ---- the product on the host --------------------------------------------------------------------------------

    def _is_wrong(self, layer: Product, side: Side, held: HeldProduct) -> bool:
        """Whether the product's worst rows differ from the host's by more than its own rounding; notes where."""
        if side == "dequantised":
            computed, right, allowed = self._weight_on_host(layer, held)
        else:
            worst = held.residuals.topk(min(ROWS, len(held.residuals))).indices
            x = host_copy(held.operand[worst]).double()
            computed = host_copy(held.result[worst]).double()
            if not x.isfinite().all():
                return False
            row_experts = _experts_of(held, worst)
            right, allowed = self._product_on_host(layer, side, held, x, row_experts.expand(len(x)))
        is_right = ((computed - right).abs() <= allowed) | (computed == right)
        above = ~(held.residuals <= layer.sides[side].level)
        layer.sides[side].where = _where(above, (~is_right).any(0))
        return not bool(is_right.all())

    def _product_on_host(
        self, layer: Product, side: Side, held: HeldProduct, x: Tensor, row_experts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The product of rows ``x`` with the weights of their experts, float64, and how far a right one may be."""
        added = held.call.added
        dtype = held.dtype
        right = torch.zeros(len(x), layer.columns[side == "forward"], dtype=torch.float64)
        norms = torch.zeros_like(right)
        for expert, rows, weight in self._weights.rows(layer, set(row_experts.tolist()), held.call.gathered):
            mine = row_experts == expert
            wide = weight.double()
            if added is not None:
                wide += _adapter_on_host(added.factors, expert)
            if side == "forward":
                right[mine, rows] = x[mine] @ wide.T
                norms[mine, rows] = wide.square().sum(1)
            else:
                right[mine] += x[mine][:, rows] @ wide
                norms[mine] += wide.square().sum(0)
        norms = norms.sqrt()
        if side == "forward" and layer.bias_norm and held.call.biased:
            if held.call.gathered:
                _, bias = held.call.gathered
            else:
                bias = local(layer.module.bias)
            right += host_copy(bias).double()
        out = roundoff(dtype)
        bound = layer.bound(side, dtype)
        length = x.norm(dim=1, keepdim=True)
        allowed = 4 * out * right.abs() + 8 * out * right.norm(dim=1, keepdim=True) / math.sqrt(right.shape[1])
        allowed += (bound.a * length + bound.q * x.abs().amax(1, keepdim=True)) * norms / max(layer.norm, 1e-30)
        if layer.quantised or added is not None:  # a kernel need not round the weight as the host does
            roundings = 2 if added is None else 4
            allowed += roundings * out * length * norms
        overflows = right.abs() > torch.finfo(dtype).max
        return torch.where(overflows, right.sign() * math.inf, right), allowed

    def _weight_on_host(self, layer: Product, held: HeldProduct) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a dequantised weight, the host's, float64, and how far they may lie apart."""
        rows, computed = host_copy(held.operand), host_copy(held.result).double()
        right = torch.zeros_like(computed)
        for _, part, weight in self._weights.rows(layer, [held.call.expert]):
            stored = weight.T if layer.transposed else weight
            inside = (rows >= part.start) & (rows < part.start + len(stored))
            right[inside] = stored[rows[inside] - part.start].double()
        return computed, right, 4 * roundoff(held.dtype) * right.abs() + torch.finfo(held.dtype).tiny

    # ---- with another library -----------------------------------------------------------------------------------

    def _library_for(self, layer: Product, side: Side, held: HeldProduct) -> str | None:
        """The library that computes the held product right, the current one first; None if none does."""
        checked = layer.sides[side]
        device = held.operand.device
        if self._weights.streamer is not None:
            self._weights.streamer.bring(layer.module)
        if side == "dequantised":  # by no BLAS library
            with torch.no_grad():
                weight = held.call.again(held.operand)
                checksum = checked.checksum[held.call.expert]
                residual = weight_residuals(weight, checked.vectors, checksum).amax()
                if bool(residual <= checked.level):
                    return products.current_library(device)
                return None
        for name in products.each_library(device):
            again = _computed_again(layer, side, held)
            with torch.no_grad():
                residual = layer.residuals(side, held.operand, again, held.dtype, held.call).amax()
                if bool(residual <= checked.level):
                    return name
        return None


def _computed_again(layer: Product, side: Side, held: HeldProduct) -> Tensor:
    """The product once more, as it was computed, [rows, columns]."""
    operand, call = held.operand, held.call
    if side == "backward" and call.back is not None:
        return call.back(operand)
    casts = not layer.quantised and layer.weight.dtype != held.dtype
    dtype = held.dtype if casts else None
    with torch.autocast(operand.device.type, dtype=dtype, enabled=casts), torch.enable_grad():
        if side == "forward":
            return call.again(operand).detach().view(len(operand), -1)
        x = operand.new_zeros(len(operand), layer.columns[0]).requires_grad_()
        y = call.again(x)
        (gradient,) = torch.autograd.grad(y, x, operand.to(y.dtype).view(y.shape))
        return gradient


def _experts_of(held: HeldProduct, rows: Tensor) -> Tensor:
    """The experts of these rows, int64 on the host: of each, or the one of all."""
    experts = held.call.experts
    if experts is None:
        return torch.zeros(1, dtype=torch.int64)
    if len(experts) == 1:
        return host_copy(experts)
    return host_copy(experts[rows])


def _adapter_on_host(factors: tuple[Tensor, Tensor | None, float], expert: int) -> Tensor:
    left, right, scaling = factors
    wide = host_copy(left[expert]).double()
    if right is None:  # the sum
        return wide
    return scaling * (wide @ host_copy(right[expert]).double())


def _where(rows: Tensor, columns: Tensor) -> str:
    """Which of a product's rows, and of its columns in the worst rows, are wrong."""
    parts = []
    for name, marks in (("rows", rows), ("columns", columns)):
        places = marks.nonzero().flatten().tolist()
        if places:
            parts.append(f"{len(places)} of {len(marks)} {name} from {places[0]} to {places[-1]}")
    return ", ".join(parts)
