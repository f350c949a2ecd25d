"""The raw bytes of a tensor, whatever its dtype, strides or subclass, and what is known of the memory they lie in.

Bytes are reached through the storage: ``Tensor.view(dtype)`` refuses some dtypes, some strides and 0-dim tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_HERE = nullcontext()


def ordinary() -> AbstractContextManager[Any]:
    """Within it, new tensors can be used by autograd later, even if the caller is in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _HERE


def plain(tensor: Tensor) -> Tensor:
    """The tensor in torch's own class, of the same memory, without a graph: a subclass may redefine operations."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor).detach()


def not_plain(tensor: Tensor) -> str:
    """Why a tensor has no plain bytes; empty if it has."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is {tensor.layout}, only dense tensors can be moved; call .to_dense() first"
    if tensor.is_meta:
        return "is on the meta device and has no bytes; load its weights first"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negation; call .resolve_conj().resolve_neg() first"
    return ""


def typed_view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A contiguous tensor of `dtype` and `shape` over the bytes of a uint8 `buffer`, starting at byte `offset`.

    It shares the storage but not the autograd version counter, so that an in-place write to one tensor of a batch does
    not invalidate another one saved for backward.
    """
    view = torch.empty(0, dtype=dtype, device=buffer.device)
    start = buffer.storage_offset() + offset
    assert start % view.element_size() == 0, "slot offsets are aligned to more than any element size"
    strides = torch.empty(shape, device="meta").stride()
    return view.set_(buffer.untyped_storage(), start // view.element_size(), tuple(shape), strides)


def as_bytes(tensor: Tensor) -> Tensor:
    """The 1-dimensional uint8 view of a contiguous tensor; it shares memory."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    assert tensor.is_contiguous(), "only contiguous tensors have a byte view"
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, uint8[n]; it shares memory."""
    storage = tensor.untyped_storage()
    with ordinary():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def dense(tensor: Tensor) -> Tensor:
    """The tensor, contiguous: a strided one's copy, made again, up to twice, until two host copies agree."""
    if tensor.is_contiguous():
        return tensor
    copy = tensor.detach().contiguous()
    if copy.device.type != "cpu":
        return copy
    for _ in range(2):
        other = copy
        copy = tensor.detach().contiguous()
        if torch.equal(as_bytes(copy), as_bytes(other)):
            break
    return copy


def memory_order(tensor: Tensor) -> list[int] | None:
    """The order of dimensions in which a tensor's elements lie in a row, as in channels_last; None: they do not.

    ``tensor.permute(order)`` is contiguous then.
    """
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    sizes = tensor.shape
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], sizes[dim]))
    return order if tensor.permute(order).is_contiguous() else None


Known = TypeVar("Known")


class Registry(Generic[Known]):
    """Maps the storages of tensors to entries, without keeping them alive.

    By storage, so that views, ``param.data = moved`` and a ``Parameter`` made from a moved tensor are found too, and a
    new tensor that happens to get the same address is not.
    """

    def __init__(self) -> None:
        self.entries: WeakKeyDictionary[torch.UntypedStorage, Known] = WeakKeyDictionary()

    def put(self, tensor: Tensor, entry: Known) -> None:
        self.entries[tensor.untyped_storage()] = entry

    def get(self, tensor: Tensor) -> Known | None:
        """The entry for the storage of `tensor`; None without one, and for sparse tensors, which have no storage."""
        return self.entries.get(tensor.untyped_storage()) if tensor.layout is torch.strided else None
