"""The version of the system's ROCm is read from either place, and nonsense there is unknown and never a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rocm_tune.machine.software import VERSION_FILES, read_rocm_version


def write(root: Path, path: str, content: bytes) -> None:
    """A file below the root that stands for ``/``."""
    file = root / path
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


@pytest.mark.parametrize("path", VERSION_FILES)
@pytest.mark.parametrize(
    ("content", "version"),
    [(b"7.2.4\n", "7.2.4"), (b"6.4.0-47", "6.4.0"), (b"10.0.0", "10.0.0"), (b"7.14.0a20260728\n", "7.14.0a20260728")],
)
def test_either_layout_gives_the_version_without_its_build_number(
    tmp_path: Path, path: str, content: bytes, version: str
) -> None:
    write(tmp_path, path, content)
    assert read_rocm_version(tmp_path).value == version


def test_the_older_layout_comes_first(tmp_path: Path) -> None:
    for path, content in zip(VERSION_FILES, (b"7.2.4", b"10.0.0"), strict=True):
        write(tmp_path, path, content)
    assert read_rocm_version(tmp_path).value == "7.2.4"


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"rocm", b"7", b"7.2.4\n10.0.0", b"9" * 2_000_000, b"1.2 3"])
def test_nonsense_is_unknown_and_the_other_place_is_still_read(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, VERSION_FILES[0], content)
    reading = read_rocm_version(tmp_path)
    assert reading.value is None and VERSION_FILES[0] in reading.reason and VERSION_FILES[1] in reading.reason
    write(tmp_path, VERSION_FILES[1], b"10.0.0")
    assert read_rocm_version(tmp_path).value == "10.0.0"
