"""Whatever the depth, the same batches come in the same order, and no more of them are on their way than it allows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import transformers.trainer
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from hf_rocm_tune.data.loader import Prefetch, verify_loader
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Mover, tree_tensors


class CountingMover(Mover):
    """A real mover that can say how many batches are on their way."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.begun: list[weakref.ref[Tensor]] = []

    def begin(self, tree: Any, *, stage: str = "batches") -> Any:
        moved = super().begin(tree, stage=stage)
        self.begun += [weakref.ref(tensor) for tensor in islice(tree_tensors(moved), 1)]
        return moved

    @property
    def under_way(self) -> int:
        """Batches in flight that somebody still holds."""
        return sum((tensor := one()) is not None and self.is_pending(tensor) for one in self.begun)


@pytest.fixture
def mover() -> Iterator[CountingMover]:
    with CountingMover() as made:
        yield made


def prepared(prefetch: Prefetch, rows: int) -> Any:
    """A loader as the trainer has it; each batch is one row that holds its own number."""
    return verify_loader(Accelerator(cpu=True).prepare(DataLoader(torch.arange(rows), batch_size=1)), prefetch)


def use(mover: Mover, batch: Any) -> int:
    """What the guard in `_verified_inputs` does, and the row's number."""
    here = mover.begin(batch)
    mover.wait_verified(here)
    assert mover.was_verified(here)
    return int(here)


def windows(loader: Any, prefetch: Prefetch, size: int) -> Iterator[list[Any]]:
    """Accumulation windows, as `Trainer.get_batch_samples` reads them."""
    batches = iter(loader)
    while found := list(islice(batches, size)):
        yield prefetch.window(found)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 17), size=st.integers(1, 6), depth=st.integers(0, 5), skipped=st.integers(0, 4))
def test_every_batch_comes_once_in_order_and_within_the_limit(rows: int, size: int, depth: int, skipped: int) -> None:
    skipped = min(skipped, rows - 1)
    with CountingMover() as mover:
        prefetch = Prefetch(mover, depth)
        loader = transformers.trainer.skip_first_batches(prepared(prefetch, rows), skipped)
        for epoch in range(2):
            numbers, before = [], mover._session.sent["batches"]
            for window in windows(loader, prefetch, size):
                assert mover.under_way <= (depth + 1 if depth else 0)
                for batch in window:
                    assert mover.under_way <= (depth + 1 if depth else 0)
                    numbers.append(use(mover, batch))
                    assert mover.under_way <= depth
                    del batch
            assert numbers == list(range(skipped, rows)), epoch
            assert mover._session.sent["batches"] - before == len(numbers), "a batch crossed twice"
            loader = prepared(prefetch, rows)
            skipped = 0


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_batches_are_under_way_while_one_is_in_use_also_across_windows(
    mover: CountingMover, size: int, depth: int
) -> None:
    prefetch = Prefetch(mover, depth)
    rows, used = 12, 0
    kept = []  # a trainer may hold what it has used
    for window in windows(prepared(prefetch, rows), prefetch, size):
        for place, batch in enumerate(window):
            use(mover, batch)
            used += 1
            kept.append(batch)
            read = min(used - place + size, rows)  # the window, and the one that the loader reads ahead
            assert mover.under_way == min(depth, read - used)


def test_a_window_holds_no_batch_that_it_has_handed_out(mover: CountingMover) -> None:
    prefetch = Prefetch(mover, 2)
    window = next(windows(prepared(prefetch, 6), prefetch, 4))
    assert len(window) == 4
    seen = []
    for batch in window:
        use(mover, batch)
        seen.append(weakref.ref(batch))
        del batch
    assert [one() for one in seen[:-1]] == [None] * 3 and len(window) == 4


def test_a_loop_left_early_leaves_nothing_behind_for_the_next(mover: CountingMover) -> None:
    prefetch = Prefetch(mover, 1)
    for window in windows(prepared(prefetch, 9), prefetch, 2):
        for batch in window:
            use(mover, batch)
        break
    again = [use(mover, batch) for window in windows(prepared(prefetch, 5), prefetch, 2) for batch in window]
    assert again == list(range(5))


def test_a_depth_below_zero_is_refused(mover: CountingMover) -> None:
    with pytest.raises(UsageError, match="prefetch_batches is -1"):
        Prefetch(mover, -1)
