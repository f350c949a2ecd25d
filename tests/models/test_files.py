"""A damaged model directory is named as such, and so is a weight file that is not what was published."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models import files
from hf_rocm_tune.models.files import check_files, check_model_directory, check_safetensors, recorded_sha256
from hf_rocm_tune.transfer import digest

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def model(model_of: Any, tmp_path: Path) -> Path:
    """A copy of a model in one file, to be damaged."""
    return Path(shutil.copytree(model_of("llama3"), tmp_path / "model"))


@pytest.fixture
def sharded(model_of: Any, tmp_path: Path) -> Path:
    """A copy of a model in several files, to be damaged."""
    return Path(shutil.copytree(model_of("llama3", shards=3), tmp_path / "sharded"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that each example overwrites."""
    directory = tmp_path_factory.mktemp("nonsense")
    (directory / "config.json").write_text("{}")
    return directory


def refused(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_model_directory(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_models_are_accepted_with_their_files_in_order(model: Path, sharded: Path) -> None:
    assert check_model_directory(model) == [model / WEIGHTS]
    files = check_model_directory(sharded)
    assert len(files) >= 3
    assert files == sorted(sharded.glob("*.safetensors"))


@pytest.mark.parametrize("kept", [0, 8, 100, -1])
def test_a_truncated_file_is_named(model: Path, kept: int) -> None:
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[:kept])
    assert str(model / WEIGHTS) in refused(model)


def test_the_truncated_shard_is_named_and_not_another(sharded: Path) -> None:
    second = sorted(sharded.glob("*.safetensors"))[1]
    second.write_bytes(second.read_bytes()[:-100])
    assert second.name in refused(sharded)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 200_000_000])
def test_a_damaged_header_length_is_refused(model: Path, length: int) -> None:
    content = bytearray((model / WEIGHTS).read_bytes())
    content[:8] = length.to_bytes(8, "little")
    (model / WEIGHTS).write_bytes(content)
    assert WEIGHTS in refused(model)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    second = sorted(sharded.glob("*.safetensors"))[1]
    second.unlink()
    message = refused(sharded)
    assert second.name in message
    assert INDEX in message


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": None},
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": ["f"]}},
        {"weight_map": {"a": "n" * 5000}},
        {"weight_map": {"a": "nul\0"}},
        {"weight_map": {"a": ""}},
    ],
    ids=range(9),
)
def test_an_index_without_a_sound_map_is_refused(sharded: Path, index: object) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    assert INDEX in refused(sharded)


def test_what_is_not_a_model_directory_says_what_is_missing(model: Path, tmp_path: Path) -> None:
    assert "not a directory" in refused(tmp_path / "nothing")
    (model / WEIGHTS).unlink()
    assert WEIGHTS in refused(model)
    (model / "config.json").unlink()
    assert "config.json" in refused(model)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"a": ' * 100_000, "\x00"], ids=range(7))
def test_a_configuration_that_is_no_json_object_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in refused(model)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for unreadable in (tmp_path, tmp_path / "gone.safetensors"):
        with pytest.raises(UsageError, match="cannot be read"):
            check_safetensors(unreadable)


HEADER = st.dictionaries(st.text(max_size=4), st.fixed_dictionaries({"data_offsets": JSON}), max_size=3)


def as_weights(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([WEIGHTS, INDEX, "config.json"]).flatmap(lambda name: st.tuples(st.just(name), st.binary()))
    | st.tuples(st.just(WEIGHTS), st.builds(as_weights, JSON | HEADER, st.binary(max_size=16)))
    | st.tuples(
        st.just(INDEX), (JSON | st.fixed_dictionaries({"weight_map": JSON})).map(lambda o: json.dumps(o).encode())
    )
)
def test_any_content_of_any_file_ends_in_a_usage_error_at_worst(scratch: Path, harmed: tuple[str, bytes]) -> None:
    file, content = scratch / harmed[0], harmed[1]
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content)
    with suppress(UsageError):
        check_model_directory(scratch)
    file.unlink() if before is None else file.write_bytes(before)


# ---- what was recorded of a file ----------------------------------------------------------------------------------


def hub_file(root: Path, content: bytes) -> Path:
    """A file as the Hub's cache lays it out: a link to a blob that is named by its SHA-256."""
    blob = root / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link = root / "snapshots" / "main" / "model.safetensors"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(blob)
    return link


