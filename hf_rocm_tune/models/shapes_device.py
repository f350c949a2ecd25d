"""What a device does differently from the meta device on which shapes are measured: kernels and autocast.

On the meta device torch would take other paths than on the card: attention by plain matrix products, dropout with a
mask as wide as its input, no autocast. This mode calls the operators that the card would call, so that torch's own
autograd saves what it saves there.

    attention   HIP and CUDA: flash without a mask, memory-efficient with one, as ``scaled_dot_product_attention``
                chooses; the mask becomes an additive one of the compute dtype, which is kept for backward.
                CPU: its flash kernel, with or without a mask.
    dropout     HIP and CUDA: fused, with a mask of one byte an element.
    autocast    to bfloat16, by the lists of torch 2.13 (``aten/src/ATen/autocast_mode.h``); casts of parameters are
                cached until the end of the forward pass.
    a yes or no that the model asks of a tensor's content (is there padding?) is answered for the batch in question.

Not covered: attention where torch would fall back to plain matrix products because AOTriton lacks a kernel; models
that branch on other content. Sources of the choices: torch ``sdp_utils.cpp`` and ``attention.cpp``; dropout:
``Dropout.cpp``; 4-bit: bitsandbytes 0.50.2 ``backends/cuda/ops.py`` (fused kernel up to 8 rows on RDNA3, else the
weight is unpacked first).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PLATFORMS = ("hip", "cuda", "cpu")

_LOWER = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "einsum", "chain_matmul"),
        *("addmm", "addbmm", "baddbmm", "scaled_dot_product_attention"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    }
)
# Only names that models use between their matrix products. The CPU's list has none of them.
_UPPER = frozenset(
    {
        *("layer_norm", "group_norm", "rms_norm", "norm", "linalg_norm", "linalg_vector_norm", "cosine_similarity"),
        *("pow", "__pow__", "rsqrt", "reciprocal", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp"),
        *("softplus", "nll_loss", "cross_entropy"),
    }
)
_UPPER_BY_DTYPE = frozenset({"softmax", "log_softmax", "sum", "cumsum", "prod"})
_TRUTH = frozenset({"__bool__"})


class DeviceMode(TorchFunctionMode):
    """Makes operations on meta tensors take the card's path.

    Args:
        platform: ``hip``, ``cuda`` or ``cpu``.
        autocast: whether mixed precision in bfloat16 is on.
        content_is_plain: the answer to questions of content: nothing is padded or packed.
    """

    def __init__(self, *, platform: str, autocast: bool, content_is_plain: bool) -> None:
        super().__init__()
        assert platform in PLATFORMS, platform
        self._platform = platform
        self._autocast = autocast
        self._plain = content_is_plain
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._caching = True

    def forget_casts(self) -> None:
        """The end of the forward pass: the cached casts of parameters go; backward keeps none between layers."""
        self._casts.clear()
        self._caching = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _TRUTH and args[0].is_meta:
            return self._plain
        if self._autocast and _on_meta(args):
            if name in _LOWER:
                args, kwargs = self._cast(args, torch.bfloat16), self._cast(kwargs, torch.bfloat16)
            elif self._platform != "cpu" and name in _UPPER:
                args, kwargs = self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
            elif self._platform != "cpu" and name in _UPPER_BY_DTYPE and _is_low(args[0]):
                kwargs = {"dtype": torch.float32, **kwargs} if kwargs.get("dtype") is None else kwargs
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _GroupedProduct.apply(*args[:2])  # on the meta device torch takes bfloat16 only
        if name == "dropout" and self._platform != "cpu":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._cast(item, dtype) for item in value)
        return value

    def _cast_tensor(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        lasting = tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad
        if not (self._caching and lasting and dtype == torch.bfloat16):
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor, tensor.to(dtype)
        return self._casts[id(tensor)][1]

    def _attention(
        self,
        stock: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self._platform == "cpu" and (dropout_p > 0 or query.shape[-1] != value.shape[-1]):
            more = {"scale": scale, "enable_gqa": enable_gqa}  # by plain products, as on the meta device
            return _tensor(stock(query, key, value, attn_mask, dropout_p, is_causal, **more))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
        if self._platform == "cpu":
            return _first(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )
            )
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]:
            return _first(
                torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
            )
        if key.shape[1] != query.shape[1]:  # the memory-efficient kernel wants as many heads
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None:
            attn_mask = _aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
        wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
        return _first(
            torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, wants_grad, dropout_p, is_causal, scale=scale
            )
        )


@contextmanager
def autocast_flags(platform: str, enabled: bool) -> Iterator[None]:
    """Within the block PEFT and transformers hear that autocast is on; meta tensors are not touched by that.

    ``torch.autocast("meta", enabled=False)``, which PEFT says on the meta device and torch refuses, does nothing.
    """
    name, stock = autocast_device(platform), torch.autocast
    before = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
    torch.set_autocast_enabled(name, enabled)
    torch.set_autocast_dtype(name, torch.bfloat16)

    def autocast(device_type: str, *rest: Any, **more: Any) -> Any:
        return nullcontext() if device_type == "meta" else stock(device_type, *rest, **more)

    torch.autocast = autocast  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autocast = stock  # type: ignore[misc]
        torch.set_autocast_enabled(name, before[0])
        torch.set_autocast_dtype(name, before[1])


def autocast_device(platform: str) -> str:
    """The device type under which torch keeps the platform's autocast; HIP answers to CUDA's name."""
    return "cpu" if platform == "cpu" else "cuda"


class _GroupedProduct(torch.autograd.Function):
    """Rows (S, K), grouped by expert, with the experts' weights (E, K, N), by what it keeps and gives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        """(S, N)."""
        ctx.shapes = rows.shape, weights.shape
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of those that want one."""
        wanted = zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        return tuple(grad.new_empty(shape) if need else None for shape, need in wanted)


def workspaces(platform: str) -> dict[Any, Callable[..., int]]:
    """Bytes that kernels take while they run and that no operator shows, by operator."""
    found: dict[Any, Callable[..., int]] = {}
    if platform == "cuda":  # flash attention 2 collects the gradient of the queries in float32
        found[torch.ops.aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward_cuda
    if hasattr(torch.ops, "bitsandbytes") and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        found[torch.ops.bitsandbytes.gemm_4bit.default] = _unpacked
    return found


def _flash_backward_cuda(grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> int:
    del grad, rest, more
    groups = query.shape[1] // key.shape[1]
    expanded = 2 * key.numel() * groups * key.element_size() if groups > 1 else 0
    return query.numel() * 4 + expanded


def _unpacked(x: Tensor, packed: Tensor, shape: tuple[int, ...], *rest: Any, **more: Any) -> int:
    del packed, rest
    elements = math.prod(shape)
    constants = 2 * 4 * (elements // 64) if more.get("absmax_8bit") is not None else 0
    return elements * x.element_size() + constants


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    return _first(torch.native_dropout(input, p, True)) if training and p > 0 else input


def _aligned(mask: Tensor) -> Tensor:
    """The kernel wants rows at multiples of 8 elements; torch pads a mask that has others."""
    short = -mask.shape[-1] % 8
    return torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]] if short else mask


def _on_meta(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_meta for argument in args)


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _first(outputs: tuple[Any, ...]) -> Tensor:
    return _tensor(outputs[0])


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
