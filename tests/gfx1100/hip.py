"""Puts the HIP runtime's stand-in below torch: libraries by the names of ROCm's, and the loader of their kernels.

Variables, read by `configure`:

    SIMCARD_GFX1100_LOG=file    a line for each kernel that ran: see `Ran`
    SIMCARD_GFX1100_CHECKS=n    1: uninitialised registers and LDS, 2: races in LDS; 3 by default
    SIMCARD_GFX1100_DRY=1       launches are told, not executed: which kernel is chosen for a large shape?
    SIMCARD_GFX1100_MUTANTS=... a line for each, kernels=instructions=n, with two regular expressions: of each kernel
                                that matches, the n-th instruction that matches, counted from 0, does nothing
    SIMCARD_SEED=n              of the order in which the waves of a workgroup go on

And when it is loaded:

    SIMCARD_BLAS=directory      of AMD's rocBLAS and hipBLASLt (see `rocm_libs`): they multiply the card's matrices
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.gfx1100 import build, code_objects
from tests.gfx1100.emulator import COUNTS, lib
from tests.gfx1100.emulator import Kernel as _Kernel

HERE = Path(__file__).resolve().parent
ROCM = "7.2.53210"
"""``torch.version.hip``."""
# What bitsandbytes' libraries for ROCm 7 and 6, and AMD's own, are linked with; all functions are in libamdhip64.so.
# That one has no versions of symbols, so it must not be the one for which a library asks by name and version.
_NAMES = ("libhipblas.so.3", "libhipblaslt.so.1", "libhipblas.so.2", "libhipblaslt.so.0", "libamdhip64.so.6")
_KINDS = {
    "by_value": 0, "global_buffer": 0, "hidden_block_count": 1, "hidden_group_size": 2, "hidden_remainder": 3,
    "hidden_global_offset": 4, "hidden_grid_dims": 5, "hidden_dynamic_lds_size": 6,
}  # fmt: skip
_NOTHING = bytes.fromhex("000080bf")  # s_nop 0
_ABSENT = 7  # a hidden argument of what this runtime has not: zero, so that its use is a fault
_Loader = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)


class _Argument(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("offset", "size", "kind", "axis"))


class _Function(ctypes.Structure):
    _fields_ = (
        ("kernel", _Kernel), ("arguments", ctypes.POINTER(_Argument)),
        *((name, ctypes.c_uint32) for name in ("count", "most_lanes", "lds", "vgprs", "scratch")),
    )  # fmt: skip


class Product(ctypes.Structure):
    """Of two matrices by AMD's libraries: ``gfx_product`` of `blas.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "d", "bias", "stream")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "batches")),
        *((name, ctypes.c_int64) for name in ("lda", "ldb", "ldc", "ldd")),
        *((f"stride_{name}", ctypes.c_int64) for name in "abcd"),
        ("alpha", ctypes.c_float), ("beta", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type_in", "type_out", "across_a", "across_b", "library", "solution")),
    )  # fmt: skip


_kept: list[object] = []
_runtime: ctypes.CDLL


