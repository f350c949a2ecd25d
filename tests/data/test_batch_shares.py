"""Uneven shares: in each step the ranks hold together what they hold with even ones, whatever an epoch's length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from hf_rocm_tune.data.batch_shares import SharedBatches, share_batches
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training.batch_shares import nearest_rows, parse_shares, rows_of


def stock(rank: int, *, rows: int, batch: int, ranks: int, drop_last: bool = False, seed: int = 3) -> BatchSamplerShard:
    """What Accelerate gives a rank."""
    sampler = SeedableRandomSampler(range(rows), generator=torch.Generator(), data_seed=seed)
    return BatchSamplerShard(BatchSampler(sampler, batch, drop_last), ranks, rank)


def steps(shards: Sequence[BatchSamplerShard]) -> list[list[list[int]]]:
    """For each micro-step the rows of each rank."""
    return [list(step) for step in zip(*shards, strict=True)]


@pytest.mark.parametrize("shares", [(6, 2), (7, 1), (4, 4), (1, 7), (5, 3), (4, 6, 2), (1, 1, 10)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_step_has_the_rows_of_an_even_split_in_their_order(shares: tuple[int, ...], drop_last: bool) -> None:
    ranks, batch = len(shares), 4
    for rows in range(1, 61):
        even = [stock(rank, rows=rows, batch=batch, ranks=ranks, drop_last=drop_last) for rank in range(ranks)]
        uneven = [
            SharedBatches(stock(rank, rows=rows, batch=batch, ranks=ranks, drop_last=drop_last), shares)
            for rank in range(ranks)
        ]
        for _ in range(2):  # epochs, in another order each
            expected, found = steps(even), steps(uneven)
            assert [[*chain(*step)] for step in found] == [[*chain(*step)] for step in expected], rows
            assert all(tuple(map(len, step)) == shares for step in found)
            assert len(found) == len(even[0]) == len(uneven[0])


def test_a_sampler_with_a_random_state_is_read_once_an_epoch() -> None:
    class Counting(RandomSampler):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            Counting.reads += 1
            return super().__iter__()

    generator = torch.Generator().manual_seed(1)
    shard = BatchSamplerShard(BatchSampler(Counting(range(24), generator=generator), 4, False), 2, 0)
    list(SharedBatches(shard, (6, 2)))
    assert Counting.reads == 1


def prepared(rank: int, *, shares: tuple[int, ...] | None) -> Any:
    """A shuffled loader as a trainer gets it from Accelerate, for one of two ranks."""
    torch.manual_seed(5)
    plain = DataLoader(list(range(24)), batch_size=4, shuffle=True)
    done = prepare_data_loader(
        plain,
        num_processes=2,
        process_index=rank,
        put_on_device=False,
        rng_types=[],
        use_seedable_sampler=True,
        data_seed=5,
    )
    if shares is not None:
        share_batches(done, shares)
    return done


def rows_seen(loaders: Sequence[Any]) -> list[list[int]]:
    """For each micro-step of an epoch the rows of all ranks."""
    return [[*chain(*(batch.tolist() for batch in step))] for step in zip(*loaders, strict=True)]


def test_epochs_and_a_continued_run_see_the_rows_of_an_even_split() -> None:
    even, uneven = ([prepared(rank, shares=shares) for rank in (0, 1)] for shares in (None, (6, 2)))
    epochs = [rows_seen(even) for _ in range(3)]
    assert epochs[0] != epochs[1] and [rows_seen(uneven) for _ in range(3)] == epochs
    for epoch in range(3):
        continued = [skip_first_batches(prepared(rank, shares=(6, 2)), 1) for rank in (0, 1)]
        for each in continued:
            each.set_epoch(epoch)
        assert rows_seen(continued) == epochs[epoch][1:]


def loader(shard: BatchSamplerShard, rows: int) -> DataLoaderShard:
    return DataLoaderShard(list(range(rows)), batch_sampler=shard)


def test_a_prepared_loader_hands_out_its_share_and_skips_as_before() -> None:
    own = loader(stock(0, rows=24, batch=4, ranks=2), 24)
    share_batches(own, (6, 2))
    assert own.total_batch_size == 8 and len(own) == 3
    batches = [batch.tolist() for batch in own]
    assert [len(batch) for batch in batches] == [6, 6, 6]
    own.set_epoch(0)
    assert [batch.tolist() for batch in skip_first_batches(own, 1)] == batches[1:]


def test_loaders_that_deal_in_another_way_are_refused() -> None:
    plain = DataLoader(list(range(8)), batch_size=4)
    split = BatchSamplerShard(BatchSampler(SequentialSampler(range(8)), 4, False), 2, 0, split_batches=True)
    uneven = BatchSamplerShard(BatchSampler(SequentialSampler(range(8)), 4, False), 2, 0, even_batches=False)
    for other, words in (
        (plain, "train_sampling_strategy"),
        (loader(split, 8), "even_batches"),
        (loader(uneven, 8), "off"),
    ):
        with pytest.raises(UsageError, match=words):
            share_batches(other, (6, 2))
    with pytest.raises(UsageError, match="way of their own"):
        share_batches(loader(stock(0, rows=24, batch=4, ranks=3), 24), (6, 2))


def test_shares_are_whole_rows_or_refused() -> None:
    assert rows_of((3, 1), 8) == (6, 2) and rows_of((1, 1), 2) == (1, 1)
    for shares, total in (((3, 1), 6), ((3, 1), 2), ((2, 1), 8)):
        with pytest.raises(UsageError, match="does not divide"):
            rows_of(shares, total)
    assert parse_shares("auto") is None and parse_shares("3:1") == (3, 1) and parse_shares("1:2:3") == (1, 2, 3)
    for text in ("", "3", "3:", "3:0", "3:-1", "a:b", "3.5:1", "1:9999999"):
        with pytest.raises(ValueError, match="whole numbers such as 3:1"):
            parse_shares(text)


@pytest.mark.parametrize(
    ("speeds", "total", "rows"),
    [
        ((1.0, 1.0), 8, (4, 4)),
        ((3.0, 1.0), 8, (6, 2)),
        ((1.0, 3.0), 8, (2, 6)),
        ((122.8, 103.0), 16, (9, 7)),
        ((1000.0, 1.0), 8, (7, 1)),
        ((1.0, 1.0), 2, (1, 1)),
        ((2.0, 1.0, 1.0), 12, (6, 3, 3)),
    ],
)
def test_measured_speeds_become_the_nearest_rows(speeds: tuple[float, ...], total: int, rows: tuple[int, ...]) -> None:
    assert nearest_rows(speeds, total) == rows


def test_no_other_rows_would_be_done_sooner() -> None:
    for total in range(2, 40):
        for fast in (1.0, 1.2, 1.9, 3.3, 17.0):
            took = max(rows / speed for rows, speed in zip(nearest_rows((fast, 1.0), total), (fast, 1.0), strict=True))
            best = min(max(rows / fast, total - rows) for rows in range(1, total))
            assert took == pytest.approx(best), (total, fast)
