"""Buffers that a model writes by itself while it computes: they change, and nothing is wrong.

Covered: running statistics of batch normalisation, and what the forward of a module that is not transformers', torch's,
PEFT's or bitsandbytes' does to that module's own buffers. Not covered: buffers that one module writes for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

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
