"""Buffers that a model writes by itself while it computes: they change, and nothing is wrong.

Covered: running statistics of batch normalisation, and what the forward of a module that is not transformers', torch's,
PEFT's or bitsandbytes' does to that module's own buffers. Not covered: buffers that one module writes for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
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
        if type(module).__module__.partition(".")[0] in LIBRARIES or not module._buffers:
            continue
        if not any(isinstance(hook, _OwnBuffers) for hook in module._forward_hooks.values()):
            hook = _OwnBuffers(mover)
            module.register_forward_pre_hook(hook.before)
            module.register_forward_hook(hook)


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
