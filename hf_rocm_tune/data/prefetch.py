"""How many batches are on their way to the device beyond the one in use.

Two places begin transfers. A loader begins that of each batch as it reads it (Accelerate's reads exactly one ahead,
and nothing here reads further). An accumulation window is read as a whole before its first ``forward``: there the
batches for which there is no room yet stay host tensors, and begin as the ones before them are handed out, so that
long windows need no more device memory than short ones.

Only the time of a transfer is decided here; which batches there are, their order and their bytes are not touched. What
a loader gives is copied when it is read: a collator may use its memory again, and the batch is still needed to count
labels, to be sent again, or to be cut. `require_unchanged` tells whether such a copy is what was read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hf_rocm_tune.errors import MemoryFaultError, UsageError
from hf_rocm_tune.transfer import digest, map_tensors, tree_tensors
from hf_rocm_tune.transfer.tree import named_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

_TRIES = 3
_read = WeakTensorKeyDictionary()  # copies of what loaders gave: name and digest of what was copied


def require_unchanged(tensor: Tensor, mover: Mover) -> Tensor:
    """Returns a host tensor of a batch, which holds what a loader gave; one of another origin is not looked at.

    Raises:
        MemoryFaultError: it has changed since it was read.
    """
    known = _read.get(tensor)
    if known is not None and digest(tensor) != known[1]:
        row = {"step": mover.step, "stage": "batches", "tensor": known[0], "kind": "source_changed"}
        mover.report.incident({**row, "outcome": "stopped"})
        raise MemoryFaultError(
            f"batch tensor '{known[0]}' changed in host memory after it was read from the loader",
            "Look for code that writes to batches, or test the memory; the same command continues from the newest "
            "checkpoint",
        )
    return tensor


def _copied(batch: Any, *, verified: bool) -> Any:
    """A batch with the host tensors copied, for good where `verified`."""
    copies: dict[int, Tensor] = {}
    for name, tensor in named_tensors(batch):
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or lazy:
            continue  # the mover knows what to say of it
        copies[id(tensor)] = tensor.clone()
        if verified:
            expected = digest(tensor)
            for _ in range(_TRIES):
                if digest(copies[id(tensor)]) == expected:
                    break
                copies[id(tensor)] = tensor.clone()
            _read[copies[id(tensor)]] = (name, expected)
    return map_tensors(batch, lambda tensor: copies.get(id(tensor), tensor))


class Prefetch:
    """Begins the transfers of one loader's batches, at most `batches` beyond the one that is used next or in use.

    Args:
        mover: the one door to the device.
        batches: how many; 0 begins nothing ahead: whoever uses a batch moves it.

    Raises:
        UsageError: `batches` is below 0.
    """

    def __init__(self, mover: Mover, batches: int = 1) -> None:
        if batches < 0:
            raise UsageError(f"prefetch_batches is {batches}; give 0 (no overlap) or more")
        self.mover = mover
        self._batches = batches
        self._under_way: list[weakref.ref[Tensor]] = []
        self._waiting: Any = None  # the batch read last, when there was no room for it
        self._begun: tuple[Any, Any] | None = None  # that batch and its copy in flight, begun after it was read

    def read(self, batch: Any) -> Any:
        """What a loader hands out for a batch that it has read: a copy in flight, or where no room is, on the host."""
        batch = _copied(batch, verified=self.mover.settings.verify != "off")
        pending = (reference() for reference in self._under_way)
        self._under_way = [weakref.ref(one) for one in pending if one is not None and self.mover.is_pending(one)]
        has_room = self._batches > 0 and len(self._under_way) <= self._batches
        self._waiting = None if has_room else batch
        return self._begin(batch) if has_room else batch

    def window(self, batches: list[Any]) -> Window:
        """The batches of an accumulation window, as a list that keeps to the limit while it is iterated."""
        begun, self._begun = self._begun, None
        if begun is not None and batches and batches[0] is begun[0]:
            batches[0] = begun[1]
        if batches and batches[-1] is self._waiting:
            self._waiting = None  # nothing was read beyond the window
        return Window(self, batches)

    def begin_ahead(self, window: list[Any], number: int) -> None:
        """Before batch `number` of a window is handed out: begins it and those that may be under way beside it."""
        if self._batches == 0:
            return
        stop = number + 1 + self._batches
        for later in range(number, min(stop, len(window))):
            window[later] = self._begin(window[later])
        if stop > len(window) and self._waiting is not None:
            self._begun, self._waiting = (self._waiting, self._begin(self._waiting)), None

    def _begin(self, batch: Any) -> Any:
        first = next(tree_tensors(batch), None)
        if first is None or self.mover.provenance(first) is not None:
            return batch
        moved = self.mover.begin(batch)
        for tensor in tree_tensors(batch):
            require_unchanged(tensor, self.mover)  # it may have waited
        self._under_way += [weakref.ref(tensor) for tensor in tree_tensors(moved) if self.mover.is_pending(tensor)][:1]
        return moved


class Window(list[Any]):
    """The batches of one accumulation window. Iterating it begins transfers, and lets go of what it hands out."""

    def __init__(self, prefetch: Prefetch, batches: list[Any]) -> None:
        super().__init__(batches)
        self._prefetch = prefetch

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            self._prefetch.begin_ahead(self, number)
            batch, self[number] = self[number], None
            yield batch
