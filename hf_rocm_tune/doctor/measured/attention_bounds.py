"""Attention and its gradients in float64, with the rounding bound of every element of an implementation that is right.

A right implementation may round every intermediate result once to the dtype of its inputs (scaled queries and keys,
scores, probabilities, the gradients of both) and takes sums in float32, in any order. From that, with u the unit
roundoff of the dtype, e that of float32, A(n) `rounding.accumulation` and |.| elementwise:

    scores          S = s Q K'              |dS| <= a = (3u + A(d) + 3e) s |Q||K|' + 4e (|S| + max|S|)
    probabilities   P = exp(S) / sum exp(S) |dP| <= E = P r + t,  r = exp(a + b + A(n) + 64e + u + u^2) - 1
    output          O = P V                 |dO| <= E|V| + A(2n) (P + E)|V|
    gradient of V   P' G                    |.|  <= E'|G| + A(2n) (P + E)'|G|
    of P            H = G V'                exact, see below
    of S            F = P o (H - D), D the row sums of P o H, or of G o O, which is the same
                    |dD| <= c = sum(E o |H|) + |G| . (A(2n) (P + E)|V| + u (|O| + |dO|) + t)
                                + (A(d) + A(n)) (|G| . |O| + sum P o |H|) + u |D|
                    |dF| <= f = E o w + P o c + 3u (P + E) o w + t,  w = |H - D| + c
    of Q            s F K                   |.|  <= s (f + (A(2n) + 2u + 3e) (|F| + f)) |K|;  of K likewise

b is log sum(P exp(a)), the most by which a row's sum of exponentials is wrong (with weights P, the mean of exp(-a) is
at least one over the mean of exp(a)). 64e: exponentials of fused kernels are good to 20 ulp (torch's own for CPUs), and
a running maximum rescales; t, the smallest normal number of the dtype: what is below it may be flushed to zero. In c,
what an error of P does to G . O is what it does to sum(P o H), because G . (dP V) is sum(dP o H). H is exact because
values and upstream gradients have to be signs: their products are integers of at most the head size. At last
`rounding.stored` adds what storing the result takes. The terms are standard first-order analysis (Higham 2002, chapter
3); their composition is this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.rounding import FLOAT32_ROUNDOFF, Reference, accumulation, roundoff, stored

NAMES = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


def attention(
    query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, hidden: Tensor, dtype: torch.dtype
) -> dict[str, Reference]:
    """Output and the three gradients.

    Args:
        query, upstream: ``(batch, heads, length, dim)``, float64 on the CPU; upstream of ones and minus ones.
        key, value: the same; with fewer heads, each serves as many query heads in a row as that takes. The values are
            ones and minus ones, too.
        hidden: bool ``(length, length)`` or broadcastable: what a query does not see. Every row sees something.
        dtype: of the implementation's inputs and results.

    Returns:
        By the names of `NAMES`.
    """
    assert bool((value.abs() == 1).all()) and bool((upstream.abs() == 1).all()), "signs, or H is not exact"
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    parts = dict(zip(NAMES, _parts(query, key, value, upstream, hidden, dtype), strict=True))
    for name in NAMES[2:] if groups > 1 else ():
        parts[name] = _summed(parts[name], groups, dtype)
    return parts


def _parts(
    query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, hidden: Tensor, dtype: torch.dtype
) -> Iterator[Reference]:
    length, dim = query.shape[-2:]
    u, e, tiny, scale = roundoff(dtype), FLOAT32_ROUNDOFF, torch.finfo(dtype).tiny, 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.mT
    a = (3 * u + accumulation(dim) + 3 * e) * scale * (query.abs() @ key.abs().mT)
    a = a + 4 * e * (scores.abs() + scores.abs().amax(-1, keepdim=True))
    p = scores.masked_fill(hidden, -math.inf).softmax(-1)
    b = (p * a.exp()).sum(-1, keepdim=True).log()
    p_error = p * torch.expm1(a + b + accumulation(length) + 64 * e + u + u * u) + tiny * ~hidden
    sums = accumulation(2 * length)

    out = p @ value
    summed = sums * (p + p_error) @ value.abs()
    out_error = p_error @ value.abs() + summed
    yield Reference(out, stored(out, out_error, dtype))

    h = upstream @ value.mT
    d = (p * h).sum(-1, keepdim=True)
    kept = summed + u * (out.abs() + out_error) + tiny
    sizes = (upstream.abs() * out.abs()).sum(-1, keepdim=True) + (p * h.abs()).sum(-1, keepdim=True)
    d_error = (p_error * h.abs()).sum(-1, keepdim=True) + (upstream.abs() * kept).sum(-1, keepdim=True)
    d_error = d_error + (accumulation(dim) + accumulation(length)) * sizes + u * d.abs()
    width = (h - d).abs() + d_error
    f = p * (h - d)
    f_error = p_error * width + p * d_error + 3 * u * (p + p_error) * width + tiny * ~hidden
    last = f_error + (sums + 2 * u + 3 * e) * (f.abs() + f_error)
    for gradient, error in (
        (scale * f @ key, scale * last @ key.abs()),
        (scale * f.mT @ query, scale * last.mT @ query.abs()),
        (p.mT @ upstream, p_error.mT @ upstream.abs() + sums * (p + p_error).mT @ upstream.abs()),
    ):
        yield Reference(gradient, stored(gradient, error, dtype))


def _summed(part: Reference, groups: int, dtype: torch.dtype) -> Reference:
    """Gradients of a head that serves several query heads: the sum over them, every partial sum rounded."""

    def over_groups(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, groups)).sum(2)

    size = over_groups(part.right.abs() + part.bound)
    return Reference(over_groups(part.right), over_groups(part.bound) + groups * roundoff(dtype) * size)
