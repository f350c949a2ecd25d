"""The interpreter from Python: kernels on numpy arrays, each array an allocation of the simulated card's memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.gfx1100.build import library

COUNTS = (
    "instructions",
    "salu",
    "valu",
    "vmem_load",
    "vmem_store",
    "atomics",
    "lds",
    "smem",
    "wmma",
    "trans",
    "branches",
    "waves",
    "bytes_loaded",
    "bytes_stored",
    "lds_conflict_cycles",
    "lane_operations",
    "valu_cycles",
)


class Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("code_bytes", ctypes.c_uint64),
        ("code_address", ctypes.c_uint64),
        ("entry", ctypes.c_uint64),
        ("descriptor", ctypes.c_void_p),
        ("kernarg_bytes", ctypes.c_uint32),
        ("lines", ctypes.c_char_p),
    )


class LaunchArguments(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("kernarg", ctypes.c_void_p),
        ("kernarg_bytes", ctypes.c_uint64),
        ("dynamic_lds", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("checks", ctypes.c_uint32),
    )


class Stats(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in COUNTS),
        *((n, ctypes.c_uint32) for n in ("sgprs", "vgprs", "lds_bytes")),
    )


LOOKUP = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint32),
)


class GpuFault(Exception):
    """What the interpreter found; its message names kernel, address, wave, lane and source line."""


@cache
def lib() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library()))
    loaded.gfx_run.argtypes = [
        ctypes.POINTER(Kernel),
        ctypes.POINTER(LaunchArguments),
        ctypes.c_void_p,
        ctypes.POINTER(Stats),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    loaded.gfx_text.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    return loaded


def text(words: Sequence[int]) -> str | None:
    """The instruction as llvm-objdump writes it, or None where it is not known or has another length."""
    code, out = struct.pack(f"<{len(words)}I", *words), ctypes.create_string_buffer(500)
    length = lib().gfx_text(code, len(code), 0, out, len(out))
    return out.value.decode() if length == len(code) else None


def descriptor(
    *,
    lds: int = 0,
    scratch: int = 0,
    vgprs: int = 256,
    flush_f32: bool = False,
    flush_f16: bool = False,
    ieee: bool = True,
    user_sgprs: int = 0,
    kernarg_pointer: bool = False,
) -> bytes:
    """A kernel descriptor for hand-written code: workgroup ids in x, y and z follow the user SGPRs."""
    rsrc1 = (vgprs // 8 - 1) | (0 if flush_f32 else 3 << 16) | (0 if flush_f16 else 3 << 18) | 1 << 21 | ieee << 23
    rsrc2 = user_sgprs << 1 | 7 << 7 | 2 << 11
    properties = 1 << 10 | (8 if kernarg_pointer else 0)
    return struct.pack("<III4xq20xIIIH6x", lds, scratch, 0, 0, 0, rsrc1, rsrc2, properties)


@dataclass
class Code:
    """A kernel that can be launched."""

    name: str
    code: bytes
    descriptor: bytes
    entry: int = 0
    lines: str | None = None


def run(
    kernel: Code,
    kernarg: bytes,
    arrays: Sequence[np.ndarray],
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    dynamic_lds: int = 0,
    seed: int = 0,
    checks: int = 3,
) -> Stats:
    """Runs a kernel that may touch `arrays`, whose addresses the caller has put into `kernarg`.

    Raises:
        GpuFault: the kernel did what it must not.
    """
    spans = [(a.ctypes.data, a.nbytes, 3 if a.flags.writeable else 1) for a in arrays]

    def lookup(address: int, base, size, flags) -> int:  # type: ignore[no-untyped-def]
        for start, length, rights in spans:
            if start <= address < start + length:
                base[0], size[0], flags[0] = start, length, rights
                return 1
        return 0

    code = ctypes.create_string_buffer(kernel.code, len(kernel.code))
    arguments = ctypes.create_string_buffer(kernarg, max(len(kernarg), 1))
    description = ctypes.create_string_buffer(kernel.descriptor, 64)
    at = ctypes.addressof(code)
    launched = Kernel(
        kernel.name.encode(),
        at,
        len(kernel.code),
        at,
        at + kernel.entry,
        ctypes.addressof(description),
        len(kernarg),
        kernel.lines.encode() if kernel.lines is not None else None,
    )
    launch = LaunchArguments(
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*block),
        ctypes.addressof(arguments),
        len(kernarg),
        dynamic_lds,
        seed,
        checks,
    )
    stats, message, callback = Stats(), ctypes.create_string_buffer(2000), LOOKUP(lookup)
    if lib().gfx_run(launched, launch, ctypes.cast(callback, ctypes.c_void_p), stats, message, len(message)):
        raise GpuFault(message.value.decode(errors="replace"))
    return stats
