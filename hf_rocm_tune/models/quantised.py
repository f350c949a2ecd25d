"""4-bit and 8-bit weights by bitsandbytes: can it run here, and does it stay trainable."""

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


#: Formats that transformers turns into bfloat16 while it loads: by ``dequantize``, and on a CPU without being asked.
_DEQUANTISED = ("fp8", "mxfp8", "mxfp4")


def checkpoint_bits(config: Any, name: str, *, on_card: bool) -> int | None:
    """How a checkpoint's own weights are quantised: 4 or 8 bits by bitsandbytes; None: not at all, once it is loaded.

    Args:
        config: of the model.
        name: of the model, for the message.
        on_card: it is trained on a card, whose kernels transformers would use for FP8 and MXFP4. RDNA3 has no FP8
            instructions.

    Raises:
        UsageError: another library quantised them: transfer, training and plan know nothing of it.
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
        f"model {name}: its weights are quantised by {method}, which is not trained here{more}: give the model that "
        "they were made from, in 4 bits where memory is short"
    )


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


def require_quantised(model: nn.Module, name: str) -> None:
    """Refuses a model of which its configuration alone says that bitsandbytes quantised it.

    Transformers loads such weights as they are, into layers that cannot compute with them.

    Raises:
        UsageError: the weights in its files are plain ones.
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


# ----------------------------------------------------------------------------------------------------
# Buffers that a model writes by itself while it computes: they change, and nothing is wrong.
#
# Covered: running statistics of batch normalisation, and what the forward of a module that is not transformers',
# torch's, PEFT's or bitsandbytes' does to that module's own buffers. Not covered: buffers that one module writes for
# another.

WRITTEN = "written by its module while it computed"
LIBRARIES = frozenset({"transformers", "torch", "peft", "bitsandbytes", "trl", "accelerate"})


def running_statistics(model: nn.Module) -> set[str]:
    """Names of the buffers that batch normalisation counts on in; torch's kernels leave no trace of it."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name in module._buffers
    }


def follow_written_buffers(model: nn.Module, mover: Mover) -> None:
    """Tells the mover of each verified buffer that the forward of its module, a user's, has written or replaced."""
    for module in model.modules():
        if not (_is_users(module) and module._buffers):
            continue
        if not any(isinstance(hook, _OwnBuffers) for hook in module._forward_hooks.values()):
            hook = _OwnBuffers(mover)
            module.register_forward_pre_hook(hook.before)
            module.register_forward_hook(hook)


def writable_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Running statistics, and the buffers of a user's modules: what is loaded into them need not be the model's own."""
    for module in model.modules():
        if _is_users(module) or isinstance(module, _NormBase):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def is_written_buffer(model: nn.Module, name: str) -> bool:
    """Whether a user's module may have given this buffer its form."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return key in module._buffers and _is_users(module)


def set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Puts `value`, whatever its form, in the place of the buffer."""
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._buffers[key] = value


def _is_users(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in LIBRARIES


class _OwnBuffers:
    """What a module's buffers were before its forward, to see afterwards which of them it has written."""

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
    """Storage, and how often torch has written to it. A fault of the memory changes neither."""
    return tensor.untyped_storage()._cdata, tensor._version
