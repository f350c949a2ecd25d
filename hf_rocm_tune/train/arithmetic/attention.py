"""Rows of torch's ``scaled_dot_product_attention``, computed again in float32 by plain products, with the run's masks;
and whether a ``topk``, as of a router of experts, has taken the best.

Not found: a wrong backward pass; attention with dropout; other attention functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.train.arithmetic.bounds import roundoff

_ROWS = 8  # of each attention call


def attention_error(
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The largest difference of some rows over what rounding explains, shape [], on the device; None with dropout.

    Arguments as of ``scaled_dot_product_attention``: ``query`` and ``result`` [batch, heads, rows, width]; ``key`` and
    ``value`` [batch, heads or fewer, keys, width].
    """
    if dropout_p:
        return None
    (batch, heads, rows, width), (_, shared, keys, _) = query.shape, key.shape
    picked = torch.linspace(0, rows - 1, min(_ROWS, rows), device=query.device).long()
    hidden = mask = None
    if is_causal:
        hidden = torch.arange(keys, device=query.device) > picked[:, None]
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, rows, keys)[:, :, picked]
    unit = roundoff(result.dtype)
    query = query[:, :, picked].to(result.dtype)  # as autocast does
    key = key.to(result.dtype)
    value = value.to(result.dtype)
    worst = []
    for head in range(shared):  # one at a time: in float32 the keys of a long row are large
        own = slice(head * heads // shared, (head + 1) * heads // shared)
        queries = query[:, own].float()
        keys_of_head = key[:, head, None].float()
        values = value[:, head, None].float()
        scores = queries @ keys_of_head.transpose(-1, -2) * (scale or width**-0.5)
        largest = scores.abs().amax(-1, keepdim=True)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, own], -math.inf)
        elif mask is not None:
            scores = scores + mask[:, own].float()
        weights = scores.softmax(-1)
        sees = scores.amax(-1, keepdim=True) > -3e4  # else: a row of padding
        allowed = 8 * unit * (1 + largest) * (weights @ values.abs()) + 1e-5 * values.abs().amax()
        difference = (result[:, own, picked].float() - weights @ values).abs()
        differs = difference != 0  # else 0 / 0, where all values are 0; NaN differs
        worst.append(torch.where(sees & differs, difference / allowed, 0.0).amax())
    return torch.stack(worst).amax()


class WatchedChoices(TorchFunctionMode):
    """Within the block, in this thread, each ``topk`` of numbers is looked over: `wrong_choice` goes to ``add``."""

    def __init__(self, add: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self._look_over(result, *args, **(kwargs or {}))
        return result

    def _look_over(
        self, result: Any, input: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any
    ) -> None:
        if not input.is_floating_point():
            return
        with torch.no_grad():
            values, chosen = result
            self._add(wrong_choice(chosen, values.detach(), input.detach(), dim, largest=largest))


def wrong_choice(chosen: Tensor, values: Tensor, scores: Tensor, dim: int, *, largest: bool) -> Tensor:
    """Whether a ``topk`` along ``dim`` left out something better, chose twice or gave other values.

    ``chosen``, ``values``: what it gave. Returns 1.0 or 0.0, shape [].
    """
    own = scores.gather(dim, chosen)
    other_values = (own != values).any()
    if not largest:
        own, scores = -own, -scores
    others = scores.scatter(dim, chosen, -math.inf).amax(dim)
    left_out_better = (others > own.amin(dim)).any()
    times = torch.zeros_like(scores, dtype=torch.int32).scatter_add_(dim, chosen, torch.ones_like(chosen).int())
    chosen_twice = (times > 1).any()
    wrong = left_out_better | chosen_twice | other_values
    return (wrong & ~scores.isnan().any()).float()
