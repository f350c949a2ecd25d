"""Operators on the meta device, and what they gave before: layers repeat the same operators on the same shapes.

torch works out an output's shape in Python, which takes longer than all the rest of a recording. What an operator gave
for the same arguments once, it gives again: new tensors of the same shapes, strides and dtypes. Operators that return
or change what they were given, or whose output is not on the meta device, are run each time.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

#: Of each output: shape, strides and dtype of a tensor; whatever else stands for itself.
_Outputs: TypeAlias = "tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | int | float | None, ...]"


class Kernels:
    """Runs operators. One instance serves all recordings of a model, which repeat each other."""

    def __init__(self) -> None:
        self._operators: dict[Any, tuple[bool, bool]] = {}
        self._known: dict[Any, tuple[bool, _Outputs, int]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What ``func`` gives for these arguments, and the operations of its matrix products."""
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _makes_new(func), _is_counted(func)
        fresh, counted = operator
        key = (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ()) if fresh else None
        if key is not None and (known := self._known.get(key)) is not None:
            alone, outputs, flops = known
            made = [
                torch.empty_strided(each[0], each[1], dtype=each[2], device="meta") if isinstance(each, tuple) else each
                for each in outputs
            ]
            return made[0] if alone else tuple(made), flops
        out = func(*args, **kwargs)
        flops = _flops(func, args, kwargs, out) if counted else 0
        if key is not None and (described := _outputs(out, (args, kwargs))) is not None:
            self._known[key] = isinstance(out, Tensor), described, flops
        return out, flops


def _makes_new(func: Any) -> bool:
    """Whether an operator's schema says that it changes nothing and returns nothing that it was given."""
    schema = func._schema
    return not any(each.alias_info for each in (*schema.arguments, *schema.returns))


def _key(value: Any) -> Any:
    """A value as far as an operator on the meta device can tell; 1, 1.0 and True are three."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    kind = type(value)
    if kind in _SEQUENCES:
        return tuple([_key(each) for each in value])
    return kind, value


_SEQUENCES = frozenset({tuple, list})


def _outputs(out: Any, given: object) -> _Outputs | None:
    """A description of what an operator gave, or None where it is not new, contiguous in memory and on the meta device.

    Some operators return a view although their schema does not say so. A number alone tells of a tensor's content.
    """
    outputs = out if isinstance(out, tuple) else (out,)
    if not tensors_in(outputs):
        return None
    seen = {id(tensor.untyped_storage()) for tensor in tensors_in(given)}
    found: list[Any] = []
    for each in outputs:
        if not isinstance(each, Tensor | int | float | None):
            return None
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            again = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            if id(storage) in seen or not each.is_meta or again.untyped_storage().nbytes() != storage.nbytes():
                return None
            seen.add(id(storage))
            found.append((each.shape, each.stride(), each.dtype))
        else:
            found.append(each)
    return tuple(found)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


def _is_counted(func: Any) -> bool:
    """Whether operations of it are counted: those of products and of attention."""
    return func._overloadpacket in flop_registry or func.name() in _PRODUCTS


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of a matrix product or of attention."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    return 2 * int(args[0].numel()) * int(out.shape[-1])  # rows times both sides of the weight


#: Products that are not in torch's table.
_PRODUCTS = frozenset({"bitsandbytes::gemm_4bit", "aten::_grouped_mm"})
