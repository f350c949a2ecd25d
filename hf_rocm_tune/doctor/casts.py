"""Casts between float32, bfloat16 and float16 on the device and on the way to and from it, against those of the CPU.

Weights are cast on the device after they were verified, so a conversion kernel that is wrong would come after the last
digest (pytorch#16448 was one that gave zeros). A copy that changes the dtype is cast by the CPU when it is blocking and
by the device when it is not (torch's Copy.cu), so both are tried. Every 16-bit pattern is cast, and float32 with every
exponent and sign; sizes are odd and views unaligned, because vectorised kernels treat those apart.

NaN count as equal whatever their payload: processors choose that differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.raw_copies import Copies, RawCopies, wait_for

PAIRS = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
)
WAYS = (
    "on the device",
    "to the device, blocking",
    "to the device, non_blocking",
    "from the device, blocking",
    "from the device, non_blocking",
)

POISONED = -21.5
"""What stands where a cast goes; any value that is exact in all three dtypes will do."""

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


def compare_casts(device: torch.device, *, seed: int, copies: Copies | None = None) -> Casts:
    """Cast in every way of `WAYS` and on the CPU, and compare bit for bit.

    Args:
        device: ``cuda`` or ``cpu``.
        seed: of the lower halves of float32.
        copies: what casts; torch unless given.

    Raises:
        CorruptionError: a source did not arrive.
    """
    found, caster = Casts(), _Caster(device, copies or RawCopies())
    with Mover(device) as mover:
        for source, target in PAIRS:
            for values in _sources(source, seed):
                arrived = mover.move(values, name=f"{source} values")
                for view in _VIEWS:
                    right = view(values).to(target)
                    for way in WAYS:
                        cast = caster.cast(view(values), view(arrived), target, way)
                        _compare(cast, right, f"{source} to {target} {way}", found)
    return found


class _Caster:
    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._device, self._copies = device, copies

    def cast(self, host: Tensor, there: Tensor, dtype: torch.dtype, way: str) -> Tensor:
        """The same values from the host or from the device, cast in one of `WAYS`; on the host."""
        source = host if way.startswith("to") else there
        target = torch.full(
            source.shape, POISONED, dtype=dtype, device="cpu" if way.startswith("from") else self._device
        )
        words = f"{source.dtype} to {dtype} {way}"
        self._copies.copy(target, source, what=words, non_blocking=way.endswith("non_blocking"))
        wait_for(target, source)
        return target.cpu()


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
