"""Each instruction against AMD's own pseudo-code, with random operands; a stored digest of the results stands for it.

`make test-long` evaluates the pseudo-code, which the registry's tinygrad package carries (it has no other use here, and
`make setup` does not install it), and checks that the stored digests are of results that agree with it. `make test`
only checks the digests.

    python -m tests.gfx1100.test_isa     # writes isa_digests.txt anew, after the comparison
"""

from __future__ import annotations

import importlib
import math
import re
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.gfx1100 import assemble as asm
from tests.gfx1100.assemble import v
from tests.gfx1100.emulator import lib, text
from tests.gfx1100.isa_cases import MASK, Case, execute, operands
from tests.gfx1100.pseudocode import Machine, Memory, Value, decode_float

DIGESTS = Path(__file__).with_name("isa_digests.txt")
# In the reference, refused by the interpreter: graphics, video, traps, waves of 64 lanes, gfx1150's scalar floats.
UNKNOWN = re.compile(
    r"sop\w\.(s_\w+_(f32|f16)|s_cvt_\w+|s_\w+(saveexec|wrexec)_b64|s_rfe_b64|s_version)|vop3\.v_(cube|mullit|m?qsad|trig_preop)\w+"
    r"|ds\.ds_(gws|ordered|append|consume|condxchg|bvh|add_gs|sub_gs)\w*|\w+\.\w+_(load_lds_\w+|format_\w+)"
)
# Not functions of operands: tested elsewhere, or without a result.
ELSEWHERE = (
    "mov_rel",
    "movrel",
    "swap",
    "permlane",
    "readlane",
    "readfirstlane",
    "writelane",
    "v_nop",
    "pipeflush",
    "getpc",
    "setpc",
    "swappc",
    "call",
    "sendmsg",
    "getreg",
    "setreg",
    "waitcnt",
    "wmma",
    "pk_fmac",
    "dot2acc",
    "stride64",
    "addtid",
    "permute",
    "swizzle",
    "ds_nop",
    "_inv",
)
# Computed in double and rounded; the reference's functions are real ones. Without denormals, which these units flush.
APPROXIMATE = ("exp", "log", "rsq", "sin", "cos", "rcp", "sqrt")


def pseudocode() -> dict:
    try:
        return importlib.import_module("tinygrad.runtime.autogen.amd.rdna3.str_pcode").PCODE
    except ImportError:
        pytest.skip("AMD's pseudo-code is in the tinygrad package, which is not installed")


def cases(table: dict) -> Iterator[tuple[Case, str]]:
    """Every instruction of the reference that has operands and a result, with its pseudo-code."""
    for op, code in table.items():
        form, number = type(op).__name__[:-2], op.value
        name = op.name.lower()
        if any(part in name for part in ELSEWHERE):
            continue
        src = (v(8), v(10), v(12))
        words: list[int]
        if form == "VOP1":
            words = asm.vop1(number, 14, v(8))
        elif form == "VOP2":
            words = asm.vop2(number, 14, v(8), v(10))
            if "fmamk" in name or "fmaak" in name:
                words = [*words, 0x40490FDB]
        elif form == "VOPC":
            words = asm.vopc(number, v(8), v(10))
        elif form == "VOP3":
            third = 16 if "cndmask" in name else src[2]
            words = asm.vop3(number, (asm.EXEC if "cmpx" in name else 20) if "_cmp" in name else 14, v(8), v(10), third)
        elif form == "VOP3SD":
            words = asm.vop3sd(number, 14, 20, v(8), v(10), 16 if "_ci_" in name else src[2])
        elif form == "VOP3P":
            words = asm.vop3p(number, 14, *src, opsel_hi=5 if "fma_mix" in name else 7)
        elif form == "SOP2":
            words = asm.sop2(number, 20, 16, 18)
        elif form == "SOP1":
            words = asm.sop1(number, 20, 16)
        elif form == "SOPC":
            words = asm.sopc(number, 16, 18)
        elif form == "SOPK":
            words = asm.sopk(number, 20, 0x9A47)
        elif form == "DS":
            words = asm.ds(number, addr=3, data0=16, data1=20, dst=24, offset=0x0201 if "2addr" in name else 8)
        elif form in ("GLOBAL", "FLAT") and name.startswith(form.lower()):
            place = {"addr": 3, "saddr": 8} if form == "GLOBAL" else {"addr": 4, "segment": 0}
            data = 24 if "_load" in name else 16
            words = asm.flat(number, data=data, dst=24, offset=8, glc="atomic" in name, **place)
        elif form == "MUBUF":
            data = 24 if "_load" in name else 16
            words = asm.mubuf(number, data=data, addr=3, srsrc=8, offset=8)
        else:
            continue
        yield Case(f"{form.lower()}.{name}", tuple(words)), code


