"""Uneven shares of each batch for the ranks of a job, with the same rows in every step as an even split.

Accelerate deals out whole batches in turn (``BatchSamplerShard``, accelerate 1.15.0): in each micro-step the ranks hold
together one stretch of the sampler's order. Here that stretch stays what it is, and is cut elsewhere: of 8 rows, 6 for
rank 0 and 2 for rank 1. So every optimizer step sees the same rows as with even batches, or as one process with all of
them; how the end of an epoch is filled up is Accelerate's affair as before.

The loss must be divided by the label tokens of all ranks, not averaged over ranks; see ``training.batch_shares``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import BatchSampler, IterableDataset

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class SharedBatches(BatchSamplerShard):
    """Batches of row numbers for one rank, ``rows[rank]`` in each.

    Args:
        stock: what Accelerate has made for this rank, with full batches for each (``even_batches``).
        rows: of each rank in a micro-step; their sum is the number of ranks times the stock batch size.
    """

    def __init__(self, stock: BatchSamplerShard, rows: Sequence[int]) -> None:
        assert sum(rows) == stock.batch_size * stock.num_processes, (rows, stock.batch_size)
        # All of it, for Accelerate hangs the sampler on it afterwards, and sets the epoch there when a run goes on.
        self.__dict__.update(vars(stock))
        self.rows = tuple(rows)

    def __iter__(self) -> Iterator[list[int]]:
        start = sum(self.rows[: self.process_index])
        stop = start + self.rows[self.process_index]
        # Read once, or a sampler with a random state would give each rank's batches another order.
        copies = itertools.tee(self.batch_sampler, self.num_processes)
        ranks = [
            BatchSamplerShard(_Replayed(copy, self.batch_sampler), self.num_processes, rank, even_batches=True)
            for rank, copy in enumerate(copies)
        ]
        for dealt in zip(*ranks, strict=True):
            yield list(itertools.chain.from_iterable(dealt))[start:stop]


class _Replayed(BatchSampler):
    """Batches that are there already, as a sampler."""

    def __init__(self, batches: Iterator[list[int]], like: BatchSampler) -> None:
        self.batch_size, self.drop_last = like.batch_size, like.drop_last
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        # Lists of its own: Accelerate fills up the last one in place.
        return (list(batch) for batch in self._batches)


def share_batches(loader: DataLoader[Any], rows: Sequence[int]) -> None:
    """Cut the batches of a prepared loader to `rows`, in place, before it is iterated.

    Args:
        loader: what ``Accelerator.prepare`` returned on this rank.
        rows: see `SharedBatches`.

    Raises:
        UsageError: this loader's batches are not dealt out as whole batches of equal size.
    """
    stock: Any = getattr(loader, "batch_sampler", None)
    if isinstance(loader.dataset, IterableDataset):
        why = "the data set is a stream, of which no row has a number: leave out --dataset_streaming"
    elif isinstance(loader, DataLoaderDispatcher):
        why = "rank 0 reads and sends the batches: leave dispatch_batches out of --accelerator_config"
    elif (
        not isinstance(loader, DataLoaderShard)
        or type(stock) is not BatchSamplerShard
        or stock.num_processes != len(rows)
    ):
        why = "batches are dealt out in a way of their own (--train_sampling_strategy): leave that out"
    elif stock.split_batches or not stock.even_batches:
        why = "split_batches is on or even_batches off: leave them out of --accelerator_config"
    else:
        # A DataLoader refuses a new batch sampler by assignment, because one that runs would not heed it.
        vars(loader.base_dataloader)["batch_sampler"] = SharedBatches(stock, rows)
        return
    raise UsageError(f"--batch_shares does not work here, because {why}")
