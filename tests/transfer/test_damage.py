"""The pattern tells every place from every other, and what is wrong is described as it is."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.transfer.damage import (
    POISON,
    Damage,
    count_wrong,
    examine,
    fill_with_pattern,
    pattern,
)

CPU = torch.device("cpu")
SLAB = 4 << 20


def bytes_of(size: int, number: int = 0) -> Tensor:
    return fill_with_pattern(torch.empty(size, dtype=torch.uint8), number)


def seen(found: Tensor, right: Tensor, earlier: Tensor | None = None) -> Damage:
    damage = examine(found, right, earlier=earlier)
    assert damage is not None
    return damage


@pytest.mark.parametrize("size", [0, 1, 3, 4, 4097, SLAB - 1, SLAB, 2 * SLAB + 5])
def test_a_pattern_is_right_in_every_size_and_a_wrong_byte_is_counted(size: int) -> None:
    data = bytes_of(size, 3)
    assert count_wrong(data, 3) == 0 and examine(data, data.clone()) is None
    assert torch.equal(bytes_of(size + 7, 3)[:size], data), "the same bytes whatever the length"
    if size:
        data[-1] ^= 1
        assert count_wrong(data, 3) == 1


def test_no_word_of_a_pattern_stands_at_another_place_or_in_another_pattern() -> None:
    words = torch.cat([pattern(number, 0, 1 << 16, CPU) for number in range(8)])
    pairs = torch.stack((words[:-1], words[1:]), 1)
    assert pairs.unique(dim=0).shape == pairs.shape
    assert bool((words != 0).all()) and bool(words.view(torch.float32).isfinite().all())


@pytest.mark.parametrize(
    ("first", "length"), [(0, 4), (4096, 3000), (SLAB - 8, 16), (2 * SLAB - 1, 1), (12, 2 * SLAB), (64 << 10, 999)]
)
def test_the_place_and_the_length_of_poison_are_told(first: int, length: int) -> None:
    right = bytes_of(3 * SLAB)
    found = right.clone()
    found[first : first + length] = POISON
    damage = seen(found, right)
    assert damage.kind == "poison" or length == 1
    # A byte of the pattern may happen to be what it is filled with, at either end too.
    assert first <= damage.first_offset < first + 4
    assert first + length - 4 < damage.first_offset + damage.length <= first + length
    assert damage.wrong == int((found != right).sum()) == damage.poison
    if damage.first_offset == 64 << 10:
        assert damage.alignment == 64 << 10
    assert damage.first_offset % damage.alignment == 0
    start = damage.first_offset
    assert damage.found == bytes(found[start : start + 16][: damage.length].tolist()).hex()
    assert damage.right == bytes(right[start : start + 16][: damage.length].tolist()).hex()


def test_of_two_runs_the_first_is_described_and_both_are_counted() -> None:
    right = bytes_of(2 * SLAB)
    found = right.clone()
    found[1000:1100] ^= 0xFF
    found[SLAB + 5 : SLAB + 105] ^= 0xFF
    damage = seen(found, right)
    assert (damage.first_offset, damage.length, damage.wrong) == (1000, 100, 200)


def test_what_is_there_instead_is_named() -> None:
    right, earlier = bytes_of(8192, 1), bytes_of(4096, 0)
    zeros, flipped, stale, other, mixed = (right.clone() for _ in range(5))
    zeros[:4096] = 0
    flipped[5000] ^= 32
    stale[:4096] = earlier
    other[:4096] ^= 0b11
    mixed[:4096] = 0
    mixed[4096:8000] = POISON
    kinds = [seen(found, right, earlier).kind for found in (zeros, flipped, stale, other, mixed)]
    assert kinds == ["zeros", "bit_flip", "stale", "other", "mixed"]
    assert seen(stale, right, earlier).zeros < 4096
    assert seen(zeros, right).alignment == 4096, "zeros from offset 0 on are told by the size of the run"


def test_the_end_of_a_run_at_the_border_of_a_slab_is_found() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        first = SLAB - rng.randrange(1, 200)
        last = SLAB + rng.randrange(0, 200)
        right = bytes_of(SLAB + 4096, seed)
        found = right.clone()
        found[first:last] ^= 0xFF
        damage = seen(found, right)
        assert (damage.first_offset, damage.length) == (first, last - first)
