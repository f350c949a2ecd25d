"""Loaders that begin the verified transfer of a batch one batch ahead of the one in use.

Accelerate still shards, seeds and resumes. A prepared loader becomes a *true subclass of its own class that shares its
state*, so the object that is iterated is the one that Accelerate knows as the active loader. ``DataLoaderShard`` reads
one batch ahead: its inner loader starts the transfers, and `Mover.wait_verified` must come before any use. Batches of
other loaders, such as ``DataLoaderDispatcher``, are verified where they cross (`transfer.interception`) or when they
are used: slower, for the next one does not cross meanwhile. So are those of the rest of an epoch in which a run with
``dataloader_num_workers`` resumes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import tree_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from hf_rocm_tune.transfer import Mover

_PREFETCH = "_hf_rocm_tune_prefetch"
IN_ROW = "pictures_in_row"
"""The name in a batch of what its rows have of its pixels, which the trainer takes out before ``forward``: int64 of
shape (rows, 3), the number of pictures, that of placeholder tokens, and 1 where the processor stacks the pictures of a
row; (pairs, 3) for preferences."""


def verify_loader(loader: DataLoader[Any], prefetch: Prefetch, shard: type | None = None) -> DataLoader[Any]:
    """Makes a prepared loader send its batches through the mover: a subclass of its own class that shares its state.

    ``shard``: the subclass of ``DataLoaderShard``; None: one whose batches are in flight when they are handed out.
    """
    if _PREFETCH in vars(loader):
        return loader
    if isinstance(loader, DataLoaderDispatcher):
        if loader.state.num_processes > 1 and prefetch.mover.settings.verify == "full":
            raise UsageError(
                "batches that rank 0 reads and broadcasts cannot be verified on the other ranks: set "
                "--accelerator_config '{\"dispatch_batches\": false}', or choose --verify sample or off"
            )
        return loader
    if isinstance(loader, DataLoaderShard):
        verified = _adopt(loader, shard or _VerifiedShard, prefetch)
        verified.device = None
        verified.base_dataloader = _feed(loader.base_dataloader, prefetch)
        return verified
    return _feed(loader, prefetch)


class _VerifiedShard(DataLoaderShard):
    """A ``DataLoaderShard`` that no longer moves tensors to the device: its inner loader starts the transfers."""


class _Collating:
    """A loader's collator in this process; each batch goes to the prefetch before the collator is called again."""

    def __init__(self, stock: Callable[[Any], Any], prefetch: Prefetch) -> None:
        self._stock = stock
        self._prefetch = prefetch

    def __call__(self, rows: Any) -> Any:
        return self._prefetch.read(self._stock(rows))

    def __getattr__(self, name: str) -> Any:  # trainers and callbacks look at their collator
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stock, name)


@cache
def _feeding(stock: Any) -> Any:
    """Subclass of a loader class that hands each batch that it reads to the prefetch."""

    class Feeding(stock):
        def __iter__(self) -> Iterator[Any]:
            prefetch = vars(self)[_PREFETCH]
            for batch in super().__iter__():
                yield prefetch.read(batch)

    Feeding.__name__ = f"Verified{stock.__name__}"
    return Feeding


def _start_worker(stock: Callable[[int], None] | None, worker: int) -> None:
    gc.freeze()  # what a worker inherited is kept from its collector, which would copy every page of it
    if stock is not None:
        stock(worker)


def _feed(loader: Any, prefetch: Prefetch) -> Any:
    # The mover's ring is the pinned memory; pinning in the loader would allocate and copy once more per batch.
    vars(loader)["pin_memory"] = False
    if getattr(loader, "num_workers", 0):
        vars(loader)["worker_init_fn"] = partial(_start_worker, loader.worker_init_fn)
    elif getattr(loader, "collate_fn", None) is not None:
        # Accelerate's loader of the rest of an epoch, made when a run resumes, has the same collator.
        vars(loader)["collate_fn"] = _Collating(loader.collate_fn, prefetch)
        vars(loader)[_PREFETCH] = prefetch
        return loader
    stock: Any = type(loader)
    return _adopt(loader, _feeding(stock), prefetch)


