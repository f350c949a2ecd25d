"""Which layers are streamed, see `models.streaming`. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_rocm_tune.errors import UsageError

FLAG = "--stream_weights"
#: One that computes, one that has arrived, one that arrives.
LAYER_BUFFERS_A_CARD = 3
#: As many layers as necessary.
AUTO = -1


def parse(text: str) -> int:
    """Reads ``auto``, ``off`` or ``N``: the number of layers, or `AUTO`."""
    if text == "auto":
        return AUTO
    text = "off" if text.lower() == "false" else text  # YAML's off
    if text != "off" and not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise UsageError(f"{FLAG} {text!r} is not understood: give auto, off or the number of layers to stream")
    return 0 if text == "off" else int(text)


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Which of the layers are streamed: evenly spread, so that every visit has time to arrive."""
    if count > layers:
        raise UsageError(f"{FLAG} {count}: this model has {layers} layers")
    return tuple(layer for layer in range(layers) if (layer + 1) * count // layers > layer * count // layers)


@dataclass(frozen=True)
class Streamed:
    stack: str  # name of the list of layers in the model
    layers: tuple[int, ...]  # their numbers, ascending
    from_files: bool = True  # their weights are used as they are in the files, and need not be quantised on the card

    def has(self, name: str) -> bool:
        in_stack = re.search(rf"(?:^|\.){re.escape(self.stack)}\.(\d+)\.", name)
        return in_stack is not None and int(in_stack[1]) in self.layers