def known(case: Case) -> bool:
    return text(case.words) is not None


def expected(case: Case, code: str, row: np.ndarray, lane: int, table: dict, *, ieee: bool) -> tuple[int, int]:
    """The result's 64 bits and the mask's bit or scc, by the pseudo-code."""
    words = [int(w) for w in row]
    pairs = [Value("b", 64, words[2 * n] | words[2 * n + 1] << 32) for n in range(8)]
    by_name = {o.name: c for o, c in table.items() if type(o).__name__ in ("VOP3Op", "VOP3SDOp")}

    def other(name: str) -> str:
        return by_name.get(name) or by_name[f"{name}_E64"]

    mask = Value("b", 64, MASK)
    scalar = case.scalar
    state = {
        "S0": pairs[0],
        "S1": pairs[1],
        "S2": pairs[2],
        "D0": pairs[2] if scalar else pairs[3],
        "D1": Value("u", 1, 0),
        "VCC": mask,
        "EXEC": Value("b", 64, 0xFFFFFFFF),
        "SCC": Value("u", 1, words[6] & 1 if scalar else 0),
        "laneId": Value("u", 32, lane),
        "SIMM16": Value("u", 16, 0x9A47),
        "SIMM32": Value("b", 32, 0x40490FDB),
        "OPSEL": Value("u", 3, 0),
        "OPSEL_HI": Value("u", 3, 5),
        "NEG": Value("u", 3, 0),
        "S": pairs[:3],
        "single": "f32" in case.name,
        "ROUND_MODE": Value("u", 2, 0),
        "ROUND_TOWARD_ZERO": Value("u", 2, 3),
        "CVT_OFF_TABLE": [
            Value("f", 32, int(np.float32(x).view(np.uint32)))
            for x in ((n - 16 if n > 7 else n) / 16 for n in range(16))
        ],
    }
    if case.name.startswith("sopk"):
        state["S0"] = pairs[2]
    if "fmac" in case.name:
        state["S2"] = pairs[3]
    if "div_scale" in case.name:
        state["D0"] = pairs[0]  # unless the pseudo-code says otherwise, which it leaves out
    machine = Machine(other, state, ieee=ieee, toward_zero="rtz" in case.name)
    machine.run(
        code.replace("declare CVT_OFF_TABLE : 32'F[16];", "")
        .replace("declare S : 32'B[3];", "")
        .replace("declare in : 32'F[3];", "declare in : 32'F[3];")
    )
    names = machine.names
    result, flag = names["D0"].bits, 0
    if scalar:
        flag = names["SCC"].bits & 1
    elif "_cmpx" in case.name:
        flag, result = names["EXEC"].bits >> lane & 1, pairs[3].bits
    elif "_cmp" in case.name:
        flag, result = result >> lane & 1, pairs[3].bits
    elif "div_scale" in case.name:
        flag = names["VCC"].bits & 1
    elif "mad_u64" in case.name or "mad_i64" in case.name:
        flag = names["D1"].bits & 1
    elif "_co_" in case.name:
        flag = names["VCC"].bits >> lane & 1
    return result, flag


def width_of(case: Case) -> int:
    """Bits of the result that the instruction defines; the others keep what was there."""
    name = case.name.split(".")[1].removesuffix("_e32").removesuffix("_e64")
    if "_cmp" in name:
        return 0
    return (
        64
        if any(name.endswith(e) for e in ("f64", "b64", "i64", "u64"))
        or "_f64_" in name
        or "mad_u64" in name
        or "mad_i64" in name
        or "_b64_" in name
        else 32
    )


def float_kind(name: str) -> str | None:
    """The format of the result, if it is a float."""
    name = name.split(".")[1].removesuffix("_e32").removesuffix("_e64")
    if "_cmp" in name or "frexp_exp" in name:
        return None
    if found := re.search(r"cvt_(?:pk_rtz_)?(f16|f32|f64)_", name):
        return found.group(1)
    if "_cvt_" in name or "sat_pk" in name:
        return None
    found = re.findall(r"(?:^|_)(bf16|f16|f32|f64)", name)
    return found[0] if found else None


