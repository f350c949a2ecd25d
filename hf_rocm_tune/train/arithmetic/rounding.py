"""How far rounding can move what a layer computes: every operation is rounded at random, as its dtype rounds.

`Rounding` multiplies each result of an operation, in forward and backward, by ``1 + u x`` with ``x`` uniform in [-1, 1]
and the unit roundoff ``u`` of the run's dtype. To a product over K columns it adds ``2^-24 sqrt(K) ||a_i|| ||b_j|| x``,
the rounding of its float32 sums (`bounds`, Higham and Mary 2019). How far a few such runs lie from one in float32 is
what all roundings together do to first order, carried through the layer's own derivatives (Monte Carlo arithmetic,
Parker 1997); for softmax, norms and gates no formula gives it. `compare` takes a multiple of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.train.arithmetic.bounds import FLOAT32
from hf_rocm_tune.transfer import tree_tensors

NORM, ROW, SCALE = 2.5, 5.0, 10.0
"""Multiples of what random rounding does: of a tensor's norm, of a row's, and of the scale of all of it."""
WIDE = 0.5
"""A bound above this share of a tensor's norm says nothing."""
_NEAR_OVERFLOW = 1 / 8  # of the largest number of a dtype
_SCALE_LEAST = 1 / 8  # of a norm's rounding: a scale's is estimated from few numbers
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "clone", "copy_", "_to_copy", "cat", "stack", "index_select", "index", "gather", "embedding", "where", "relu",
        "masked_fill", "masked_fill_", "zeros_like", "ones_like", "zero_", "fill_", "new_zeros", "zeros", "arange",
        "ones", "full", "full_like", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "neg",
        "abs", "amax", "max", "min", "sort", "topk", "repeat", "constant_pad_nd", "tril", "triu", "roll", "flip",
        "slice_backward", "select_backward", "new_full", "scalar_tensor", "maximum", "minimum", "clamp", "unbind",
    )
)  # fmt: skip
_ATTENTION = "scaled_dot_product_attention"
_TOPK = (torch.topk, Tensor.topk)
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))


