"""What LoRA's layers multiply and drop with, against the adapter's configuration: numbers on the host, no tensors.

PEFT computes a layer's factor once, ``alpha / r`` (``alpha / sqrt(r)`` with rsLoRA), and every forward pass reads it: a
wrong one trains and saves an adapter that means something else wherever it is loaded.
"""

from __future__ import annotations

import math
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn


class AdapterSettings:
    """Factors and dropout of a model's LoRA layers as a training begins with them.

    The constructor compares them with the configuration where that states them for all layers (no patterns), unless
    dropout is off in the whole model: TRL's preference trainers switch it off. `wrong` compares them with what they
    were.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        self._before = [_settings_of(layer) for _, layer in self._layers]
        self.wrong_at_start = self._unlike(model)

    def wrong(self) -> str | None:
        """The first layer whose settings have changed."""
        for (name, layer), before in zip(self._layers, self._before, strict=True):
            now = _settings_of(layer)
            if now != before:
                return f"the settings of LoRA's layer {name} are {_in_words(now)} instead of {_in_words(before)}"
        return None

    def adopt(self) -> None:
        """Take the present settings for right: a user's own code may set others."""
        self._before = [_settings_of(layer) for _, layer in self._layers]

    def _unlike(self, model: nn.Module) -> str | None:
        configs = getattr(model, "peft_config", {})
        is_without_dropout = not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))
        for (name, layer), settings in zip(self._layers, self._before, strict=True):
            for adapter, (scaling, dropout) in settings.items():
                config = configs.get(adapter)
                if config is None or config.rank_pattern or config.alpha_pattern or not layer.r.get(adapter):
                    continue
                root = math.sqrt(config.r) if config.use_rslora else config.r
                wanted = (config.lora_alpha / root, 0.0 if is_without_dropout else config.lora_dropout)
                if not math.isclose(scaling, wanted[0], rel_tol=1e-6) or dropout not in (None, wanted[1]):
                    return (
                        f"the settings of LoRA's layer {name} are {_in_words({adapter: (scaling, dropout)})}, but its "
                        f"configuration says {_in_words({adapter: wanted})}"
                    )
        return None


def _settings_of(layer: Any) -> dict[str, tuple[float, float | None]]:
    """Factor and dropout of each adapter."""
    dropouts = layer.lora_dropout
    return {
        adapter: (scaling, getattr(dropouts[adapter], "p", 0.0) if adapter in dropouts else None)
        for adapter, scaling in layer.scaling.items()
    }


def _in_words(settings: dict[str, Any]) -> str:
    return ", ".join(f"factor {scaling:.6g} and dropout {dropout}" for scaling, dropout in settings.values())