def agrees(case: Case, got: int, want: int, row: np.ndarray) -> bool:
    if got == want:
        return True
    if (
        "frexp_exp" in case.name
    ):  # of what is not normal LLVM expects the true one, or 0; the pseudo-code the stored one
        form = re.findall("f16|f32|f64", case.name)[0]
        source = decode_float((int(row[0]) | int(row[1]) << 32) & ((1 << int(form[1:])) - 1), form)
        return source == 0 or (
            not isinstance(source, float) and abs(source) < Fraction(2) ** {"f16": -14, "f32": -126, "f64": -1022}[form]
        )
    kind = float_kind(case.name)
    if kind is None:
        return False
    parts = [(got, want)]
    if "_pk_" in case.name:
        parts = [(got & 0xFFFF, want & 0xFFFF), (got >> 16 & 0xFFFF, want >> 16 & 0xFFFF)]
    if "mixhi" in case.name:
        parts = [(got >> 16, want >> 16)] if got & 0xFFFF == want & 0xFFFF else parts
    bits = 16 if "_pk_" in case.name else int(kind.lstrip("bf"))
    if bits < 32 and parts == [(got, want)] and got >> 16 != want >> 16:
        return False
    for a, b in parts:
        a, b = a & ((1 << bits) - 1), b & ((1 << bits) - 1)
        x, y = decode_float(a, kind), decode_float(b, kind)
        if isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y):
            continue
        if a == b:
            continue
        if "rndne" in case.name and x == y == 0:
            continue  # the pseudo-code loses the sign of what rounds to 0, which LLVM relies on
        if "rndne" in case.name and x == decode_float((int(row[0]) | int(row[1]) << 32) & ((1 << bits) - 1), kind):
            continue  # a whole number, to which the pseudo-code adds a half that does not fit
        if "fract" in case.name and y == 1:
            continue  # the card's stays below 1: LLVM makes one of min(x - floor(x), the number below 1)
        if not any(f"_{part}_" in case.name for part in APPROXIMATE):
            return False
        tiny = 2.0 ** (-126 if kind == "f32" else -1022)
        source = decode_float(int(row[0]) & ((1 << bits) - 1), kind) if bits < 64 else 1
        if kind == "f32" and (abs(y) < tiny or 0 < abs(source) < tiny):
            continue  # flushed by these units
        if "_sin_" in case.name or "_cos_" in case.name:
            if (
                not math.isfinite(source)
                or abs(source) > 256
                or abs(float(x) - float(y)) < (2**-9 if kind == "f16" else 2**-20) * (1 + 8 * abs(source))
            ):
                continue
            return False
        if abs(a - b) > 1:
            return False
    return True


def memory_expected(code: str, row: np.ndarray, table: dict, two: bool) -> list[int]:
    """The eight words of the slot and the four that come back."""
    words = [int(w) for w in row]
    memory = Memory(enumerate(np.array(words[:8], dtype=np.uint32).tobytes()))

    def wide(first: int) -> Value:
        return Value("b", 128, sum(w << 32 * n for n, w in enumerate(words[first : first + 4])))

    state = {
        "MEM": memory,
        "ADDR": Value("u", 32, 0 if "OFFSET" in code else 8),
        "ADDR_BASE": Value("u", 32, 0),
        "OFFSET": Value("u", 32, 8),
        "OFFSET0": Value("u", 32, 1),
        "OFFSET1": Value("u", 32, 2),
        "DATA": wide(8),
        "DATA2": wide(12),
        "VDATA": wide(8),
        "RETURN_DATA": wide(8),
        "single": True,
    }
    machine = Machine(lambda name: table[name], state)
    machine.run(code)
    back = "VDATA" if machine.names["VDATA"].bits != wide(8).bits else "RETURN_DATA"
    bits = machine.names[back].bits
    old = wide(8).bits >> machine.names[back].width << machine.names[back].width
    slot = [memory[4 * n].bits & 0xFFFFFFFF for n in range(8)]
    return slot + [(bits | old) >> 32 * n & 0xFFFFFFFF for n in range(4)]


def same_numbers(case: Case, out: np.ndarray, want: list[int]) -> bool:
    """NaN is as good as NaN; what comes back counts only where the instruction, too, returns something."""
    returns = (
        "rtn" in case.name
        or "load" in case.name
        or (case.memory and not case.name.startswith("ds.") and "store" not in case.name)
    )
    count = 12 if returns and not case.name.startswith("mubuf.buffer_atomic") else 8
    return all(
        int(a) == b or ("add" in case.name and "f32" in case.name and (int(a) & b & 0x7F800000) == 0x7F800000)
        for a, b in zip(out[:count], want[:count], strict=True)
    )