def _adopt(loader: Any, subclass: Any, prefetch: Prefetch) -> Any:
    adopted = subclass.__new__(subclass)
    adopted.__dict__ = loader.__dict__
    adopted.__dict__[_PREFETCH] = prefetch
    return adopted


# ---- how many batches are transferred ahead --------------------------------------------------------------------------
#
# A loader begins the transfer of each batch that it reads (Accelerate reads exactly one ahead). A window is read whole
# before its first ``forward``: batches beyond the limit stay host tensors and are begun as earlier ones are handed out.
# Only the time of a transfer is decided here, never the batches, their order or their bytes. A batch is copied when it
# is read, because a collator may reuse its memory and the batch is still needed to count labels.


class Prefetch:
    """Begins the transfers of one loader's batches, at most `batches` beyond the one that is used next or in use."""

    def __init__(self, mover: Mover, batches: int = 1) -> None:
        if batches < 0:
            raise UsageError(f"prefetch_batches is {batches}; give 0 (no overlap) or more")
        self.mover = mover
        self.batches = batches
        self._under_way: list[weakref.ref[Tensor]] = []
        self._waiting: Any = None  # the batch read last, when there was no room for it
        self._begun: tuple[Any, Any] | None = None  # that batch and its copy in flight, begun after it was read

    def read(self, batch: Any) -> Any:
        """What a loader returns for a batch that it has read: a transfer in flight, or beyond the limit a host copy."""
        batch = self.mover.stage_batch(batch)
        self._under_way = [reference for reference in self._under_way if self._is_pending(reference)]
        has_room = self.batches > 0 and len(self._under_way) <= self.batches
        if not has_room:
            self._waiting = batch
            return batch
        self._waiting = None
        return self.begin(batch)

    def _is_pending(self, reference: weakref.ref[Any]) -> bool:
        batch = reference()
        return batch is not None and self.mover.is_pending(batch)

    def window(self, batches: list[Any]) -> AccumulationWindow:
        """The batches of an accumulation window, as a list that keeps the limit while it is iterated."""
        begun = self._begun
        self._begun = None
        if begun is not None and batches:
            on_host, in_flight = begun
            if batches[0] is on_host:
                batches[0] = in_flight
        if batches and batches[-1] is self._waiting:
            self._waiting = None  # nothing was read beyond the window
        return AccumulationWindow(self, batches)

    def begin_waiting(self) -> None:
        """Begins the batch that was read beyond a window."""
        if self._waiting is not None:
            self._begun = (self._waiting, self.begin(self._waiting))
            self._waiting = None

    def begin(self, batch: Any) -> Any:
        """A batch with its transfer in flight; one that was begun already stays as it is."""
        first = next(tree_tensors(batch), None)
        if first is None or self.mover.provenance(first) is not None:
            return batch
        moved = self.mover.begin(batch)
        self._under_way += [weakref.ref(tensor) for tensor in tree_tensors(moved) if self.mover.is_pending(tensor)][:1]
        return moved


class AccumulationWindow(list[Any]):
    """The batches of one accumulation window. Iterating it begins transfers and releases what it hands out."""

    def __init__(self, prefetch: Prefetch, batches: list[Any]) -> None:
        super().__init__(batches)
        self._prefetch = prefetch

    def begin_all(self) -> None:
        """Begins the transfers of all remaining batches, for concurrent use."""
        if self._prefetch.batches:
            self[:] = [self._prefetch.begin(batch) for batch in self[:]]

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            stop = number + 1 + self._prefetch.batches
            if self._prefetch.batches:
                self[number:stop] = [self._prefetch.begin(batch) for batch in self[number:stop]]
                if stop > len(self):
                    self._prefetch.begin_waiting()
            batch = self[number]
            self[number] = None
            yield batch
