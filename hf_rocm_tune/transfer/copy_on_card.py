"""The function in C++ for copies on one card, where a compiler is: see copy_on_card.cpp.

Each cast is a copy on the card, and a micro-step has thousands: by a function of Python each takes 4 us more of host
time than torch's own. It is compiled once for a version of torch (6 processor seconds), in the background, and used by
the processes that begin afterwards. Without a compiler, or until then, Python's function serves all copies.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import torch

from hf_rocm_tune.paths import cache_directory

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-w")
_AGAIN_SECONDS = 24 * 3600.0  # after which a compilation that left nothing is tried again
_BACKGROUND = """
(nice -n 19 "$@" -o "$0.$$" && mv "$0.$$" "$0" && rm -f "$0.begun"; rm -f "$0.$$") >/dev/null 2>&1 </dev/null &
"""


class CopyOnCard:
    """The loaded library. `find_torchs` comes before Python's function is there, `install` afterwards."""

    def __init__(self, library: Path) -> None:
        """Raises OSError or AttributeError: the library does not fit."""
        functions = ctypes.CDLL(str(library))
        self.find_torchs = functions.find_torchs
        self._install = functions.install
        self._watch = functions.watch
        self._watch.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._leave = functions.leave

    def install(self) -> None:
        """Put it in front of Python's function, for good."""
        self._install()
        atexit.register(self._leave)

    def watch(self, storage: int, on: bool) -> None:
        """Whether copies into a storage, by its address in torch, are given to Python's function."""
        self._watch(storage, int(on))


def load() -> CopyOnCard | None:
    """The library, if it has been compiled; otherwise its compilation begins, unless it was tried today."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        return None
    try:
        library = _library(compiler)
        if library.exists():
            return CopyOnCard(library)
        if _may_begin(library):
            subprocess.run(["sh", "-c", _BACKGROUND, str(library), *command(compiler)], check=False, timeout=30)
    # No home directory, one that cannot be written, a library that does not load.
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        pass
    return None


def command(compiler: str) -> list[str]:
    """The compilation, but for the name of its result."""
    directory = Path(torch.__file__).parent
    return [
        compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{directory}/include", f"-I{directory}/include/torch/csrc/api/include", str(SOURCE),
        f"-L{directory}/lib", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def build() -> Path:
    """Compile it now, unless that was done. Raises OSError or SubprocessError."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (c++, or what CXX names)")
    library = _library(compiler)
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command(compiler), "-o", str(fresh)], check=True, capture_output=True)
        fresh.replace(library)  # atomic: other processes may be compiling or loading the same library
    return library


def _library(compiler: str) -> Path:
    content = hashlib.sha256(SOURCE.read_bytes())
    content.update((Path(torch.__file__).parent / "version.py").read_bytes())
    content.update(repr(command(compiler)).encode())
    library = cache_directory() / f"copy-{content.hexdigest()[:24]}.so"
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return library


def _may_begin(library: Path) -> bool:
    """Whether no process has begun to compile it today; notes that this one does."""
    begun = Path(f"{library}.begun")
    if begun.exists() and time.time() - begun.stat().st_mtime > _AGAIN_SECONDS:
        begun.unlink(missing_ok=True)
    try:
        begun.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
