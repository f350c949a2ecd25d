"""Inputs of the attention check, with what comes out of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.doctor.measured.attention_bounds import NAMES, attention
from hf_rocm_tune.doctor.measured.rounding import FLOAT32_ROUNDOFF, Reference, spread

_SCALE = 0.5
"""Of queries and keys: larger ones make the bound of the probabilities wider than the outputs are large."""
_SHARP = 16.0
_SHARP_ERROR = 2.0**-14


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

    Sharp rows of exact values; then a causal one of odd length with heads last (ROCm/pytorch#3230: wrong where V is not
    contiguous), one with a padding mask (pytorch#147460: wrong with a mask), and grouped heads.
    """
    yield _sharp(dtype, generator)
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
    query, upstream = (spread((batch, heads, length, dim), dtype, generator, scale=s) for s in (_SCALE, 1.0))
    key, value = (spread((batch, key_heads, length, dim), dtype, generator, scale=s) for s in (_SCALE, 1.0))
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

    The score of the key that belongs to a query is 128, that of any other below 100, so all other probabilities are
    below exp(-28), which is nothing beside 1 in any of the dtypes. Values and gradients are small integers. What is
    left is the error of ``exp(score - log sum)`` in float32: with a score of 128, at most 128 log2(e) 2e, below 2^-14.
    """
    length, dim = 96, 64
    key = torch.randint(0, 2, (1, 2, length, dim), generator=generator).double() * 2 - 1
    order = torch.randperm(length, generator=generator)
    query = _SHARP * key[:, :, order]
    value, upstream = (
        torch.randint(1, 9, (1, 2, length, dim), generator=generator).double()
        * (torch.randint(0, 2, (1, 2, length, dim), generator=generator) * 2 - 1)
        for _ in range(2)
    )
    back = order.argsort()
    rights = (value[:, :, order], torch.zeros_like(query), torch.zeros_like(key), upstream[:, :, back])
    moved = _SHARP_ERROR * (upstream.abs() * value[:, :, order].abs()).sum(-1, keepdim=True) / dim**0.5
    bounds = (
        64 * FLOAT32_ROUNDOFF * rights[0].abs(),
        moved.expand_as(query).contiguous(),
        _SHARP * moved[:, :, back].expand_as(key).contiguous(),
        _SHARP_ERROR * rights[3].abs(),
    )
    right = {name: Reference(*both) for name, both in zip(NAMES, zip(rights, bounds, strict=True), strict=True)}
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    return Case("one key for each query", inputs, upstream.to(dtype), right)
