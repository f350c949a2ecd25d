"""Products that a hook does not see: of a mixture's experts, and of linear layers with sharded weights.

Each row of a mixture is checked by the checksum of its expert. The hooks of a layer with sharded weights see gathered
weights, but sums over the ranks in place of its own products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

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


class ProductsWithin(TorchFunctionMode):
    """Within a module's forward: products with its weights are checked, whichever function computes them.

    ``layers``: of the one module; ``after_forward`` is called with each of their products.
    """

    def __init__(self, layers: Sequence[Product], after_forward: AfterForward) -> None:
        super().__init__()
        self._layers, self._after_forward = layers, after_forward
        self._weights: dict[int, tuple[Tensor, Product, AdapterSum | None]] = {}
        self._chosen = torch.empty(0)

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
        for at in range(2):
            weight = args[1 - at]
            known, row_experts = getattr(weight, "of_experts", (weight.data_ptr(), None))
            _, layer, added = self._weights.get(known, (None, None, None))
            if layer is not None and (
                row_experts is not None or weight.dim() == 3 or func is experts.multiply or layer.cut
            ):
                break
        else:
            return func(*args, **kwargs)
        bias = None
        if func is functional.linear and len(args) > 2:
            bias = args[2]
        if bias is not None and layer.experts:
            return func(*args, **kwargs)
        x, before, after = args[at], args[:at], args[at + 1 :]
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.view_as(x)  # its gradient is this product's alone
        shape = x.shape
        y = func(*before, x, *after, **kwargs)
        if row_experts is None and layer.experts:
            row_experts = self._chosen.sort().values

        def again(operand: Tensor) -> Tensor:
            return cast(Tensor, func(*before, operand.view(shape), *after, **kwargs))

        gathered: tuple[Tensor, ...] = ()
        if layer.cut == "gathered":
            gathered = tuple(tensor for tensor in (weight, bias) if tensor is not None)
        call = Call(again=again, experts=row_experts, added=added, biased=bias is not None, gathered=gathered)
        self._after_forward(layer, x, y, call)
        return y


# ---- what adapters add to the weights of experts ----------------------------------------------------------------


def _adapter_sum(layer: Product, proxy: Any) -> AdapterSum:
    """Of one adapter PEFT has the factors, from 0.21 on; of several at once, and before 0.21, the sum."""
    if not hasattr(proxy, "lhs"):
        return _of_sum(layer, proxy.delta_weight.detach())
    left, right, scaling = proxy.lhs.detach(), proxy.rhs.detach(), proxy.scaling
    if layer.transposed:
        left, right = right.mT, left.mT
    with unrecorded(layer.weight.device):
        one, two = scaling * left.float(), right.float()
        forward, backward = layer.sides["forward"], layer.sides["backward"]
        by_column = (two * (one.mT @ one @ two)).sum(1)  # squares of the norms, [experts, in]
        by_row = (one * (one @ (two @ two.mT))).sum(2)
        return AdapterSum(
            factors=(left, right, scaling),
            checksums={
                "forward": forward.checksum + two.mT @ (one.mT @ forward.vectors),
                "backward": backward.checksum + one @ (two @ backward.vectors),
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
