"""Block sums of gradients that an average must keep, and how far rounding may move them.

A bucket of gradients ``g`` is cut into blocks. Of each block are taken, in float64,

    P1 = sum(g[i])        P2 = sum(w[i] * g[i])        A = sum(|g[i]|)

with fixed weights ``-1 <= w[i] < 1``, all different within a block and neighbours far apart. Both projections are
linear, so those of an average over R ranks equal the average of the ranks' projections, but for rounding. P1 sees what
is lost, zeroed or added; P2 sees what changed places. Blocks are short (`block_elements`), because the bound below
grows with the block and a fault does not.

Gradients that are cast for the way between the ranks are projected as they are after the cast, which each rank makes
by itself: what is compared is what travels, and the rounding of the cast needs no allowance.

**The bound.** ``e`` is the spacing at 1 (`torch.finfo.eps`) of the dtype in which the ranks' gradients are added up,
twice what rounding to nearest may do, so it holds for any faithful rounding. An element of the average comes from R
divisions by R and R-1 additions, in any order. A division by a power of two is exact, so each summand passes through
``k = R-1`` (R a power of two) or ``k = R`` roundings, and the element is off by at most
``((1+e)^k - 1) * mean_r |g_r[i]|`` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). With
``|w| <= 1`` both projections of a block are off by at most ``((1+e)^k - 1) * mean_r A_r``. To that come

* ``3 R t`` an element for underflow: each input, quotient and partial sum may lose up to ``t``, the smallest normal
  number where an accelerator may flush denormals (float32, bfloat16), else the smallest denormal (float16);
* the rounding of the projections themselves: with n elements a block and ``u = 2^-53``, taking them costs at most
  ``(n+1) u A`` on each side, averaging them and the magnitudes ``(n+2R) u A`` more; ``(4n + 4R + 16) u A`` covers it
  as long as the first term is below A.

A block that holds NaN or an infinity has no bound: it is not compared.

Not seen: a wrong average within the bound. For float32 that is a change below ``5e-4`` of the mean magnitude of an
element, for bfloat16 (two ranks) below 2 of them, in a block of 4,096 and of 256 elements.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest import digest, digest_on_device

SHORT_BLOCK, LONG_BLOCK = 256, 4096
"""Elements a block, for dtypes of 16 bits and for wider ones."""
MAGNITUDE = 2
"""Column of `project` that holds the sum of magnitudes; the projections stand before it."""

_SLAB = 1 << 18
"""Elements converted to float64 at a time: 2 MiB, which stays in a processor's cache."""
_DEVICE_SLAB = 1 << 22


def block_elements(dtype: torch.dtype) -> int:
    """Elements of a block of gradients of this dtype."""
    return SHORT_BLOCK if dtype.itemsize < 4 else LONG_BLOCK


def project(flat: Tensor, *, wire: torch.dtype | None = None) -> Tensor:
    """Block sums of a bucket.

    Args:
        flat: floating point, 1-dimensional and contiguous, on any device.
        wire: dtype in which the ranks' gradients are added up, which decides the size of the blocks; that of `flat`
            unless given. `flat` is not cast to it.

    Returns:
        float64[blocks, 3] on the same device: sum, weighted sum, sum of magnitudes. The last block may be short.
    """
    size = block_elements(wire or flat.dtype)
    weights = _weights(size, flat.device)
    columns = torch.empty(-(-flat.numel() // size), 3, dtype=torch.float64, device=flat.device)
    step = min(_SLAB if flat.device.type == "cpu" else _DEVICE_SLAB, columns.shape[0] * size)
    scratch = torch.empty(step, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        slab = scratch[: -(-piece.numel() // size) * size]
        slab[: piece.numel()] = piece
        slab[piece.numel() :] = 0
        slab = slab.view(-1, size)
        rows = columns[start // size : start // size + slab.shape[0]]
        rows[:, :MAGNITUDE] = slab @ weights.t()
        rows[:, MAGNITUDE] = slab.abs_().sum(1)
    return columns


def rounding_bound(magnitude: Tensor, *, dtype: torch.dtype, ranks: int) -> Tensor:
    """How far a projection of an average may be from the average of the projections; see the module's description.

    Args:
        magnitude: float64[blocks], mean over the ranks of each block's sum of magnitudes.
        dtype: in which the gradients were averaged.
        ranks: over how many ranks.

    Returns:
        float64[blocks], in the unit of the gradients.
    """
    kind = torch.finfo(dtype)
    elements = block_elements(dtype)
    roundings = ranks - 1 if ranks & (ranks - 1) == 0 else ranks
    averaging = math.expm1(roundings * math.log1p(kind.eps))
    projecting = (4 * elements + 4 * ranks + 16) * 2.0**-53
    lost = kind.smallest_normal * (kind.eps if dtype == torch.float16 else 1.0)
    return magnitude * (averaging + projecting) + 3 * ranks * elements * lost


def digest_words(flat: Tensor) -> Tensor:
    """int64[2]: the digest's sums, on the device of ``flat``. Nothing is waited for on an accelerator."""
    if flat.device.type != "cpu":
        return digest_on_device(flat)
    found = digest(flat)
    return torch.tensor([found.s1, found.s2], dtype=torch.uint64).view(torch.int64)


@cache
def _weights(size: int, device: torch.device) -> Tensor:
    """float64[2, size]: ones, and multiples of the golden ratio modulo 1, stretched to [-1, 1). Exact everywhere."""
    index = torch.arange(1, size + 1, device=device)
    golden = (index * 40503 % 65536).to(torch.float64) / 32768 - 1  # 40503 = 2^16 / 1.618, odd: no value comes twice
    return torch.stack([torch.ones_like(golden), golden])
