"""Words of gfx1100 instructions, for hand-written test kernels: v(5) is v5, numbers below 128 are scalar registers."""

from __future__ import annotations

import struct

VCC, NULL, M0, EXEC, LITERAL = 106, 124, 125, 126, 255


def v(number: int) -> int:
    """The operand code of a vector register."""
    return 256 + number


def const(number: int) -> int:
    """The operand code of an inline integer, -16 to 64."""
    return 128 + number if number >= 0 else 192 - number


def sop1(op: int, dst: int, src: int) -> list[int]:
    return [0xBE800000 | dst << 16 | op << 8 | src]


def sop2(op: int, dst: int, a: int, b: int) -> list[int]:
    return [0x80000000 | op << 23 | dst << 16 | b << 8 | a]


def sopc(op: int, a: int, b: int) -> list[int]:
    return [0xBF000000 | op << 16 | b << 8 | a]


def sopk(op: int, dst: int, immediate: int) -> list[int]:
    return [0xB0000000 | op << 23 | dst << 16 | (immediate & 0xFFFF)]


def sopp(op: int, immediate: int = 0) -> list[int]:
    return [0xBF800000 | op << 16 | (immediate & 0xFFFF)]


def smem(op: int, dst: int, base: int, offset: int = 0, soffset: int = NULL) -> list[int]:
    return [0xF4000000 | op << 18 | dst << 6 | base >> 1, (offset & 0x1FFFFF) | soffset << 25]


def vop1(op: int, dst: int, src: int) -> list[int]:
    return [0x7E000000 | dst << 17 | op << 9 | src]


def vop2(op: int, dst: int, a: int, b: int) -> list[int]:
    return [op << 25 | dst << 17 | (b & 255) << 9 | a]


def vopc(op: int, a: int, b: int) -> list[int]:
    return [0x7C000000 | op << 17 | (b & 255) << 9 | a]


def vop3(
    op: int,
    dst: int,
    a: int,
    b: int = 0,
    c: int = 0,
    *,
    neg: int = 0,
    abs: int = 0,
    opsel: int = 0,
    clamp: int = 0,
    omod: int = 0,
) -> list[int]:
    return [
        0xD4000000 | op << 16 | clamp << 15 | opsel << 11 | abs << 8 | dst,
        a | b << 9 | c << 18 | omod << 27 | neg << 29,
    ]


def vop3sd(op: int, dst: int, sdst: int, a: int, b: int = 0, c: int = 0) -> list[int]:
    return [0xD4000000 | op << 16 | sdst << 8 | dst, a | b << 9 | c << 18]


def vop3p(
    op: int,
    dst: int,
    a: int,
    b: int = 0,
    c: int = 0,
    *,
    opsel: int = 0,
    opsel_hi: int = 7,
    neg: int = 0,
    neg_hi: int = 0,
) -> list[int]:
    return [
        0xCC000000 | op << 16 | (opsel_hi >> 2) << 14 | opsel << 11 | neg_hi << 8 | dst,
        a | b << 9 | c << 18 | (opsel_hi & 3) << 27 | neg << 29,
    ]


def dpp16(
    words: list[int], src: int, control: int, *, row_mask: int = 15, bank_mask: int = 15, bound: int = 0, fetch: int = 0
) -> list[int]:
    """The instruction, assembled with 250 for its first source, and its DPP word."""
    return [*words, (src & 255) | control << 8 | fetch << 18 | bound << 19 | bank_mask << 24 | row_mask << 28]


def ds(op: int, *, addr: int = 0, data0: int = 0, data1: int = 0, dst: int = 0, offset: int = 0) -> list[int]:
    return [0xD8000000 | op << 18 | offset, addr | data0 << 8 | data1 << 16 | dst << 24]


def flat(
    op: int,
    *,
    addr: int = 0,
    data: int = 0,
    dst: int = 0,
    saddr: int = NULL,
    offset: int = 0,
    segment: int = 2,
    glc: int = 0,
    sve: int = 0,
) -> list[int]:
    return [
        0xDC000000 | op << 18 | segment << 16 | glc << 14 | (offset & 0x1FFF),
        addr | data << 8 | saddr << 16 | sve << 23 | dst << 24,
    ]


def mubuf(
    op: int, *, data: int, addr: int = 0, srsrc: int, soffset: int = NULL, offset: int = 0, offen: int = 1
) -> list[int]:
    return [0xE0000000 | op << 18 | offset, addr | data << 8 | (srsrc // 4) << 16 | offen << 22 | soffset << 24]


END = sopp(0x30)
BARRIER = sopp(0x3D)
WAIT = sopp(0x09)


def program(*parts: list[int]) -> bytes:
    """The code of instructions in order, ended."""
    words = [word for part in (*parts, END) for word in part]
    return struct.pack(f"<{len(words)}I", *words)
