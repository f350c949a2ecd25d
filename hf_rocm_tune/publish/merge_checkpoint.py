"""The base's weight files: which tensors they hold, and the tensors themselves, one file mapped at a time.

Tensors are views of the mapped file, so that reading one costs no memory of the process's own; pages of a file go as
soon as another one is opened and its views are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.files import check_model_directory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor in a file: its dtype as safetensors names it (``BF16``), shape, size in bytes, and the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


class Checkpoint:
    """A model directory.

    Args:
        directory: holds ``config.json`` and safetensors files.

    Attributes:
        directory: as given.
        files: its weight files.
        config: ``config.json``.
        tensors: what is stored, by name, in the order of the files and of the bytes in them.

    Raises:
        UsageError: a file is missing or damaged, the weights are no safetensors, or they are quantised.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = check_model_directory(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.tensors: Mapping[str, Stored] = dict(_stored(self.files))
        self._opened: tuple[Path, Any] | None = None
        if not self.files:
            raise UsageError(
                f"{directory} has its weights as pickles (pytorch_model.bin), which are not read here: load it with "
                "transformers and save it again (save_pretrained writes safetensors)"
            )
        if self.config.get("quantization_config"):
            raise UsageError(
                f"{directory} is quantised, and an adapter cannot be merged into that: give the original model, of "
                "which it was made, with --base"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """One tensor, on the host.

        Raises:
            UsageError: its file cannot be read any more.
        """
        file = self.tensors[name].file
        try:
            if self._opened is None or self._opened[0] != file:
                self.close()
                self._opened = (file, safe_open(file, framework="pt", device="cpu").__enter__())
            tensor: Tensor = self._opened[1].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"model file {file}: cannot be read ({error}): check the disk") from error
        return tensor

    def close(self) -> None:
        """Let go of the mapped file."""
        if self._opened is not None:
            self._opened[1].__exit__(None, None, None)
            self._opened = None


def _stored(files: list[Path]) -> Iterator[tuple[str, Stored]]:
    for file in files:
        with file.open("rb") as stream:  # its form was checked before
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            yield name, Stored(dtype=entry["dtype"], shape=tuple(entry["shape"]), nbytes=stop - start, file=file)
