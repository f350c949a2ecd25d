"""Where the layers of a model lie that is split over several cards: stages, each a range of layers on one card.

Everything that is no layer (embeddings, masks, position embeddings, the last norm, the output head and with it the
loss) lies on the first card: a tied output head is then where its embedding is, labels and logits never cross, and the
loss is where the trainer expects it. What the last layer gives comes home to the first card. For schedules of
``torch.distributed.pipelining`` this is the V-shaped placement, in which the first card has the first and the last
stage.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLAG = "--split_layers"
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A range of layers on one card.

    Args:
        card: its number, from 0 on.
        layers: their numbers.
    """

    card: int
    layers: range


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model's stages, in the order in which a batch passes them.

    Args:
        stack: name of the list of layers in the model, as ``model.layers``.
        stages: they cover all layers, each once; stage ``n`` is on card ``n``.
    """

    stack: str
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, stack: str, counts: Sequence[int]) -> Split:
        """From the number of layers on each card."""
        ends = list(itertools.accumulate(counts))
        ranges = (range(end - count, end) for count, end in zip(counts, ends, strict=True))
        return cls(stack=stack, stages=tuple(Stage(card=card, layers=each) for card, each in enumerate(ranges)))

    @property
    def cards(self) -> int:
        """How many."""
        return len(self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers on each card."""
        return tuple(len(stage.layers) for stage in self.stages)

    def card_of_layer(self, layer: int) -> int:
        """The card of a layer."""
        return next(stage.card for stage in self.stages if layer in stage.layers)

    def card_of(self, name: str) -> int:
        """The card of a parameter or module, by its name in the model, wrapped by PEFT or not."""
        found = re.search(rf"(?:^|\.){re.escape(self.stack)}\.(\d+)(?:\.|$)", name)
        return self.card_of_layer(int(found[1])) if found else 0

    def device_map(self, devices: Sequence[torch.device]) -> dict[str, torch.device]:
        """For ``from_pretrained``: everything on the first device, but for the layers of the other cards."""
        others = {f"{self.stack}.{layer}": devices[stage.card] for stage in self.stages[1:] for layer in stage.layers}
        return {"": devices[0], **others}


def parse(text: str) -> tuple[int, ...] | None:
    """Read ``auto`` or ``N[,N...]``: None, or the number of layers on each card, the last of which may be left out.

    Raises:
        UsageError: it is neither.
    """
    words = [word.strip() for word in text.split(",")]
    if words == [AUTO]:
        return None
    if not all(re.fullmatch("[0-9]{1,5}", word) and int(word) > 0 for word in words):
        raise UsageError(f"{FLAG} {text!r} is not understood: give {AUTO}, or layers of each card, as 18 or 18,22")
    return tuple(int(word) for word in words)


def counts_for(given: Sequence[int], layers: int) -> tuple[int, ...]:
    """Layers on each card, when the last card's may have been left out.

    Raises:
        UsageError: they do not fit the model, or leave nothing to a second card.
    """
    rest = layers - sum(given)
    if rest < 0 or (rest == 0 and len(given) < 2):
        wanted = ",".join(map(str, given))
        raise UsageError(f"{FLAG} {wanted} does not fit a model of {layers} layers: at least one must be left for each")
    return (*given, rest) if rest else tuple(given)


def layer_stack(model: nn.Module, config: PreTrainedConfig) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name: the heaviest list of as many modules as the configuration has layers.

    Raises:
        UsageError: there is none.
    """
    count = getattr(config.get_text_config(), "num_hidden_layers", 0)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count > 0
    ]
    if not found:
        raise UsageError(
            f"{FLAG}: no list of {count} layers could be told in {type(model).__name__}, so it cannot be split"
        )
    return max(found, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))


def stack_of(config: Any, *, trust_remote_code: bool) -> tuple[str, int]:
    """Name of the list of layers and their number, from the configuration alone.

    Raises:
        UsageError: see `layer_stack`.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{FLAG}: this model cannot be split: {str(error).splitlines()[0]}") from error
    name, layers = layer_stack(skeleton, config)
    return name, len(layers)
