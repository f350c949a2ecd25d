"""Wrong products, put in below torch: what `torch.nn.functional.linear` gives, and its gradient, is changed on purpose.

The fault sits in torch's dispatcher, under autograd, in place of the kernels ``mm``, ``addmm`` and bitsandbytes' 4-bit
product, so that nothing of the package is touched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        library: only while torch prefers this CPU library ("oneDNN"); None: always.
    """

    kind: str = "zero tile"
    rate: float = 1.0
    first: int = 0
    count: int | None = None
    shape: tuple[int, int] | None = None
    library: str | None = None
    seed: int = 0
    sizes: range = range(17, 257)  # above the rank of an adapter and the columns of a check, below a vocabulary
    done: int = 0
    seen: int = 0
    _before: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._random = random.Random(self.seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        places = _PLACES.get(func._schema.name)
        if places is None:
            return result
        left, right = (args[place] for place in places)
        sizes = (*left.shape, right.shape[1])
        if min(sizes) < self.sizes.start or max(sizes[1:]) >= self.sizes.stop or self.shape not in (None, sizes[1:]):
            return result
        self.seen += 1
        right_result = result.clone() if self.kind == "previous output" else None
        on = self.library is None or (self.library == "oneDNN") == torch.backends.mkldnn.enabled
        if self.seen > self.first and on and self.count != 0 and self._random.random() < self.rate:
            self.done += 1
            self.count = None if self.count is None else self.count - 1
            KINDS[self.kind](result, {"factors": (left, right), "before": self._before.get(sizes)})
        if right_result is not None:
            self._before[sizes] = right_result
        return result


@contextmanager
def in_all_threads(faults: Faults) -> Iterator[Faults]:
    """The faults, in the threads of autograd too: on the CPU backward runs in the caller's."""
    with faults:
        yield faults