def library() -> Path:
    """The built ``libamdhip64.so``, beside it libraries by the names of hipBLAS.

    Raises:
        build.NoCompiler: it does not compile here, or Triton, which has the headers of HIP, is not installed.
    """
    compiler, triton = shutil.which("g++") or shutil.which("clang++"), find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        raise build.NoCompiler("the HIP runtime's stand-in needs g++ or clang++, and Triton for the headers of HIP")
    headers = Path(triton.origin).parent / "backends" / "amd" / "include"
    sources = [HERE / name for name in ("hip.cpp", "blas.cpp")]
    read = [path.read_bytes() for path in (*sources, HERE / "gfx1100.h", HERE / "blas.h")]
    key = hashlib.sha256(b"".join([*read, str(headers).encode(), *map(str.encode, _NAMES)])).hexdigest()
    target = HERE.parents[1] / "build" / "gfx1100" / f"hip-{key[:16]}" / "libamdhip64.so"
    if not target.exists():
        from filelock import FileLock

        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / "lock"):
            if not target.exists():
                command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{headers}"]
                for name in _NAMES:
                    _run([*command, "-x", "c++", os.devnull, f"-Wl,-soname,{name}", "-o", str(target.parent / name)])
                scratch = target.with_name("building")
                _run([*command, *map(str, sources), "-Wl,-soname,libamdhip64.so.7", "-o", str(scratch)])
                scratch.rename(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise build.NoCompiler(f"the HIP runtime's stand-in does not compile here: {done.stderr.strip()[:600]}")


def install() -> ctypes.c_void_p:
    """Loads it all; the simulated card's library is loaded already.

    Returns:
        The function that multiplies matrices by AMD's libraries, NULL where the environment does not name them.
    """
    global _runtime
    runtime = library()
    ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    for name in _NAMES:
        ctypes.CDLL(str(runtime.parent / name))

    def load(image: int, module: int) -> None:
        try:
            for elf in code_objects.at_address(image):
                for kernel in code_objects.load(elf):
                    _mutate(kernel)
                    function = _function(kernel)
                    _kept.append(function)
                    loaded.gfx_hip_add(ctypes.c_void_p(module), kernel.name.encode(), ctypes.byref(function))
        except Exception:  # C has called this and cannot pass it on
            traceback.print_exc(file=sys.stderr)
            os._exit(70)

    _kept.append(_Loader(load))
    loaded.gfx_hip_loader(_kept[-1])
    _runtime = loaded
    if "SIMCARD_BLAS" not in os.environ:
        return ctypes.c_void_p()
    _load_blas(Path(os.environ["SIMCARD_BLAS"]))
    return ctypes.cast(_runtime.gfx_blas_multiply, ctypes.c_void_p)


def _load_blas(directory: Path) -> None:
    """AMD's libraries, as they lie in `directory`.

    Raises:
        OSError: one cannot be loaded.
    """
    os.environ.setdefault("ROCBLAS_TENSILE_LIBPATH", str(next(directory.glob("rocblas/*/library"))))
    os.environ.setdefault("HIPBLASLT_TENSILE_LIBPATH", str(directory / "hipblaslt" / "library"))
    ctypes.CDLL(str(directory / "libroctx64.so.4"))  # rocBLAS asks for it by its name
    error = ctypes.create_string_buffer(1000)
    paths = [str(directory / name).encode() for name in ("librocblas.so.4", "libhipblaslt.so.1")]
    if _runtime.gfx_blas_load(*paths, error, ctypes.c_size_t(len(error))):
        raise OSError(error.value.decode())


def multiply(product: Product) -> None:
    """Queues a product.

    Raises:
        RuntimeError: the library refuses it.
    """
    error = ctypes.create_string_buffer(1000)
    if _runtime.gfx_blas_multiply(ctypes.byref(product), error, ctypes.c_size_t(len(error))):
        raise RuntimeError(error.value.decode())


def solutions(product: Product) -> list[int]:
    """Numbers of all the ways that the library has for a product, for its field ``solution``.

    Raises:
        RuntimeError: the library refuses it.
    """
    error, count = ctypes.create_string_buffer(1000), ctypes.c_int32(0)
    room = ctypes.c_size_t(len(error))
    if _runtime.gfx_blas_solutions(ctypes.byref(product), None, ctypes.byref(count), error, room):
        raise RuntimeError(error.value.decode())
    numbers = (ctypes.c_int32 * max(count.value, 1))()
    if _runtime.gfx_blas_solutions(ctypes.byref(product), numbers, ctypes.byref(count), error, room):
        raise RuntimeError(error.value.decode())
    return list(numbers)[: count.value]


def configure() -> None:
    """Takes over what the environment says now."""
    environ = os.environ
    seed, checks = int(environ.get("SIMCARD_SEED", "1")), int(environ.get("SIMCARD_GFX1100_CHECKS", "3"))
    dry = int(environ.get("SIMCARD_GFX1100_DRY", "0"))
    _runtime.gfx_hip_configure(environ.get("SIMCARD_GFX1100_LOG", "").encode(), seed, checks, dry)


def _mutate(kernel: code_objects.Kernel) -> None:
    """Takes away the instructions that ``SIMCARD_GFX1100_MUTANTS`` names of this kernel."""
    for line in os.environ.get("SIMCARD_GFX1100_MUTANTS", "").splitlines():
        kernels, instructions, number = line.rsplit("=", 2)
        if re.search(kernels, kernel.name):
            _take_away(kernel, instructions, int(number))


def _take_away(kernel: code_objects.Kernel, instructions: str, number: int) -> None:
    room, at = ctypes.create_string_buffer(500), kernel.entry
    while length := lib().gfx_text(at, kernel.code + kernel.code_bytes - at, 0, room, len(room)):
        number -= bool(re.search(instructions, room.value.decode()))
        if number < 0:
            ctypes.memmove(at, _NOTHING * (length // 4), length)
            return
        at += length


def _function(kernel: code_objects.Kernel) -> _Function:
    noted = kernel.metadata
    size = noted[".kernarg_segment_size"]
    arguments = (_Argument * len(noted[".args"]))(*(_argument(each) for each in noted[".args"]))
    name, lines = kernel.name.encode(), kernel.lines.encode() or None
    return _Function(
        _Kernel(name, kernel.code, kernel.code_bytes, kernel.code, kernel.entry, kernel.descriptor, size, lines),
        arguments, len(arguments), noted[".max_flat_workgroup_size"], noted[".group_segment_fixed_size"],
        noted[".vgpr_count"], noted[".private_segment_fixed_size"],
    )  # fmt: skip


def _argument(noted: dict[str, object]) -> tuple[object, ...]:
    kind, _, axis = str(noted[".value_kind"]).rpartition("_")
    known = str(noted[".value_kind"]) if axis not in ("x", "y", "z") else kind
    number = _KINDS.get(known, _ABSENT) if known.startswith("hidden_") else _KINDS[known]
    return noted[".offset"], noted[".size"], number, "xyz".index(axis) if axis in ("x", "y", "z") else 0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One line of ``SIMCARD_GFX1100_LOG``: a launch, how long its interpretation took, and what was counted."""

    process: int
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    dynamic_lds: int
    seconds: float
    counts: dict[str, int]


def ran(log: Path) -> Iterator[Ran]:
    """The launches that a log tells of."""
    for line in log.read_text().splitlines():
        process, name, grid, block, dynamic_lds, seconds, *counts = line.split("\t")
        yield Ran(
            process=int(process),
            name=name,
            grid=tuple(map(int, grid.split(","))),
            block=tuple(map(int, block.split(","))),
            dynamic_lds=int(dynamic_lds),
            seconds=float(seconds),
            counts=dict(zip((*COUNTS, "sgprs", "vgprs", "lds_bytes"), map(int, counts), strict=True)),
        )
