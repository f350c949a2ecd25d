"""Redirects copies that other libraries make between host and device through the mover.

PEFT, bitsandbytes and torch's optimizers move tensors to the device themselves: ``module.to(device)``,
``torch.tensor(..., device=...)``, ``parameter.copy_(host)``. Within `redirected` each such call goes through the mover
and is verified, in both directions, whichever class makes it.

What a function that is not in `_HANDLERS` makes on the device from host tensors is marked unverified. Not covered:
copies inside torch's C++ code, by storages (``torch.load(map_location="cuda")``), and by other threads. Autograd
history is lost: use it for construction, loading and resuming, not for training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_rocm_tune.transfer.digest import digest
from hf_rocm_tune.transfer.mover import Mover
from hf_rocm_tune.transfer.raw_bytes import tree_tensors

_VALUELESS = frozenset(
    ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"]
    + [f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")]
)
"""Functions that take a tensor for its shape, dtype and device, not for its values."""
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
READERS = (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.tolist)
"""Calls that read numbers from the device, for which the caller waits."""


def redirected(mover: Mover, *, stage: str) -> AbstractContextManager[Any]:
    """Within the block, copies between the host and the mover's device go through the mover."""
    return nullcontext() if mover.device.type == "cpu" else _Redirect(mover, stage)


class _Redirect(TorchFunctionMode):
    """The mode's own calls of torch are not redirected: torch suspends a mode while it runs."""

    def __init__(self, mover: Mover, stage: str) -> None:
        super().__init__()
        self._mover, self._stage = mover, stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [] if name in _VALUELESS else tree_tensors((args, kwargs))
        if name == "new_tensor" or any(each.dim() and each.device.type == "cpu" for each in given):
            for each in filter(self._is_here, tree_tensors(result)):
                self._mover.mark_unverified(each, f"copied to the device by torch itself ({name})")
        return result

    def _up(self, tensor: Tensor, device: torch.device) -> Tensor:
        name = _described(tensor)
        with torch._C.DisableTorchFunction():  # a subclass is sent as plain data
            return self._mover.move_to(device, tensor.detach(), name=name, stage=self._stage)

    def _down(self, tensor: Tensor) -> Tensor:
        name = _described(tensor)
        with (
            torch._C.DisableTorchFunction(),
            self._mover.fetched(tensor.detach(), name=name, stage=self._stage) as found,
        ):
            return found.host.clone()

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type != "cpu" and self._mover.serves(value.device)

    def _goes_there(self, value: Any, device: torch.device | None) -> bool:
        on_host = isinstance(value, Tensor) and value.device.type == "cpu"
        return on_host and device is not None and device.type != "cpu" and self._mover.serves(device)

    # ---- the calls ------------------------------------------------------------------------------------------

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        parsed = {name: value for name, value in kwargs.items() if name not in ("copy", "memory_format")}
        device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **parsed)
        return self._carried(func, args, kwargs, tensor, device, dtype)

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = args[1] if len(args) > 1 else kwargs.get("device")
        device = torch.device("cuda", torch.cuda.current_device()) if asked is None else torch.device(asked)
        return self._carried(func, args, kwargs, args[0], device)

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._carried(func, args, kwargs, args[0], torch.device("cpu"))

    def _carried(self, func: Any, args: Any, kwargs: Any, tensor: Tensor, device: Any, dtype: Any = None) -> Any:
        if self._goes_there(tensor, device):
            # Cast first: the digest is then that of the values that are used.
            moved = self._up(tensor if dtype is None else tensor.detach().to(dtype), device)
        elif device is not None and device.type == "cpu" and self._is_here(tensor):
            moved = self._down(tensor)
            moved = moved if dtype is None else moved.to(dtype)
        else:
            copy = func(*args, **kwargs)
            if self._is_here(tensor) and copy is not tensor:  # it inherits provenance if its bytes are the same
                with torch._C.DisableTorchFunction():
                    known = self._mover.digest_of(tensor)
                    if known is not None and self._mover.provenance(copy) is None and digest(copy) == known:
                        self._mover.mark_derived(copy, "copied on the device", digest=known)
            return copy
        return moved.requires_grad_(tensor.requires_grad)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source, *rest = args
        if self._is_here(target) and self._goes_there(source, target.device):
            args = (target, self._up(source.detach().to(target.dtype), target.device), *rest)
        elif target.device.type == "cpu" and self._is_here(source):
            args = (target, self._down(source), *rest)
        return func(*args, **kwargs)

    def _set_item(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, index, value = args
        if self._is_here(target) and self._goes_there(value, target.device):
            value = self._up(value.detach().to(target.dtype), target.device)
        return func(target, index, value, **kwargs)

    def _get_item(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, index = args
        if self._is_here(target) and self._goes_there(index, target.device):  # torch would send it itself
            index = self._up(index, target.device)
        return func(target, index, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        device = None if device is None else torch.device(device)
        if device is None or device.type == "cpu" or not self._mover.serves(device) or self._is_here(args[0]):
            return func(*args, **kwargs)
        return self._carried(func, args, kwargs, func(*args, **{**kwargs, "device": "cpu"}), device)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(self._down(args[0]) if self._is_here(args[0]) else args[0], *args[1:], **kwargs)


_HANDLERS: dict[Any, Callable[[_Redirect, Any, Any, Any], Any]] = {
    Tensor.to: _Redirect._to,
    Tensor.cuda: _Redirect._cuda,
    Tensor.cpu: _Redirect._cpu,
    Tensor.copy_: _Redirect._copy,
    Tensor.__setitem__: _Redirect._set_item,
    Tensor.__getitem__: _Redirect._get_item,
    **dict.fromkeys(_MAKERS, _Redirect._make),
    **dict.fromkeys(READERS, _Redirect._read),
}


def _described(tensor: Tensor) -> str:
    """Shape, dtype and the requester of the copy: the innermost caller outside torch and this package."""
    frame = sys._getframe(3)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "hf_rocm_tune/")):
        frame = frame.f_back
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} of {file}:{frame.f_code.co_name}"
