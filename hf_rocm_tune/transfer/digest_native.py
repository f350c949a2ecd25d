"""The host's digest in C, compiled at first use with the system's compiler; without one, plain torch does the same.

Nothing is needed to install the package, and nothing is downloaded: `cc` (or ``CC``) compiles 100 lines that ship with
it, for this very processor, into the user's cache directory. The library is named by its source and the processor, so
neither an update nor a home directory shared between machines can bring up one that does not fit. `digest_host` uses it
once it has given the same sums as plain torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-pthread", "-shared", "-fPIC")
COMPILE_SECONDS = 60

NativeSums = Callable[[int, int | None, int, int, int, int], tuple[int, int]]
"""Address, address of a copy to be made or None, bytes, index of the first word, address of the table and threads to
``(s1, s2)`` modulo 2^64."""


def cache_directory() -> Path:
    """Where compiled libraries are kept: ``hf_rocm_tune`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_rocm_tune" / "native"


def load() -> tuple[NativeSums | None, str]:
    """The compiled function, unchecked, or None; and in words what it was compiled with, or why there is none."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        return None, "there is no C compiler (cc, or what CC names)"
    try:
        library = cache_directory() / f"digest-{_key(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        return _bind(library), f"compiled with {compiler} {' '.join(FLAGS)}"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return None, f"{compiler} failed: {lines[0][:200]}"
    # A home that cannot be found, a directory that cannot be written, a library that cannot be loaded, a time-out.
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}: {error}"


def _key(compiler: str) -> str:
    """Changes with the source, the flags, the compiler's path and the processor's instruction set."""
    content = hashlib.sha256(SOURCE.read_bytes())
    content.update(repr((FLAGS, compiler, platform.machine(), _instruction_set())).encode())
    return content.hexdigest()[:24]


def _instruction_set() -> list[str]:
    """The lines of ``/proc/cpuinfo`` that decide what ``-march=native`` means, without repetition."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.partition("\t")[0].partition(":")[0].strip() in names})


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        fresh = Path(directory) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL)
        fresh.replace(library)  # at once: other processes may be compiling, or loading, the same


def _bind(library: Path) -> NativeSums:
    function = ctypes.CDLL(str(library)).hf_rocm_tune_digest  # a CDLL's functions run without the interpreter's lock
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, pointer, ctypes.c_uint64, ctypes.c_uint64, pointer, ctypes.c_int, pointer)
    function.restype = None

    def sums(address: int, copy: int | None, nbytes: int, index: int, table: int, threads: int) -> tuple[int, int]:
        result = (ctypes.c_uint64 * 2)()
        function(address, copy, nbytes, index, table, threads, result)
        return result[0], result[1]

    return sums
