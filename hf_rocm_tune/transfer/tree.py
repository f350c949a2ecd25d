"""Nested batches: dicts and other mappings, lists, tuples, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tree_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a nested structure, in order; one that stands in two places comes twice."""
    for _, tensor in named_tensors(tree):
        yield tensor


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors with their dotted path; a bare tensor is called ``tensor``."""
    if isinstance(tree, Tensor):
        yield prefix or "tensor", tree
        return
    for key, value in _children(tree):
        yield from named_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def map_tensors(tree: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, each container rebuilt with its own type, with `replace` applied to the tensors.

    Everything else is kept as it is, the very same object; the containers given are not changed.
    """
    if isinstance(tree, Tensor):
        return replace(tree)
    values = {key: map_tensors(value, replace) for key, value in _children(tree)}
    if isinstance(tree, Mapping):
        if isinstance(tree, (dict, UserDict)):
            # A copy keeps what such types carry beside their items (default factory, token encodings).
            rebuilt = copy.copy(tree)
            for key, value in values.items():
                rebuilt[key] = value
            return rebuilt
        return type(tree)(values)  # type: ignore[call-arg]  # mappings are built from a dict by convention
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values.values())
    if isinstance(tree, (list, tuple)):
        return type(tree)(values.values())
    if _is_dataclass_instance(tree):
        rebuilt = copy.copy(tree)
        for key, value in values.items():
            object.__setattr__(rebuilt, key, value)
        return rebuilt
    return tree


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if _is_dataclass_instance(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return []


def _is_dataclass_instance(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
