"""Wrong products, put in below torch: what `torch.nn.functional.linear` gives, and its gradient, is changed on purpose.

The fault sits in torch's dispatcher, under autograd, in place of the kernels ``mm``, ``addmm`` and bitsandbytes' 4-bit
product, so that nothing of the package is touched.
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
    left, right = call["factors"]
    width = max(1, left.shape[1] // 4)
    result -= (left[:, :width].float() @ right[:width].float()).to(result.dtype)


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


def _block(result: Tensor, call: dict[str, Any]) -> None:
    if call["factors"] is None:  # the weight itself
        result[0, :64] *= -1
    else:
        left, right = call["factors"]
        result[:, 0] -= 2 * (left[:, :64].float() @ right[:64, 0].float()).to(result.dtype)


DEQUANTISED = "wrong dequantisation block"
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
}
_PLACES = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}


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
    relative: float = 0.0  # of the last wrong product: norm of the error over the right row's, in the worst row
    _before: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._random = random.Random(self.seed)
        self.shape = self.shape and (self.shape[0], self.shape[1])  # it may come from JSON

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call, name = result, func._schema.name
        if name == "bitsandbytes::dequantize_4bit":
            if self.kind != DEQUANTISED:
                return result
            sizes, factors = (self.sizes.start, *result.shape), None
        elif name == "bitsandbytes::gemm_4bit":
            out, into = args[2]
            result = result.view(-1, out)
            unit = torch.eye(into, dtype=result.dtype, device=result.device)
            factors = args[0].reshape(-1, into), func(unit, *args[1:6], None, *args[7:], **(kwargs or {}))
            sizes = (len(result), into, out)
        elif name in _PLACES and self.kind != DEQUANTISED:
            left, weight = factors = tuple(args[place] for place in _PLACES[name])
            sizes = (*left.shape, weight.shape[1])
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
            KINDS[self.kind](result, {"factors": factors, "before": self._before.get(sizes)})
            if self.strength != 1.0:
                result.copy_(right + self.strength * (result - right))
            error, norms = (result.double() - right.double()).norm(dim=1), right.double().norm(dim=1)
            self.relative = float((error / norms.clamp(min=1e-300)).nan_to_num(1e38, 1e38).amax())
        if self.kind == "previous output":
            self._before[sizes] = right
        return call
