"""Tensors of a base's weight files that its loaded model has no place for, such as a head for multi-token prediction.

transformers drops them when it loads a model, those of some architectures without a message. A merged model keeps
them, so that every program that reads the base's files reads the merged ones too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from hf_rocm_tune.models.files import MappedFile, check_model_directory

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 3


@dataclass(frozen=True)
class Leftovers:
    """What loading did not read: the tensors, which share the bytes of the mapped files, by name."""

    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]  # names of further weight files beside them, which no index names

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def lines(self, *, reward: bool) -> list[str]:
        """What is printed of them; a reward model is another class than its base, whose head it does not take over."""
        names = sorted(self.tensors)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = f"{', '.join(names[:_SHOWN])}{more}"
        noun = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        lines = []
        if names and reward:
            lines.append(f"{noun} of the base left out, for which a reward model has no place: {shown}")
        elif names:
            lines.append(
                f"{noun} of the base ({self.nbytes / 1e9:.3g} GB) are copied as they are, because transformers does "
                f"not load them and the adapter does not change them: {shown}"
            )
        if self.files:
            lines.append(f"weight files of the base that its index does not name are left out: {', '.join(self.files)}")
        return lines


def leftovers_of(directory: Path, loaded: Collection[tuple[str, str]]) -> Leftovers:
    """The tensors of a model's weight files that were not read; ``loaded``: file and name of each that was."""
    read = {(os.path.realpath(file), name) for file, name in loaded}
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for file in check_model_directory(directory):
        where = os.path.realpath(file)
        mapped = MappedFile(file).tensors
        tensors |= {name: tensor for name, tensor in mapped.items() if (where, name) not in read}
        used.add(file.name)
    unused = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used)
    return Leftovers(tensors, tuple(unused))


def add_leftovers(directory: Path, leftovers: Leftovers) -> None:
    """Write the leftovers beside a saved model's weights, as one more file of its shards.

    The shards are renamed as those of a model with one more shard. The caller compares the files and writes the index.
    """
    shards = sorted(directory.glob("*.safetensors"))
    count = len(shards) + 1
    for number, shard in enumerate(shards, start=1):
        shard.rename(directory / f"model-{number:05d}-of-{count:05d}.safetensors")
    tensors = {name: tensor.contiguous() for name, tensor in leftovers.tensors.items()}
    save_file(tensors, directory / f"model-{count:05d}-of-{count:05d}.safetensors", metadata={"format": "pt"})
