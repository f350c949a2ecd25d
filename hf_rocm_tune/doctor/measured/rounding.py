"""Bounds of rounding errors, and inputs for which there are none.

With the unit roundoff ``u`` of a format (half the distance of 1 to the next number), every correctly rounded operation
has a relative error of at most ``u``, and n of them one after another of at most ``gamma(n) = n u / (1 - n u)``
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, lemma 3.1). A dot product of n terms, summed in
any order, is wrong by at most ``gamma(n)`` times the sum of the absolute values of its terms (there, equation 3.5).

Matrix units do not round every addition correctly. Measured on tensor cores (Fasi, Higham, Mikaitis, Pranesh 2021,
PeerJ CS 7:e330; Blanchard and others 2020, SIAM J. Sci. Comput. 42(3)): products of 16-bit floats are exact, p of them
are added at once to the float32 accumulator after all were aligned to the largest and cut off there, so that each of
the p + 1 addends and the sum lose at most ``2 u`` of the largest. Over n terms that is at most ``2 u n (1 + 2/p)`` of
the sum of absolute values, which is below ``4 u n`` for p >= 2. `accumulation` allows that much, so one bound serves
for scalar code and for matrix units. What RDNA3's units do exactly is not published; a unit that is worse than this
counts as wrong here.

Exact inputs leave no room at all: where every product and every partial sum, in whatever order, is an integer that the
narrowest format in use can hold, each correct implementation gives the same bits (`exact_factors`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps / 2
SMALLEST = 2.0**-6
"""Least magnitude of inputs: products of two are normal numbers in float16, which a device that flushes subnormal
numbers to zero handles like any other."""
_EXACT_FLOAT32 = 64


@dataclass(frozen=True)
class Reference:
    """What a result should be, in float64 on the CPU, and by how much each element may miss it."""

    right: Tensor
    bound: Tensor


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16``, without the package."""
    return str(dtype).removeprefix("torch.")


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a floating-point format: 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16."""
    return torch.finfo(dtype).eps / 2


def gamma(n: float, u: float) -> float:
    """Relative error of n operations in a row, each with a relative error of at most u."""
    assert n * u < 1, "too many operations for a bound"
    return n * u / (1 - n * u)


def accumulation(n: int) -> float:
    """Error of a sum of n products in float32, relative to the sum of their absolute values; see the module."""
    return gamma(4 * max(n, 1), FLOAT32_ROUNDOFF)


def stored(exact: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound of ``exact`` with an error of at most ``error``, after it was rounded to ``dtype``.

    A result below the smallest normal number may be flushed to zero.
    """
    return error + roundoff(dtype) * (exact.abs() + error) + torch.finfo(dtype).tiny


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Reference:
    """The product of two matrices, to be computed with float32 sums and stored as ``dtype``.

    Args:
        left: ``(..., m, k)`` float64 on the CPU, with the values that the device gets.
        right: ``(..., k, n)`` likewise.
        dtype: of the result.
    """
    exact = left @ right
    return Reference(exact, stored(exact, accumulation(left.shape[-1]) * (left.abs() @ right.abs()), dtype))


def spread(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normally distributed values of ``dtype`` with magnitudes of at least ``SMALLEST``."""
    values = torch.randn(shape, generator=generator) * scale
    return torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST).copysign(values), values).to(dtype)


def exact_factors(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors ``(m, k)`` and ``(k, n)`` of small integers whose product is exact in ``dtype``, in any order of sums.

    float32: integers of at most 64 in magnitude, so that sums stay below 2^24 for k up to 4096. float16 and bfloat16:
    ones and minus ones, in each row of the left factor at most as many as the format's largest run of integers (2048
    and 256), zeros elsewhere. int8: all values, for int32 sums.
    """
    if dtype is torch.int8:
        return tuple(  # type: ignore[return-value]
            torch.randint(-128, 128, shape, generator=generator, dtype=dtype) for shape in ((m, k), (k, n))
        )
    if dtype is torch.float32:
        assert k * _EXACT_FLOAT32**2 <= 1 / FLOAT32_ROUNDOFF, k
        span = (-_EXACT_FLOAT32, _EXACT_FLOAT32 + 1)
        return tuple(  # type: ignore[return-value]
            torch.randint(*span, shape, generator=generator).to(dtype) for shape in ((m, k), (k, n))
        )
    signs = [torch.randint(0, 2, shape, generator=generator) * 2 - 1 for shape in ((m, k), (k, n))]
    most = round(1 / roundoff(dtype))
    if k > most:
        ranks = torch.rand((m, k), generator=generator).argsort(dim=1)
        signs[0] = torch.where(ranks < most, signs[0], 0)
    return signs[0].to(dtype), signs[1].to(dtype)
