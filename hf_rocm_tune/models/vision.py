"""The parts of an image-text model: its language model, its vision tower, and the projector between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
        names: list[str] = []
        if not tower:
            names += self.tower
        if not projector:
            names += self.projector
        if not names:
            return None
        pattern = rf"(?:{_any_of(names)})(?:\..*)?"
        if projector and self.projector and not tower:  # which may lie inside of the tower
            pattern = rf"(?!(?:{_any_of(self.projector)})(?:\.|$)){pattern}"
        return pattern


def _any_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


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
    towers = _towers(model, language)
    tower: set[str] = set()
    projector: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head or _is_within(name, language):
            continue
        owner = next((top for top in towers if _is_within(name, top)), None)
        if owner is None:
            projector.add(_outermost(name))
            continue
        inside = name.removeprefix(f"{owner}.").split(".")
        merger = next((number for number, part in enumerate(inside) if _MERGER.search(part)), None)
        if merger is not None:
            projector.add(".".join([owner, *inside[: merger + 1]]))
        else:
            tower.add(owner)
    if not projector:  # one without a linear layer
        for name, _ in model.named_modules():
            leaf = name.rpartition(".")[2]
            if _MERGER.search(leaf) and not _is_within_any(name, towers):
                projector.add(name)
    return VisionParts(tuple(sorted(tower)), tuple(sorted(projector)))


def _towers(model: nn.Module, language: str) -> list[str]:
    """The outermost models inside of ``model`` beside its language model."""
    towers = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or not name:
            continue
        if not _is_within(name, language) and not _is_within(language, name):
            towers.append(name)
    outermost = []
    for name in towers:
        if not _is_within_any(name, [other for other in towers if other != name]):
            outermost.append(name)
    return outermost


def _outermost(name: str) -> str:
    """The module directly below the model in which a layer is."""
    parts = name.split(".")
    depth = next((number for number, part in enumerate(parts) if part not in ("model", "base_model")), 0)
    return ".".join(parts[: depth + 1])


def _is_within_any(name: str, owners: Iterable[str]) -> bool:
    return any(_is_within(name, owner) for owner in owners)


def has_linear(model: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether adapters can be put on one of these modules."""
    for name in names:
        if any(isinstance(module, nn.Linear | Conv1D) for module in model.get_submodule(name).modules()):
            return True
    return False


def parameters_of(model: nn.Module, names: tuple[str, ...], but: tuple[str, ...] = ()) -> int:
    """Number of parameters of modules; ``but``: without those of these."""
    count = 0
    for name, parameter in model.named_parameters():
        if _is_within_any(name, names) and not _is_within_any(name, but):
            shape = (getattr(parameter, "quant_state", None) or parameter).shape  # a packed one has its own
            count += shape.numel()
    return count


def whole_modules(model: nn.Module, parts: VisionParts, *, tower: bool, projector: bool) -> list[str]:
    """PEFT's ``modules_to_save`` for parts that are trained whole.

    UsageError: the projector is inside the tower, which is trained whole too: one copy cannot be in another.
    """
    names: list[str] = []
    if tower:
        names += parts.tower
    if projector:
        names += parts.projector
    for name in names:
        if _is_within_any(name, [other for other in names if other != name]):
            raise UsageError(
                f"--train_vision_tower whole trains {name} too, which is part of the tower here: leave "
                "--train_projector out"
            )
    modules = []
    inside = []
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):  # PEFT takes none
            inside += [f"{name}.{number}" for number in range(len(module))]
        else:
            modules.append(name)
    return modules + inside


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
