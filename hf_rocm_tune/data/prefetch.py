"""How many batches are on their way to the device beyond the one in use.

Two places begin transfers. A loader begins that of each batch as it reads it (Accelerate's reads exactly one ahead,
and nothing here reads further). An accumulation window is read as a whole before its first ``forward``: there the
batches for which there is no room yet stay host tensors, and begin as the ones before them are handed out, so that
long windows need no more device memory than short ones.

Only the time of a transfer is decided here; which batches there are, their order and their bytes are not touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import tree_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover


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
        """What a loader hands out for a batch that it has read: the copy in flight, or where no room is, the batch."""
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
