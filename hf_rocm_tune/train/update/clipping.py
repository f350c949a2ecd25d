"""Clipping: the norm of all gradients by another kernel, and sampled gradients before and after it."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.update.comparison import TENSORS, TINY, Awaited, Recomputed, copied

if TYPE_CHECKING:
    from hf_rocm_tune.transfer import TransferReport

NORM_BYTES = 256 << 20
"""Bytes of gradients whose norm is computed a second time in a step, on average."""
_BUCKET_BYTES = 32 << 20
_NORM_ERROR = 1e-4  # of a scalar product of millions of float32, relative
_SINGLE = float(torch.finfo(torch.float32).eps)

Gradients = list[tuple[Tensor, Tensor]]  # parameters, and this rank's part of their gradients


@dataclass
class _Clipping:
    """One call of ``clip_grad_norm_``; ``norm`` and ``scale`` are known once they have been read from the device.

    They are the first of what is `Awaited`, in whose order everything is read.
    """

    dtype: torch.dtype  # of the norm
    max_norm: float
    norm: float = math.nan
    scale: float = 1.0  # with which the gradients are multiplied until then

    def keep_norm(self, numbers: Any) -> None:
        self.norm = float(numbers[0])

    def keep_scale(self, numbers: Any) -> None:
        self.scale = float(numbers[0])


@dataclass(frozen=True)
class _GradientSample:
    """Neighbouring elements of one gradient, before clipping."""

    parameter: Tensor
    part: slice
    before: Tensor  # float64


@dataclass
class _Squares:
    """Sums of squares of all gradients on one device."""

    sums: Tensor  # float64 of shape [n]
    roundings: list[float]  # how far torch's norm of what is in each sum may be off, relative


class ClippingCheck:
    """Watches ``clip_grad_norm_``: compares what is read of a step's `awaited` with the definition."""

    def __init__(
        self,
        report: TransferReport,
        names: Mapping[int, str],
        drawn: random.Random,
        elements: int,
        *,
        checks_norm: bool,
    ) -> None:
        """
        Args:
            names: of parameters by id.
            drawn: draws the samples, of ``elements`` each.
            checks_norm: this rank has all gradients.
        """
        self._report = report
        self._names = names
        self._drawn = drawn
        self._elements = elements
        self._checks_norm = checks_norm
        self._clippings = 0

    def clip(
        self, stock: Callable[..., Any], parameters: list[Tensor], max_norm: float, scale: Tensor | None
    ) -> tuple[Any, list[Awaited]]:
        """Clip as ``stock`` does. Returns the norm, and what is compared later; ``scale``: see `_Clipping`."""
        gradients: Gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append((parameter, local(parameter.grad)))
        samples = list(self._samples(gradients))
        squares = self._squares([grad for _, grad in gradients])
        norm = stock(parameters, max_norm)
        self._clippings += 1
        if not isinstance(norm, Tensor):
            return norm, []
        total = local(norm).detach().reshape(1)
        clipping = _Clipping(total.dtype, max_norm)
        awaited = [Awaited(total.double(), clipping.keep_norm)]
        if scale is not None:
            awaited.append(Awaited(scale.detach().double().reshape(1), clipping.keep_scale))
        for sample in samples:
            grad = local(sample.parameter.grad)  # type: ignore[arg-type]
            numbers = torch.cat([sample.before, copied(grad.view(-1)[sample.part])])
            awaited.append(Awaited(numbers, partial(self._wrong_gradient, sample, grad.dtype, clipping)))
        return norm, awaited + self._norm_comparisons(squares, clipping)

    # ---- sampled gradients ----------------------------------------------------------------------------------

    def _samples(self, gradients: Gradients) -> Iterator[_GradientSample]:
        """Copies of neighbouring elements of a few gradients."""
        usable = [
            (parameter, grad)
            for parameter, grad in gradients
            if grad.numel() and not grad.is_sparse and grad.is_contiguous()
        ]
        for parameter, grad in self._drawn.sample(usable, min(TENSORS, len(usable))):
            length = min(self._elements, grad.numel())
            begin = self._drawn.randrange(grad.numel() - length + 1)
            part = slice(begin, begin + length)
            yield _GradientSample(parameter, part, copied(grad.view(-1)[part]))

    def _wrong_gradient(
        self, sample: _GradientSample, dtype: torch.dtype, clipping: _Clipping, numbers: Any
    ) -> str | None:
        """``numbers``: the elements before clipping, then after it."""
        length = len(sample.before)
        before = numbers[:length] / clipping.scale
        after = numbers[length:]
        if not math.isfinite(clipping.norm):
            return None  # the step is not used
        expected = before * min(1.0, clipping.max_norm / (clipping.norm + 1e-6))
        of_gradient = torch.finfo(dtype)
        of_norm = torch.finfo(clipping.dtype)
        relative = 6 * of_gradient.eps + 6 * of_norm.eps
        bound = relative * np.abs(expected) + max(2 * of_gradient.tiny * of_gradient.eps, TINY)
        self._report.count("arithmetic", clipped=1)
        name = self._names.get(id(sample.parameter), "a parameter")
        wrong = Recomputed(f"the clipped gradient of {name}", after, expected, bound).wrong()
        if wrong is None:
            return None
        return f"{wrong}, for a norm of {clipping.norm:.6g}"

    # ---- the norm -------------------------------------------------------------------------------------------

    def _squares(self, gradients: list[Tensor]) -> list[_Squares]:
        """By device; empty where it is not this step's turn."""
        if not self._checks_norm:
            return []
        steps = max(1, math.ceil(_bytes(gradients) / NORM_BYTES))
        if self._clippings % steps:
            return []
        longest = max((gradient.numel() for gradient in gradients), default=0)
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_device[gradient.device].append(gradient)
        squares = []
        for on_device in by_device.values():
            buckets = _buckets(on_device)
            sums = torch.cat([_square(bucket) for bucket in buckets])
            squares.append(_Squares(sums, [_rounding_of_a_norm(bucket[0], longest) for bucket in buckets]))
        return squares

    def _norm_comparisons(self, squares: list[_Squares], clipping: _Clipping) -> list[Awaited]:
        norm = _Norm(clipping, devices=len(squares))

        def wrong(roundings: Any, numbers: Any) -> str | None:
            if not norm.add(numbers, roundings):
                return None
            self._report.count("arithmetic", norms=1)
            return norm.wrong()

        return [Awaited(of_device.sums, partial(wrong, np.array(of_device.roundings))) for of_device in squares]


