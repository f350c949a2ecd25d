"""The script that fetches AMD's libraries, with packages of the same names that have next to nothing in them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gfx1100 import rocm_libs

CONTENT = {
    "librocblas4": ["librocblas.so.4", "rocblas/4.4.0/library/a_gfx1100.hsaco", "rocblas/4.4.0/library/a_gfx90a.co"],
    "libhipblaslt1": ["libhipblaslt.so.1", "hipblaslt/library/Kernels.so-000-gfx1100.hsaco"],
    "libroctx64-4": ["libroctx64.so.4"],
    "libc6": ["ld-linux-x86-64.so.2"],
    "libstdc++6": ["libstdc++.so.6"],
    "libgcc-s1": ["libgcc_s.so.1"],
}  # fmt: skip
VERSIONS = {"libc6": "99.1-7"}


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[rocm_libs.Package]:
    """What a fetch says that came."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("there is no dpkg-deb here")
    monkeypatch.setenv("ROCM_LIBS", str(tmp_path / "libs"))
    monkeypatch.setattr(rocm_libs.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(rocm_libs, "_fetched", lambda into, _: archives(into / "archives"))
    return rocm_libs.fetch("http://nowhere.invalid/debian")


def archives(into: Path) -> list[Path]:
    """The packages, built."""
    (into.parent / "apt").mkdir()
    for name, files in CONTENT.items():
        root, version = into / name, VERSIONS.get(name, "1.0-1")
        for file in files:
            path = root / "usr" / "lib" / "x86_64-linux-gnu" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file)
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN" / "control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody\nDescription: nothing\n"
        )
        archive = into / f"{name}_{version}_amd64.deb"
        subprocess.run(["dpkg-deb", "--build", str(root), str(archive)], check=True, capture_output=True)
    return sorted(into.glob("*.deb"))


def test_what_is_loaded_lies_together_and_what_is_below_apart(fetched: list[rocm_libs.Package]) -> None:
    """The emulator loads three libraries from one directory; the C library's loader is that of its own package."""
    assert {each.name: each.version for each in fetched} == {name: VERSIONS.get(name, "1.0-1") for name in CONTENT}
    for name in ("librocblas.so.4", "libhipblaslt.so.1", "libroctx64.so.4"):
        assert (rocm_libs.directory() / name).read_text() == name
    loader, *rest = rocm_libs.command(["-c", "pass"])
    assert Path(loader).name == "ld-linux-x86-64.so.2" and Path(loader).exists()
    assert rest[-3:] == [sys.executable, "-c", "pass"]


def test_kernels_of_other_cards_are_left_out_and_versions_written_down(fetched: list[rocm_libs.Package]) -> None:
    found = {path.name for path in rocm_libs.home().rglob("*") if path.is_file()}
    assert "a_gfx1100.hsaco" in found and "a_gfx90a.co" not in found
    written = json.loads((rocm_libs.home() / "packages.json").read_text())
    assert [each["sha256"] for each in written] == [each.sha256 for each in fetched]
    assert not (rocm_libs.home() / "archives").exists()


def test_where_they_were_not_fetched_it_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_LIBS", str(tmp_path / "absent"))
    with pytest.raises(rocm_libs.Missing, match=r"python -m tests\.gfx1100\.rocm_libs"):
        rocm_libs.environment()
