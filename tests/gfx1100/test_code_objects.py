"""Code objects as ROCm's libraries carry them: relocated addresses, bundles with and without compression."""

from __future__ import annotations

import ctypes
import struct

import pyarrow
import pytest

from tests.gfx1100 import assemble as asm
from tests.gfx1100 import code_objects
from tests.gfx1100.emulator import descriptor

OTHER = "hipv4-amdgcn-amd-amdhsa--gfx1030"
TARGET = "hipv4-amdgcn-amd-amdhsa--gfx1100"


def elf(**more: object) -> bytes:
    return asm.code_object("empty", asm.program(), descriptor(vgprs=16), [(0, 8, "global_buffer")], **more)  # type: ignore[arg-type]


def compressed(bundle: bytes) -> bytes:
    packed = pyarrow.Codec("zstd").compress(bundle, asbytes=True)
    return struct.pack("<4sHHIIQ", b"CCOB", 2, 1, 24 + len(packed), len(bundle), 0) + packed


def test_relocations_are_addresses_in_the_image() -> None:
    """R_AMDGPU_ABS64 adds the symbol's address, R_AMDGPU_RELATIVE64 that of the file."""
    data = struct.pack("<QQQ", 1, 2, 3)
    (kernel,) = code_objects.load(elf(data=data, relocations=[(0, 3, 16), (16, 13, 64)]))
    image = ctypes.string_at(kernel.code, kernel.code_bytes)
    at = kernel.code + image.index(struct.pack("<Q", 2)) - 8
    assert struct.unpack("<QQQ", ctypes.string_at(at, 24)) == (at + 16, 2, kernel.code + 64)
    assert kernel.name == "empty" and kernel.entry % 256 == kernel.code % 256
    with pytest.raises(ValueError, match="a relocation of type 10 at 0x"):
        code_objects.load(elf(data=data, relocations=[(8, 10, 0)]))


@pytest.mark.parametrize("wrapped", ["plain", "compressed"])
def test_a_bundle_gives_the_code_for_this_card(wrapped: str) -> None:
    mine, other = elf(), elf(data=b"of another card")
    given = asm.bundle({"host-x86_64-unknown-linux-gnu-": b"", OTHER: other, TARGET: mine})
    if wrapped == "compressed":
        given = compressed(given)
    kept = ctypes.create_string_buffer(given, len(given))
    assert code_objects.elf_files(given) == code_objects.at_address(ctypes.addressof(kept)) == [mine]
    none = asm.bundle({OTHER: other})
    kept = ctypes.create_string_buffer(none, len(none))
    assert code_objects.elf_files(none) == code_objects.at_address(ctypes.addressof(kept)) == []


def test_an_elf_file_is_taken_as_it_is_and_nothing_else() -> None:
    kept = ctypes.create_string_buffer(elf(), len(elf()))
    assert code_objects.at_address(ctypes.addressof(kept)) == [elf()]
    kept = ctypes.create_string_buffer(b"#!/bin/sh", 100)
    with pytest.raises(ValueError, match="neither a bundle nor an ELF file"):
        code_objects.at_address(ctypes.addressof(kept))
