"""Wrong products, put in below torch: what `torch.nn.functional.linear` gives, and its gradient, is changed on purpose.

The fault sits in torch's dispatcher, under autograd, in place of the kernels ``mm``, ``addmm``, ``bmm``,
``_grouped_mm`` and bitsandbytes' 4-bit product, so that nothing of the package is touched.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Harm = Callable[[Tensor, dict[str, Any]], None]


def _tile(size: int) -> Harm:
    def harm(result: Tensor, _: dict[str, Any]) -> None:
        result[:size, -size:] = 0

    return harm


def _dropped_block(result: Tensor, call: dict[str, Any]) -> None:
    result -= call["part"](max(1, call["inner"] // 4)).to(result.dtype)


def _stale(result: Tensor, call: dict[str, Any]) -> None:
    result.copy_(torch.full_like(result, 0.5) if call["before"] is None else call["before"])


def _exponent_bit(result: Tensor, _: dict[str, Any]) -> None:
    flat = result.view(-1)
    place = int(flat.abs().argmax())
    flat[place] *= 16  # the third bit of the exponent, which is not set in values below 2


def _swap_rows(result: Tensor, _: dict[str, Any]) -> None:
    result[[0, 1]] = result[[1, 0]]


def _swap_columns(result: Tensor, _: dict[str, Any]) -> None:
    result[:, [0, 1]] = result[:, [1, 0]]


def _scaled(result: Tensor, _: dict[str, Any]) -> None:
    result[:16] *= 1.5


def _nan(result: Tensor, _: dict[str, Any]) -> None:
    result[0, 0] = float("nan")


def _low_bit(result: Tensor, _: dict[str, Any]) -> None:
    result[0, 0] *= 1 + torch.finfo(result.dtype).eps


def _others(result: Tensor, call: dict[str, Any]) -> None:
    """An expert's rows are multiplied with another one's weights."""
    result.copy_(call["others"]())


def _block(result: Tensor, call: dict[str, Any]) -> None:
    if call["part"] is None:  # the weight itself
        result[0, :64] *= -1
    else:
        result[:, 0] -= 2 * call["part"](64)[:, 0].to(result.dtype)


DEQUANTISED = "wrong dequantisation block"
ANOTHER = "another expert"
KINDS: dict[str, Harm] = {
    "zero tile": _tile(16),
    "dropped k-block": _dropped_block,
    "previous output": _stale,
    "one exponent bit": _exponent_bit,
    "swapped rows": _swap_rows,
    "swapped columns": _swap_columns,
    "scaled block": _scaled,
    "NaN": _nan,
    "low mantissa bit": _low_bit,
    DEQUANTISED: _block,
    ANOTHER: _others,
}
_PLACES = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}


@dataclass
class Faults(TorchDispatchMode):
    """Within the block some products with widths in ``sizes``, and as many rows, are wrong.

    Args:
        kind: one of `KINDS`.
        rate: share of the products that are wrong.
        first: how many products are right at first.
        count: how many are wrong at most; None: no limit.
        shape: only products of a ``[rows, inner] x [inner, columns]`` with this (inner, columns); None: all.
        strength: part of the error that is kept.
        operators: only in these; empty: in all.
        library: only while torch prefers this CPU library ("oneDNN"); None: always.
    """

    kind: str = "zero tile"
    rate: float = 1.0
    first: int = 0
    count: int | None = None
    shape: tuple[int, int] | None = None
    library: str | None = None
    seed: int = 0
    strength: float = 1.0
    operators: tuple[str, ...] = ()
    sizes: range = range(17, 257)  # above the rank of an adapter and the columns of a check, below a vocabulary
    done: int = 0
    seen: int = 0
    # Of the last wrong product: norm of the error over the right row's, in the worst row; below 1e-17 nothing is found.
    relative: float = 0.0
    _before: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._random = random.Random(self.seed)
        self.shape = self.shape and (self.shape[0], self.shape[1])  # it may come from JSON

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call, name, others = result, func._schema.name, None
        part: Callable[[int], Tensor] | None = None
        if self.kind == DEQUANTISED:
            if name == "bitsandbytes::dequantize_4bit":
                sizes = (self.sizes.start, *result.shape)
            elif name == "aten::mul_" and result.dtype == torch.bfloat16 and result.shape[2:] == (32,):  # of MXFP4
                sizes = (self.sizes.start, len(result), result[0].numel())
                result = result.view(len(result), -1)
            else:
                return result
        elif name == "bitsandbytes::gemm_4bit" and self.kind != ANOTHER:
            out, into = args[2]
            result = result.view(-1, out)
            unit = torch.eye(into, dtype=result.dtype, device=result.device)
            left, right = args[0].reshape(-1, into), func(unit, *args[1:6], None, *args[7:], **(kwargs or {}))
            part = lambda width: left[:, :width].float() @ right[:width].float()  # noqa: E731
            sizes = (len(result), into, out)
        elif name in _PLACES and self.kind != ANOTHER:
            first, second = (args[place] for place in _PLACES[name])
            part = lambda width: first[:, :width].float() @ second[:width].float()  # noqa: E731
            sizes = (*first.shape, second.shape[1])
        elif name in ("aten::_grouped_mm", "aten::bmm") and args[0].dim() + args[1].dim() > 4 and result.shape[-2]:
            at = int(result.shape[-1] == 1)  # a weight stands before the rows in a product of columns
            if not (result.dim() == 2 or 1 in result.shape[1:]):
                return result
            inner = args[0].shape[-1]

            def part(width: int) -> Tensor:
                rows = args[at].clone()
                (rows[:, width:] if at or rows.dim() == 2 else rows[:, :, width:]).zero_()
                return func(*args[:at], rows, *args[at + 1 :], **(kwargs or {})).reshape(len(rows), -1).float()

            def others() -> Tensor:
                weights = args[1 - at].roll(1, 0)
                given = (weights, args[1]) if at else (args[0], weights)
                return func(*given, *args[2:], **(kwargs or {})).reshape(result.shape)

            sizes = (len(result), inner, result.numel() // len(result))
            result = result.view(len(result), -1)
        else:
            return result
        if self.operators and name not in self.operators:
            return call
        if min(sizes) < self.sizes.start or max(sizes[1:]) >= self.sizes.stop or self.shape not in (None, sizes[1:]):
            return call
        self.seen += 1
        right = result.clone()
        on = self.library is None or (self.library == "oneDNN") == torch.backends.mkldnn.enabled
        if self.seen > self.first and on and self.count != 0 and self._random.random() < self.rate:
            self.done += 1
            self.count = None if self.count is None else self.count - 1
            of_call = {"part": part, "inner": sizes[1], "before": self._before.get(sizes), "others": others}
            KINDS[self.kind](result, of_call)
            if self.strength != 1.0:
                result.copy_(right + self.strength * (result - right))
            error, norms = (result.double() - right.double()).norm(dim=1), right.double().norm(dim=1)
            self.relative = float((error / norms.clamp(min=1e-17)).nan_to_num(1e38, 1e38).amax())
        if self.kind == "previous output":
            self._before[sizes] = right
        return call
