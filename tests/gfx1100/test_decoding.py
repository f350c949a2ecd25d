"""The decoder against LLVM's: the same text and length for random words of every encoding."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess

import pytest

from tests.gfx1100.emulator import text

# Name, the bits that make the encoding, how many of the first word's bits are free below them.
ENCODINGS = (
    ("sop2", 0x80000000, 30),
    ("sop1", 0xBE800000, 23),
    ("sopc", 0xBF000000, 23),
    ("sopk", 0xB0000000, 28),
    ("sopp", 0xBF800000, 23),
    ("vop1", 0x7E000000, 25),
    ("vopc", 0x7C000000, 25),
    ("vop2", 0x00000000, 31),
    ("vop3", 0xD4000000, 26),
    ("vop3p", 0xCC000000, 24),
    ("vopd", 0xC8000000, 26),
    ("ds", 0xD8000000, 26),
    ("flat", 0xDC000000, 26),
    ("mubuf", 0xE0000000, 26),
    ("smem", 0xF4000000, 26),
)
# What the interpreter refuses by name: graphics, traps and debugging, waves of 64 lanes, and operands of these.
REFUSED = re.compile(
    r"image_|tbuffer_|exp |lds_|v_interp|buffer_\w+_format|(buffer|global|scratch)_load_lds|ds_(bvh|gws|ordered)"
    r"|ds_\w+_gs|ds_append|ds_consume|ds_condxchg|s_subvector|s_version|s_cbranch_cdbg|s_sendmsghalt|s_sethalt|s_setkill"
    r"|s_endpgm_|s_rfe|s_sendmsg_rtn|s_atc_probe|s_\w+(saveexec|wrexec)_b64|v_cube|v_mullit|v_m?qsad|v_trig_preop"
    r"|.*(src_vccz|src_pops_exiting_wave_id|src_lds_direct| tfe\b| gds\b|Invalid (immediate|dpp_ctrl)|row_bcast|sext\()"
    r"|v_(pk_fmac|dot2acc|dot2)_(f16|bf16|f32_f16)\S* .*[-|]|buffer_.*, 0x"
    # Not of the register class that the operation wants: LLVM prints a number.
    r"|([sv]_movrel|v_permlane64|v_swap|s_setpc|s_swappc|v_readfirstlane|v_wmma)\w* (.*, )?-?[\d.]+\b(?!:)"
)
NUMBERS_ONLY = (
    "s_waitcnt",
    "s_delay_alu",
    "s_sendmsg",
    "s_getreg",
    "s_setreg",
    "ds_swizzle",
)  # LLVM has words for them


def disassembler() -> str:
    for version in ("", *(f"-{n}" for n in range(25, 15, -1))):
        tool = shutil.which(f"llvm-mc{version}")
        if (
            tool
            and "gfx1100"
            in subprocess.run([tool, "-triple=amdgcn", "-mcpu=help"], capture_output=True, text=True, input="").stderr
        ):
            return tool
    pytest.skip("no llvm-mc that knows gfx1100 (Debian: llvm-16 or newer) is installed")


def normal(line: str) -> str:
    """Without what depends on LLVM's version: suffixes of encodings, caches, names for halves."""
    line = re.sub(r"/\*.*?\*/", "", line)
    line = re.sub(r"_(e64_dpp|dpp|e32|e64)\b", "", line, count=1)
    line = re.sub(r"\bv(\d+)\.h\b", lambda m: f"v{int(m.group(1)) + 128}", line.replace(".l", ""))
    line = re.sub(r"( slc| dlc)+| op_sel:\[[01,]*\]", "", line)
    line = re.sub(r"\bneg\((\S+?)\)", r"-\1", line)
    line = re.sub(r"offset:-?0x[0-9a-f]+", lambda m: f"offset:{int(m.group()[7:], 16) & 0xFFFFFFFF:#x}", line)
    line = line.replace("0.15915494309189532", "0.15915494").replace("exec_lo, s[", "exec, s[")
    name, _, rest = line.partition(" ")
    if "16" in name:  # of literals only the lower half counts, and it prints no signs of integers
        rest = re.sub(r"\b0x[0-9a-f]+\b", lambda m: f"{int(m.group(), 16) & 0xFFFF:#x}", rest)
        rest = re.sub(r"[-|]", "", rest) if re.search("[iu]16", name) else rest
    if name.startswith("s_") and not name.startswith(("s_load", "s_buffer")):  # immediates: decimal or hexadecimal
        rest = re.sub(r"\b0x[0-9a-f]+\b", lambda m: str(int(m.group(), 16)), rest)
    return " ".join(f"{name} {'' if name.startswith(NUMBERS_ONLY) or name == 's_endpgm' else rest}".split())


def compare(per_encoding: int, seed: int) -> tuple[int, list[str]]:
    tool, generator = disassembler(), random.Random(seed)
    lines = []
    for name, base, free in ENCODINGS:
        for _ in range(per_encoding):
            first = base | generator.getrandbits(free)
            if name == "vop3" and generator.random() < 0.7:
                first &= ~0x7800  # no selectors of halves, which most operations do not have
            words = first, generator.getrandbits(32), generator.getrandbits(32)
            lines.append(" ".join(f"0x{byte:02x}" for byte in struct.pack("<3I", *words)))
    same, different = 0, []
    for at in range(0, len(lines), 400):
        done = subprocess.run(
            [tool, "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-disassemble", "-show-encoding"],
            input="\n".join(lines[at : at + 400]),
            capture_output=True,
            text=True,
            check=False,
        )
        for theirs, encoding in re.findall(r"^\t(\S.*?)\s*; encoding: \[(.*)\]", done.stdout, re.MULTILINE):
            code = bytes(int(byte, 16) for byte in encoding.split(","))
            ours = text(struct.unpack(f"<{len(code) // 4}I", code))
            if ours is None:
                # LLVM takes `clamp` on integer operations that have no use for it.
                if not REFUSED.match(theirs) and " clamp" not in theirs:
                    different.append(f"{theirs}: not known ({encoding})")
            elif REFUSED.match(theirs):
                continue
            elif normal(ours) != normal(theirs):
                different.append(f"{normal(theirs)}: decoded as {normal(ours)} ({encoding})")
            else:
                same += 1
    return same, different


def test_random_words_decode_as_llvm_decodes_them() -> None:
    same, different = compare(60, 1)
    assert not different, "\n".join(different)
    assert same > 300


@pytest.mark.long
def test_many_random_words_decode_as_llvm_decodes_them() -> None:
    same, different = compare(8000, 2)
    assert not different, f"{len(different)}: " + "\n".join(different[:40])
    assert same > 50_000
