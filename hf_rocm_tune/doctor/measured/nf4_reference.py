"""NF4 quantisation on the CPU, from its definition and without bitsandbytes.

A tensor is cut into blocks in memory order. Each is divided by its largest magnitude (``absmax``) and every quotient
replaced by the number of the nearest of 16 values, two numbers a byte, the first in the upper half. The values are
those of Dettmers and others 2023 (QLoRA, arXiv:2305.14314, appendix E). With double quantisation, the mean is taken off
the ``absmax``, and what is left is quantised in blocks of 256 to 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float64,
)
NEAR = 2.0**-18
"""How close to the middle of two values a quotient counts as undecided: it and the middle are rounded in float32."""


@dataclass(frozen=True)
class Quantised:
    """A quantised tensor.

    Attributes:
        packed: uint8, two elements a byte.
        absmax: float32, one a block.
        other: the bytes with the second nearest number where the quotient is undecided, and as ``packed`` elsewhere.
        values: float64, what the numbers stand for, in the shape of the tensor.
    """

    packed: Tensor
    absmax: Tensor
    other: Tensor
    values: Tensor


def quantise(tensor: Tensor, blocksize: int) -> Quantised:
    """Quantise a tensor whose size is a multiple of ``blocksize`` and that has no block of zeros.

    Args:
        tensor: of any floating dtype, on the CPU.
        blocksize: elements of a block.
    """
    blocks = tensor.double().reshape(-1, blocksize)
    absmax = blocks.abs().amax(1)
    quotients = (blocks / absmax[:, None]).reshape(-1)
    middles = (LEVELS[1:] + LEVELS[:-1]) / 2
    numbers = torch.bucketize(quotients, middles)
    gaps = (quotients[:, None] - middles).abs()
    closest = gaps.argmin(1)
    undecided = gaps.amin(1) <= NEAR
    neighbours = torch.where(numbers > closest, closest, closest + 1)
    others = torch.where(undecided, neighbours, numbers)
    values = (LEVELS[numbers].view(-1, blocksize) * absmax[:, None]).view(tensor.shape)
    return Quantised(_pack(numbers), absmax.float(), _pack(others), values)


def ternary(outputs: int, width: int, blocksize: int, generator: torch.Generator) -> Quantised:
    """A weight of 0, 1, 2, -1 and -2, at most 128 in a row not zero: sums up to 256 are exact in bfloat16.

    The numbers are those of the levels 0, 1 and -1, the scales 1 and 2.
    """
    shape = (outputs, width)
    signs = torch.randint(0, 2, shape, generator=generator) * 15
    ranks = torch.rand(shape, generator=generator).argsort(dim=1)
    numbers = torch.where(ranks < min(128, width // 2), signs, int(LEVELS.abs().argmin())).view(-1)
    absmax = 2.0 ** torch.randint(0, 2, (numbers.numel() // blocksize,), generator=generator)
    packed = _pack(numbers)
    return Quantised(packed, absmax, packed, values_of(packed, absmax, blocksize, shape))


def unpack(packed: Tensor) -> Tensor:
    """The numbers, int64, of packed bytes."""
    flat = packed.view(-1).long()
    return torch.stack((flat >> 4, flat & 15), 1).view(-1)


def accept_undecided(found: Tensor, quantised: Quantised) -> Tensor:
    """The right bytes, with every half that is undecided as it is in ``found``, where that is one of the two."""
    numbers, first, second = (unpack(packed) for packed in (found, quantised.packed, quantised.other))
    return _pack(torch.where(numbers == second, second, first))


def values_of(packed: Tensor, absmax: Tensor, blocksize: int, shape: tuple[int, ...]) -> Tensor:
    """float64 values of packed bytes."""
    return (LEVELS[unpack(packed)].view(-1, blocksize) * absmax.double()[:, None]).view(shape)


def _pack(numbers: Tensor) -> Tensor:
    pairs = numbers.view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] << 4) | pairs[:, 1]
