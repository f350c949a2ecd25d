"""Parts of a tensor: together they are the whole, wherever it is cut, and a wrong byte in one of them shows."""

from __future__ import annotations

import random

import pytest
import torch

from hf_rocm_tune.models.shards import digest_at, rows_of
from hf_rocm_tune.transfer import combine, digest


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 512])
def test_rows_of_all_ranks_are_all_rows_once_and_as_torch_cuts_them(ranks: int, rows: int) -> None:
    parts = [rows_of(rank, ranks, rows) for rank in range(ranks)]
    assert [row for first, last in parts for row in range(first, last)] == list(range(rows))
    chunks = torch.arange(rows).chunk(ranks) if rows else ()
    assert [last - first for first, last in parts[: len(chunks)]] == [len(chunk) for chunk in chunks]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_digests_of_parts_add_up_wherever_they_begin(dtype: torch.dtype) -> None:
    chooser = random.Random(7)
    for _ in range(50):
        whole = torch.randint(0, 256, (chooser.randrange(1, 400) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        cuts = sorted(chooser.randrange(len(whole) + 1) for _ in range(chooser.randrange(4)))
        bounds = list(zip([0, *cuts], [*cuts, len(whole)], strict=True))
        found = combine(digest_at(whole[first:last], first * dtype.itemsize) for first, last in bounds)
        assert found == digest(whole)


def test_a_flipped_bit_and_two_exchanged_parts_show() -> None:
    whole = torch.randint(0, 256, (30,), dtype=torch.uint8)
    parts = [whole[:15].clone(), whole[15:].clone()]
    assert digest_at(parts[1], 0) != digest_at(parts[1], 15)
    assert combine([digest_at(parts[1], 0), digest_at(parts[0], 15)]) != digest(whole)
    parts[1][4] ^= 32
    assert combine([digest_at(parts[0], 0), digest_at(parts[1], 15)]) != digest(whole)
