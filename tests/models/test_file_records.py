"""A weight file that is not what was published is named, and one that was found right is not read twice."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models import files
from hf_rocm_tune.models.files import check_files, recorded_sha256
from hf_rocm_tune.transfer import digest


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
    monkeypatch.setattr(files, "_sums", lambda _: pytest.fail("read again"))
    assert check_files([file], memory).attested == 1


def test_what_was_loaded_is_compared_with_the_reading_that_was_hashed(tmp_path: Path) -> None:
    """Also when the file is remembered, and with tensors of odd lengths across the pieces that are read."""
    file = tmp_path / "model" / "model.safetensors"
    tensors = {f"t{size}": torch.arange(size, dtype=torch.uint8) for size in (0, 1, 5, 250)}
    tensors["large"] = torch.randint(0, 255, (files._PIECE_BYTES + 13,), dtype=torch.uint8)
    file = with_manifest(file.parent, save(tensors))
    loaded = {(file.name, name): digest(tensor) for name, tensor in tensors.items()}
    loaded["another.safetensors", "t5"] = loaded[file.name, "t250"]
    for _ in range(2):
        assert check_files([file], tmp_path / "memory.json", loaded).attested == 1
        for name in ("t5", "large"):
            tensors[name][3] ^= 8
            with pytest.raises(CorruptionError, match=f"{name} was loaded from it with other bytes"):
                check_files([file], tmp_path / "memory.json", {**loaded, (file.name, name): digest(tensors[name])})
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


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert check_files([hub_file(tmp_path / "model", b"right")], tmp_path / "file" / "memory.json").attested == 1
