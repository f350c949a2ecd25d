"""What pseudo-code does not say: permutations, DPP, modifiers, halves, dual issue, matrix products, denormals."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest

from tests.gfx1100 import assemble as asm
from tests.gfx1100.assemble import const, v
from tests.gfx1100.emulator import Code, GpuFault, descriptor, run

RNG = np.random.default_rng(7)
LANES = np.arange(32)


def lanes(
    words: list[int],
    inputs: np.ndarray,
    *,
    mask: int = 0xFFFFFFFF,
    flush: bool = False,
    ieee: bool = True,
    outputs: int = 8,
) -> np.ndarray:
    """Runs `words` in the lanes of `mask`; uint32[outputs, 32]: v8 and on afterwards.

    Before: v8 and on from uint32[n, 32], s20 to s23 0x76543210, 0xFEDCBA98, 5 and 3, vcc 0x5A3C96F1.
    """
    count = len(inputs)
    memory, out = np.ascontiguousarray(inputs.astype(np.uint32)), np.zeros((outputs, 32), dtype=np.uint32)
    code = asm.program(
        asm.smem(2, 4, 0),
        asm.smem(2, 20, 0, 16),
        asm.smem(1, 24, 0, 32),
        asm.WAIT,
        asm.vop2(0x18, 1, const(2), v(0)),
        asm.sop1(0, asm.VCC, 25),
        *(asm.flat(0x14, addr=1, dst=8 + n, saddr=4, offset=128 * n) for n in range(count)),
        asm.WAIT,
        asm.sop1(0, asm.EXEC, 24),
        words,
        asm.sop1(0, 26, asm.EXEC),
        asm.sop1(0, asm.EXEC, const(-1)),
        *(asm.flat(0x1A, addr=1, data=8 + n, saddr=6, offset=128 * n) for n in range(outputs)),
    )
    kernarg = struct.pack(
        "<QQIIIIII", memory.ctypes.data, out.ctypes.data, 0x76543210, 0xFEDCBA98, 5, 3, mask, 0x5A3C96F1
    )
    kernel = Code(
        "lanes",
        code,
        descriptor(user_sgprs=2, kernarg_pointer=True, flush_f32=flush, flush_f16=flush, ieee=ieee, lds=256),
    )
    run(kernel, kernarg, [memory, out], checks=0)
    return out


def bits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).view(np.uint32)


def numbers(count: int) -> np.ndarray:
    return RNG.integers(0, 2**32, (count, 32), dtype=np.uint32)


def floats(count: int) -> np.ndarray:
    return RNG.normal(size=(count, 32)).astype(np.float32).view(np.uint32)


def dpp_controls() -> list[tuple[int, Callable[[int], int | None]]]:
    """Each control, and from where a lane of a row of 16 reads (None: from outside)."""

    def inside(at: int) -> int | None:
        return at if 0 <= at < 16 else None

    found: list[tuple[int, Callable[[int], int | None]]] = [
        (c, lambda a, c=c: a & ~3 | c >> 2 * (a & 3) & 3) for c in (0xE4, 0x1B, 0xB1, 0x00, 0xFF, 0x4E)
    ]
    for n in range(1, 16):
        found += [
            (0x100 + n, lambda a, n=n: inside(a + n)),
            (0x110 + n, lambda a, n=n: inside(a - n)),
            (0x120 + n, lambda a, n=n: (a - n) % 16),
        ]
    found += [(0x140, lambda a: 15 - a), (0x141, lambda a: a ^ 7)]
    for n in range(16):
        found += [(0x150 + n, lambda a, n=n: n), (0x160 + n, lambda a, n=n: a ^ n)]
    return found


@pytest.mark.parametrize(("bound", "fetch"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_dpp16_reads_the_lane_that_the_reference_names(bound: int, fetch: int) -> None:
    mask = 0xF0F7FFEB
    for control, source in dpp_controls():
        for row_mask, bank_mask in ((15, 15), (1, 11)):
            given = numbers(2)
            words = asm.dpp16(
                asm.vop2(0x25, 8, 250, v(9)),
                8,
                control,
                row_mask=row_mask,
                bank_mask=bank_mask,
                bound=bound,
                fetch=fetch,
            )
            expected = given[0].copy()
            for lane in range(32):
                at = source(lane & 15)
                there = at is not None and (fetch or mask >> (lane & 16 | at) & 1)
                if (
                    not mask >> lane & 1
                    or not row_mask >> (lane >> 4) & 1
                    or not bank_mask >> (lane >> 2 & 3) & 1
                    or not (there or bound)
                ):
                    continue
                read = int(given[0][lane & 16 | at]) if there else 0
                expected[lane] = (read + int(given[1][lane])) & 0xFFFFFFFF
            assert (lanes(words, given, mask=mask)[0] == expected).all(), hex(control)


def test_dpp_in_vop3_and_dpp8() -> None:
    given = floats(2)
    a, b = given.view(np.float32)
    # v_add_co_u32_e64_dpp v8, s26, v8, v9 row_shr:1: in place, which needs all lanes read before any is written.
    words = asm.dpp16(asm.vop3sd(0x300, 8, 26, 250, v(9)), 8, 0x111, bound=1)
    shifted = np.where(LANES % 16 == 0, 0, np.roll(given[0], 1))
    assert (lanes(words, given)[0] == (shifted + given[1])).all()
    # v_mul_f32_e64_dpp v8, -v8, |v9| quad_perm
    words = asm.dpp16(asm.vop3(0x108, 8, 250, v(9), neg=1, abs=2), 8, 0xB1)
    assert (lanes(words, given)[0].view(np.float32) == -a[LANES ^ 1] * np.abs(b)).all()
    # v_add_f32_dpp v8, v8, v9 dpp8:[7,6,5,4,3,2,1,0]; inactive lanes read as 0
    reverse = sum((7 - n) << 3 * n for n in range(8))
    words = [*asm.vop2(3, 8, 233, v(9)), 8 | reverse << 8]
    mask = 0xFFFFFF0F
    expected = np.where(mask >> LANES & 1, np.where(mask >> (LANES ^ 7) & 1, a[LANES ^ 7], 0) + b, a)
    assert (lanes(words, given, mask=mask)[0].view(np.float32) == expected).all()


def test_lanes_are_permuted_and_broadcast() -> None:
    given, mask = numbers(2), 0xFFFFFFF7
    select = np.array([0x76543210 >> 4 * n & 15 for n in range(8)] + [0xFEDCBA98 >> 4 * n & 15 for n in range(8)])
    assert (
        lanes(asm.vop3(0x25B, 10, v(8), 21, 20), given, outputs=3)[2] == given[0][LANES & 16 | select[(LANES + 8) % 16]]
    ).all()
    assert (
        lanes(asm.vop3(0x25C, 10, v(8), 20, 21), given, outputs=3)[2]
        == given[0][(LANES & 16) ^ 16 | select[LANES % 16]]
    ).all()
    assert (lanes([*asm.vop3(0x360, 26, v(8), 22), *asm.vop1(1, 10, 26)], given, outputs=3)[2] == given[0][5]).all()
    first = lanes([*asm.vop1(2, 26, v(8)), *asm.vop1(1, 10, 26)], given, mask=0xFFFFFFF8, outputs=3)[2]
    assert (first[3:] == given[0][3]).all()
    written = lanes(asm.vop3(0x361, 8, 20, 23), given, mask=0)[0]  # whatever the mask says
    assert written[3] == 0x76543210 and (np.delete(written, 3) == np.delete(given[0], 3)).all()
    swapped = lanes(asm.vop1(0x65, 8, v(9)), given, mask=mask)
    assert (swapped[0] == np.where(LANES == 3, given[0], given[1])).all() and (
        swapped[1] == np.where(LANES == 3, given[1], given[0])
    ).all()
    given[1] = RNG.integers(0, 64, 32) * 4
    places = (given[1] // 4 + 1) % 32
    pulled = lanes(asm.ds(0xB3, addr=9, data0=8, dst=10, offset=4), given, mask=mask, outputs=3)[2]
    assert (pulled == np.where(LANES == 3, pulled, np.where(places == 3, 0, given[0][places]))).all()
    pushed, expected = (
        lanes(asm.ds(0xB2, addr=9, data0=8, dst=10, offset=4), given, outputs=3)[2],
        np.zeros(32, np.uint32),
    )
    expected[places] = given[0]
    assert (pushed == expected).all()
    for offset, source in (
        (0x041F, LANES ^ 1),
        (0x8000 | 0x1B, LANES ^ 3),
        (0x01E0, np.full(32, 15)),
        (0xC000 | 3 << 5, (LANES + 3) % 32),
    ):
        assert (lanes(asm.ds(0x35, addr=8, dst=10, offset=offset), given, outputs=3)[2] == given[0][source]).all(), hex(
            offset
        )


def test_registers_are_chosen_by_m0() -> None:
    given = numbers(4)
    to_m0 = asm.sop1(0, asm.M0, const(2))
    assert (lanes([*to_m0, *asm.vop1(0x43, 8, v(9))], given)[0] == given[3]).all()  # v_movrels: from v11
    assert (lanes([*to_m0, *asm.vop1(0x42, 8, v(9))], given)[2] == given[1]).all()  # v_movreld: to v10
    moved = lanes([*to_m0, *asm.sop1(0x40, 26, 20), *asm.vop1(1, 8, 26)], given)[0]
    assert (moved == 5).all()  # s_movrels_b32 s26, s20: from s22


def test_modifiers() -> None:
    a, b = (given := floats(2)).view(np.float32)
    cases = [
        (asm.vop3(0x103, 8, v(8), v(9), neg=1), b - a, {}),
        (asm.vop3(0x103, 8, v(8), v(9), abs=3, neg=2), np.abs(a) - np.abs(b), {}),
        (asm.vop3(0x108, 8, v(8), v(9), clamp=1), np.clip(a * b, 0, 1), {}),
        # Output modifiers only where denormals are flushed and IEEE mode is off.
        (asm.vop3(0x108, 8, v(8), v(9), omod=1), a * b * 2, {"flush": True, "ieee": False}),
        (asm.vop3(0x108, 8, v(8), v(9), omod=3), a * b / 2, {"flush": True, "ieee": False}),
        (asm.vop3(0x108, 8, v(8), v(9), omod=1), a * b, {}),
    ]
    for words, expected, mode in cases:
        assert (lanes(words, given, **mode)[0].view(np.float32) == expected.astype(np.float32)).all(), words
    chosen = lanes(asm.vop3(0x101, 8, v(8), v(9), 25, neg=1, abs=2), given)[0].view(
        np.float32
    )  # v_cndmask_b32, s25: a mask
    assert (chosen == np.where(0x5A3C96F1 >> LANES & 1, np.abs(b), -a)).all()
    x, y = numbers(2)
    saturated = np.minimum(x.astype(np.uint64) + y, 0xFFFFFFFF).astype(np.uint32)
    assert (lanes(asm.vop3(0x125, 8, v(8), v(9), clamp=1), np.stack([x, y]))[0] == saturated).all()
    packed = lanes(asm.vop3p(0x02, 8, v(8), v(9)), np.stack([x, y]))[0].view(np.int16)  # v_pk_add_i16
    assert (packed == x.view(np.int16) + y.view(np.int16)).all()
    crossed = (
        lanes(asm.vop3p(0x02, 8, v(8), v(9), opsel=1, opsel_hi=2), np.stack([x, y]))[0].view(np.int16).reshape(32, 2)
    )
    assert (crossed == x.view(np.int16).reshape(32, 2)[:, ::-1] + y.view(np.int16).reshape(32, 2)).all()


def test_halves_are_read_and_written_apart() -> None:
    halves = RNG.normal(size=(2, 32, 2)).astype(np.float16)
    given = halves.view(np.uint32).reshape(2, 32)
    added = lanes(asm.vop3(0x132, 8, v(8), v(9), opsel=0b1001), given)[0].view(np.float16).reshape(32, 2)
    assert (added[:, 1] == halves[0, :, 1] + halves[1, :, 0]).all() and (added[:, 0] == halves[0, :, 0]).all()
    # The same in 32 bits: bit 7 of a register's number means its upper half.
    short = lanes(asm.vop2(0x32, 8 + 128, v(8 + 128), v(9)), given)[0].view(np.float16).reshape(32, 2)
    assert (short == added).all()
    factor = floats(1)[0]  # v_fma_mix_f32: an upper half times a float, plus a lower half
    mixed = lanes(asm.vop3p(0x20, 8, v(8), v(9), v(8), opsel=1, opsel_hi=5), np.stack([given[0], factor]))[0].view(
        np.float32
    )
    exactly = halves[0, :, 1].astype(np.float64) * factor.view(np.float32) + halves[0, :, 0]
    assert (mixed == exactly.astype(np.float32)).all()
    product = lanes(asm.vop2(0x3C, 8, v(9), v(9)), given)[0].view(np.float16).reshape(32, 2)  # v_pk_fmac_f16
    exact = halves[1].astype(np.float64) ** 2 + halves[0]
    assert (product == exact.astype(np.float16)).all()


def test_dual_instructions_read_before_they_write() -> None:
    given = floats(3)
    a, b, c = given.view(np.float32)
    # v_dual_add_f32 v8, v8, v9 :: v_dual_mul_f32 v9, v8, v10
    words = [0xC8000000 | 4 << 22 | 3 << 17 | v(8) | (9 << 9), v(8) | 10 << 9 | (9 >> 1) << 17 | 8 << 24]
    out = lanes(words, given).view(np.float32)
    assert (out[0] == a + b).all() and (out[1] == a * c).all()
    # v_dual_mov_b32 v8, v9 :: v_dual_mov_b32 v9, v8
    out = lanes([0xC8000000 | 8 << 22 | 8 << 17 | v(9), v(8) | (9 >> 1) << 17 | 8 << 24], given)
    assert (out[0] == given[1]).all() and (out[1] == given[0]).all()


def test_denormals_follow_the_mode() -> None:
    tiny = np.stack([np.full(32, 0x00400000, np.uint32), bits(*[1.0] * 32)])
    assert (lanes(asm.vop2(0x08, 8, v(8), v(9)), tiny)[0] == 0x00400000).all()
    assert (lanes(asm.vop2(0x08, 8, v(8), v(9)), tiny, flush=True)[0] == 0).all()
    half = np.stack([bits(*[2.0**-126] * 32), bits(*[0.5] * 32)])
    assert (lanes(asm.vop2(0x08, 8, v(8), v(9)), half)[0] == 0x00400000).all()
    assert (lanes(asm.vop2(0x08, 8, v(8), v(9)), half, flush=True)[0] == 0).all()
    assert (
        lanes([*asm.sopp(0x12, 15), *asm.vop2(0x08, 8, v(8), v(9))], half, flush=True)[0] == 0x00400000
    ).all()  # s_denorm_mode


def bfloat(values: np.ndarray) -> np.ndarray:
    u = values.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def matrix(op: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, **modifiers: int) -> np.ndarray:
    """v_wmma with A's rows and B's columns as uint32[16, n], C as uint32[8, 32]; D likewise."""
    words = a.shape[1]
    given = np.concatenate([np.tile(a.T, 2), np.tile(b.T, 2), c])
    first = asm.vop3p(op, 8 + 2 * words, v(8), v(8 + words), v(8 + 2 * words), **modifiers)
    return lanes(first, given, outputs=2 * words + 8)[2 * words :]


def spread(d: np.ndarray) -> np.ndarray:
    """16 x 16 in the rows and lanes of C and D."""
    return np.stack([np.concatenate([d[2 * r], d[2 * r + 1]]) for r in range(8)])


def test_matrix_products() -> None:
    generator = random.Random(3)
    for op, kind in ((0x40, "f16"), (0x41, "bf16"), (0x42, "f16"), (0x43, "bf16")):
        a, b, c = RNG.normal(size=(3, 16, 16)).astype(np.float32)
        if kind == "f16":
            raw_a, raw_b = a.astype(np.float16).view(np.uint16), b.T.astype(np.float16).view(np.uint16)
            a, b = a.astype(np.float16).astype(np.float64), b.astype(np.float16).astype(np.float64)
        else:
            raw_a, raw_b = bfloat(a), bfloat(b.T)
            a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (raw_a, raw_b.T))
        pack = [np.ascontiguousarray(x).view(np.uint32) for x in (raw_a, raw_b)]
        if op in (0x40, 0x41):
            d = matrix(op, *pack, spread(c).view(np.uint32)).view(np.float32)
            assert np.abs(d - spread(a @ b + c)).max() < 1e-6 * 16
        else:
            low = (c.astype(np.float16).view(np.uint16) if kind == "f16" else bfloat(c)).astype(np.uint32)
            held = low if kind == "bf16" else low << 16 | 0x1234  # in the upper halves, with op_sel
            d = matrix(op, *pack, spread(held), **({} if kind == "bf16" else {"opsel": 4}))
            if kind == "f16":
                assert (d & 0xFFFF == 0x1234).all()
                got, plus = (d >> 16).astype(np.uint16).view(np.float16), c.astype(np.float16)
            else:
                got, plus = ((d & 0xFFFF) << 16).view(np.float32), (low << 16).view(np.float32)
            assert np.abs(got.astype(np.float64) - spread(a @ b + plus)).max() < (0.02 if kind == "f16" else 0.1)
    for op, width in ((0x44, 8), (0x45, 4)):
        for signs in (0, 1, 2, 3):
            a, b = (
                np.array([[generator.randrange(1 << width) for _ in range(16)] for _ in range(16)]) for _ in range(2)
            )
            c = RNG.integers(-1000, 1000, (16, 16))
            pack = [
                np.stack(
                    [
                        sum((x[:, k + n].astype(np.uint32) << n * width) for n in range(32 // width))
                        for k in range(0, 16, 32 // width)
                    ],
                    1,
                )
                for x in (a, b.T)
            ]
            signed = [
                np.where(x >> (width - 1), x - (1 << width), x) if signs >> n & 1 else x for n, x in enumerate((a, b))
            ]
            d = matrix(op, *(p.astype(np.uint32) for p in pack), spread(c).astype(np.uint32), neg=signs)
            assert (d.view(np.int32) == spread(signed[0] @ signed[1] + c)).all(), (op, signs)


def test_matrix_operands_must_be_the_same_in_both_half_waves() -> None:
    given = np.concatenate([floats(16), np.zeros((8, 32), np.uint32)])
    with pytest.raises(GpuFault, match=r"matrix operand v8 differs between lane 0 .* and lane 16"):
        lanes(asm.vop3p(0x40, 24, v(8), v(16), v(24)), given)
