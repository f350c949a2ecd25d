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
"""Tolerances over the errors of random rounding: for a tensor's norm, for a row's, and for the scale of the tensor."""
WIDE = 0.5
"""A tolerance above this share of a tensor's norm says nothing."""
_NEAR_OVERFLOW = 1 / 8  # of the largest number of a dtype
_SCALE_LEAST = 1 / 8  # of the relative error of the norm: that of the scale is estimated from few numbers
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
    """The device's error in a tensor over the tolerance that rounding gives it: above 1 it is too large."""

    name: str
    norm: float = 0.0  # of the whole tensor
    row: float = 0.0  # of its worst row
    scale: float = 0.0  # of the share by which the whole tensor is too large or too small
    width: float = 0.0  # the tolerance of the norm, relative to the tensor's norm; infinite: the tensor is not judged

    @property
    def ratio(self) -> float:
        return max(self.norm, self.row, self.scale)


class _Tolerance(NamedTuple):
    """The largest error of a tensor that rounding explains."""

    norm: float  # of the whole error
    rows: Tensor  # of the error in each row, float32[rows]
    scale: float  # of the share by which the error makes the tensor larger or smaller
    relative: float  # `norm` over the norm of the tensor


def compare(name: str, computed: Tensor, exact: Tensor, rounded: Sequence[Tensor], largest: float) -> LayerDifference:
    """Compare a tensor that the device computed with the host's: its error over the tolerance for rounding.

    The host has computed the tensor in float32, and several times more with random rounding. How far those runs lie
    from the float32 one is what rounding does to this tensor; the tolerance is a multiple of it.

    Args:
        name: of the tensor, in the result.
        computed: by the device, in any float dtype.
        exact: by the host in float32, of the same shape. A row is its last dim; a tensor of one dim is one row.
        rounded: by the host with random rounding, one tensor for each run.
        largest: finite number of the device's dtype. A tensor with numbers near it may have overflowed on the device,
            and is not judged: the result's ``width`` is infinite.
    """
    exact = _rows(exact)
    is_far_from_overflow = bool((exact.abs() < _NEAR_OVERFLOW * largest).all())
    if not exact.numel() or not is_far_from_overflow:
        return LayerDifference(name, width=math.inf)
    rounding_errors = [_rows(run) - exact for run in rounded]
    tolerance = _tolerance(exact, rounding_errors)

    error = _rows(computed).float() - exact
    if not bool(error.isfinite().all()):
        return LayerDifference(name, norm=math.inf, width=tolerance.relative)
    row_errors = torch.linalg.vector_norm(error, dim=1)
    return LayerDifference(
        name,
        norm=float(error.norm()) / tolerance.norm,
        row=float((row_errors / tolerance.rows).amax()),
        scale=_change_of_scale(error, exact) / tolerance.scale,
        width=tolerance.relative,
    )


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of rows, [rows, columns]."""
    columns = max(tensor.numel(), 1)
    if tensor.dim() > 1:
        columns = tensor.shape[-1]
    return tensor.reshape(-1, columns)


def _tolerance(exact: Tensor, rounding_errors: Sequence[Tensor]) -> _Tolerance:
    """From the errors of several runs with random rounding; each, and ``exact``: float32[rows, columns]."""
    tiny = torch.finfo(torch.float32).tiny
    row_norms = torch.linalg.vector_norm(exact, dim=1)
    row_errors = torch.stack([torch.linalg.vector_norm(error, dim=1) for error in rounding_errors])  # [runs, rows]
    typical_row_errors = row_errors.square().mean(0).sqrt()  # root mean square of the runs, [rows]
    typical_error = float(typical_row_errors.norm())
    relative_error = typical_error / max(float(row_norms.norm()), tiny)
    # In a few runs a row may by chance have a small error: its share of the whole tensor's error is added.
    row_tolerances = ROW * (typical_row_errors + relative_error * row_norms)
    largest_change_of_scale = max(_change_of_scale(error, exact) for error in rounding_errors)
    scale_tolerance = SCALE * max(largest_change_of_scale, _SCALE_LEAST * relative_error)
    return _Tolerance(
        norm=max(NORM * typical_error, tiny),
        rows=row_tolerances.clamp_min(tiny),
        scale=max(scale_tolerance, tiny),
        relative=NORM * relative_error,
    )


def _change_of_scale(error: Tensor, exact: Tensor) -> float:
    """By which share an error makes all of a tensor larger or smaller: its projection on the tensor."""
    square = exact.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return abs(float((error * exact).sum() / square))


def worst_choice(chosen: Tensor, scores: Tensor, rounded: Sequence[Tensor]) -> LayerDifference:
    """How much lower the scores of the experts that the device chose are than the best ones, over the tolerance.

    Args:
        chosen: indices of the device's experts, int64[..., k] on the host.
        scores: of all experts, computed by the host, [..., experts].
        rounded: the same with random rounding, one tensor for each run.
    """
    best_scores = scores.topk(chosen.shape[-1], dim=-1).values
    chosen_scores = scores.gather(-1, chosen).sort(dim=-1, descending=True).values
    are_finite = best_scores.isfinite() & chosen_scores.isfinite()
    largest_loss = float(torch.where(are_finite, best_scores - chosen_scores, 0.0).max())
    ratio = largest_loss / _difference_tolerance(scores, rounded)
    is_any_chosen_twice = bool((chosen.sort(dim=-1).values.diff(dim=-1) == 0).any())
    if is_any_chosen_twice:
        ratio = math.inf
    return LayerDifference("the choice of experts", norm=ratio)


def worst_side(name: str, side: Tensor, above: Tensor, rounded: Sequence[Tensor]) -> LayerDifference:
    """How far beyond a limit (of ReLU, say) numbers lie on the host that the device had on its other side.

    Args:
        name: of the function that has the limit.
        side: whether the device's numbers lay above the limit, bool.
        above: how far the host's numbers lie above it, of the same shape; negative: below.
        rounded: the same with random rounding, one tensor for each run.
    """
    is_on_other_side = (side != (above > 0)) & above.isfinite()
    farthest = float(torch.where(is_on_other_side, above.abs(), 0.0).max())
    ratio = farthest / _difference_tolerance(above, rounded)
    return LayerDifference(f"the side of a limit of {name}", norm=ratio)


def _difference_tolerance(exact: Tensor, rounded: Sequence[Tensor]) -> float:
    """How far single numbers may lie apart: a multiple of the largest difference that random rounding makes."""
    largest_error = max(float((run - exact).abs().max()) for run in rounded)
    return max(NORM * largest_error, torch.finfo(torch.float32).tiny)
