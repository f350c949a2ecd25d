"""Empty libraries in place of missing ones, with which `make drift` starts builds of torch for cards on a processor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = "libvendor.so.1 { global: vendorAsk; cudaGetDeviceCount; };"
VENDOR = "int vendorAsk(void) { return 1; } int cudaGetDeviceCount(int *n) { *n = 1; return 0; }"
USER = """
int vendorAsk(void); int cudaGetDeviceCount(int *);
int right(void) { return 7; }
int asks(void) { return vendorAsk(); }
int count(int *n) { return cudaGetDeviceCount(n); }
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A directory with a library that needs another one, in a version, which is gone."""
    place = tmp_path / "lib"
    place.mkdir()
    for name, text in (("vendor.c", VENDOR), ("user.c", USER), ("versions", VERSIONS)):
        (tmp_path / name).write_text(text)
    compiler, vendor = ["cc", "-shared", "-fPIC"], place / "libvendor.so.1"
    subprocess.run([*compiler, f"-Wl,-soname,{vendor.name},--version-script={tmp_path / 'versions'}",
                    tmp_path / "vendor.c", "-o", vendor], check=True)  # fmt: skip
    subprocess.run(
        [*compiler, tmp_path / "user.c", "-Wl,-rpath,$ORIGIN", vendor, "-o", place / "libuser.so"], check=True
    )
    vendor.unlink()
    return place


def test_a_library_starts_without_the_one_that_it_needs(checkout: Path, libraries: Path) -> None:
    user = libraries / "libuser.so"
    with pytest.raises(OSError, match=r"libvendor\.so\.1"):
        ctypes.CDLL(str(user))
    command = [sys.executable, str(checkout / "scripts/empty_libraries.py"), str(libraries)]
    for added in ("libvendor.so.1\n", ""):  # the second time nothing is missing
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == added
    asked = (
        "import ctypes, sys; one = ctypes.CDLL(sys.argv[1]); print(one.right(), one.count(0), flush=True); one.asks()"
    )
    done = subprocess.run([sys.executable, "-c", asked, str(user)], capture_output=True, text=True, check=False)
    assert done.stdout == "7 100\n"  # 100: no device
    assert done.returncode < 0 and "vendorAsk: an empty library" in done.stderr