@dataclass
class _Norm:
    """The norm of all gradients, from the sums of their squares on each device."""

    clipping: _Clipping
    devices: int  # whose sums are missing
    squares: float = field(default=0.0, init=False)
    rounded: float = field(default=0.0, init=False)  # squares of how far torch's norm of each sum may be off

    def add(self, squares: Any, roundings: Any) -> bool:
        """The sums of a device; whether those of all devices are there."""
        self.devices -= 1
        self.squares += float(squares.sum())
        self.rounded += float((squares * roundings**2).sum())
        return self.devices == 0

    def wrong(self) -> str | None:
        """What is wrong with torch's norm; None if nothing is."""
        info = torch.finfo(self.clipping.dtype)
        norm = self.clipping.norm
        expected = math.sqrt(self.squares) / self.clipping.scale
        # torch rounds each tensor's norm to its own dtype, then takes the norm of these: it moves at most by the norm
        # of their errors
        of_tensors = math.sqrt(self.rounded) / self.clipping.scale
        bound = (_NORM_ERROR + 8 * float(info.eps)) * expected + of_tensors + 1e-18
        if not math.isfinite(expected):
            return None  # what overflows in float32 is infinite in both, or its square is
        if math.isinf(norm) and expected + bound >= info.max:
            return None  # a float16 norm is infinite from 65,520 on
        if abs(norm - expected) <= bound:
            return None
        return f"the norm of the gradients is {norm:.6g} instead of {expected:.6g}"


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Flat parts of gradients of one device, in lists of one dtype and at most `_BUCKET_BYTES` each."""
    buckets: list[list[Tensor]] = []
    room = 0  # bytes that the last bucket still takes
    for gradient in gradients:
        for part in gradient.reshape(-1).split(_BUCKET_BYTES // gradient.element_size()):
            if not buckets or buckets[-1][0].dtype != part.dtype or part.nbytes > room:
                buckets.append([])
                room = _BUCKET_BYTES
            buckets[-1].append(part)
            room -= part.nbytes
    return buckets


def _square(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of flat tensors, float64 of shape [1]."""
    flat = torch.cat([*parts])
    if _adds_in_sequence(flat.device):
        flat = flat.double()  # added one after another, 8 million equal products are 0.4 % off in float32
    else:
        flat = flat.float()
    return torch.dot(flat, flat).double().reshape(1)


def _rounding_of_a_norm(part: Tensor, longest: int) -> float:
    """How far torch's norm of a gradient of this dtype may be off, relative; ``longest``: elements of a gradient."""
    rounding = float(torch.finfo(part.dtype).eps) / 2
    if _adds_in_sequence(part.device):
        rounding += longest / 8 * _SINGLE / 4  # in 8 lanes of float32
    return rounding


@cache
def _adds_in_sequence(device: torch.device) -> bool:
    """Whether torch adds a tensor's squares in few lanes, one after another, as its code for processors does.

    Cards add in short chunks. What is no processor is measured once, on a million equal numbers: a sequence is off by
    2e-3 there, chunks by less than 1e-6. Waits for the device.
    """
    if device.type == "cpu":
        return True
    numbers = torch.full((1,), 0.1, device=device).expand(1 << 20)
    exact = float(torch.tensor(0.1)) * math.sqrt(len(numbers))
    return not math.isclose(float(torch.linalg.vector_norm(numbers)), exact, rel_tol=1e-5)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
