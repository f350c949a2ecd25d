"""The products with frozen weights that can be checked, what is known of each, and the residuals of one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.models import experts
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.train.arithmetic.bounds import CHUNK, DEVIATIONS, FLOAT32, UNDERFLOW, VECTORS, Bound, roundoff

Side = Literal["forward", "backward", "dequantised"]

# The level is so many times the largest clean residual, after so many checks; and never lower than the floor.
_LEVEL, _ENOUGH, _FLOOR = 4.0, 20, 1e-3
_BITSANDBYTES = {"Linear4bit": "4 bit", "LinearNF4": "4 bit", "LinearFP4": "4 bit", "Linear8bitLt": "8 bit"}


@dataclass(frozen=True, kw_only=True)
class AdapterSum:
    """What adapters have added to the weights of a layer's experts: ``scaling * left @ right``, or their sum."""

    # left [experts, out, rank], right [experts, rank, in]; right is None where left is the sum, [experts, out, in]
    factors: tuple[Tensor, Tensor | None, float]
    checksums: dict[Side, Tensor]  # as in `CheckedSide`, of both
    norm: Tensor  # [], as in `Product`
    largest: tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One product: how it is computed again, from an operand [rows, columns]; and of experts what they are."""

    again: Callable[[Tensor], Tensor]  # in forward
    biased: bool = True  # if the layer has a bias
    gathered: tuple[Tensor, ...] = ()  # weight and bias, which are there only while the layer computes
    back: Callable[[Tensor], Tensor] | None = None  # in backward; None: by autograd
    experts: Tensor | None = None  # int64, of each row, or the one of all rows [1]
    added: AdapterSum | None = None
    expert: int = 0  # of a dequantised weight

    def to_keep(self) -> Call:
        """The same call with copies of what is there only while the layer computes."""
        if not self.gathered:
            return self
        kept = tuple(tensor.detach().clone() for tensor in self.gathered)
        return replace(self, again=lambda operand: functional.linear(operand, *kept), gathered=kept)


@dataclass(frozen=True)
class HeldProduct:
    """A product, or rows of a dequantised weight, that may be wrong, until it is judged."""

    operand: Tensor  # or the numbers of the rows
    result: Tensor
    residuals: Tensor
    dtype: torch.dtype
    call: Call


@dataclass(kw_only=True, eq=False)
class CheckedSide:
    """Forward, backward or the dequantised weight of one product, with what its clean residuals have taught."""

    vectors: Tensor  # [columns of the result, 3], float32 on the device
    checksum: Tensor  # [experts or 1, columns of the operand, 3]
    offset: Tensor | None = None  # [1, 3]: the bias times the vectors
    level: float = 1.0
    largest: float = 0.0  # clean residual over its bound, so far
    seen: int = 0
    spread: float = 1.0  # of clean residuals over the data that there may be
    flagged: float = 0.0  # the residual that made the step be repeated
    where: str = ""  # which rows and columns are wrong
    held: HeldProduct | None = None  # when repeated

    def learn(self, clean: float, *, cleared: bool = False) -> None:
        """Take a clean residual into account; ``cleared``: the host has shown that it is clean."""
        self.seen += 1
        self.largest = max(self.largest, clean)
        if not cleared and self.seen < _ENOUGH:
            return
        level = max(_LEVEL * self.largest, _FLOOR)
        usual = min(1.0, level * self.spread)
        if cleared:
            self.level = max(level, usual)
        else:
            self.level = usual


@dataclass(kw_only=True, eq=False)
class Product:
    """A frozen linear layer, ``y = x W^T + b``, or the same of each expert; norms and sides are filled in later."""

    name: str
    module: Any
    key: str = "weight"
    experts: int = 0  # 0: a linear layer
    chosen: int = 0  # experts of a token
    transposed: bool = False  # experts' weights are [in, out]
    cut: Literal["", "own", "gathered"] = ""  # over ranks: each computes with its part, or with all of it
    columns: tuple[int, int]  # of the input, and of the output
    quantised: Literal["", "4 bit", "8 bit"]
    dtype: torch.dtype | None  # in which it is computed; None: the dtype of each call's input
    norm: float = 0.0  # Frobenius; of experts that of the largest one, as below
    largest: tuple[float, float] = (0.0, 0.0)  # norms of columns and of rows
    bias_norm: float = 0.0
    sides: dict[Side, CheckedSide] = field(default_factory=dict)
    on_host: list[Tensor] = field(default_factory=list)  # checksums: `W^T v`, `W u` and `b . v`

    @property
    def weight(self) -> Any:
        """The frozen parameter, also while PEFT has it parametrised."""
        parametrised = getattr(self.module, "parametrizations", {})
        if self.key in parametrised:
            return parametrised[self.key].original
        return getattr(self.module, self.key)

    def columns_of(self, side: Side) -> tuple[int, int]:
        """Columns of the operand and of the result."""
        into, out = self.columns
        if side == "forward":
            return into, out
        return out, into

    def dtype_for(self, x: Tensor, y: Tensor) -> torch.dtype | None:
        """In which a call has computed; None where that is not what the checksum was made for."""
        if self.quantised:  # and rounded to the input's dtype, if that is a coarser one
            dtypes = [getattr(self.module, "compute_dtype", None) or x.dtype, y.dtype]
            if torch.is_autocast_enabled(x.device.type):  # bitsandbytes dequantises, and torch's product is cast
                dtypes.append(torch.get_autocast_dtype(x.device.type))
            return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        if y.dtype == self.dtype:
            return y.dtype
        return None

    def put(self, side: Side, *, vectors: Tensor, checksum: Tensor, offset: Tensor | None = None) -> None:
        """Have these tensors on the device; what is known of clean residuals stays."""
        known = self.sides.setdefault(side, CheckedSide(vectors=vectors, checksum=checksum))
        known.vectors, known.checksum, known.offset = vectors, checksum, offset

    def bound(self, side: Side, dtype: torch.dtype, *, added: bool = False) -> Bound:
        """The bound of one row's residual; see `bounds`."""
        finfo = torch.finfo(dtype)
        out = roundoff(dtype)
        inner, outer = self.columns_of(side)
        bias = 0.0
        if side == "forward":
            bias = self.bias_norm
        output_roundings = 2 if bias else 1
        weight_rounding = 0.0
        if added or not self._computes_as_on_host(dtype):
            weight_rounding = (1 + added) * out * self.largest[side == "backward"]
        input_rounding = 0.0
        if self.quantised == "8 bit" and side == "forward":
            input_rounding = DEVIATIONS * (1 / 254 + 2**-11) * self.norm
        a = DEVIATIONS * (FLOAT32 * (2 * math.sqrt(inner) + math.sqrt(outer)) * self.norm + weight_rounding)
        b = DEVIATIONS * (out * output_roundings + FLOAT32 * math.sqrt(outer))
        unseen = UNDERFLOW * (a * math.sqrt(inner) + b * math.sqrt(outer))
        return Bound(
            a=a,
            b=b,
            c=DEVIATIONS * (out * bias + finfo.tiny * math.sqrt(outer)) + unseen,
            q=input_rounding,
            limit=finfo.max / max(self.norm, 1.0),
        )

    def _computes_as_on_host(self, dtype: torch.dtype) -> bool:
        """Whether the weight is multiplied with as the host has it, without a rounding of its own."""
        if not self.quantised:
            return True
        state = getattr(self.weight, "quant_state", None)
        return state is not None and state.dtype == dtype

    def residuals(self, side: Side, operand: Tensor, result: Tensor, dtype: torch.dtype, call: Call) -> Tensor:
        """Of each row the largest of its residuals over its bound; NaN where only the result has it.

        Args:
            side: of the product.
            operand: ``[rows, columns of the operand]``, any float dtype.
            result: ``[rows, columns of the result]``.
            dtype: in which it was computed.
            call: which experts and adapters took part.

        Returns:
            float32 ``[rows]``, on the device, without a wait.
        """
        checked = self.sides[side]
        added, chosen = call.added, call.experts
        bound = self.bound(side, dtype, added=added is not None)
        checksum = checked.checksum
        slope: Tensor | float = bound.a
        if added is not None:
            sums = 2 * math.sqrt(operand.shape[1]) + math.sqrt(result.shape[1])
            rounding = 2 * roundoff(dtype) * added.largest[side == "backward"]
            slope = DEVIATIONS * (FLOAT32 * sums * added.norm + rounding) + slope
            checksum = added.checksums[side]
        rows_at_once = max(1, CHUNK // max(self.columns))
        row_experts = None  # of each row its own
        if chosen is None:
            shared = checksum[0]
        elif len(chosen) > 1:
            row_experts = chosen
            rows_at_once = max(1, CHUNK // (max(self.columns) * VECTORS))
        else:
            shared = checksum.index_select(0, chosen)[0]
        parts = []
        for begin in range(0, len(operand), rows_at_once):
            part = slice(begin, begin + rows_at_once)
            x, y = operand[part].to(dtype), result[part]
            residual = torch.mm(y.float(), checked.vectors)
            if call.biased and checked.offset is not None:
                residual -= checked.offset
            if row_experts is not None:
                residual -= torch.bmm(x.float()[:, None], checksum.index_select(0, row_experts[part]))[:, 0]
            else:
                residual = torch.addmm(residual, x.float(), shared, alpha=-1)
            length = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
            norm = torch.linalg.vector_norm(y, dim=1, dtype=torch.float32)
            allowed = length * slope + bound.c
            allowed.add_(norm, alpha=bound.b)
            if bound.q:
                largest = torch.linalg.vector_norm(x, math.inf, dim=1, dtype=torch.float32)
                allowed.add_(largest, alpha=bound.q)
            ratio = residual.abs_().amax(1).div_(allowed)
            parts.append(torch.where(length < bound.limit, ratio, 0.0))
        return torch.cat(parts)


def frozen_products(model: nn.Module, *, computed_in: torch.dtype | None, own_parts: bool = False) -> list[Product]:
    """The layers whose products can be checked, in order; their weights lie where they are computed with.

    ``computed_in``: autocast's dtype; ``own_parts``: each rank computes with its own part of a sharded weight.
    """
    layers = []
    for name, module in model.named_modules():
        layer = _linear_product(name, module, computed_in=computed_in, own_parts=own_parts)
        if layer is not None:
            layers.append(layer)
    for name, module in experts.experts_of(model):
        for key in experts.weights_of(module):
            weight = getattr(module, key)
            if weight.requires_grad or weight.is_meta or isinstance(weight, DTensor):
                continue
            layers.append(_expert_product(name, module, key, computed_in=computed_in))
    return layers


def _linear_product(name: str, module: Any, *, computed_in: torch.dtype | None, own_parts: bool) -> Product | None:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor) or weight.is_meta:
        return None
    if any(parameter.requires_grad for parameter in module.parameters()):
        return None
    columns: tuple[int, int]
    if isinstance(module, Conv1D):
        columns = module.nx, module.nf
    else:
        columns = module.in_features, module.out_features
    cut: Any = ""
    if isinstance(weight, DTensor) and own_parts:
        cut = "own"
        columns = local(weight).shape[1], local(weight).shape[0]
    elif isinstance(weight, DTensor):
        cut = "gathered"
    quantised: Any = _BITSANDBYTES.get(type(module).__name__, "")
    plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) and weight.is_floating_point()
    if not plain and (cut or not quantised):
        return None
    dtype = None
    if not quantised:
        dtype = computed_in or weight.dtype
    return Product(name=name, module=module, columns=columns, quantised=quantised, dtype=dtype, cut=cut)


def _expert_product(name: str, module: Any, key: str, *, computed_in: torch.dtype | None) -> Product:
    weight = getattr(module, key)
    count, *shape, transposed = experts.layout(module, key)
    out, into = shape
    if transposed:
        into, out = shape
    is_packed = experts.is_packed(module)
    # Autocast knows no grouped product.
    grouped = is_packed or module.config._experts_implementation == "grouped_mm"
    dtype = weight.dtype
    if not grouped and computed_in is not None:
        dtype = computed_in
    return Product(
        name=f"{name}.{key}",
        module=module,
        key=key,
        experts=count,
        transposed=transposed,
        chosen=getattr(module.config, "num_experts_per_tok", 1),
        columns=(into, out),
        quantised="4 bit" if is_packed else "",
        dtype=dtype,
    )


def bytes_of(layers: Iterable[Product]) -> int:
    """Of the checksums of these layers."""
    return sum(part.nbytes for layer in layers for part in layer.on_host)


@contextmanager
def unrecorded(device: torch.device) -> Iterator[None]:
    """Nothing within is recorded: not by autograd, and not by selective recomputation, which would hand it out."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