def with_manifest(root: Path, content: bytes) -> Path:
    """A file beside a manifest of ours."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "model.safetensors"
    file.write_bytes(content)
    entry = {"files": {file.name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}}
    (root / "integrity.json").write_text(json.dumps(entry))
    return file


@pytest.mark.parametrize("make", [hub_file, with_manifest])
def test_a_changed_byte_is_the_files_fault(tmp_path: Path, make: object) -> None:
    file = make(tmp_path / "model", b"right bytes")  # type: ignore[operator]
    memory = tmp_path / "memory.json"
    assert check_files([file], memory).attested == 1
    state = file.stat()
    file.resolve().write_bytes(b"wrong bytes")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a tool that restores times would leave it
    with pytest.raises(UsageError, match=r"model\.safetensors: its SHA-256 .* damaged on this disk"):
        check_files([file], memory)


def test_a_file_that_was_found_right_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = hub_file(tmp_path / "model", b"right bytes")
    memory = tmp_path / "deep" / "memory.json"
    assert check_files([file], memory).attested == 1
    monkeypatch.setattr(files, "_read_again", lambda _: pytest.fail("read again"))
    assert check_files([file], memory).attested == 1


def test_a_file_without_a_record_is_read_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the page cache; a large one only once, unless the readings differ."""
    file, memory = tmp_path / "model.safetensors", tmp_path / "memory.json"
    tensors = {f"t{size}": torch.arange(size, dtype=torch.int16) for size in (0, 3, 4097, files._PIECE_BYTES)}
    file.write_bytes(save(tensors))
    assert files._read_again(file) == files.sums(file)
    right = {(str(file), name): {digest(tensor)} for name, tensor in tensors.items()}
    tensors["t4097"][77] ^= 64
    wrong = {**right, (str(file), "t4097"): {digest(tensors["t4097"])}}
    monkeypatch.setattr(files, "_WORTH_KEEPING", 0)
    for loaded in (right, wrong, right, right):
        if loaded is right:
            assert check_files([file], memory, loaded).unknown == ("model.safetensors",)
            continue
        with pytest.raises(CorruptionError, match="t4097 was loaded from it with other bytes"):
            check_files([file], memory, loaded)
        assert str(file) not in json.loads(memory.read_text())
    monkeypatch.setattr(files, "_read_again", lambda _: pytest.fail("read again"))
    check_files([file], memory, right)


def test_what_was_loaded_is_compared_with_the_reading_that_was_hashed(tmp_path: Path) -> None:
    """Also when the file is remembered, and with tensors of odd lengths across the pieces that are read."""
    file = tmp_path / "model" / "model.safetensors"
    tensors = {f"t{size}": torch.arange(size, dtype=torch.uint8) for size in (0, 1, 5, 250)}
    tensors["large"] = torch.randint(0, 255, (files._PIECE_BYTES + 13,), dtype=torch.uint8)
    file = with_manifest(file.parent, save(tensors))
    loaded = {(str(file), name): {digest(tensor)} for name, tensor in tensors.items()}
    loaded["another.safetensors", "t5"] = loaded[str(file), "t250"]
    for _ in range(2):
        assert check_files([file], tmp_path / "memory.json", loaded).attested == 1
        for name in ("t5", "large"):
            tensors[name][3] ^= 8
            with pytest.raises(CorruptionError, match=f"{name} was loaded from it with other bytes"):
                check_files([file], tmp_path / "memory.json", {**loaded, (str(file), name): {digest(tensors[name])}})
            tensors[name][3] ^= 8


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"/x": 1}'])
def test_a_memory_of_nonsense_only_costs_time(tmp_path: Path, content: str) -> None:
    memory = tmp_path / "memory.json"
    memory.write_text(content)
    assert check_files([hub_file(tmp_path / "model", b"right bytes")], memory).attested == 1


def test_a_file_without_a_record_is_not_attested_and_no_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"who knows")
    for manifest in ("", "{}", '{"files": {"model.safetensors": {"sha256": "short"}}}', '{"files": []}'):
        (tmp_path / "integrity.json").write_text(manifest)
        assert recorded_sha256(file) is None
    found = check_files([file], tmp_path / "memory.json")
    assert (found.attested, found.unknown) == (0, ("model.safetensors",))
