"""4-bit and 8-bit weights by bitsandbytes: can it run here, and does it stay trainable."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from hf_rocm_tune.transfer import Mover

BIAS_CAST = "cast by bitsandbytes from a verified tensor"


def require_bitsandbytes(device: torch.device, flag: str) -> None:
    """Checks that bitsandbytes has a native library for this device before anything is loaded.

    Args:
        device: where the model, or the optimizer's state, will be quantised.
        flag: what asks for it, for the message: "--load_in_4bit".

    Raises:
        UsageError: the package or its library for this device is missing.
    """
    try:
        importlib.import_module("bitsandbytes")
        cextension = importlib.import_module("bitsandbytes.cextension")
    except Exception as error:
        raise UsageError(
            f"{flag} needs bitsandbytes, which cannot be imported here ({type(error).__name__}: {error}): "
            f"install bitsandbytes>=0.50.2, or train without {flag}"
        ) from error
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        raise UsageError(
            f"{flag}: bitsandbytes has no native library for {runtime if device.type == 'cuda' else device.type}: "
            f"install a version that carries one (`python -m bitsandbytes` lists them), or train without {flag}"
        )


def keep_trainable_on_cpu(model: nn.Module) -> int:
    """Stops bitsandbytes from repacking 4-bit weights on a CPU with AVX512-BF16.

    One evaluation under ``no_grad`` would repack them in place, lossily, and later training steps would take a kernel
    without autograd (read and tried with bitsandbytes 0.50.2: 26 of 28 adapter gradients changed by more than 1 %).

    Returns:
        How many layers were told so.
    """
    told = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        on_cpu = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
        if on_cpu and hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # a plain flag, not a parameter
            told += 1
    return told


def follow_bias_casts(model: nn.Module, mover: Mover) -> None:
    """Lets bitsandbytes cast a verified, frozen bias: the cast counts as derived, and is watched from then on.

    Its layers do so in ``forward``, wherever the bias has another dtype than the input or the layer's compute dtype. Of
    a Qwen2 that is loaded in float32, quantised and given adapters, no such bias would be what was loaded.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes."):
            continue
        bias = getattr(module, "bias", None)
        hooked = any(isinstance(hook, _BiasCast) for hook in module._forward_hooks.values())
        if bias is not None and not bias.requires_grad and not hooked and mover.was_verified(bias):
            module.register_forward_hook(_BiasCast(mover, bias.dtype))


class _BiasCast:
    """A forward hook that tells the mover of a bias that the layer has cast."""

    def __init__(self, mover: Mover, dtype: torch.dtype) -> None:
        self._mover, self._dtype = mover, dtype

    def __call__(self, module: Any, *_: Any) -> None:
        if module.bias.dtype != self._dtype:
            self._dtype = module.bias.dtype
            self._mover.mark_derived(module.bias, BIAS_CAST)
