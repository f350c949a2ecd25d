"""Kernels that do what they must not: each fault is found, and its message says what and where.

The kernel that is right adds up int32 numbers: each lane loads one where there is one, both waves exchange theirs
through LDS, and the sum of a lane and its partner is added to a total. Each mutant is one changed instruction of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest

from tests.gfx1100 import assemble as asm
from tests.gfx1100.assemble import const, v
from tests.gfx1100.emulator import Code, GpuFault, Stats, descriptor, run

COUNT = 60  # of 64 lanes
ADDRESS, LOAD, MASK, STORE, BARRIER, PARTNER, FETCH, ATOMIC = (
    f"{n}" for n in ("address", "load", "mask", "store", "barrier", "partner", "fetch", "atomic")
)
PARTS: dict[str, list[int]] = {
    "arguments": [
        *asm.smem(2, 4, 0),
        *asm.smem(0, 8, 0, 16),
        *asm.WAIT,
    ],  # s[4:5] numbers, s[6:7] total, s8 their count
    ADDRESS: asm.vop2(0x18, 1, const(2), v(0)),  # v1: 4 * lane
    "number": asm.vop1(1, 2, const(0)),
    MASK: [*asm.vopc(0x4C, 8, v(0)), *asm.sop1(0x20, 9, asm.VCC)],  # count > lane
    LOAD: asm.flat(0x14, addr=1, dst=2, saddr=4),
    "all": [*asm.sop1(0, asm.EXEC, 9), *asm.WAIT],
    STORE: asm.ds(0x0D, addr=1, data0=2),
    BARRIER: [*asm.WAIT, *asm.BARRIER],
    PARTNER: [*asm.vop1(1, 3, asm.LITERAL), 0x80, *asm.vop2(0x1D, 3, v(3), v(1))],  # v3: the address of lane ^ 32
    FETCH: [*asm.ds(0x36, addr=3, dst=4), *asm.WAIT],
    "sum": asm.vop2(0x25, 4, v(4), v(2)),
    "place": asm.vop1(1, 5, const(0)),
    ATOMIC: asm.flat(0x35, addr=5, data=4, saddr=6),
}
LINES = "0 kernel.py:1\n20 kernel.py:2\n"


def total(
    changes: dict[str, list[int]] | None = None,
    *,
    after: list[int] | None = None,
    readonly: bool = False,
    **options: object,
) -> tuple[int, Stats]:
    """Runs the kernel with parts replaced; twice the sum."""
    numbers, out = np.arange(1, COUNT + 1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    out.flags.writeable = not readonly
    parts = {**PARTS, **(changes or {})}
    kernel = Code(
        "total",
        asm.program(*parts.values(), after or []),
        descriptor(user_sgprs=2, kernarg_pointer=True, vgprs=16, lds=256, scratch=16),
        lines=LINES,
    )
    kernarg = struct.pack("<QQI4x", numbers.ctypes.data, out.ctypes.data, COUNT)
    launch = {"grid": (1, 1, 1), "block": (64, 1, 1), **options}
    stats = run(kernel, kernarg, [numbers, out], **launch)  # type: ignore[arg-type]
    return int(out[0]), stats


def test_the_kernel_is_right_in_any_order_of_waves() -> None:
    for seed in range(6):
        assert total(seed=seed)[0] == COUNT * (COUNT + 1)


def test_what_is_executed_is_counted() -> None:
    _, stats = total()
    assert (stats.waves, stats.branches, stats.atomics, stats.lds, stats.smem, stats.vmem_load, stats.vmem_store) == (
        2,
        0,
        2,
        4,
        4,
        2,
        0,
    )
    assert stats.bytes_loaded == 4 * COUNT + 2 * (16 + 4) and stats.vgprs == 16 and stats.lds_bytes == 256
    assert stats.instructions == 2 * 21 and stats.lds_conflict_cycles == 0
    conflicts = asm.vop2(0x18, 6, const(7), v(0))  # every lane in bank 0
    _, stats = total(
        {PARTNER: [*PARTS[PARTNER], *conflicts, *asm.vop2(0x1B, 6, const(0), v(6)), *asm.vop2(0x1C, 6, v(6), v(3))]}
    )
    assert stats.lds_conflict_cycles == 0
    _, stats = total(
        after=[*asm.BARRIER, *asm.vop2(0x18, 6, const(7), v(0)), *asm.ds(0x0D, addr=6, data0=2)], dynamic_lds=1 << 13
    )
    assert stats.lds_conflict_cycles == 2 * 31


MUTANTS: dict[str, tuple[dict, str]] = {
    "missing barrier": (
        {BARRIER: asm.WAIT},
        r"LDS byte \d+ is (read|written) by lane \d+ of wave \d .* by wave \d without a barrier between",
    ),
    "dropped mask": (
        {MASK: asm.sop1(0, 9, asm.EXEC)},
        r"lane 28 reads 4 bytes at 0x\w+: 0 bytes past the end of the allocation of 240 bytes",
    ),
    "bound off by one": (
        {MASK: [*asm.vopc(0x4E, 8, v(0)), *asm.sop1(0x20, 9, asm.VCC)]},
        r"lane 28 reads 4 bytes .* 0 bytes past the end",
    ),
    "wrong shift": (
        {ADDRESS: asm.vop2(0x18, 1, const(3), v(0))},
        r"lane \d+ reads 4 bytes at .* past the end of the allocation",
    ),
    "load too wide": (
        {LOAD: asm.flat(0x15, addr=1, dst=2, saddr=4)},
        r"lane 27 reads 8 bytes at 0x\w+, reaching past the end of the allocation",
    ),
    "load before the start": (
        {LOAD: asm.flat(0x14, addr=1, dst=2, saddr=4, offset=-4)},
        r"lane 0 reads 4 bytes at 0x\w+: (4 bytes before|no allocation)",
    ),
    "LDS out of bounds": (
        {STORE: asm.ds(0x0D, addr=1, data0=2, offset=4)},
        r"lane 31 writes 4 bytes of LDS at 256, but the workgroup has 256",
    ),
    "LDS atomic not aligned": (
        {STORE: asm.ds(0x00, addr=1, data0=2, offset=2)},
        r"an atomic operation on LDS at 2, which is not aligned",
    ),
    "missing wait for a load": (
        {"all": asm.sop1(0, asm.EXEC, 9)},
        r"v2 is used, but the program has not waited for the load into it; instruction: ds_store_b32 v1, v2",
    ),
    "missing wait for LDS": ({FETCH: asm.ds(0x36, addr=3, dst=4)}, r"v4 is used, but the program has not waited"),
    "missing wait for a scalar load": (
        {"arguments": PARTS["arguments"][:-1]},
        r"s\d+ is used, but the program has not wait",
    ),
    "wait for too few": (
        {FETCH: [*asm.ds(0x36, addr=3, dst=4), *asm.ds(0x36, addr=1, dst=6), *asm.sopp(0x09, 63 << 10 | 2 << 4)]},
        r"v4 is used, but the program has not waited",
    ),
    "address never computed": (
        {ADDRESS: asm.vop1(1, 7, const(0))},
        r"a vector register of the lane holds what was never written, and decides an address",
    ),
    "address from LDS that nobody wrote": (
        {STORE: [], FETCH: [*asm.ds(0x36, addr=3, dst=4), *asm.ds(0x36, addr=4, dst=4), *asm.WAIT]},
        r"a vector register of the lane holds what was never written, and decides an address of LDS",
    ),
    "condition never computed": (
        {"number": asm.sopp(0x22, 0)},
        r"a condition holds what was never written, and decides a branch",
    ),
    "mask never computed": (
        {MASK: asm.sop1(0x20, 9, 30)},
        r"the mask of active lanes holds what was never written, and decides which lanes go on",
    ),
    "pointer never loaded": (
        {LOAD: asm.flat(0x14, addr=1, dst=2, saddr=40)},
        r"holds what was never written, and decides an address",
    ),
    "scalar load from nowhere": (
        {"number": asm.smem(0, 20, 8)},
        r"holds what was never written, and decides an address|reads 4 bytes at",
    ),
    "total read-only": ({}, r"lane 0 writes memory at 0x\w+ that is not to be written"),
    "register beyond the kernel's": (
        {"sum": asm.vop2(0x25, 20, v(4), v(2))},
        r"v20 is used, but the kernel has 16 vector registers",
    ),
    "unknown instruction": (
        {"sum": [0xF0000000, 0]},
        r"unknown instruction: encoding 0x3c \(words 0xf0000000 0x00000000\)",
    ),
    "branch out of the code": ({"sum": asm.sopp(0x20, 4000)}, r"the program counter left the code"),
    "assertion": ({"sum": asm.sopp(0x10, 2)}, r"s_trap 2: an assertion of the kernel failed"),
    "scratch out of bounds": (
        {"sum": asm.flat(0x1A, data=2, segment=1, offset=16)},
        r"lane 0 accesses 4 bytes of scratch at 16, but each lane has 16",
    ),
    "rounding toward zero": ({"sum": asm.sopp(0x11, 15)}, r"rounding mode 15: only to nearest even is known"),
    "register chosen by nothing": (
        {"sum": asm.vop1(0x43, 4, v(4))},
        r"m0 holds what was never written, and decides which register is meant",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_by_the_right_message(name: str) -> None:
    changes, message = MUTANTS[name]

    def any_order() -> None:
        for seed in range(3):  # a race shows in any
            total(changes, readonly=name == "total read-only", seed=seed)

    with pytest.raises(GpuFault, match=message) as caught:
        any_order()
    where = r"kernel total at 0x\w+ \(kernel\.py:[12]\), workgroup 0,0,0 wave \d: "
    assert re.match(where, str(caught.value)), caught.value


def test_the_message_names_the_instruction() -> None:
    with pytest.raises(GpuFault, match=r"instruction: global_load_b64 v\[2:3\], v1, s\[4:5\]$"):
        total(MUTANTS["load too wide"][0])


def test_loads_come_in_order() -> None:
    first = [*asm.ds(0x36, addr=3, dst=4), *asm.ds(0x36, addr=1, dst=6), *asm.sopp(0x09, 63 << 10 | 1 << 4)]
    assert total({FETCH: first, "end": asm.WAIT})[0] == COUNT * (COUNT + 1)


def halves(*then: list[int], left: int = 0) -> None:
    """Loads two numbers into the halves of v6, waits until `left` of the loads are outstanding, and goes on."""
    loads = [
        *asm.flat(0x20, addr=5, dst=6, saddr=4),
        *asm.flat(0x23, addr=5, dst=6, saddr=4, offset=4),
        *asm.sopp(0x09, left << 10 | 63 << 4),
    ]
    total({"place": [*PARTS["place"], *loads, *(word for part in then for word in part)]})


LOWER, UPPER = (
    {
        "a store": asm.flat(store, addr=5, data=6, saddr=6),
        "a sum of halves": asm.vop3(0x132, 7, v(6), v(6), opsel=3 * half),
        "a packed sum": asm.vop3p(0x0F, 7, v(6), v(6), opsel=3 * half, opsel_hi=3 * half),
        "a mixed product": asm.vop3p(0x20, 7, v(6), v(6), v(6), opsel=7 * half, opsel_hi=7),
        "a half written anew": asm.vop3(0x132, 6, const(1), const(1), opsel=8 * half),
    }
    for half, store in ((0, 0x19), (1, 0x25))
)


@pytest.mark.parametrize("name", LOWER)
def test_halves_of_a_register_are_awaited_one_by_one(name: str) -> None:
    """Loads of 16 bits fill one half each: the first may be used while the second is still on its way."""
    halves(LOWER[name], left=1)
    for used, left in ((UPPER, 1), (LOWER, 2), (UPPER, 2)):
        with pytest.raises(GpuFault, match="v6 is used, but the program has not waited for the load into it"):
            halves(used[name], left=left)
    halves(UPPER[name], left=0)


@pytest.mark.parametrize("whole", [asm.vop1(1, 7, v(6)), asm.vop2(0x25, 7, v(6), v(5)), asm.ds(0x0D, addr=5, data0=6)])
def test_a_whole_register_waits_for_both_halves(whole: list[int]) -> None:
    with pytest.raises(GpuFault, match="v6 is used, but the program has not waited for the load into it"):
        halves(whole, left=1)
    halves(asm.BARRIER, whole)


@pytest.mark.parametrize("first", ["lower", "upper"])
def test_half_of_a_packed_result_is_unknown_only_where_its_sources_are(first: str) -> None:
    """v6 has one half that was never written; what depends on the other one may decide an address."""
    half, store = (0, 0x20) if first == "lower" else (1, 0x23)
    load = [*asm.flat(store, addr=5, dst=6, saddr=4), *asm.WAIT, *asm.vop3p(0x0A, 7, v(6), const(0))]
    of = [[*asm.vop2(0x1B, 7, asm.LITERAL, v(7)), 0xFFFF], asm.vop2(0x19, 7, const(16), v(7))]
    mixed = [
        [*asm.vop3p(0x20, 8, v(6), v(6), v(6), opsel=7 * of, opsel_hi=7), *asm.vop2(0x1B, 8, const(4), v(8))]
        for of in (0, 1)
    ]
    for known, register in ((of[half], 7), (mixed[half], 8)):
        total({"place": [*PARTS["place"], *load, *known, *asm.ds(0x36, addr=register, dst=10)]})
    for unknown, register in ((of[1 - half], 7), (mixed[1 - half], 8)):
        with pytest.raises(GpuFault, match="holds what was never written, and decides an address of LDS"):
            total({"place": [*PARTS["place"], *load, *unknown, *asm.ds(0x36, addr=register, dst=10)]})


def test_the_time_is_asked_for_and_awaited() -> None:
    """s_sendmsg_rtn: its answer comes as a scalar load's does."""
    ask = {words: [0xBE800000 | 20 << 16 | op << 8 | 131] for op, words in ((0x4C, 1), (0x4D, 2))}
    for words, asked in ask.items():
        read = asm.sop1(0, 22, 20 + words - 1)
        total({"place": [*PARTS["place"], *asked, *asm.WAIT, *read]})
        with pytest.raises(GpuFault, match=rf"s{20 + words - 1} is used, but the program has not waited"):
            total({"place": [*PARTS["place"], *asked, *read]})
    with pytest.raises(GpuFault, match="s_sendmsg_rtn_b32 128: only 131, the time, is known"):
        total({"place": [*PARTS["place"], 0xBE800000 | 20 << 16 | 0x4C << 8 | 128]})


