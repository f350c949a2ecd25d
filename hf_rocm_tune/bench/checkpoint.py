"""A synthetic checkpoint in the shape of an 8B Llama: real configuration, real safetensors shards, made-up weights.

Shape of Llama-3.1-8B (its ``config.json``): hidden 4096, intermediate 14336, 32 layers, 32 heads of 128 with 8 for keys
and values, vocabulary 128256, untied, bfloat16: 8.03 billion parameters, 16.06 GB, four shards. A smaller scale keeps
the layers and the proportions and narrows the widths, in steps of whole groups of four heads; below the narrowest it
takes fewer layers.

Not covered: the values of a trained model. They repeat, so a file system that compresses would read faster than it does
with real weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

SHARDS = 4
SMALLEST_SCALE = 1 / 4096
_FULL_GROUPS = 8
"""Groups of the full size: each has four query heads and one of keys and values."""
_LAYERS = 32
_HEAD = 128
_NARROWEST = 1 / (4 * _FULL_GROUPS**2)
"""Scale of one group with heads of half the width. 4-bit kernels want widths in multiples of 64: none are narrower."""
_VOCABULARY = 128256
_POOL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths of the checkpoint.

    Args:
        groups: groups of four query heads and one key and value head.
        head: width of a head.
        vocabulary: tokens.
        layers: decoder layers.
    """

    groups: int
    head: int
    vocabulary: int
    layers: int

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return 4 * self.groups * self.head

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        attention = self.hidden * self.hidden * 2 + 2 * self.hidden * self.groups * self.head
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def intermediate(self) -> int:
        """Width inside the feed-forward block."""
        return self.hidden * 7 // 2

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return 2 * self.parameters

    def config(self) -> LlamaConfig:
        """The configuration that goes with it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=4 * self.groups,
            num_key_value_heads=self.groups,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )


def shape_for(scale: float) -> Shape:
    """The shape with about `scale` times the parameters of the full size.

    Raises:
        UsageError: the scale is not between 1/4096 and 1.
    """
    if not SMALLEST_SCALE <= scale <= 1:
        raise UsageError(f"--scale is {scale:g}; give a number from {SMALLEST_SCALE:g} to 1 (the 8B model itself)")
    width = math.sqrt(scale)
    vocabulary = max(64, round(_VOCABULARY * width / 64) * 64)
    groups = _FULL_GROUPS * width
    if groups >= 0.75:  # nearer to one whole group than to one with heads of half the width
        return Shape(groups=max(1, round(groups)), head=_HEAD, vocabulary=vocabulary, layers=_LAYERS)
    layers = min(_LAYERS, max(1, round(_LAYERS * scale / _NARROWEST)))
    return Shape(groups=1, head=_HEAD // 2, vocabulary=vocabulary, layers=layers)


def largest_scale(budget: float) -> float:
    """The largest scale whose weights have at most `budget` bytes, among those with whole groups of heads."""
    scales = [(groups / _FULL_GROUPS) ** 2 for groups in range(_FULL_GROUPS, 0, -1)]
    return next((scale for scale in scales if shape_for(scale).nbytes <= budget), SMALLEST_SCALE)


def write(shape: Shape, folder: Path) -> list[Path]:
    """Write the checkpoint, a shard at a time, and see it on the disk.

    Returns:
        The weight files.
    """
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(shape.config()).state_dict().items()}
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files, where = [], {}
    for number, names in enumerate(_split(shapes), start=1):
        file = folder / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: _weight(name, shapes[name], pool) for name in names}
        save_file(tensors, file, metadata={"format": "pt"})
        where.update(dict.fromkeys(names, file.name))
        files.append(file)
    index = {"metadata": {"total_size": shape.nbytes, "total_parameters": shape.parameters}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    shape.config().save_pretrained(folder)
    return files


def _split(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    """The names in their order, cut into shards of about the same size, none of them empty."""
    total, passed = sum(size.numel() for size in shapes.values()), 0
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for name, size in shapes.items():
        shards[min(passed * SHARDS // total, SHARDS - 1)].append(name)
        passed += size.numel()
    yield from shards


def _weight(name: str, size: torch.Size, pool: Tensor) -> Tensor:
    """Ones for a norm, else values of the pool from a place that is another for each name."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weight = torch.empty(size.numel(), dtype=torch.bfloat16)
    start = sum(map(ord, name)) * 7919 % _POOL
    turned = pool.roll(-start)
    for position in range(0, weight.numel(), _POOL):
        piece = weight[position : position + _POOL]
        piece[:] = turned[: piece.numel()]
    return weight.view(size)
