"""Experts in 4 bit: the fused weights of a mixture's experts stay packed, and each is unpacked where it is used.

NF4 by bitsandbytes, quantised on the device as a layer's experts arrive; or gpt-oss's own MXFP4 files, two e2m1 values
a byte and a power of two for 32 of them (OCP Microscaling Formats 1.0, section 5.3). A packed tensor is a parameter
with a ``quant_state``, as bitsandbytes' own. The rows of a micro-batch are sorted by expert. Not covered: experts that
are not fused in one module with transformers' `use_experts_implementation`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.quantised import rows_of_4_bit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import BitsAndBytesConfig

FORWARD = "packed_4bit"
CHECKSUMS_OF_EXPERTS = 64 << 20
"""Bytes of experts' checksums that are on a card in sampled checks of products; the host keeps the others."""
CHECKED_AT_ONCE = 1 << 23
"""Elements of an activation that the checks of products widen to float32 at once."""
_BLOCK = 64  # values of a constant, in NF4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if _holds_experts(module))


def _holds_experts(module: nn.Module) -> bool:
    """What transformers' decorator `use_experts_implementation` leaves in a module."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def weights_of(experts: nn.Module) -> list[str]:
    return [name for name, parameter in experts.named_parameters(recurse=False) if _is_weight(parameter)]


def routers_of(model: nn.Module) -> list[str]:
    """Names of the linear layers beside experts that choose among them or weigh a shared one."""
    routers = []
    for name, experts in experts_of(model):
        block = name.rpartition(".")[0]
        for inner, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Linear) and module.out_features in (1, _shape(_first(experts))[0]):
                routers.append(f"{block}.{inner}")
    return routers


def is_expert_weight(model: nn.Module, name: str) -> bool:
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    return _holds_experts(owner) and key in weights_of(owner)


def is_packed(experts: nn.Module) -> bool:
    return getattr(_first(experts), "quant_state", None) is not None


def _first(experts: nn.Module) -> Tensor:
    return next(parameter for parameter in experts.parameters(recurse=False) if _is_weight(parameter))


def _is_weight(parameter: Tensor) -> bool:
    return len(_shape(parameter)) == 3


def layout(experts: Any, key: str) -> tuple[int, int, int, bool]:
    """How many experts a weight has, rows and columns of each as stored, and whether these are (inputs, outputs)."""
    weight = getattr(experts, key)
    count, rows, columns = _shape(weight)
    mxfp4 = getattr(getattr(weight, "quant_state", None), "quant_type", "") == "mxfp4"
    return count, rows, columns, experts.is_transposed and not mxfp4


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "quant_state", parameter).shape


@dataclass(kw_only=True, eq=False)
class Mxfp4State:
    """What unpacks MXFP4 weights; the names are those of bitsandbytes' ``QuantState``."""

    absmax: Tensor  # uint8 (experts, outputs, inputs / 32): the exponents of the scales, biased by 127
    code: Tensor  # bfloat16 (256, 2): the two values of a byte, the low half first
    shape: torch.Size  # experts, outputs, inputs
    dtype: torch.dtype
    quant_type: str = "mxfp4"


