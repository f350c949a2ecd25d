"""Casts between float32, bfloat16 and float16, made on the device from a verified source, against those of the CPU.

Weights are cast on the device after they were verified, so a conversion kernel that is wrong would come after the last
digest (pytorch#16448 was one that gave zeros). Every 16-bit pattern is cast, and float32 with every exponent and sign;
sizes are odd and views unaligned, because vectorised kernels treat those apart.

NaN count as equal whatever their payload: processors choose that differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Mover

PAIRS = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
)
_PATTERNS = 1 << 16
_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor[1:],
    lambda tensor: tensor[3:-2],
    lambda tensor: tensor[::2],
    lambda tensor: tensor[5:6],
    lambda tensor: tensor[: tensor.numel() // 7 * 7].view(7, -1).t(),
)


@dataclass(kw_only=True)
class Casts:
    """How many casts were compared, elements in all, and elements that differ from the CPU's, with the first pair."""

    compared: int = 0
    elements: int = 0
    wrong: int = 0
    example: str | None = None

    @property
    def good(self) -> bool:
        """Whether no element differs."""
        return self.wrong == 0


def compare_casts(device: torch.device, *, seed: int) -> Casts:
    """Cast on the device and on the CPU, and compare bit for bit.

    Raises:
        CorruptionError: a source did not arrive.
    """
    found = Casts()
    with Mover(device) as mover:
        for source, target in PAIRS:
            for values in _sources(source, seed):
                arrived = mover.move(values, name=f"{source} values")
                for view in _VIEWS:
                    _compare(view(arrived).to(target).cpu(), view(values).to(target), f"{source} to {target}", found)
    return found


def _sources(dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """Every 16-bit pattern, also as the upper half of a float32 with random lower halves; once of an odd length."""
    patterns = torch.arange(_PATTERNS, dtype=torch.int32)
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(seed)
        lower = torch.randint(0, _PATTERNS, (4, _PATTERNS), generator=generator, dtype=torch.int32)
        # Lower halves that decide how the cut-off part is rounded: nothing, just below, at and just above the middle.
        edges = torch.tensor([[0], [0x7FFF], [0x8000], [0x8001]], dtype=torch.int32).expand(4, _PATTERNS)
        bits = (patterns << 16 | torch.cat((lower, edges))).flatten()
        yield bits.view(dtype)
        yield bits[:-1].view(dtype)
    else:
        bits16 = patterns.to(torch.int16)
        yield bits16.view(dtype)
        yield bits16[:-1].view(dtype)


def _compare(found: Tensor, right: Tensor, pair: str, casts: Casts) -> None:
    integers = torch.int32 if right.element_size() == 4 else torch.int16
    same = found.contiguous().view(integers) == right.contiguous().view(integers)
    wrong = ~(same | (found.isnan() & right.isnan()))
    casts.compared += 1
    casts.elements += right.numel()
    casts.wrong += int(wrong.sum())
    if casts.example is None and bool(wrong.any()):
        casts.example = f"{pair}: {float(found[wrong][0])} instead of {float(right[wrong][0])}"
