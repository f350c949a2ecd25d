"""bitsandbytes: whether it can run here, and what keeps its 4-bit and 8-bit weights trainable and watched."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover


#: Formats that transformers converts to bfloat16 on loading: with ``dequantize``, and always on a CPU.
_DEQUANTISED = ("fp8", "mxfp8", "mxfp4")


def checkpoint_bits(config: Any, name: str, *, on_card: bool) -> int | None:
    """How a checkpoint's weights are quantised: 4 or 8 bits by bitsandbytes; None: not quantised once loaded.

    Args:
        config: the model's configuration.
        name: the model's name, for the message.
        on_card: trained on a card, for which transformers keeps FP8 and MXFP4. RDNA3 has no FP8 instructions.

    Raises:
        UsageError: quantised by another library, which is not supported.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    values = given if isinstance(given, dict) else given.to_dict()
    method = str(values.get("quant_method"))
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return 4 if values.get("load_in_4bit") else 8
    if method in _DEQUANTISED and (values.get("dequantize") or not on_card):
        return None
    more = " (`dequantize: true` in its quantization_config loads it as bfloat16)" if method in _DEQUANTISED else ""
    raise UsageError(
        f"model {name}: its weights are quantised by {method}, which cannot be trained here{more}: give the model "
        "that was quantised; --load_in_4bit saves memory"
    )


BIAS_CAST = "cast by bitsandbytes from a verified tensor"


def require_bitsandbytes(device: torch.device, flag: str) -> None:
    """Checks that bitsandbytes has a native library for this device.

    Args:
        device: where the model or the optimizer's state is quantised.
        flag: the flag that needs it, for the message, such as "--load_in_4bit".

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


def require_quantised(model: nn.Module, name: str) -> None:
    """Refuses a model whose configuration claims bitsandbytes over plain weights.

    Transformers loads such weights unchanged into layers that cannot compute with them.

    Raises:
        UsageError: the files hold plain weights.
    """
    marks = {"Linear4bit": "quant_state", "Linear8bitLt": "CB"}
    for path, module in model.named_modules():
        mark = marks.get(type(module).__name__)
        if mark is not None and not hasattr(module.weight, mark):
            raise UsageError(
                f"model {name}: its config.json says that bitsandbytes quantised the weights, and {path}.weight in its "
                "files is not quantised: take quantization_config out of config.json, and give --load_in_4bit instead"
            )


def keep_trainable_on_cpu(model: nn.Module) -> int:
    """Stops bitsandbytes from repacking 4-bit weights on a CPU with AVX512-BF16.

    One evaluation under ``no_grad`` would repack them in place, lossily, and later training steps would use a kernel
    without autograd (tried with bitsandbytes 0.50.2: 26 of 28 adapter gradients changed by more than 1 %).

    Returns:
        Number of layers changed.
    """
    changed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        on_cpu = isinstance(weight, torch.Tensor) and weight.device.type == "cpu"
        if on_cpu and hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # a plain flag, not a parameter
            changed += 1
    return changed


def follow_bias_casts(model: nn.Module, mover: Mover) -> None:
    """Marks a verified, frozen bias as derived when bitsandbytes casts it.

    Its layers cast a bias in ``forward`` if its dtype differs from the input's or the layer's compute dtype, as for a
    Qwen2 that was loaded in float32 and quantised.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes."):
            continue
        bias = getattr(module, "bias", None)
        hooked = any(isinstance(hook, _BiasCast) for hook in module._forward_hooks.values())
        if bias is not None and not bias.requires_grad and not hooked and mover.was_verified(bias):
            module.register_forward_hook(_BiasCast(mover, bias.dtype))


class _BiasCast:
    """A forward hook that marks a bias as derived after the layer has cast it."""

    def __init__(self, mover: Mover, dtype: torch.dtype) -> None:
        self._mover, self._dtype = mover, dtype

    def __call__(self, module: Any, *_: Any) -> None:
        if module.bias.dtype != self._dtype:
            self._dtype = module.bias.dtype
            self._mover.mark_derived(module.bias, BIAS_CAST)


# ----------------------------------------------------------------------------------------------------
# Buffers that a model legitimately changes in its forward pass.
#
# Covered: running statistics of batch normalisation, and a user's module (not one of the LIBRARIES) that writes its own
# buffers. Not covered: buffers that one module writes for another.

WRITTEN = "written by its module's forward"
LIBRARIES = frozenset({"transformers", "torch", "peft", "bitsandbytes", "trl", "accelerate"})


def running_statistics(model: nn.Module) -> set[str]:
    """Names of batch normalisation's running statistics, which torch's kernels update without a version count."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name in module._buffers
    }


def follow_written_buffers(model: nn.Module, mover: Mover) -> None:
    """Marks verified buffers of a user's modules as derived when the module's forward writes or replaces them."""
    for module in model.modules():
        if not (_is_users(module) and module._buffers):
            continue
        if not any(isinstance(hook, _OwnBuffers) for hook in module._forward_hooks.values()):
            hook = _OwnBuffers(mover)
            module.register_forward_pre_hook(hook.before)
            module.register_forward_hook(hook)


def writable_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Running statistics and the buffers of a user's modules, which a checkpoint may restore to other values."""
    for module in model.modules():
        if _is_users(module) or isinstance(module, _NormBase):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def is_written_buffer(model: nn.Module, name: str) -> bool:
    """Whether a user's module owns this buffer and may have changed its shape."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return key in module._buffers and _is_users(module)


def set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Replaces the buffer by `value`, of any shape and dtype."""
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._buffers[key] = value


def _is_users(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in LIBRARIES


class _OwnBuffers:
    """Compares the state of a module's buffers before and after its forward."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._before: dict[str, tuple[int, int]] = {}

    def before(self, module: nn.Module, *_: Any) -> None:
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        self._before = {name: _state(buffer) for name, buffer in buffers.items() if self._mover.was_verified(buffer)}

    def __call__(self, module: nn.Module, *_: Any) -> None:
        for name, state in self._before.items():
            buffer = module._buffers.get(name)
            if buffer is not None and _state(buffer) != state:
                self._mover.mark_derived(buffer.detach(), WRITTEN)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Storage and version counter; a memory fault changes neither."""
    return tensor.untyped_storage()._cdata, tensor._version
