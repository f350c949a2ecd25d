"""The tensors of nested batches: mappings, lists, tuples and dataclasses of tensors and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


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


def with_replaced(tree: Any, ids: Iterable[int], others: Sequence[Tensor]) -> Any:
    """As `map_tensors`, with ``others`` in the places of the tensors with these ids, in their order."""
    others_by_id = dict(zip(ids, others, strict=True))
    return map_tensors(tree, lambda tensor: others_by_id.get(id(tensor), tensor))


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return []
