"""The Triton kernel without a GPU: its sums under Triton's interpreter, its instructions for the cards it is meant for.

The interpreter shows that the kernel computes the digest; the compiled text shows that it can do so at the speed of the
memory: 128-bit loads, no spills, registers for many waves. Neither runs on a card; the tests marked `gpu` do.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_rocm_tune.transfer import digest, digest_on_device
from hf_rocm_tune.transfer.digest import _differs, device_method, torch_sums
from tests.transfer.digest_reference import BLOCK, random_bytes, reference

CHILD = Path(__file__).with_name("triton_interpreted.py")
SHIPPED_TILE = 1024


def interpreted(cases: list[tuple[int, int, int, int]]) -> list[list[int]]:
    """``s1`` and ``s2`` of each (bytes, start, word offset, tile), by the kernel, in a process with the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-W", "error", str(CHILD)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def interpreted_cases() -> Iterator[tuple[int, int, int, int]]:
    for length in (0, 1, 3, 4, 5, 15, 16, 17, 31, 4 * SHIPPED_TILE - 1, 4 * SHIPPED_TILE + 3):
        yield length, 0, 0, SHIPPED_TILE
        # Blocks that begin inside a tile, between two of its granules, and in the tail.
        for word_offset in (1, BLOCK - 3, BLOCK - length // 4, 2**33 + BLOCK - 701, 2**48 - 1):
            yield length, 0, word_offset, SHIPPED_TILE
    for start in (1, 2, 3, 4, 8, 12, 16):  # addresses that allow byte, 32-bit and 128-bit loads
        yield 5003, start, 0, SHIPPED_TILE
        yield 5003, start, BLOCK - 600, SHIPPED_TILE
    generator = random.Random(0)
    for _ in range(6):
        length = generator.randrange(1, 9000)
        yield length, generator.randrange(min(length, 20)), generator.randrange(2**34), SHIPPED_TILE
    # Every tile of a block as shipped; then several blocks a program, in wide tiles, which the interpreter does faster.
    yield 4 * BLOCK + 9, 0, 0, SHIPPED_TILE
    yield 11 * 4 * BLOCK + 4099, 0, 3 * BLOCK - 1, BLOCK
    yield 4 * BLOCK - 1, 0, 17, 1 << 14


def test_interpreted_kernel_equals_the_reference() -> None:
    cases = list(interpreted_cases())
    for (length, start, word_offset, tile), sums in zip(cases, interpreted(cases), strict=True):
        data = random_bytes(length)[start:]
        if length < 4 * BLOCK:
            expected = reference(data, word_offset)
        else:
            expected = digest(torch.frombuffer(bytearray(data), dtype=torch.uint8), word_offset=word_offset)
        assert sums == [expected.s1, expected.s2], (length, start, word_offset, tile)


CARDS = {
    # Lanes, the widest load, and registers: 1536 of 32 lanes in a SIMD leave room for 16 waves, all that it can hold.
    "gfx1100": (32, "_load_b128", 96),
    "gfx1201": (32, "_load_b128", 96),
    # 512 registers of 64 lanes: 8 waves, all that it can hold.
    "gfx942": (64, "_load_dwordx4", 64),
}


def compiled(card: str, *, by_bytes: bool = False, skewed: bool = False, aligned: bool = True) -> tuple[set[str], int]:
    """Compile the kernel for a card that is not there, as `triton_sums` would launch it: its loads and registers.

    None of these may take memory in their place.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_rocm_tune.transfer import digest_triton

    assert digest_triton.TILE == SHIPPED_TILE
    types = ("*u8", "*i64", "i64", "i64", "i32", "i32", "constexpr", "constexpr", "constexpr")
    names = digest_triton.digest_kernel.arg_names
    source = ASTSource(
        fn=digest_triton.digest_kernel,
        signature=dict(zip(names, types, strict=True)),
        constexprs={(6,): digest_triton.TILE, (7,): by_bytes, (8,): skewed},
        # What Triton finds out by itself at a launch: addresses that are multiples of 16.
        attrs={(place,): [["tt.divisibility", 16]] for place in ((0, 1) if aligned else (1,))},
    )
    target = GPUTarget("hip", card, CARDS[card][0])
    text = triton.compile(source, target=target, options={"num_warps": digest_triton.WARPS}).asm["amdgcn"]
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+_count|private_segment_fixed_size): +(\d+)", text)}
    assert counts["vgpr_spill_count"] + counts["sgpr_spill_count"] + counts["private_segment_fixed_size"] == 0
    assert "scratch_" not in text
    return set(re.findall(r"(?:global|buffer|flat)_load_\w+", text)), counts["vgpr_count"]


@pytest.fixture(autouse=True)
def compile_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("card", CARDS)
def test_compiled_kernel_loads_128_bits_spills_nothing_and_leaves_room_for_many_waves(card: str) -> None:
    loads, registers = compiled(card)
    wide = {name for name in loads if CARDS[card][1] in name}
    assert wide
    # What is not wide reads single bytes of the tail, once.
    assert all(re.search(r"_load_u8|_load_ubyte", name) for name in loads - wide), loads
    assert 24 <= registers <= CARDS[card][2]


@pytest.mark.parametrize("variant", ["by_bytes", "skewed", "unaligned"])
def test_every_variant_compiles_without_spills(variant: str) -> None:
    skewed = variant == "skewed"
    loads, registers = compiled("gfx1100", by_bytes=variant == "by_bytes", skewed=skewed, aligned=skewed)
    assert any(CARDS["gfx1100"][1] in name for name in loads) == skewed
    assert registers <= 160


def test_choice_is_plain_torch_with_a_reason_where_there_is_no_accelerator() -> None:
    method = device_method(torch.device("cpu"))
    assert method.name == "torch" and "cpu" in method.reason
    if not torch.cuda.is_available():
        method = device_method(torch.device("cuda", 0))
        assert method.name == "torch" and method.reason and "\n" not in method.reason


def test_a_kernel_with_other_sums_is_found_out() -> None:
    host = torch.device("cpu")
    assert _differs(torch_sums, host) == ""
    assert _differs(lambda flat, offset, sums: torch_sums(flat, offset, sums.add_(1)), host)
    assert _differs(lambda flat, offset, sums: torch_sums(flat, 0, sums), host)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 1, 4095, 4 * BLOCK + 9, 70 * 4 * BLOCK + 5, (1 << 30) + 13])
def test_kernel_on_the_card_equals_the_host(length: int) -> None:
    assert device_method(torch.device("cuda", torch.cuda.current_device())).name == "triton"
    data = torch.randint(-(2**31), 2**31, (length // 4 + 1,), dtype=torch.int32).view(torch.uint8)[:length]
    there = data.cuda()
    for start, word_offset in ((0, 0), (0, 77), (16, BLOCK - 5), (4, 3), (3, 0)):
        expected = digest(data[start:], word_offset=word_offset)
        assert [value % 2**64 for value in digest_on_device(there[start:], word_offset).tolist()] == [
            expected.s1,
            expected.s2,
        ]
