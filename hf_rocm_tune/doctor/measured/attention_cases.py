"""Inputs of the attention check, with what comes out of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.attention_bounds import NAMES, attention
from hf_rocm_tune.doctor.measured.rounding import FLOAT32_ROUNDOFF, Reference, spread, stored

_SCALE = 0.25
"""Of queries and keys: larger ones make the bound of the probabilities wider than the gradients are large."""
_SHARP = 8.0
_LIBRARY = 64 * FLOAT32_ROUNDOFF
"""Error of an exponential and what is done with it in float32, see `attention_bounds`."""


@dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        name: what is special about it.
        inputs: query, key, value, each ``(batch, heads, length, dim)``, on the CPU.
        upstream: gradient of the output.
        options: of ``scaled_dot_product_attention``, without the mask.
        mask: bool, True is seen; None where there is none.
        right: what comes out, by the names of `NAMES`.
        heads_last: on the device, the tensors are views of ``(batch, length, heads, dim)``, as models have them.
    """

    name: str
    inputs: tuple[Tensor, Tensor, Tensor]
    upstream: Tensor
    right: dict[str, Reference]
    options: dict[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None
    heads_last: bool = False


def cases(dtype: torch.dtype, generator: torch.Generator, *, full: bool) -> Iterator[Case]:
    """The cases of one dtype.

    Three in which next to nothing is rounded; then a causal one of odd length with heads last (ROCm/pytorch#3230: wrong
    where V is not contiguous), one with a padding mask (pytorch#147460: wrong with a mask), and grouped heads.
    """
    yield _sharp(dtype, generator)
    yield _even(dtype, generator, of_queries=True)
    yield _even(dtype, generator, of_queries=False)
    yield _random("causal, length 62, heads last", (2, 3, 3, 62, 128), dtype, generator, causal=True, heads_last=True)
    yield _random("padded, length 77", (2, 2, 2, 77, 64), dtype, generator, padding=13)
    yield _random("causal, grouped heads", (1, 4, 2, 64, 64), dtype, generator, causal=True)
    if full:
        yield _random("causal, length 1024", (1, 2, 2, 1024, 128), dtype, generator, causal=True, heads_last=True)
        yield _random("causal, length 333, dim 80", (1, 2, 2, 333, 80), dtype, generator, causal=True)
        yield _random("length 512, dim 256", (1, 1, 1, 512, 256), dtype, generator)


def plain_case(dtype: torch.dtype, generator: torch.Generator) -> Case:
    """What training runs: causal, no mask, heads last; for finding out which backend takes it."""
    return _random("causal", (1, 2, 2, 128, 64), dtype, generator, causal=True, heads_last=True)


def _random(
    name: str,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    causal: bool = False,
    padding: int = 0,
    heads_last: bool = False,
) -> Case:
    batch, heads, key_heads, length, dim = sizes
    query_size, key_size = (batch, heads, length, dim), (batch, key_heads, length, dim)
    query, key = (spread(size, dtype, generator, scale=_SCALE) for size in (query_size, key_size))
    value, upstream = (_signs(size, generator).to(dtype) for size in (key_size, query_size))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if causal or padding else torch.zeros(1, 1).bool()
    if padding:
        # The first example is padded in front, as generation does it: its first rows see only themselves.
        hidden = hidden.expand(batch, 1, -1, -1).clone()
        hidden[0, :, :, :padding] = True
        hidden[0, :, range(padding), range(padding)] = False
    double = [tensor.double() for tensor in (query, key, value, upstream)]
    options: dict[str, Any] = {"is_causal": True} if causal else {}
    return Case(
        name,
        (query, key, value),
        upstream,
        attention(double[0], double[1], double[2], double[3], hidden, dtype),
        options | ({"enable_gqa": True} if heads != key_heads else {}),
        ~hidden if padding else None,
        heads_last,
    )


def _sharp(dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Every query sees exactly one key: what comes out is a permutation of the values, whatever the rounding.

    Half of each key is ones and half a row of a Hadamard matrix or its negative; of a query, minus eight times ones and
    eight times the row of its key. So the score of its own key is 0, by cancellation of numbers of one size, which no
    scaling or rounding of queries and keys disturbs, and that of any other is below -45, whose exponential is nothing
    beside 1 in any of the dtypes. Values are 1, 2 and their negatives and upstream gradients signs: products are exact.
    """
    length, half = 96, 64
    rows = torch.ones(1, 1, dtype=torch.float64)
    while rows.shape[0] < half:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    rows = torch.cat((rows, -rows))[torch.randperm(2 * half, generator=generator)[:length]]
    ones, order = torch.ones_like(rows), torch.randperm(length, generator=generator)
    size = (1, 2, length, 2 * half)
    key = torch.cat((ones, rows), 1).expand(size)
    query = _SHARP * torch.cat((-ones, rows[order]), 1).expand(size)
    value = _signs(size, generator) * torch.randint(1, 3, size, generator=generator)
    upstream = _signs(size, generator)
    back = order.argsort()
    rights = (value[:, :, order], torch.zeros(size).double(), torch.zeros(size).double(), upstream[:, :, back])
    moved = _LIBRARY * (upstream.abs() * value[:, :, order].abs()).sum(-1, keepdim=True) / (2 * half) ** 0.5
    bounds = (
        _LIBRARY * rights[0].abs(),
        moved.expand(size).contiguous(),
        _SHARP * moved[:, :, back].expand(size).contiguous(),
        _LIBRARY * rights[3].abs(),
    )
    right = {name: Reference(*both) for name, both in zip(NAMES, zip(rights, bounds, strict=True), strict=True)}
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    return Case("one key for each query", inputs, upstream.to(dtype), right)


def _even(dtype: torch.dtype, generator: torch.Generator, *, of_queries: bool) -> Case:
    """Every query sees all 64 keys alike, so that a gradient of queries or keys is rounded only once, at its end.

    Queries (or keys) are zero, so all probabilities are 1/64. Keys (or queries), values and upstream gradients are
    signs, and half of the values of each dimension are negative, so the output is zero. What goes back to the scores is
    an integer over 64, and its sum with signs an integer, exact in float32. Beside storing the result there is only the
    error of the probabilities in float32, ``exp(log 64)`` taken back.
    """
    length = dim = 64
    size = (1, 2, length, dim)
    signs, upstream = _signs(size, generator), _signs(size, generator)
    ranks = torch.rand(size, generator=generator).argsort(dim=2).argsort(dim=2)
    value = (ranks < length // 2).double() * 2 - 1
    scores = upstream @ value.mT / length
    nothing = torch.zeros(size, dtype=torch.float64)
    scale = 1 / dim**0.5
    gradient = scale * (scores @ signs if of_queries else scores.mT @ signs)
    # The probabilities' error changes what goes back by as much of itself, and the output, which is taken off, by 1/64
    # of it for each of the 64 dimensions.
    sizes = scores.abs() + 1
    slack = _LIBRARY * scale * (sizes if of_queries else sizes.mT) @ signs.abs()
    summed = upstream.mean(2, keepdim=True).expand(size).contiguous()
    known = Reference(gradient, stored(gradient, slack, dtype))
    none = Reference(nothing, torch.full_like(nothing, torch.finfo(dtype).tiny))
    rights = (
        Reference(nothing, torch.full_like(nothing, _LIBRARY + torch.finfo(dtype).tiny)),
        known if of_queries else none,
        none if of_queries else known,
        Reference(summed, stored(summed, torch.full_like(summed, _LIBRARY), dtype)),
    )
    query, key = (nothing, signs) if of_queries else (signs, nothing)
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    name = f"all keys alike, for the gradient of the {'queries' if of_queries else 'keys'}"
    return Case(name, inputs, upstream.to(dtype), dict(zip(NAMES, rights, strict=True)))


def _signs(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, size, generator=generator).double() * 2 - 1
