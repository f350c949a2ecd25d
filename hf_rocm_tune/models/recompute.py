"""Activation recomputation per layer: the first layers whole, the next ones selectively, the others not at all.

Selectively: results of matrix products and of attention are kept, the cheap rest is recomputed; their backward comes
before that of the first layers, when there is memory. Needs transformers' ``GradientCheckpointingLayer``. Kernels that
are not torch operators are always recomputed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_rocm_tune.errors import UsageError

FLAG = "--recompute_layers"
_NAMES = [
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
]
#: transformers' name for recomputing activations: ``gradient_checkpointing`` before 5.23, where it became an alias that
#: v6 removes. Settings and methods of models (`_enable`, `_disable`, `is_`) have it.
SETTING = _NAMES[0]
#: A product over fewer columns takes no longer than writing its result: 2 * 128 operations per element at 50e12 a
#: second against 2 bytes at 640e9. Products with an adapter's second matrix and attention scores are recomputed.
_CHEAP = 128


def parse(text: str) -> tuple[int, int]:
    """Reads ``WHOLE`` or ``WHOLE,SELECTIVE``: numbers of layers to recompute whole and selectively."""
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:,\s*([0-9]{1,5})\s*)?", text)
    if match is None:
        raise UsageError(
            f"{FLAG} {text!r} is not understood: give the number of layers to recompute whole and, after a comma, the "
            "number to recompute except for products and attention, as 8 or 8,20"
        )
    whole = int(match[1])
    selective = int(match[2] or 0)
    if not whole + selective:
        raise UsageError(f"{FLAG} {text} recomputes nothing: give --gradient_checkpointing false instead")
    return whole, selective


def is_chosen(training: Any) -> bool:
    """Whether training arguments ask for activations to be recomputed."""
    return bool(getattr(training, SETTING))


def is_reversible(model: nn.Module) -> bool:
    """Whether a model hands its layers to an autograd function that computes them again itself: Reformer's.

    Such a function gives its layers gradients only where its input has one, so that adapters on a frozen model need an
    embedding whose output requires a gradient.
    """
    code = vars(sys.modules[type(model).__module__])
    functions = [each for each in code.values() if isinstance(each, type) and issubclass(each, torch.autograd.Function)]
    return any("layers" in inspect.signature(each.forward).parameters for each in functions)


def options_of(training: Any) -> dict[str, Any]:
    """How they ask for it: ``gradient_checkpointing_kwargs``."""
    return getattr(training, f"{SETTING}_kwargs") or {}


def choose(training: Any, on: bool) -> None:
    """Sets whether activations are recomputed, under each name that these transformers have."""
    for name in _NAMES:
        setattr(training, name, on)


def is_enabled(model: Any) -> bool:
    """Whether a transformers model recomputes its activations."""
    return bool(getattr(model, f"is_{SETTING}"))


def enable(model: Any, **options: Any) -> None:
    """Lets a transformers model recompute its activations, with options of ``torch.utils.checkpoint``."""
    getattr(model, f"{SETTING}_enable")(**{f"{SETTING}_kwargs": options or None})


def disable(model: Any) -> None:
    getattr(model, f"{SETTING}_disable")()


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(model: nn.Module, counts: tuple[int, int]) -> None:
    """Sets the first layers of a model with checkpointing on to be recomputed whole, the next ones selectively."""
    layers = layers_of(model)
    check(counts, len(layers))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < sum(counts)
        more: dict[str, Any] = {} if number < counts[0] else {"context_fn": contexts}
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **more)


#: In older transformers (5.19) a layer checkpoints its ``__call__``: its hooks run again when it is recomputed.
_HOOKS_INSIDE = "__call__" in vars(GradientCheckpointingLayer)


def keep_hooks_outside(layer: nn.Module) -> None:
    """Has a layer recompute its ``forward`` only, as newer transformers do: hooks run once in a step."""
    if not (_HOOKS_INSIDE and isinstance(layer, GradientCheckpointingLayer)):
        return
    kind = type(layer)
    forward = layer.forward

    def checkpointed(*arguments: Any, **keywords: Any) -> Any:
        if not (layer.gradient_checkpointing and layer.training):
            return forward(*arguments, **keywords)
        # as upstream does: a cache cannot be recomputed
        without = {"use_cache": False, "past_key_values": None, "layer_past": None}
        keywords |= {name: value for name, value in without.items() if keywords.get(name)}
        return layer._gradient_checkpointing_func(partial(forward, **keywords), *arguments)

    layer.forward = checkpointed
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": nn.Module.__call__, "__module__": kind.__module__})


def check(counts: tuple[int, int], layers: int) -> None:
    if sum(counts) > layers:
        raise UsageError(
            f"{FLAG} {counts[0]},{counts[1]} needs {sum(counts)} layers, and this model can recompute {layers}"
        )


def contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_is_kept)


def _is_kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    del context
    costs = _costly().get(op)
    return costs is not None and costs(args, kwargs)


@cache
def _costly() -> dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]]:
    aten = torch.ops.aten
    rules: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {}
    for position, ops in enumerate(((aten.mm, aten.bmm, aten._grouped_mm), (aten.addmm, aten.baddbmm))):
        rules |= {op.default: partial(_is_wide, position) for op in ops}
    if hasattr(torch.ops, "bitsandbytes") and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        rules[torch.ops.bitsandbytes.gemm_4bit.default] = partial(_is_wide, 0)
    names = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for op in (getattr(aten, f"_scaled_dot_product_{name}").default for name in names):
        (position,) = (at for at, argument in enumerate(op._schema.arguments) if argument.name == "dropout_p")
        rules[op] = partial(_draws_nothing, position)
    return rules


def _is_wide(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    del kwargs
    return bool(args[position].shape[-1] > _CHEAP)


def _draws_nothing(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention has no dropout: kept attention would draw no random numbers in the recomputation."""
    return not kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