def test_what_is_allowed_is_not_reported() -> None:
    """Undefined bits that decide nothing; waves that write the same; buffers that leave out what is outside."""
    fine: list[Callable[[], object]] = [
        lambda: total(
            after=[
                *asm.vop2(0x25, 10, v(11), v(12)),
                *asm.vop2(0x1B, 11, const(0), v(10)),
                *asm.ds(0x36, addr=11, dst=12),
            ],
            checks=1,
        ),
        lambda: total(after=[*asm.BARRIER, *asm.vop1(1, 10, const(0)), *asm.ds(0x0D, addr=10, data0=10)]),
    ]
    for each in fine:
        each()
    buffer = [
        *asm.sop1(1, 12, 4),
        *asm.sop1(0, 14, asm.LITERAL),
        4 * COUNT,
        *asm.sop1(0, 15, asm.LITERAL),
        3 << 28,
        *asm.mubuf(0x14, data=2, addr=1, srsrc=12),
        *asm.WAIT,
    ]
    assert total({MASK: asm.sop1(0, 9, asm.EXEC), LOAD: buffer})[0] == COUNT * (COUNT + 1)
    partly = [*buffer[:-3], *asm.mubuf(0x15, data=2, addr=1, srsrc=12)]
    with pytest.raises(
        GpuFault, match=r"lane 27 accesses 8 bytes at offset 236 of a buffer of 240 bytes: partly outside"
    ):
        total({MASK: asm.sop1(0, 9, asm.EXEC), LOAD: partly})
    beyond = [w if w != 4 * COUNT else 4 * COUNT + 64 for w in buffer]  # a descriptor that promises more than there is
    with pytest.raises(GpuFault, match=r"lane 28 reads 4 bytes at .* past the end"):
        total({MASK: asm.sop1(0, 9, asm.EXEC), LOAD: beyond})
