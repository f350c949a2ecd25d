"""Products that a hook does not see: of a mixture's experts, and of linear layers with sharded weights.

Each row of a mixture is checked by the checksum of its expert. The hooks of a layer with sharded weights see gathered
weights, but sums over the ranks in place of its own products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.models import experts
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.arithmetic.products import AdapterSum, Call, Product, Side, unrecorded

AfterForward = Callable[[Product, Tensor, Tensor, Call], None]
"""Checks one product: the layer, ``x``, ``y``, and how it was computed."""

_DIRECTIONS: tuple[Side, Side] = "forward", "backward"
_MULTIPLY = {
    functional.linear, torch._grouped_mm, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__,
    torch.ops.transformers.grouped_mm_fallback, experts.multiply,
}  # fmt: skip


class _OwnOperand(NamedTuple):
    """An argument of a multiplication that is a weight of the module."""

    position: int  # 0 or 1
    layer: Product
    added: AdapterSum | None
    row_experts: Tensor | None  # of each row; None: as the module has chosen, or no mixture


class ProductsWithin(TorchFunctionMode):
    """Within a module's forward: products with its weights are checked, whichever function computes them.

    ``layers``: of the one module; ``after_forward`` is called with each of their products.
    """

    def __init__(self, layers: Sequence[Product], after_forward: AfterForward) -> None:
        super().__init__()
        self._layers = layers
        self._after_forward = after_forward
        self._weights: dict[int, tuple[Tensor, Product, AdapterSum | None]] = {}  # by their address
        self._chosen = torch.empty(0)  # experts of each token, flat

    def begin(self, module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Before ``module(hidden)``, or ``module(hidden, chosen experts [tokens, experts], their weights)``."""
        for layer in self._layers:
            if layer.experts:
                _, chosen, *_ = (*arguments, *keywords.values())
                self._chosen = chosen.detach().reshape(-1)
            weight = local(getattr(module, layer.key))  # as it is multiplied with: of PEFT's cache
            parametrised = getattr(module, "parametrizations", None)
            proxies = list(getattr(parametrised, layer.key, ()))
            if not proxies:
                self._weights[weight.data_ptr()] = weight, layer, None
            elif len(proxies) == 1 and (hasattr(proxies[0], "lhs") or hasattr(proxies[0], "delta_weight")):
                self._weights[weight.data_ptr()] = weight, layer, _adapter_sum(layer, proxies[0])
        self.__enter__()

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)
        self._weights.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[0].data_ptr() in self._weights:
            picked: Any = func(*args, **kwargs)
            picked.of_experts = args[0].data_ptr(), args[1].reshape(-1)
            return picked
        if func not in _MULTIPLY:
            return func(*args, **kwargs)
        own = self._own_operand(func, args)
        if own is None:
            return func(*args, **kwargs)
        bias = None
        if func is functional.linear and len(args) > 2:
            bias = args[2]
        layer = own.layer
        if bias is not None and layer.experts:
            return func(*args, **kwargs)
        at = 1 - own.position
        before, x, after = args[:at], args[at], args[at + 1 :]
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.view_as(x)  # its gradient is this product's alone
        shape = x.shape
        y = func(*before, x, *after, **kwargs)
        row_experts = own.row_experts
        if row_experts is None and layer.experts:
            row_experts = self._chosen.sort().values

        def again(operand: Tensor) -> Tensor:
            return cast(Tensor, func(*before, operand.view(shape), *after, **kwargs))

        gathered: tuple[Tensor, ...] = ()
        if layer.cut == "gathered":
            gathered = tuple(tensor for tensor in (args[own.position], bias) if tensor is not None)
        call = Call(again=again, experts=row_experts, added=own.added, biased=bias is not None, gathered=gathered)
        self._after_forward(layer, x, y, call)
        return y

    def _own_operand(self, func: Any, args: Sequence[Any]) -> _OwnOperand | None:
        """Which of the first two arguments of a multiplication is a weight of the module; None: neither is."""
        for position in (1, 0):
            weight = args[position]
            address, row_experts = getattr(weight, "of_experts", (weight.data_ptr(), None))
            if address not in self._weights:
                continue
            _, layer, added = self._weights[address]
            is_whole = weight.dim() == 3 or func is experts.multiply or bool(layer.cut)  # not a part of one expert
            if row_experts is not None or is_whole:
                return _OwnOperand(position, layer, added, row_experts)
        return None


# ---- what adapters add to the weights of experts ----------------------------------------------------------------


def _adapter_sum(layer: Product, proxy: Any) -> AdapterSum:
    """Of one adapter PEFT has the factors, from 0.21 on; of several at once, and before 0.21, the sum."""
    if not hasattr(proxy, "lhs"):
        return _of_sum(layer, proxy.delta_weight.detach())
    left, right, scaling = proxy.lhs.detach(), proxy.rhs.detach(), proxy.scaling
    if layer.transposed:
        left, right = right.mT, left.mT
    with unrecorded(layer.weight.device):
        b, a = scaling * left.float(), right.float()  # the sum is ``b @ a``
        forward, backward = layer.sides["forward"], layer.sides["backward"]
        by_column = (a * (b.mT @ b @ a)).sum(1)  # squares of the norms, [experts, in]
        by_row = (b * (b @ (a @ a.mT))).sum(2)
        return AdapterSum(
            factors=(left, right, scaling),
            checksums={
                "forward": forward.checksum + a.mT @ (b.mT @ forward.vectors),
                "backward": backward.checksum + b @ (a @ backward.vectors),
            },
            norm=by_column.sum(1).amax().sqrt(),
            largest=(by_column.amax().sqrt(), by_row.amax().sqrt()),
        )


def _of_sum(layer: Product, delta: Tensor) -> AdapterSum:
    if layer.transposed:
        delta = delta.mT
    with unrecorded(layer.weight.device):
        checksums = {side: layer.sides[side].checksum.clone() for side in _DIRECTIONS}
        norms, columns, rows = [], [], []
        for expert, part in enumerate(delta):  # one at a time: in float32 they take as much memory as the weights
            wide = part.float()
            checksums["forward"][expert] += wide.mT @ layer.sides["forward"].vectors
            checksums["backward"][expert] += wide @ layer.sides["backward"].vectors
            squares = wide.square()
            norms.append(squares.sum())
            columns.append(squares.sum(0).amax())
            rows.append(squares.sum(1).amax())
        return AdapterSum(
            factors=(delta, None, 1.0),
            checksums=checksums,
            norm=torch.stack(norms).amax().sqrt(),
            largest=(torch.stack(columns).amax().sqrt(), torch.stack(rows).amax().sqrt()),
        )
