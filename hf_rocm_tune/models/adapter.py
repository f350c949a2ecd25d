"""Adapters: the LoRA configuration of the command line, checked against the model that it is for."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN = 24


def target_names(targets: str | Iterable[str] | None) -> str | Iterable[str] | None:
    """Makes a single module name a set of one again.

    TRL unwraps a list of one into its string, which PEFT reads as a regular expression on whole names: ``q_proj``
    alone would match nothing. Whatever a name as an expression could match, it matches as a name too.

    Args:
        targets: as :class:`trl.ModelConfig` holds them.

    Returns:
        The same targets; a string of letters, digits, ``_`` and ``.`` as a set.
    """
    return {targets} if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets) else targets


def check_targets(model: nn.Module, targets: str | Iterable[str] | None) -> None:
    """Checks that each LoRA target names at least one module of the model.

    Args:
        model: the base model, not yet wrapped.
        targets: ``"all-linear"``, a regular expression (one string), or module names, matched as PEFT does: the
            whole name or its last part.

    Raises:
        UsageError: a target matches nothing; the message lists what exists.
    """
    if targets is None or targets == "all-linear":
        return
    names = [name for name, _ in model.named_modules() if name]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if isinstance(targets, str):
        try:
            missing = [] if any(re.fullmatch(targets, name) for name in names) else wanted
        except re.error as error:
            raise UsageError(f"--lora_target_modules {targets!r} is not a regular expression: {error}") from error
    else:
        missing = [t for t in wanted if not any(name == t or name.endswith(f".{t}") for name in names)]
    if missing:
        found = ", ".join(adaptable(model)[:_SHOWN])
        raise UsageError(
            f"--lora_target_modules: {', '.join(missing)} match no module of {type(model).__name__}; it has {found} "
            "(or say all-linear)"
        )


def adaptable(model: nn.Module) -> list[str]:
    """Last name parts of the linear layers of a model that LoRA can adapt, most frequent first."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            counts[name.rsplit(".", 1)[-1]] += 1
    return [name for name, _ in counts.most_common()]


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Number of trainable parameters and of all parameters; packed 4-bit weights count as what they stand for."""
    trainable = total = 0
    for parameter in model.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        count = state.shape.numel() if state is not None else parameter.numel()
        total += count
        trainable += count if parameter.requires_grad else 0
    return trainable, total
