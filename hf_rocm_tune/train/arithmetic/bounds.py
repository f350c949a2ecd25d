"""How far a right product may be from its checksum: rounding, derived from dtypes and shapes, and what a check costs.

Freivalds' check: with a random ``v`` and ``c = W^T v``, computed on the host from the weight's verified bytes, each row
of ``y = x W^T`` must have ``y . v = x . c`` up to rounding; in backward ``dX . u = dY . r`` with ``r = W u``. Each side
has three vectors, one of signs and two of normal numbers; a wrong product must escape all.

The rounding errors ``e_i`` of row i do not depend on v, so by Hoeffding's inequality ``|v . e_i| > t ||e_i||`` has at
most the probability ``2 exp(-t^2 / 2)``: 4e-16 for t = 8.5. ``||e_i||`` is at most

    u ||y_i||                          the output is rounded to its dtype (unit roundoff u); twice with a separate bias
    2^-24 sqrt(K) ||x_i|| ||W||        K float32 additions with roundings of random sign (Higham and Mary 2019)
    u ||x_i|| max_k ||W_k||            8 bit, or 4 bit in another dtype than that of the checksums: the dequantised
                                       weight is rounded (W_k: column, in backward row)
    ||W|| max|x_i| / 254               8-bit layers, forward: the input is rounded to 1/127 of its largest value

(Frobenius norm), and the check's own products add terms of the second kind. An adapter that PEFT adds to the weight,
W + s B A, adds ``s A^T B^T v`` to c, ``s B A u`` to r, its norms to those of W, and has the third term twice. A 4-bit
weight that bitsandbytes has dequantised is checked by itself: each row times the vectors against `r`, within
``t 2^-23 sqrt(K)`` of its norm. The forward product dequantises within its kernel: there a wrong block must exceed the
product's own bound.

A `level` below 1 tightens the bound to four times a layer's largest clean residual; of float32 products, whose error is
that of their sums, to four times what it would be with other data: sums of K products that all have one sign round
sqrt(2 K / 3) times as much as sums that stay small.

Always found is a single element that is off by more than the bound B (3.4 % of its row's norm in bfloat16, 0.4 % in
float16; 0.007 % of a dequantised row of 4,096); an error of norm E spread over a row escapes with a probability of
about (0.8 B / E)^3, one in r rows with the r-th power of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm_tune.models.experts import CHECKED_AT_ONCE

SHARE = 0.007
"""Of a step's time, as estimated by `share_of_step`, that the sampled checks may take."""
DEVIATIONS = 8.5
"""The ``t`` of the module's description."""
VECTORS = 3
"""Random vectors of each side."""
CHUNK = CHECKED_AT_ONCE
"""Elements of an activation that are widened to float32 at once."""
FLOAT32 = 2.0**-24
"""Unit roundoff of float32."""
UNDERFLOW = 2.0**-63
"""The square of a smaller number may be zero in a norm."""

# Of an RX 7900 XT: dense bfloat16 operations and bytes of memory a second, as achieved, not peak.
_OPERATIONS, _BYTES = 50e12, 640e9
# Of a bfloat16 activation: read for its norm and to widen it (2 + 2), written, read (4 + 4).
_BYTES_AN_ELEMENT = 12


class Bound(NamedTuple):
    """Of ``|y_i . v - x_i . c|``: a ||x_i|| + b ||y_i|| + c + q max|x_i|; rows with ||x_i|| >= limit may overflow."""

    a: float
    b: float
    c: float
    q: float
    limit: float


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a result, including that of the operands where float32 products round them first."""
    if dtype == torch.float32:
        by_precision = {"highest": FLOAT32, "high": 2.0**-10, "medium": 2.0**-7}
        return by_precision[torch.get_float32_matmul_precision()]
    return torch.finfo(dtype).eps / 2


def share_of_step(columns: Sequence[tuple[int, int]], experts: Sequence[int] | None = None) -> float:
    """Time of checking every product of these layers, as a share of the products' own time, by bytes and operations.

    ``experts``: of each layer, how many of them a token is given to; 0 for those without, whose checks cost half.
    """
    checks = products = 0.0
    for (into, out), chosen in zip(columns, experts or [0] * len(columns), strict=True):
        checks += (2 * chosen or 1) * _BYTES_AN_ELEMENT * (into + out) / _BYTES
        products += (chosen or 1) * 2 * into * out / _OPERATIONS
    return checks / products


def random_vectors(size: int, generator: torch.Generator) -> Tensor:
    """Signs, which miss no single wrong element, and normal numbers, which tell swapped columns apart; [size, 3]."""
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return torch.cat([signs[:, None], torch.randn(size, VECTORS - 1, generator=generator)], dim=1)


def weight_residuals(weight: Tensor, vectors: Tensor, checksum: Tensor) -> Tensor:
    """Of each row of a dequantised weight the largest of its residuals over its bound, float32 [rows]."""
    rows_at_once = max(1, CHUNK // weight.shape[1])
    bound = DEVIATIONS * FLOAT32 * 2 * math.sqrt(weight.shape[1])
    parts = []
    for begin in range(0, len(weight), rows_at_once):
        wide = weight[begin : begin + rows_at_once].float()
        residual = torch.addmm(checksum[begin : begin + rows_at_once], wide, vectors, beta=-1).abs_().amax(1)
        length = torch.linalg.vector_norm(wide, dim=1)
        allowed = length.mul_(bound).add_(torch.finfo(torch.float32).tiny)
        parts.append(residual.div_(allowed))
    return torch.cat(parts)