def host_weights(
    weight: Any, wanted: Iterable[int], transposed: bool, dtype: torch.dtype | None, copy: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Weights of these experts (outputs, inputs), float32 on the host, where packed ones are unpacked too.

    ``dtype``: to which weights that are not packed are rounded; ``copy``: gives a host copy of a tensor.
    """
    held = copy(weight)
    state = getattr(weight, "quant_state", None)
    if state is None:
        matrices: Iterator[Tensor] = (held[expert].to(dtype).float() for expert in wanted)
    elif state.quant_type == "mxfp4":
        known = replace(state, code=copy(state.code))
        exponents = copy(state.absmax)
        matrices = (_mxfp4(held[expert], exponents[expert], known).float() for expert in wanted)
    else:
        rows = state.shape[1]
        parts = (slice(expert * rows, (expert + 1) * rows) for expert in wanted)
        matrices = (values for _, values in rows_of_4_bit(held, state, copy, parts))
    if transposed:
        return (matrix.T for matrix in matrices)
    return matrices


def pack_nf4(name: str, weights: Tensor, settings: BitsAndBytesConfig) -> Any:
    """Quantises the weights of a layer's experts (experts, rows, columns) where they are: a ``Params4bit``."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    if weights[0].numel() % _BLOCK:
        raise UsageError(
            f"{name}: an expert's {list(weights.shape[1:])} values are no multiple of {_BLOCK}, so that its experts "
            "cannot be kept in 4 bit: train without --load_in_4bit"
        )
    packed = bitsandbytes.nn.Params4bit(
        weights,
        requires_grad=False,
        compress_statistics=settings.bnb_4bit_use_double_quant,
        quant_type=settings.bnb_4bit_quant_type,
    )
    return packed._quantize(weights.device)


def pack_mxfp4(blocks: Tensor, scales: Tensor, code: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """The parameter of a checkpoint's tensors, where they are.

    ``blocks``: uint8 (experts, outputs, groups, 16); ``scales``: uint8 (experts, outputs, groups); ``code``:
    `mxfp4_code`.
    """
    packed: Any = nn.Parameter(blocks, requires_grad=False)
    shape = torch.Size((*scales.shape[:2], 32 * scales.shape[2]))
    packed.quant_state = Mxfp4State(absmax=scales, code=code, shape=shape, dtype=dtype)
    return packed


@cache
def mxfp4_code() -> Tensor:
    """The two values of each byte, bfloat16 (256, 2), on the host."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte % 16], values[byte // 16]], dim=1).to(torch.bfloat16)


def use_packed(model: nn.Module) -> None:
    """Lets a model, and PEFT's adapters, compute with packed experts, if it has any."""
    for _, experts in experts_of(model):
        if is_packed(experts):
            experts.config._experts_implementation = FORWARD
            upstream.replace_for_good("expert_weights", _described)
            upstream.replace_for_good("expert_adapters", _beside)


def _forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What each token's experts, int64 ``index`` (tokens, chosen), give, summed by their ``weights``."""
    tokens, chosen = index.shape
    by_expert, order = index.reshape(-1).sort(stable=True)
    sizes = _rows_of_each(by_expert, _shape(_first(self))[0])
    rows = hidden[order // chosen]
    if self.has_gate:
        rows = self._apply_gate(_linear(self, "gate_up_proj", rows, sizes, by_expert))
    else:
        rows = self.act_fn(_linear(self, "up_proj", rows, sizes, by_expert))
    rows = _linear(self, "down_proj", rows, sizes, by_expert)
    if getattr(self, "has_post_expert_norm", False):  # since transformers 5.20
        rows = self.post_expert_norm(rows)
    rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(tokens, chosen, -1).sum(dim=1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(FORWARD, _forward)


def _rows_of_each(by_expert: Tensor, experts: int) -> list[int]:
    """How many of the sorted rows each expert has; evenly many where there is no data, in the plan."""
    total = len(by_expert)
    if by_expert.is_meta:
        ends = [total * number // experts for number in range(experts + 1)]
        return [end - begin for begin, end in pairwise(ends)]
    counts: list[int] = torch.bincount(by_expert, minlength=experts).tolist()
    if sum(counts) != total or len(counts) != experts:
        raise CorruptionError(
            f"the rows of {experts} experts add up to {sum(counts)} instead of {total}: the card counted or copied "
            "them wrong. They were not used; run hf-rocm-tune doctor --full"
        )
    return counts


def _linear(experts: Any, name: str, rows: Tensor, sizes: Sequence[int], by_expert: Tensor) -> Tensor:
    weight = getattr(experts, name)
    state = weight.quant_state
    rows = rows.to(state.dtype)
    out = multiply(rows, weight, sizes, experts.is_transposed and state.quant_type != "mxfp4")
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[by_expert]
    for lora_a, lora_b, scaling in vars(experts).get(_ADAPTERS, {}).get(name, ()):
        ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        out = out + scaling * grouped(grouped(rows, lora_a, ends), lora_b, ends)
    return out


def multiply(rows: Tensor, weight: Any, sizes: Sequence[int], transposed: bool) -> Tensor:
    """As `_Product`, seen by torch's function modes."""
    if has_torch_function_unary(rows):
        return handle_torch_function(multiply, (rows,), rows, weight, sizes, transposed)
    return _Product.apply(rows, weight, sizes, transposed)


class _Product(torch.autograd.Function):
    """The products of each expert's rows with its weights, which are unpacked for it, in backward again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Any, sizes: Sequence[int], transposed: bool) -> Tensor:
        """``rows`` (S, inputs) give (S, outputs); ``transposed``: an expert's weights are (inputs, outputs)."""
        ctx.weight = weight
        ctx.sizes = sizes
        ctx.transposed = transposed
        return _multiply(rows, weight, sizes, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _multiply(grad, ctx.weight, ctx.sizes, not ctx.transposed), None, None, None


def _multiply(rows: Tensor, weight: Any, sizes: Sequence[int], transposed: bool) -> Tensor:
    _, *shape = weight.quant_state.shape
    result = rows.new_empty(len(rows), shape[transposed])
    matrices = _unpacked(weight, sizes)
    observer = getattr(weight.quant_state, "observer", None)
    for expert, (part, out) in enumerate(zip(rows.split(sizes), result.split(sizes), strict=True)):
        matrix = next(matrices)
        if matrix is not None:
            if observer is not None:
                observer(matrix, expert)
            torch.mm(part, matrix if transposed else matrix.t(), out=out)
        del matrix  # before the next one is unpacked
    return result


def unpacked(weight: Any, expert: int) -> Tensor:
    """One expert's weights, unpacked."""
    sizes = [0] * _shape(weight)[0]
    sizes[expert] = 1  # those without rows are not unpacked
    matrix = list(_unpacked(weight, sizes))[expert]
    assert matrix is not None
    return matrix


def _unpacked(weight: Any, sizes: Sequence[int]) -> Iterator[Tensor | None]:
    """The weights of one expert after the other (rows, columns); None for those without rows."""
    state = weight.quant_state
    experts, *shape = state.shape
    if state.quant_type == "mxfp4":
        for size, blocks, exponents in zip(sizes, weight.unbind(), state.absmax.unbind(), strict=True):
            yield _mxfp4(blocks, exponents, state) if size else None
        return
    operators: Any = torch.ops.bitsandbytes
    constants = state.absmax
    if state.nested:
        inner = state.state2
        constants = operators.dequantize_blockwise(constants, inner.absmax, inner.code, inner.blocksize, inner.dtype)
        constants = constants.add_(state.offset)
    how = state.blocksize, state.quant_type, shape, state.dtype
    for size, packed, own in zip(sizes, weight.detach().view(experts, -1), constants.view(experts, -1), strict=True):
        yield operators.dequantize_4bit(packed, own, *how) if size else None


def _mxfp4(blocks: Tensor, exponents: Tensor, state: Mxfp4State) -> Tensor:
    """(outputs, inputs) of one expert's bytes; exact, since e2m1 times a power of two fits into bfloat16."""
    pairs = state.code.view(torch.int32).view(-1)[blocks.int()]  # a byte's two values are the halves of a word
    scales = (exponents.to(torch.int16) << 7).view(torch.bfloat16)  # the exponent's bits
    values = pairs.view(torch.bfloat16).mul_(scales.unsqueeze(-1))
    return values.view(len(blocks), -1).to(state.dtype)


# ---- adapters of packed experts: PEFT's `ParamWrapper`, which would add their product to unpacked weights ----------

_ADAPTERS = "_adapters_of_packed"


def _described(stock: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """What PEFT asks of a weight, its shape, dtype and device, by a tensor without memory of its own."""

    def get_param(self: Any) -> Tensor:
        weight = stock(self)
        state: Any = getattr(weight, "quant_state", None)
        if state is None:
            return weight
        turned = state.quant_type == "mxfp4" and self.get_base_layer().is_transposed
        count, rows, columns = state.shape
        shape = (count, columns, rows) if turned else state.shape
        return torch.empty((), dtype=state.dtype, device=weight.device).expand(shape)

    return get_param


def _beside(stock: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
    """Within PEFT's block the experts know the factors of their adapters."""

    @contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        experts = self.get_base_layer()
        if getattr(getattr(experts, self.parameter_name), "quant_state", None) is None:
            with stock(self, active_adapters):
                yield
            return
        held = vars(experts).setdefault(_ADAPTERS, {})
        held[self.parameter_name] = [_factors(self, name) for name in active_adapters if name in self.lora_A]
        try:
            yield
        finally:
            del held[self.parameter_name]

    return activate


def _factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """An adapter's A (experts, inputs, rank) and B (experts, rank, outputs) in the weights' dtype, and its scaling."""
    state: Any = getattr(wrapper.get_base_layer(), wrapper.parameter_name).quant_state
    experts = state.shape[0]
    down = wrapper.lora_A[adapter].weight
    up = wrapper.lora_B[adapter].weight
    lora_a = down.reshape(experts, -1, down.shape[-1]).mT
    lora_b = up.reshape(up.shape[0], -1, experts).permute(2, 1, 0)
    return lora_a.to(state.dtype), lora_b.to(state.dtype), wrapper.scaling[adapter]
