"""Instructions with operands: how `test_isa` runs one in the interpreter, and evaluates it by AMD's pseudo-code."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from tests.gfx1100 import assemble as asm
from tests.gfx1100.assemble import const, v
from tests.gfx1100.emulator import Code, descriptor, run

GROUPS = 24
"""Operand sets of a scalar instruction; a vector instruction has one in each lane of two waves."""
SLOT = 32
"""Bytes of memory that each lane has for itself, in LDS or outside."""
SPECIAL = (
    0,
    1,
    2,
    31,
    32,
    33,
    0xFF,
    0x7F,
    0x80,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0xFFFFFFFE,
    0x3F800000,
    0xBF800000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7F800001,
    0x00000001,
    0x807FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0x3F000000,
    0x3C003C00,
    0x7C00FC00,
    0x7E003555,
    0x00018001,
    0x7BFF0400,
    0x3F803F80,
    0x4B000001,
    0x4F000000,
    0xCF000001,
    0x40200000,
)


@dataclass(frozen=True)
class Case:
    """One instruction.

    Vector ones read v[8:9], v[10:11], v[12:13], v[14:15], vcc and s16, and write v[14:15] and vcc, exec or s20. Scalar
    ones read s[16:17], s[18:19], s[20:21] and scc, and write s[20:21] and scc. Of memory: see `execute_memory`.
    """

    name: str
    words: tuple[int, ...]

    @property
    def scalar(self) -> bool:
        return self.name.startswith("sop")

    @property
    def memory(self) -> bool:
        return self.name.startswith(("ds.", "global.", "flat.", "mubuf."))

    @property
    def sets(self) -> int:
        """How many sets of operands it is tried with."""
        return GROUPS if self.scalar else 64


def operands(case: Case, count: int) -> np.ndarray:
    """uint32[count, 16]: words of each set; special ones, floats, halves, doubles and random ones are mixed."""
    generator = random.Random(zlib.crc32(case.name.encode()))
    rows = []
    for _ in range(count):
        row = []
        for _ in range(8):  # pairs of words: an operand of 64 bits each
            kind = generator.randrange(8)
            low, high = generator.getrandbits(32), generator.getrandbits(32)
            if kind < 2:
                low, high = generator.choice(SPECIAL), generator.choice(SPECIAL)
            elif kind < 4:
                low = struct.unpack(
                    "<I", struct.pack("<f", generator.uniform(-300, 300) * 2 ** generator.randrange(-9, 9))
                )[0]
                high = generator.choice((0, low, high))
            elif kind < 5:
                low = struct.unpack("<I", struct.pack("<ee", generator.uniform(-30, 30), generator.uniform(-3, 3)))[0]
            elif kind < 7 and "64" in case.name:
                low, high = struct.unpack(
                    "<II", struct.pack("<d", generator.uniform(-9, 9) * 2.0 ** generator.randrange(-40, 40))
                )
            elif kind < 6:
                low, high = generator.randrange(70), generator.randrange(3)
            row += [low, high]
        if "div_scale" in case.name or "div_fixup" in case.name:
            row[:6] = _quotient(generator, wide="f64" in case.name)
        rows.append(row)
    return np.array(rows, dtype=np.uint32)


def _quotient(generator: random.Random, *, wide: bool) -> list[int]:
    """Quotient so far, denominator and numerator of a division, with exponents at which their treatment changes."""
    bits, top = (11, 2046) if wide else (8, 254)
    far = (767, 768, 769, -1075, -1076) if wide else (95, 96, 97, -150, -151)
    below = generator.choice((0, 1, 22, 23, 24, 52, 53, 54, top - 1, top, generator.randrange(top)))
    above = min(max(below + generator.choice((*far, 0, 1)), 0), top)

    def number(exponent: int) -> tuple[int, int]:
        high = generator.getrandbits(1) << 31 | exponent << (31 - bits) | generator.getrandbits(31 - bits)
        return (generator.getrandbits(32), high) if wide else (high, 0)

    denominator, numerator = number(below), number(above)
    return [*generator.choice((denominator, numerator, number(generator.randrange(top)))), *denominator, *numerator]


def execute_memory(case: Case, inputs: np.ndarray) -> np.ndarray:
    """uint32[count, 12]: what the lane's slot holds afterwards, and what came back.

    v[8:15] is the slot as it was, v[16:19] and v[20:23] are data, and v[24:27] is v[16:19] until something comes back.
    """
    count = len(inputs)
    memory, slots, out = (
        np.ascontiguousarray(inputs),
        np.ascontiguousarray(inputs[:, :8]),
        np.zeros((count, 12), dtype=np.uint32),
    )
    outside = not case.name.startswith("ds.")
    code = asm.program(
        asm.smem(3, 4, 0),
        asm.WAIT,  # s[4:5] operands, s[6:7] results, s[8:9] slots, s[10:11] their bytes and a buffer's format
        asm.sop2(0x08, 3, 2, const(5)),
        asm.vop2(0x25, 0, 3, v(0)),
        asm.vop2(0x18, 1, const(6), v(0)),
        asm.vop2(0x18, 3, const(5), v(0)),
        asm.vop2(0x0B, 2, const(48), v(0)),
        *(asm.flat(0x17, addr=1, dst=8 + 4 * n, saddr=4, offset=16 * n) for n in range(4)),
        asm.WAIT,
        *(asm.vop1(1, 24 + n, v(16 + n)) for n in range(4)),
        asm.vop2(0x0B, 5, const(0), v(0)),
        asm.vop1(1, 5, 9),
        asm.vop3sd(0x300, 4, 20, 8, v(3)),
        asm.vop3sd(0x120, 5, 20, v(5), const(0), 20),
        *([] if outside else [asm.ds(0xDF, addr=3, data0=8), asm.ds(0xDF, addr=3, data0=12, offset=16)]),
        list(case.words),
        asm.WAIT,
        *(
            [asm.flat(0x17, addr=3, dst=8, saddr=8), asm.flat(0x17, addr=3, dst=12, saddr=8, offset=16)]
            if outside
            else [asm.ds(0xFF, addr=3, dst=8), asm.ds(0xFF, addr=3, dst=12, offset=16)]
        ),
        *(asm.flat(0x1D, addr=2, data=d, saddr=6, offset=16 * n) for n, d in enumerate((8, 12, 24))),
    )
    kernarg = struct.pack("<QQQII", memory.ctypes.data, out.ctypes.data, slots.ctypes.data, slots.nbytes, 3 << 28)
    kernel = Code(case.name, code, descriptor(user_sgprs=2, kernarg_pointer=True, lds=count * SLOT))
    run(kernel, kernarg, [memory, out, slots], grid=(count // 32, 1, 1), checks=0)
    return out


def execute(case: Case, inputs: np.ndarray, *, ieee: bool = True, flush: bool = False) -> np.ndarray:
    """uint32[count, 4]: the two words of the result, and the mask's bit or scc; of memory, see above."""
    if case.memory:
        return execute_memory(case, inputs)
    count = len(inputs)
    memory, out = np.ascontiguousarray(inputs), np.zeros((count, 4), dtype=np.uint32)
    addresses = [*asm.smem(2, 4, 0), *asm.WAIT]  # s[4:5]: operands, s[6:7]: results
    if case.scalar:
        code = asm.program(
            addresses,
            asm.sop2(0x08, 8, 2, const(6)),
            asm.smem(4, 16, 4, soffset=8),
            asm.WAIT,
            asm.sopc(0x0D, 22, const(0)),
            list(case.words),  # scc: bit 0 of s22
            asm.sop2(0x30, 24, const(1), const(0)),
            asm.sop1(0, asm.EXEC, const(-1)),
            asm.sop2(0x08, 8, 2, const(4)),
            asm.vop1(1, 1, 8),
            asm.vop1(1, 2, 20),
            asm.vop1(1, 3, 21),
            asm.vop1(1, 4, 24),
            asm.vop1(1, 5, const(0)),
            asm.flat(0x1D, addr=1, data=2, saddr=6),
        )
        grid, block = (count, 1, 1), (32, 1, 1)
    else:
        code = asm.program(
            addresses,
            asm.smem(2, 16, 0, 16),
            asm.WAIT,  # s16: a mask
            asm.sop2(0x08, 3, 2, const(5)),
            asm.vop2(0x25, 0, 3, v(0)),  # v0: number of the lane in all
            asm.vop2(0x18, 1, const(6), v(0)),
            asm.vop2(0x18, 2, const(4), v(0)),
            *(asm.flat(0x17, addr=1, dst=8 + 4 * n, saddr=4, offset=16 * n) for n in range(4)),
            asm.WAIT,
            asm.sop1(0, asm.VCC, 16),
            asm.sop1(0, 20, const(0)),
            list(case.words),
            asm.sop1(0, 21, asm.EXEC),
            asm.sop1(0, asm.EXEC, const(-1)),
            asm.vop1(1, 16, 20 if _mask_place(case) == 20 else 21 if _mask_place(case) == asm.EXEC else asm.VCC),
            asm.vop1(1, 17, const(0)),
            asm.flat(0x1D, addr=2, data=14, saddr=6),
        )
        assert count % 32 == 0
        grid, block = (count // 32, 1, 1), (32, 1, 1)
    kernarg = struct.pack("<QQIIII", memory.ctypes.data, out.ctypes.data, MASK, 0, 0, 0)
    kernel = Code(
        case.name, code, descriptor(user_sgprs=2, kernarg_pointer=True, ieee=ieee, flush_f32=flush, flush_f16=flush)
    )
    run(kernel, kernarg, [memory, out], grid=grid, block=block, checks=0)
    if not case.scalar:
        out[:, 2] = out[:, 2] >> np.arange(count, dtype=np.uint32) % 32 & 1
    return out


MASK = 0x5A3C96F1


def _mask_place(case: Case) -> int:
    if case.words[0] >> 26 == 0x35:
        return asm.EXEC if "cmpx" in case.name else 20
    return asm.EXEC if "cmpx" in case.name else asm.VCC