def compare(table: dict) -> tuple[dict[Case, int], list[str]]:
    """Digest of the results by case, and what differs from the pseudo-code."""
    digests, wrong = {}, []
    for case, code in cases(table):
        if not known(case):
            assert UNKNOWN.fullmatch(case.name), f"{case.name} is not known to the interpreter"
            continue
        inputs, total = operands(case, case.sets), 0
        if case.memory:
            results = execute(case, inputs)
            for row, out in zip(inputs, results, strict=True):
                want = memory_expected(code, row, table, "2addr" in case.name)
                if list(out) != want and not same_numbers(case, out, want):
                    wrong.append(
                        f"{case.name} {[hex(w) for w in row]}: {[hex(w) for w in out]}, "
                        f"pseudo-code {[hex(w) for w in want]}"
                    )
                    break
            digests[case] = digest_of(case, results, 0)
            continue
        for ieee in (True, False) if any(part in case.name for part in ("min", "max", "med")) else (True,):
            results = execute(case, inputs, ieee=ieee)
            width = width_of(case)
            for n, (row, out) in enumerate(zip(inputs, results, strict=True)):
                want, flag = expected(case, code, row, n % 32, table, ieee=ieee)
                mask = (1 << width) - 1
                got = (int(out[0]) | int(out[1]) << 32) & mask
                has_flag = case.scalar or any(
                    p in case.name for p in ("_cmp", "_co_", "mad_u64", "mad_i64", "div_scale")
                )
                if not agrees(case, got, want & mask, row) or (has_flag and int(out[2]) & 1 != flag):
                    wrong.append(
                        f"{case.name} ieee={ieee} operands {[hex(w) for w in row[:8]]}: {got:#x} {int(out[2]) & 1}, "
                        f"pseudo-code {want & mask:#x} {flag}"
                    )
                    break
            total = digest_of(case, results, total)
        digests[case] = total
    return digests, wrong


def digest_of(case: Case, results: np.ndarray, total: int) -> int:
    """Without the bits of NaN, which processors differ in, and functions that libraries round differently."""
    if any(f"_{part}_" in case.name for part in APPROXIMATE):
        return 0
    if case.memory:
        return 0 if "add" in case.name and "f32" in case.name else zlib.crc32(results.tobytes())
    kept = results.copy()
    kind = float_kind(case.name)
    if kind in ("f32", "f64"):
        high = kept[:, 0 if kind == "f32" else 1]
        nan = (high & 0x7FFFFFFF) > (0x7F800000 if kind == "f32" else 0x7FF00000)
        kept[nan, :2] = 0x7FC00000
    elif kind == "f16":
        for shift in (0, 16):
            nan = (kept[:, 0] >> shift & 0x7FFF) > 0x7C00
            kept[nan, 0] = (kept[nan, 0] & np.uint32(0xFFFF0000 >> shift)) | np.uint32(0x7E00 << shift)
    return zlib.crc32(kept.tobytes(), total)


def stored() -> Iterator[tuple[Case, int]]:
    for line in DIGESTS.read_text().splitlines():
        name, words, digest = line.split()
        yield Case(name, tuple(int(w, 16) for w in words.split(","))), int(digest, 16)


def test_results_are_those_that_agreed_with_the_pseudo_code() -> None:
    different = []
    for case, digest in stored():
        inputs, total = operands(case, case.sets), 0
        for ieee in (True, False) if any(part in case.name for part in ("min", "max", "med")) else (True,):
            total = digest_of(case, execute(case, inputs, ieee=ieee), total)
        if total != digest:
            different.append(case.name)
    assert not different


@pytest.mark.long
def test_each_instruction_does_what_amds_pseudo_code_says() -> None:
    digests, wrong = compare(pseudocode())
    assert not wrong, "\n".join(wrong)
    assert {case.name: d for case, d in digests.items()} == {case.name: d for case, d in stored()}


if __name__ == "__main__":
    found, problems = compare(pseudocode())
    print("\n".join(problems) or "all agree")
    if not problems:
        lines = (f"{c.name} {','.join(f'{w:08x}' for w in c.words)} {d:08x}" for c, d in found.items())
        DIGESTS.write_text("\n".join(lines) + "\n")
    assert lib()
