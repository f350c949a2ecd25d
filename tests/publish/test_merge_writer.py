"""Files that are laid out first and filled in any order are what the safetensors library itself would have written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.files import check_model_directory
from hf_rocm_tune.publish import merge_writer
from hf_rocm_tune.publish.merge_writer import Output, ShardWriter

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every width, odd sizes, a scalar, an empty one, a transposed one."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for number, dtype in enumerate(NAMES):
        raw = torch.randint(0, 100, (3, 2 * number + 1), generator=generator)
        made[f"t.{number}"] = raw.to(dtype)
    made["scalar"] = torch.tensor(2.5)
    made["empty"] = torch.zeros(0, 4)
    made["transposed"] = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()
    return made


def outputs(made: dict[str, Tensor]) -> list[Output]:
    return [
        Output(name=name, dtype=NAMES[value.dtype], shape=tuple(value.shape), nbytes=value.nbytes)
        for name, value in made.items()
    ]


def written(directory: Path, made: dict[str, Tensor], *, most: int, seed: int = 0) -> ShardWriter:
    writer = ShardWriter(directory, outputs(made), max_shard_bytes=most)
    names = list(made)
    random.Random(seed).shuffle(names)
    for name in names:
        writer.put(name, made[name])
    writer.finish()
    return writer


@pytest.mark.parametrize("most", [1, 40, 1 << 20])
def test_any_reader_gets_the_same_tensors_back(most: int, tmp_path: Path) -> None:
    made = tensors()
    writer = written(tmp_path, made, most=most)
    assert writer.read_back() == len(made)
    found = {name: value for file in writer.files for name, value in load_file(tmp_path / file).items()}
    assert found.keys() == made.keys()
    for name, value in made.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    (tmp_path / "config.json").write_text("{}")
    assert check_model_directory(tmp_path) == [tmp_path / name for name in writer.files]
    if len(writer.files) > 1:
        index = json.loads((tmp_path / merge_writer.INDEX_FILE).read_text())
        assert index["weight_map"].keys() == made.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in made.values())


def test_each_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    written(tmp_path, tensors(), most=1 << 20)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 8 == 0
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes.get(entry["dtype"], 1) == 0


@pytest.mark.parametrize("piece", [4, 1 << 20])
def test_a_flipped_bit_on_disk_is_found_and_named(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_writer, "_PIECE_BYTES", piece)
    made = {"a": torch.arange(1000, dtype=torch.int64), "b": torch.arange(999, dtype=torch.uint8)}
    writer = written(tmp_path, made, most=1 << 20)
    assert writer.read_back() == 2
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4  # the last byte is b's
    path.write_bytes(raw)
    with pytest.raises(CorruptionError, match="b differs from what was written"):
        writer.read_back()


@pytest.mark.parametrize("harm", ["truncated", "other header", "gone"])
def test_a_file_that_cannot_be_read_back_is_corruption(harm: str, tmp_path: Path) -> None:
    writer = written(tmp_path, tensors(), most=1 << 20)
    path = tmp_path / "model.safetensors"
    if harm == "truncated":
        path.write_bytes(path.read_bytes()[:-3])
    elif harm == "other header":
        path.write_bytes(path.read_bytes().replace(b'"scalar"', b'"scalor"'))
    else:
        path.unlink()
    with pytest.raises(CorruptionError, match="read back wrong"):
        writer.read_back()


def test_a_tensor_that_was_not_written_is_our_bug(tmp_path: Path) -> None:
    made = tensors()
    writer = ShardWriter(tmp_path, outputs(made), max_shard_bytes=1 << 20)
    writer.put("scalar", made["scalar"])
    with pytest.raises(AssertionError, match="not written"):
        writer.finish()


def test_metadata_says_which_library_reads_it(tmp_path: Path) -> None:
    written(tmp_path, tensors(), most=1 << 20)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers refuses a file without it
