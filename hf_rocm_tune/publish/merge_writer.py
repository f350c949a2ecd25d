"""Safetensors shards that are written tensor by tensor, so that no shard is ever whole in memory, and read back.

The format (https://github.com/huggingface/safetensors#format) puts a header with every tensor's dtype, shape and place
before the data, so files can be laid out from names and shapes alone and filled in any order. Wider dtypes come first
in a file, because a reader that maps it needs each tensor aligned to its element.

Each tensor is digested in memory when it is written. `read_back` then flushes the files, drops them from the page
cache where the system allows it, and compares what is on disk with those digests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.integrity.atomic import flush
from hf_rocm_tune.integrity.manifest import drop_from_cache
from hf_rocm_tune.transfer import Digest, combine, digest
from hf_rocm_tune.transfer.raw_bytes import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights that can be merged or cast, by safetensors' names."""

_PIECE_BYTES = 8 << 20  # a multiple of a digest's words


@dataclass(frozen=True, kw_only=True)
class Output:
    """A tensor that will be written: its name, dtype as safetensors names it, shape, and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def element_bytes(self) -> int:
        """Of one element, from the dtype's name (``BF16``: 2); 0 for formats that pack several into a byte."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) // 8 if bits else 1


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: str
    offset: int
    nbytes: int


class ShardWriter:
    """The weight files of one model directory.

    Args:
        directory: exists and is empty of weights.
        outputs: every tensor that will be written, in the order in which they are to be spread over the files.
        max_shard_bytes: of a file's data; a tensor that is larger has a file of its own.

    Attributes:
        digests: of each tensor as it was in memory, by ``<file>:<tensor>``, hexadecimal.
        files: names of the files.
        nbytes: of all tensors.
    """

    def __init__(self, directory: Path, outputs: Sequence[Output], *, max_shard_bytes: int) -> None:
        self._directory = directory
        self.digests: dict[str, str] = {}
        self.nbytes = sum(output.nbytes for output in outputs)
        self._places: dict[str, _Place] = {}
        shards = _spread(outputs, max_shard_bytes)
        self.files = _file_names(len(shards))
        for file, shard in zip(self.files, shards, strict=True):
            self._lay_out(file, shard)

    def _lay_out(self, file: str, shard: list[Output]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for output in sorted(shard, key=lambda output: -output.element_bytes):
            header[output.name] = {
                "dtype": output.dtype,
                "shape": list(output.shape),
                "data_offsets": [position, position + output.nbytes],
            }
            self._places[output.name] = _Place(file=file, offset=position, nbytes=output.nbytes)
            position += output.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        with (self._directory / file).open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(start + position)
        for output in shard:
            place = self._places[output.name]
            self._places[output.name] = _Place(file=file, offset=start + place.offset, nbytes=place.nbytes)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, which is on the host and has the dtype and shape that were announced.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        place = self._places[name]
        data = as_bytes(tensor.detach().contiguous())
        assert data.numel() == place.nbytes, f"{name}: {data.numel()} bytes instead of {place.nbytes}"
        self.digests[f"{place.file}:{name}"] = digest(data).hex()
        with (self._directory / place.file).open("r+b", buffering=0) as stream:
            stream.seek(place.offset)
            view = memoryview(data.numpy())  # type: ignore[arg-type]  # an array is a buffer; Python 3.11 cannot say so
            while view:
                view = view[stream.write(view) :]

    def finish(self) -> None:
        """Write the index, where there are several files. Every tensor must have been put."""
        missing = len(self._places) - len(self.digests)
        assert not missing, f"{missing} announced tensors were not written"
        if len(self.files) == 1:
            return
        index = {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {name: place.file for name, place in sorted(self._places.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._directory / INDEX_FILE).write_text(text, encoding="utf-8")

    def read_back(self) -> int:
        """Compare every tensor on disk with what was in memory, in pieces, so that no file is mapped whole.

        Returns:
            How many were compared.

        Raises:
            CorruptionError: one differs, or a file cannot be read.
        """
        for file in self.files:
            path = self._directory / file
            here = {name: place for name, place in self._places.items() if place.file == file}
            try:
                flush(path)
                drop_from_cache(path)
                with safe_open(path, framework="pt", device="cpu") as opened:
                    if set(opened.keys()) != here.keys():
                        raise CorruptionError(_differs(file, "its header lists other tensors"))
                with path.open("rb", buffering=0) as stream:
                    for name, place in here.items():
                        if _digest_of(stream, place).hex() != self.digests[f"{file}:{name}"]:
                            raise CorruptionError(_differs(file, f"{name} differs from what was written"))
            except (SafetensorError, OSError) as error:
                raise CorruptionError(_differs(file, f"it cannot be read ({error})")) from error
        return len(self._places)


def _digest_of(stream: FileIO, place: _Place) -> Digest:
    """Of a range of a file; digests of pieces add up."""
    stream.seek(place.offset)
    buffer = bytearray(min(_PIECE_BYTES, place.nbytes))
    parts = []
    done = 0
    while done < place.nbytes:
        wanted = memoryview(buffer)[: place.nbytes - done]
        filled = 0
        while filled < len(wanted):
            count = stream.readinto(wanted[filled:])
            if not count:
                raise OSError(f"it ends {place.nbytes - done - filled} bytes too early")
            filled += count
        piece = torch.frombuffer(buffer, dtype=torch.uint8, count=filled)
        parts.append(digest(piece, word_offset=done // 4))
        done += filled
    return combine(parts)


def _differs(file: str, what: str) -> str:
    return (
        f"{file} was read back wrong: {what}. Nothing was kept: check the disk and the memory, then start the same "
        "command again"
    )


def _spread(outputs: Sequence[Output], most: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def needed_bytes(outputs: Sequence[Output]) -> int:
    """Room that the files will take, headers included, generously."""
    return sum(output.nbytes + 256 for output in outputs)


def free_bytes(directory: Path) -> int:
    """Room that a user other than root has on the file system of an existing directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
