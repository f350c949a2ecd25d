"""The raw bytes of a tensor, whatever its dtype, strides or subclass, and the tensors of nested batches.

Bytes are reached through the storage: ``Tensor.view(dtype)`` refuses some dtypes, some strides and 0-dim tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


def tree_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a nested structure, in order; one that occurs twice is yielded twice."""
    for _, tensor in named_tensors(tree):
        yield tensor


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors with their dotted paths; a bare tensor is named ``tensor``."""
    if isinstance(tree, Tensor):
        yield prefix or "tensor", tree
        return
    for key, value in _children(tree):
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from named_tensors(value, name)


def map_tensors(tree: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Apply `replace` to the tensors of a nested structure; each container is rebuilt with its own type.

    Other objects are kept as they are, and the given containers are not changed.
    """
    if isinstance(tree, Tensor):
        return replace(tree)
    values = {key: map_tensors(value, replace) for key, value in _children(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values.values())
    if isinstance(tree, (list, tuple)):
        return type(tree)(values.values())
    if isinstance(tree, Mapping) and not isinstance(tree, (dict, UserDict)):
        return type(tree)(values)  # type: ignore[call-arg]  # mappings are built from a dict by convention
    rebuilt = tree
    if values or isinstance(tree, Mapping):
        rebuilt = copy.copy(tree)  # with its default factory or encodings
    for key, value in values.items():
        if isinstance(tree, Mapping):
            rebuilt[key] = value
        else:
            object.__setattr__(rebuilt, key, value)
    return rebuilt


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return []
