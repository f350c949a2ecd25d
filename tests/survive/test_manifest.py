"""Attacks: every change to a listed file is named, and no manifest, however absurd, makes `verify` raise."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, Manifest, read, verify


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with three files, one of them in a folder and one empty, and its manifest."""
    folder = tmp_path / "checkpoint-7"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 5000)
    (folder / "sub" / "state").write_bytes(b"state")
    (folder / "empty").write_bytes(b"")
    manifest.write(folder, run_id="r1", step=7, status="checkpoint", tensors={"a": "12"}, extra={"k": [1]})
    return folder


def _kinds(directory: Path) -> list[tuple[str, str]]:
    return [(problem.file, problem.kind) for problem in verify(directory)]


def test_what_is_written_is_read(directory: Path) -> None:
    found = read(directory)
    assert isinstance(found, Manifest)
    assert (found.run_id, found.step, found.status) == ("r1", 7, "checkpoint")
    assert set(found.files) == {"weights", "sub/state", "empty"} and found.tensors == {"a": "12"}
    assert found.files["sub/state"].sha256 == hashlib.sha256(b"state").hexdigest()
    assert verify(directory) == []


def test_each_damage_is_named(directory: Path) -> None:
    weights = directory / "weights"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert _kinds(directory) == [("weights", "truncated")]
    weights.write_bytes(whole + b"x")
    assert _kinds(directory) == [("weights", "changed")]
    weights.write_bytes(whole[:700000] + bytes([whole[700000] ^ 1]) + whole[700001:])
    assert _kinds(directory) == [("weights", "changed")]
    weights.unlink()
    assert _kinds(directory) == [("weights", "missing")]
    os.mkfifo(weights)  # reading it would block for ever
    assert _kinds(directory) == [("weights", "refused")]
    weights.unlink()
    weights.mkdir()
    assert _kinds(directory) == [("weights", "refused")]


def test_only_links_of_the_hubs_cache_are_followed(directory: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "main"
    (repository / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    directory.rename(snapshot)
    (snapshot / "weights").rename(repository / "blobs" / "0123")
    (snapshot / "weights").symlink_to("../../blobs/0123")
    assert verify(snapshot) == []
    (repository / "blobs" / "0123").rename(tmp_path / "private")
    (snapshot / "weights").unlink()
    (snapshot / "weights").symlink_to(tmp_path / "private")
    assert _kinds(snapshot) == [("weights", "refused")]
    snapshot.rename(directory)
    (directory / "weights").unlink()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "private").rename(tmp_path / "blobs" / "0123")
    (directory / "weights").symlink_to(tmp_path / "blobs" / "0123")
    assert _kinds(directory) == [("weights", "refused")]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a\\..\\b", "a\0b"])
def test_paths_that_escape_are_refused_unread(directory: Path, name: str) -> None:
    (directory.parent / "secret").write_text("x")
    _forge(directory, {name: {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}})
    assert _kinds(directory) == [(MANIFEST_NAME, "refused")]


def test_every_flipped_bit_of_the_manifest_is_seen(directory: Path) -> None:
    path = directory / MANIFEST_NAME
    whole = path.read_bytes()
    missed = []
    for position in range(0, len(whole), 7):
        for bit in (0, 4):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            if not verify(directory) and json.loads(damaged) != json.loads(whole):
                missed.append(position)
    assert missed == []


def test_a_missing_or_cut_manifest_is_a_problem(directory: Path) -> None:
    path = directory / MANIFEST_NAME
    for content in (path.read_bytes()[:-5], b"\xff\xfe\x00", b"[" * 100000, b"", b"NaN", b'{"digest": 1}', b"1" * 5000):
        path.write_bytes(content)
        assert _kinds(directory) in ([(MANIFEST_NAME, "damaged")], [(MANIFEST_NAME, "refused")])
    path.unlink()
    assert _kinds(directory) == [(MANIFEST_NAME, "missing")]
    path.mkdir()
    assert _kinds(directory) in ([(MANIFEST_NAME, "damaged")], [(MANIFEST_NAME, "refused")])
    assert [problem.kind for problem in verify(directory / "nowhere")] == ["missing"]
    assert [problem.kind for problem in verify(directory / "weights")] == ["damaged"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_JSON, files=_JSON, field=st.sampled_from(["schema", "step", "status", "files", "tensors", "extra"]))
def test_nonsense_never_raises(directory: Path, body: Any, files: Any, field: str) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(body))
    assert verify(directory)
    _forge(directory, files)
    verify(directory)
    _forge(directory, {}, {field: body})
    verify(directory)


def test_a_failed_write_leaves_the_old_manifest(directory: Path) -> None:
    before = (directory / MANIFEST_NAME).read_bytes()
    with pytest.raises(FileNotFoundError):
        manifest.write(directory, run_id="r2", step=8, status="final", files=["weights", "never_written"])
    assert (directory / MANIFEST_NAME).read_bytes() == before


def _forge(directory: Path, files: Any, other: dict[str, Any] | None = None) -> None:
    """A manifest with a valid digest of its own over content that we would never write."""
    body = {
        "schema": 1, "run_id": "r", "step": 1, "status": "final", "created": "now",
        "files": files, "tensors": {}, "extra": {},
    } | (other or {})  # fmt: skip
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / MANIFEST_NAME).write_text(json.dumps(body | {"digest": digest}))