class Rounding(TorchDispatchMode):
    """Within the block results of operations on the host are rounded at random; ``unit``: unit roundoff.

    ``least``: what the dtype rounds to zero; ``weights``: which are not written to.
    """

    def __init__(self, unit: float, least: float, seed: int, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.unit = unit
        self._least = least
        self._kept = frozenset(weight.untyped_storage().data_ptr() for weight in weights)
        self._random = torch.Generator().manual_seed(seed)

    def uniform(self, like: Tensor, size: float) -> Tensor:
        """Numbers between -size and size in the shape of a tensor."""
        return torch.empty_like(like, requires_grad=False).uniform_(-size, size, generator=self._random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in _MOVES:
            return result
        written = None
        if name.endswith("_") and args:
            written = args[0]
        given = [tensor for tensor in tree_tensors((args, kwargs)) if tensor is not written]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        for made in tree_tensors(result):
            if not made.is_floating_point() or not made.numel():
                continue
            memory = made.untyped_storage().data_ptr()
            if memory in known or memory in self._kept:  # a view
                continue
            made.mul_(self.uniform(made, self.unit).add_(1.0))
            if name in _PRODUCTS:
                self._round_sums(made, args[-2], args[-1])
            if self._least:
                made.add_(self.uniform(made, self._least))
        return result

    def _round_sums(self, made: Tensor, a: Tensor, b: Tensor) -> None:
        size = FLOAT32 * math.sqrt(a.shape[-1])
        rows = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
        columns = torch.linalg.vector_norm(b, dim=-2, keepdim=True)
        made.add_(self.uniform(made, size).mul_(rows).mul_(columns))


# ---- what a layer chooses ---------------------------------------------------------------------------------------

Key = tuple[str, tuple[int, ...]]
"""Name and shape of a choice by limits; those of one key are in order."""


def _bounds(_: Tensor, min: Any = None, max: Any = None) -> list[Any]:
    return [limit for limit in (min, max) if limit is not None]


def _hard_bounds(_: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> list[float]:
    del inplace
    return [min_val, max_val]


def _at(*limits: float) -> Callable[..., list[Any]]:
    """Always these limits, whatever the arguments."""
    return lambda *_, **__: list(limits)


_JUMPS: dict[str, Callable[..., list[Any]]] = {
    "relu": _at(0.0),
    "leaky_relu": _at(0.0),
    "threshold": lambda _, threshold, *__, **___: [threshold],
    "relu6": _at(0.0, 6.0),
    "hardtanh": _hard_bounds,
    "hardsigmoid": _at(-3.0, 3.0),
    "hardswish": _at(-3.0, 3.0),
}
"""The limits at which a function's derivative jumps, given its arguments."""
_LIMITS: dict[str, Callable[..., list[Any]]] = {
    **_JUMPS,
    "abs": _at(0.0),
    "clamp": _bounds,
    "clip": _bounds,
    "clamp_min": lambda _, min: [min],
    "clamp_max": lambda _, max: [max],
    **dict.fromkeys(("gt", "ge", "lt", "le"), lambda _, other: [other]),
}
_COMPARISONS = ("gt", "ge", "lt", "le")


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", "")).strip("_")


def _above_limits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """How far the numbers of a call lie above each of its function's limits; empty where it is not known."""
    if name not in _LIMITS or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return []
    x = args[0].detach()
    above = []
    for limit in _LIMITS[name](*args, **kwargs):
        if isinstance(limit, Tensor):
            limit = limit.detach()
        above.append(x - limit)
    return above


class Chosen(TorchFunctionMode):
    """Within the block, on the device, what each `topk` chooses is kept, and on which side of a limit numbers lie.

    Attributes:
        indices: of each `topk`.
        sides: bools, by function and shape: which numbers lie above a limit of `_LIMITS`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []
        self.sides: dict[Key, list[Tensor]] = defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name_of(func)
        sides = [above > 0 for above in _above_limits(name, args, kwargs or {})]  # before what writes in place
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.indices.append(result.indices.detach())
        if name in _COMPARISONS and sides:
            sides = [result if name in ("gt", "ge") else ~result]
        for side in sides:
            self.sides[name, tuple(side.shape)].append(side)
        return result


class OnHost(TorchFunctionMode):
    """Within the block attention is computed by plain products, and what is chosen is chosen as on the device.

    So a number that rounding moves past a limit, as of ReLU, gives no other derivative here than there.
    ``chosen``: what each `topk` chose there, in order, int64 on the host; ``sides``: as of `Chosen`, on the host.

    Attributes:
        scores: among what each `topk` chose here.
        above: how far the numbers lie above the limits here; as ``sides``.
    """

    def __init__(self, chosen: Sequence[Tensor], sides: Mapping[Key, Sequence[Tensor]] | None = None) -> None:
        super().__init__()
        self._chosen = list(chosen)
        self._sides = sides or {}
        self.scores: list[Tensor] = []
        self.above: dict[Key, list[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == _ATTENTION:
            return plain_attention(*args, **kwargs)
        if _name_of(func) in _LIMITS:
            return self._limited(func, _name_of(func), args, kwargs)
        if func in _TOPK:
            return self._topk(func, args, kwargs)
        return func(*args, **kwargs)

    def _topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What was chosen on the device, with the values of here."""
        own = func(*args, **kwargs)
        chosen = self._chosen[len(self.scores)]
        self.scores.append(args[0].detach())
        if chosen.shape != own.indices.shape:
            raise ValueError("other rows are chosen among on the host than on the device")
        dim = -1
        if "dim" in kwargs:
            dim = kwargs["dim"]
        elif len(args) > 2:
            dim = args[2]
        return torch.return_types.topk((args[0].gather(dim, chosen), chosen))

    def _limited(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The function of numbers that lie on the device's side of each limit."""
        sides = []
        for above in _above_limits(name, args, kwargs):
            key = (name, tuple(above.shape))
            known = self._sides.get(key, ())
            number = len(self.above.get(key, ()))
            if number >= len(known):
                if name in _JUMPS:
                    raise ValueError(f"the derivative of {name} jumps, and where is not known of the device")
                return func(*args, **kwargs)
            self.above.setdefault(key, []).append(above)
            sides.append((above, known[number]))
        if name in _COMPARISONS and sides:
            _, side = sides[0]
            return side if name in ("gt", "ge") else ~side
        moved = args[0]
        for above, side in sides:
            if above.shape == moved.shape:
                moved = _BesideLimit.apply(moved, above, side)
        is_in_place = getattr(func, "__name__", "").endswith("_") or kwargs.get("inplace")
        if not is_in_place:
            return func(moved, *args[1:], **kwargs)
        result = func(moved.clone(), *args[1:], **kwargs)
        return args[0].zero_().add_(result)

    def require_matched(self) -> None:
        """Raises where the device has made more choices of a kind than the host."""
        for key, above in self.above.items():
            if len(above) != len(self._sides[key]):
                raise ValueError(f"{key[0]} is called more often on the device than on the host")


class _BesideLimit(torch.autograd.Function):
    """Numbers on another side of a limit than ``side`` says are put beside it; their gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, above: Tensor, side: Tensor) -> Tensor:
        del ctx
        limit = x - above
        little = limit.abs() * 1e-6 + 1e-26
        beside = torch.where(side, limit + little, limit - little)
        return torch.where((above > 0) == side, x, beside)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0], None, None


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` without dropout by products and a softmax; shapes as there."""
    del dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = scale or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * factor
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


class LayerDifference(NamedTuple):
    """How far a tensor of the device lies from the host's; ratios over what rounding explains."""

    name: str
    norm: float = 0.0  # of all of it
    row: float = 0.0  # of its worst row
    scale: float = 0.0  # how much larger or smaller all of it is
    width: float = 0.0  # of the bound of the norm, relative to the norm; infinite: not judged

    @property
    def ratio(self) -> float:
        return max(self.norm, self.row, self.scale)


def compare(name: str, computed: Tensor, exact: Tensor, rounded: Sequence[Tensor], largest: float) -> LayerDifference:
    """How far a tensor that the device computed lies from the host's, in multiples of what rounding can do to it.

    The host has computed it exactly (float32), and several times with random rounding: how far those lie from the exact
    one is the noise. The device's error is divided by a multiple of the noise in three ways: over the whole tensor, in
    its worst row (of the last dim; a tensor of one dim is one row), and as a change of its scale.

    Args:
        name: of the tensor, in the result.
        computed: by the device.
        exact: by the host in float32, of the same shape.
        rounded: by the host with random rounding, once for each run.
        largest: finite number of the device's dtype. A tensor with numbers near it may have overflowed on the device,
            and is not judged: the result's bound is infinitely wide.
    """
    columns = max(exact.numel(), 1)
    if exact.dim() > 1:
        columns = exact.shape[-1]
    exact = exact.reshape(-1, columns)
    may_overflow = not bool((exact.abs() < _NEAR_OVERFLOW * largest).all())
    if not exact.numel() or may_overflow:
        return LayerDifference(name, width=math.inf)

    tiny = torch.finfo(torch.float32).tiny
    noise_of_runs = [run.reshape(-1, columns) - exact for run in rounded]
    row_norms_of_runs = torch.stack([torch.linalg.vector_norm(noise, dim=1) for noise in noise_of_runs])
    row_noise = row_norms_of_runs.square().mean(0).sqrt()  # the runs' root mean square, of shape [rows]
    total_noise = float(row_noise.norm())
    row_norm = torch.linalg.vector_norm(exact, dim=1)
    relative_noise = total_noise / max(float(row_norm.norm()), tiny)
    width = NORM * relative_noise

    error = computed.reshape(-1, columns).float() - exact
    if not bool(error.isfinite().all()):
        return LayerDifference(name, norm=math.inf, width=width)
    # A few runs may by chance have little noise in a row: its share of the whole tensor's is added.
    row_bound = ROW * (row_noise + relative_noise * row_norm)
    row_error = torch.linalg.vector_norm(error, dim=1)
    scale_noise = max(_change_of_scale(noise, exact) for noise in noise_of_runs)
    scale_bound = SCALE * max(scale_noise, _SCALE_LEAST * relative_noise)
    return LayerDifference(
        name,
        norm=float(error.norm()) / max(NORM * total_noise, tiny),
        row=float((row_error / row_bound.clamp_min(tiny)).amax()),
        scale=_change_of_scale(error, exact) / max(scale_bound, tiny),
        width=width,
    )


def _change_of_scale(error: Tensor, exact: Tensor) -> float:
    """By which share an error makes all of a tensor larger or smaller: its projection on the tensor."""
    square = exact.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return abs(float((error * exact).sum() / square))


def worst_choice(chosen: Tensor, scores: Tensor, rounded: Sequence[Tensor]) -> LayerDifference:
    """How much worse the experts that the device chose are than the host's best ones.

    ``scores``: over the last dim, of the host; ``rounded``: the same, rounded at random.
    """
    best = scores.topk(chosen.shape[-1], dim=-1).values
    taken = scores.gather(-1, chosen).sort(dim=-1, descending=True).values
    finite = best.isfinite() & taken.isfinite()
    lost = float(torch.where(finite, best - taken, 0.0).max())
    ratio = lost / _allowed(scores, rounded)
    chosen_twice = bool((chosen.sort(dim=-1).values.diff(dim=-1) == 0).any())
    if chosen_twice:
        ratio = math.inf
    return LayerDifference("the choice of experts", norm=ratio)


def worst_side(name: str, side: Tensor, above: Tensor, rounded: Sequence[Tensor]) -> LayerDifference:
    """How far beyond a limit numbers lie on the host which the device had on the other side of it.

    ``side``: whether a number lay above the limit on the device; ``above``, ``rounded``: how far above on the host.
    """
    on_other_side = (side != (above > 0)) & above.isfinite()
    beyond = float(torch.where(on_other_side, above.abs(), 0.0).max())
    return LayerDifference(f"the side of a limit of {name}", norm=beyond / _allowed(above, rounded))


def _allowed(exact: Tensor, rounded: Sequence[Tensor]) -> float:
    """How far numbers may lie apart, by the largest difference that random rounding makes."""
    noise = max(float((run - exact).abs().max()) for run in rounded)
    return max(NORM * noise, torch.finfo(torch.float32).tiny)
