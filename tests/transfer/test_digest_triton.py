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
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is expected of the instructions for one target."""

    backend: str
    architecture: str | int
    lanes: int
    wide_load: str
    most_registers: int
    """A lane's; what that leaves room for is said in the list below."""


CARDS = [
    # 1536 registers of 32 lanes in a SIMD: 16 waves, all that it can hold.
    Card(backend="hip", architecture="gfx1100", lanes=32, wide_load="_load_b128", most_registers=96),
    Card(backend="hip", architecture="gfx1101", lanes=32, wide_load="_load_b128", most_registers=96),
    Card(backend="hip", architecture="gfx1201", lanes=32, wide_load="_load_b128", most_registers=96),
    # 512 registers of 64 lanes in a SIMD: 8 waves, all that it can hold.
    Card(backend="hip", architecture="gfx942", lanes=64, wide_load="_load_dwordx4", most_registers=64),
    # 65536 registers in a multiprocessor: 6 blocks of 128 threads, 24 KiB of loads in flight.
    Card(backend="cuda", architecture=90, lanes=32, wide_load="ld.global.v4.b32", most_registers=80),
]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The text of a compiled kernel and what its metadata says."""

    text: str
    registers: int
    spilled: int
    """Registers and bytes of memory that take the place of registers."""

    def loads(self) -> set[str]:
        return set(re.findall(r"(?:global|buffer|flat)_load_\w+|ld\.global[\w.:]+", self.text))


def compiled(card: Card, *, by_bytes: bool = False, skewed: bool = False, aligned: bool = True) -> Compiled:
    """Compile the kernel for a card that is not there, as `triton_sums` would launch it."""
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
    target = GPUTarget(card.backend, card.architecture, card.lanes)
    kernel = triton.compile(source, target=target, options={"num_warps": digest_triton.WARPS})
    return _amd(kernel.asm["amdgcn"]) if card.backend == "hip" else _nvidia(kernel.asm)


def _amd(text: str) -> Compiled:
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+_count|private_segment_fixed_size): +(\d+)", text)}
    spilled = counts["vgpr_spill_count"] + counts["sgpr_spill_count"] + counts["private_segment_fixed_size"]
    return Compiled(text=text, registers=counts["vgpr_count"], spilled=spilled + text.count("scratch_"))


def _nvidia(asm: dict[str, str | bytes]) -> Compiled:
    """PTX has no registers yet: those are counted in the binary, by the tool that comes with Triton."""
    from triton.knobs import nvidia

    binary = asm["cubin"]
    assert isinstance(binary, bytes)
    file = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    file.write_bytes(binary)
    command = [nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(text=str(asm["ptx"]), registers=counts["REG"], spilled=counts["STACK"] + counts["LOCAL"])


@pytest.fixture(autouse=True)
def compile_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.architecture))
def test_compiled_kernel_loads_128_bits_spills_nothing_and_leaves_room_for_many_waves(card: Card) -> None:
    kernel = compiled(card)
    wide = {name for name in kernel.loads() if card.wide_load in name}
    assert wide
    # What is not wide reads single bytes of the tail, once.
    assert all(re.search(r"_load_u8|_load_ubyte|\.[bu]8$", name) for name in kernel.loads() - wide), kernel.loads()
    assert kernel.spilled == 0
    assert 24 <= kernel.registers <= card.most_registers


@pytest.mark.parametrize("card", [CARDS[0], CARDS[-1]], ids=lambda card: str(card.architecture))
@pytest.mark.parametrize("variant", ["by_bytes", "skewed", "unaligned"])
def test_every_variant_compiles_without_spills(card: Card, variant: str) -> None:
    kernel = compiled(
        card,
        by_bytes=variant == "by_bytes",
        skewed=variant == "skewed",
        aligned=variant not in ("by_bytes", "unaligned"),
    )
    assert any(card.wide_load in name for name in kernel.loads()) == (variant == "skewed")
    assert kernel.spilled == 0
    assert kernel.registers <= 160


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
