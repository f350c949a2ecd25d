"""The verified loader yields what Accelerate's own yields, in the same order and with the same bookkeeping."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.data_loader
import pytest
import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hf_rocm_tune.data.loader import Prefetch, verify_loader
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, tree_tensors

CPU = torch.device("cpu")


class Rows(Dataset[dict[str, Tensor]]):
    """Rows that depend on the epoch, and optionally one that cannot be read."""

    def __init__(self, size: int, *, broken: int | None = None, start: int = 0) -> None:
        self.size, self.broken, self.start, self.epoch = size, broken, start, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.broken:
            raise LookupError(f"row {index} is broken")
        return {"row": torch.tensor([self.start + index, self.epoch]), "noise": torch.rand(3)}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows in order, without a length."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[index] for index in range(self.rows.size))

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)


@pytest.fixture
def mover() -> Iterator[Mover]:
    with Mover(CPU) as made:
        yield made


Prepare = Callable[..., Any]


@pytest.fixture
def prepare() -> Prepare:
    """Makes a loader as the trainer does: prepared by Accelerate, with a mover verified as well."""

    def make(dataset: Any, mover: Mover | None = None, *, dispatch: bool | None = None, **options: Any) -> Any:
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        torch.manual_seed(7)
        shuffle = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
        loader = DataLoader(dataset, **{"batch_size": 3, **shuffle, **options})
        prepared = accelerator.prepare(loader)
        prepared.accelerator = accelerator
        return prepared if mover is None else verify_loader(prepared, Prefetch(mover))

    return make


def seen(loader: Any, *, epochs: int = 1) -> list[Any]:
    """Everything that a training loop can see of a loader: batches, end, remainder, and the state of the generator."""
    state = accelerate.data_loader.GradientState()
    found: list[Any] = []
    torch.manual_seed(11)  # workers draw their seeds from it
    for epoch in range(epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        for batch in loader:
            wait_verified(loader, batch)
            flags = (state.in_dataloader, state.end_of_dataloader, state.remainder)
            if state.in_dataloader:
                assert state.active_dataloader is loader
            found.append(({name: value.tolist() for name, value in batch.items()}, flags))
        found.append((torch.rand(1).item(), state.in_dataloader))
    return found


def wait_verified(loader: Any, batch: Any) -> None:
    """Waits for the verdict as the trainer does, and insists on one where the loader has begun the transfer."""
    collator = getattr(loader, "collate_fn", None)
    prefetch = vars(loader).get("_hf_rocm_tune_prefetch") or getattr(collator, "_prefetch", None)
    if prefetch is not None and not isinstance(loader, accelerate.data_loader.DataLoaderDispatcher):
        mover = prefetch.mover
        mover.wait_verified(batch)
        assert all(mover.was_verified(tensor) for tensor in tree_tensors(batch))


@pytest.mark.parametrize("size", [0, 1, 8])
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_same_batches_in_the_same_order_with_the_same_flags(
    prepare: Prepare, mover: Mover, size: int, kind: str, drop_last: bool
) -> None:
    def make(chosen: Mover | None) -> Any:
        dataset: Any = Rows(size) if kind == "map" else Stream(size)
        return prepare(dataset, chosen, dispatch=False, drop_last=drop_last)

    if size == 0 and kind == "map":  # a shuffled sampler refuses an empty dataset before a loader is there
        return
    assert seen(make(mover), epochs=3) == seen(make(None), epochs=3)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 6),
    dispatch=st.booleans(),
    drop_last=st.booleans(),
    skipped=st.integers(0, 6),
)
def test_any_size_any_batch_any_resumption(
    size: int, batch: int, dispatch: bool, drop_last: bool, skipped: int
) -> None:
    if drop_last and size < batch:
        return
    with Mover(CPU) as mover:
        found = []
        for chosen in (None, mover):
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
            torch.manual_seed(5)
            loader = accelerator.prepare(DataLoader(Rows(size), batch_size=batch, shuffle=True, drop_last=drop_last))
            loader = loader if chosen is None else verify_loader(loader, Prefetch(chosen))
            steps = min(skipped, len(loader) - 1)
            resumed = transformers.trainer.skip_first_batches(loader, steps)
            found.append([seen(loader), seen(resumed), len(loader), len(resumed)])
        assert found[0] == found[1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_worker_processes_change_nothing(prepare: Prepare, mover: Mover, persistent: bool, streamed: bool) -> None:
    def make(chosen: Mover | None, workers: int) -> Any:
        options = {"num_workers": workers, "persistent_workers": persistent} if workers else {}
        dataset: Any = Stream(8) if streamed else Rows(8)
        return prepare(dataset, chosen, dispatch=False, **options)

    found = []
    for chosen in (None, mover):
        loader = make(chosen, 2)
        found.append(seen(loader, epochs=2))
        if persistent:
            assert vars(loader.base_dataloader)["_iterator"] is not None, "the workers were not kept"
            loader.base_dataloader._iterator._shutdown_workers()  # a collected iterator waits 5 s for each of them
    assert found[0] == found[1]


def test_a_resumed_loader_is_verified_and_starts_where_stock_does(prepare: Prepare, mover: Mover) -> None:
    for dataset, dispatch in ((Rows(10), False), (Rows(10), True), (Stream(10), True), (Stream(10), False)):
        loaders = [prepare(copy.deepcopy(dataset), chosen, dispatch=dispatch) for chosen in (None, mover)]
        stock, ours = [transformers.trainer.skip_first_batches(loader, 2) for loader in loaders]
        sent = mover.report.to_dict()["batches"]["tensors"]
        assert seen(ours) == seen(stock)
        # The batches of a dispatcher are sent by the trainer when it uses them.
        assert (mover.report.to_dict()["batches"]["tensors"] > sent) == (not dispatch)
        again = transformers.trainer.skip_first_batches(ours, 1)
        assert seen(again) == seen(transformers.trainer.skip_first_batches(stock, 1))


def test_every_sample_is_gathered_once_also_from_a_last_partial_batch(prepare: Prepare, mover: Mover) -> None:
    for dataset, dispatch in ((Rows(29), False), (Rows(29), True), (Stream(29), True)):
        loader = prepare(dataset, mover, dispatch=dispatch, batch_size=4)
        rows: list[int] = []
        for batch in loader:
            wait_verified(loader, batch)
            rows += loader.accelerator.gather_for_metrics(batch["row"])[:, 0].tolist()
        assert sorted(rows) == list(range(29))


def nested(make: Callable[..., Any]) -> list[Any]:
    """An evaluation inside the training loop."""
    training, evaluation = make(Rows(11)), make(Rows(5), shuffle=False)
    state = accelerate.data_loader.GradientState()
    found: list[Any] = []
    torch.manual_seed(2)
    for batch in training:
        wait_verified(training, batch)
        for other in evaluation:
            wait_verified(evaluation, other)
            assert state.active_dataloader is evaluation
            found.append((other["row"].tolist(), state.end_of_dataloader, state.remainder))
        assert state.active_dataloader is training
        found.append((batch["row"].tolist(), state.end_of_dataloader, state.remainder))
    return found


def left_early(make: Callable[..., Any]) -> list[Any]:
    """A loop that is left, and another over the same loader."""
    loader = make(Rows(11))
    torch.manual_seed(4)
    for batch in loader:
        wait_verified(loader, batch)
        break
    del batch
    found = seen(loader)
    accelerate.data_loader.GradientState()._reset_state()
    return found


def until_broken(make: Callable[..., Any]) -> int:
    """The number of batches before a row that cannot be read."""
    loader, count = make(Rows(12, broken=7), shuffle=False), 0
    with pytest.raises(LookupError, match="row 7 is broken"):  # noqa: PT012 - the loop raises
        for batch in loader:
            wait_verified(loader, batch)
            count += 1
    accelerate.data_loader.GradientState()._reset_state()
    return count


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("story", [nested, left_early, until_broken])
def test_what_happens_in_and_around_a_loop_is_as_in_stock(
    prepare: Prepare, mover: Mover, story: Callable[..., Any], dispatch: bool
) -> None:
    def make(chosen: Mover | None) -> Callable[..., Any]:
        return lambda rows, **options: prepare(rows, chosen, dispatch=dispatch, **options)

    assert story(make(mover)) == story(make(None))


def test_a_plain_loader_and_its_resumed_one_are_verified_too(mover: Mover) -> None:
    stock = DataLoader(Rows(7), batch_size=2)
    expected = [batch["row"].tolist() for batch in stock]
    ours = verify_loader(DataLoader(Rows(7), batch_size=2), Prefetch(mover))
    for start, loader in ((0, ours), (1, transformers.trainer.skip_first_batches(ours, 1))):
        rows = []
        for batch in loader:
            wait_verified(loader, batch)
            assert mover.was_verified(batch["row"])
            rows.append(batch["row"].tolist())
        assert rows == expected[start:]


def test_the_next_batch_is_under_way_while_one_is_in_use_and_not_the_one_after(prepare: Prepare, mover: Mover) -> None:
    loader = prepare(Rows(12), mover)
    for number, batch in enumerate(loader, start=1):
        assert all(mover.is_pending(tensor) for tensor in tree_tensors(batch))
        wait_verified(loader, batch)
        assert mover.report.to_dict()["batches"]["tensors"] == 2 * number
        started = mover._session.sent["batches"]
        assert started == min(number + 1, 4)


_STARTS = itertools.count(1000, 1000)


@pytest.mark.parametrize("kind", ["zero", "stale", "flip", "late", "drop"])
def test_harmed_batches_arrive_right(prepare: Prepare, kind: str) -> None:
    start = next(_STARTS)  # memory that an equal batch has left would be right although nothing arrived
    with Mover(CPU, faults=FaultSpec(kind=kind, rate=0.5, seed=3)) as faulty:
        harmed = seen(prepare(Rows(24, start=start), faulty))
        assert harmed == seen(prepare(Rows(24, start=start)))
        counts = faulty.report.to_dict()["batches"]
        assert counts["mismatches"] == counts["recovered"] > 0


def test_dispatching_to_several_processes_is_refused(
    prepare: Prepare, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0's host has the source. What a second rank would change is the count alone."""
    loader = prepare(Rows(4), dispatch=True)
    monkeypatch.setitem(loader.state.__dict__, "num_processes", 2)
    with pytest.raises(UsageError, match="dispatch_batches"):
        verify_loader(loader, Prefetch(mover))
    with Mover(CPU, settings=TransferSettings(verify="off")) as unverified:
        verify_loader(loader, Prefetch(unverified))


def test_no_loader_pins_memory_of_its_own(prepare: Prepare, mover: Mover) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = prepare(Rows(4), mover, pin_memory=True)
        assert len(seen(loader)) == 3
        assert len(seen(transformers.trainer.skip_first_batches(loader, 1))) == 2


class Fatal(Dataset[dict[str, Tensor]]):
    """Rows of which one ends the process that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number == 5:
            os._exit(9)
        return {"input_ids": torch.full((4,), number)}


def test_a_worker_that_dies_ends_the_loop_and_leaves_the_mover_usable(prepare: Prepare, mover: Mover) -> None:
    loader = prepare(Fatal(), mover, num_workers=1, shuffle=False)
    # torch's own words, or if it notices while it receives a batch from the worker, the broken connection
    with pytest.raises((RuntimeError, ConnectionError), match=r"exited unexpectedly|reset by peer"):
        mover.wait_verified(list(loader))
    assert torch.equal(mover.move(torch.arange(9), name="after"), torch.arange(9))
