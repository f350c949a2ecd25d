"""The parts of an image-text model: its language model, its vision tower, and the projector between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune.errors import UsageError

_MERGER = re.compile("merger|projector|connector")  # inside a tower, as Qwen's


@dataclass(frozen=True)
class VisionParts:
    """Names of modules outside the language model that hold linear layers.

    ``projector`` may hold none: Gemma 3's is a matrix of its own, which can be trained whole only.
    """

    tower: tuple[str, ...]
    projector: tuple[str, ...]

    def left_out(self, *, tower: bool, projector: bool) -> str | None:
        """PEFT's ``exclude_modules``, a regular expression of whole names, for the parts without adapters."""
        names = (() if tower else self.tower) + (() if projector else self.projector)
        if not names:
            return None
        inside = "|".join(re.escape(name) for name in names)
        kept = "|".join(re.escape(name) for name in (self.projector if projector else ()))
        beside = rf"(?!(?:{kept})(?:\.|$))" if kept and not tower else ""
        return rf"{beside}(?:{inside})(?:\..*)?"


def vision_parts(model: nn.Module) -> VisionParts | None:
    """The parts of a model that reads pictures; None for a model of text."""
    config: Any = model.config
    if config.get_text_config() is config or not hasattr(config, "vision_config"):
        return None
    decoder = getattr(model, "get_decoder", lambda: None)()
    language = next((name for name, module in model.named_modules() if module is decoder), None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not language:
        return None
    tops = [name for name, module in model.named_modules() if isinstance(module, PreTrainedModel) and name]
    towers = [name for name in tops if not _is_within(name, language) and not _is_within(language, name)]
    towers = [name for name in towers if not any(name != other and _is_within(name, other) for other in towers)]
    tower, projector = set[str](), set[str]()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head or _is_within(name, language):
            continue
        owner = next((each for each in towers if _is_within(name, each)), None)
        inside = name.removeprefix(f"{owner}.").split(".") if owner else name.split(".")
        merger = next((number for number, part in enumerate(inside) if _MERGER.search(part)), None)
        if owner is None:
            parts = name.split(".")
            depth = next((n for n, part in enumerate(parts) if part not in ("model", "base_model")), 0)
            projector.add(".".join(parts[: depth + 1]))
        elif merger is not None:
            projector.add(".".join([owner, *inside[: merger + 1]]))
        else:
            tower.add(owner)
    if not projector:
        outside = (name for name, _ in model.named_modules() if not any(_is_within(name, each) for each in towers))
        projector.update(name for name in outside if _MERGER.search(name.rpartition(".")[2]))
    return VisionParts(tuple(sorted(tower)), tuple(sorted(projector)))


def has_linear(model: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether adapters can be put on one of these modules."""
    return any(
        isinstance(module, nn.Linear | Conv1D) for name in names for module in model.get_submodule(name).modules()
    )


def parameters_of(model: nn.Module, names: tuple[str, ...], but: tuple[str, ...] = ()) -> int:
    """Number of parameters of modules; ``but``: without those of these."""
    return sum(
        (getattr(parameter, "quant_state", None) or parameter).shape.numel()
        for name, parameter in model.named_parameters()
        if any(_is_within(name, each) for each in names) and not any(_is_within(name, each) for each in but)
    )


def whole_modules(model: nn.Module, parts: VisionParts, *, tower: bool, projector: bool) -> list[str]:
    """PEFT's ``modules_to_save`` for parts that are trained whole.

    UsageError: the projector is inside the tower, which is trained whole too: one copy cannot be in another.
    """
    names = [*(parts.tower if tower else ()), *(parts.projector if projector else ())]
    for name in names:
        if any(name != other and _is_within(name, other) for other in names):
            raise UsageError(
                f"--train_vision_tower whole trains {name} too, which is part of the tower here: leave "
                "--train_projector out"
            )
    lists = {name: module for name in names if isinstance(module := model.get_submodule(name), nn.ModuleList)}
    inside = [f"{name}.{number}" for name, module in lists.items() for number in range(len(module))]
    return [name for name in names if name not in lists] + inside  # PEFT takes no list of modules


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
