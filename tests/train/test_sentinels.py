"""A frozen tensor whose bits change in place is found within one period, whatever the sizes, and nothing else is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rocm_tune.models import sentinels
from hf_rocm_tune.models.sentinels import Change, FrozenSentinel, Listed, TrainedSentinel
from hf_rocm_tune.transfer import digest


def tensors(*sizes: int) -> dict[str, Tensor]:
    return {f"t{number}": torch.rand(size) for number, size in enumerate(sizes)}


def found_in(held: dict[str, Tensor]) -> Iterator[Listed]:
    """What a model would list: where it is found again is the dictionary."""

    def find(name: str) -> Tensor:
        if name not in held:
            raise AttributeError(name)
        return held[name]

    return ((name, tensor, partial(find, name)) for name, tensor in held.items())


def watch(held: dict[str, Tensor], period: int, **more: Any) -> FrozenSentinel:
    return FrozenSentinel(list_tensors=lambda: found_in(held), period=period, **more)


def changed(*names: str) -> list[Change]:
    return [Change("frozen", name, "changed in memory") for name in names]


def flip(tensor: Tensor, bit: int) -> None:
    """Flips one bit of the bytes that the tensor covers, in place."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw[tensor.storage_offset() * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    period=st.integers(1, 20),
    start=st.integers(0, 40),
    data=st.data(),
)
def test_a_flipped_bit_is_found_within_one_period_and_named(
    sizes: list[int], period: int, start: int, data: st.DataObject
) -> None:
    held = tensors(*sizes)
    sentinel = watch(held, period)
    assert not any(sentinel.check_slice() for _ in range(start))
    assert (sentinel.passes, sentinel.tensors) == (start // period, len(sizes))
    name = data.draw(st.sampled_from(sorted(held)))
    flip(held[name], data.draw(st.integers(0, held[name].numel() * 32 - 1)))
    found = [sentinel.check_slice() for _ in range(period)]
    assert [each for each in found if each] == [changed(name)]
    assert sentinel.check_all() == changed(name)


def test_a_weight_that_has_another_one_s_memory_is_no_new_baseline() -> None:
    """Its bytes came verified, but as those of another weight."""
    held = tensors(30, 30, 30)
    sentinel = watch(held, period=1, explain=lambda *_: "came through the mover")
    held["t0"].data = held["t2"].data
    assert sentinel.check_all() == [Change("frozen", "t0", "replaced")]
    held = tensors(30, 30)
    sentinel = watch(held, period=1, explain=lambda *_: "came through the mover")
    held["t0"].data = torch.rand(30)
    assert sentinel.check_all() == []


def test_a_replaced_tensor_is_no_new_baseline_unless_it_is_explained() -> None:
    """Explained is a rotary table that grows, say; anything else would train on with unknown bytes."""
    held = tensors(10, 20, 30)
    asked: list[tuple[str, bool]] = []

    def explain(name: str, tensor: Tensor, same: bool) -> str | None:
        asked.append((name, same))
        return "a table that grew" if name == "t1" or same else None

    sentinel = watch(held, 2, explain=explain)
    held["t1"] = torch.rand(40)
    held["t2"] = held["t2"].clone()
    assert sentinel.check_all() == []
    assert asked == [("t1", False), ("t2", True)]
    for name in ("t1", "t2"):
        flip(held[name], 3)
    held["t0"] = torch.rand(10)
    found = sentinel.check_all()  # t1 is explained whatever it holds
    assert found == [Change("frozen", "t0", "replaced"), *changed("t2")], "what was explained is watched like the rest"


def test_new_memory_at_the_old_address_is_a_replacement() -> None:
    held = tensors(1000)
    sentinel = watch(held, 1)
    del held["t0"]
    held["t0"] = torch.rand(1000)  # the allocator likes to give the same memory again
    assert sentinel.check_all() == [Change("frozen", "t0", "replaced")]


def test_what_is_gone_and_what_has_come_is_told() -> None:
    held = tensors(10, 20)
    sentinel = watch(held, 1)
    held["new"] = held.pop("t0")
    assert sentinel.check_all() == [Change("frozen", "t0", "removed"), Change("frozen", "new", "added")]


def test_what_is_trained_from_now_on_is_watched_no_more() -> None:
    held = tensors(10, 20)
    sentinel = watch(held, 1)
    held["t0"].requires_grad_()
    flip(held["t0"], 5)
    assert sentinel.check_all() == []


def test_what_changed_between_the_load_and_the_first_step_is_found() -> None:
    """A baseline that is taken at the start would take the fault for the truth."""
    held = tensors(10, 20, 30)
    arrived = {tensor.data_ptr(): digest(tensor) for tensor in held.values()}
    del arrived[held["t2"].data_ptr()]  # not known how it arrived
    for name in ("t1", "t2"):
        flip(held[name], 5)
    sentinel = watch(held, 3, arrived_with=lambda tensor: arrived.get(tensor.data_ptr()))
    assert sentinel.changed_at_start == changed("t1")
    assert sentinel.check_all() == changed("t1"), "what is wrong is never adopted"
    flip(held["t1"], 5)
    assert sentinel.check_all() == []


# ---- what is trained ----------------------------------------------------------------------------------------


def optimizer_of(held: dict[str, Tensor]) -> Any:
    """Trained weights are one parameter without gradients; the rest is state."""
    return SimpleNamespace(param_groups=[{"params": []}], state={"a parameter": held})


def named(*names: str) -> list[Change]:
    return [Change("trained", f"optimizer state {name}", "changed in memory") for name in names]


def test_writes_of_foreign_code_are_excused_on_request_and_counted() -> None:
    for excuse in (False, True):
        held = tensors(10, 20)
        sentinel = TrainedSentinel(optimizer_of(held), excuse_writes=excuse)
        sentinel.take()
        held["t0"].add_(1)
        sentinel.queue_check()
        assert (bool(sentinel.collect()), sentinel.rewritten) == (not excuse, int(excuse))
        sentinel.take()
        held["t1"].data = torch.rand(20)
        sentinel.queue_check()
        assert (bool(sentinel.collect()), sentinel.rewritten) == (not excuse, 2 * int(excuse))
        sentinel.take()
        flip(held["t1"], 9)  # through the storage: not counted by torch, as a fault is not
        sentinel.queue_check()
        assert sentinel.collect() == named("t1")


def test_groups_of_trained_tensors_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    group_of = sentinels.TensorGroup
    monkeypatch.setattr(sentinels, "TensorGroup", lambda parts: made.append(parts) or group_of(parts))
    parameters = [torch.nn.Parameter(torch.rand(size)) for size in (3, 5, 7)]
    optimizer = torch.optim.AdamW(parameters)
    watched, counts = TrainedSentinel(optimizer), []
    for _ in range(4):
        watched.queue_check()
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        watched.take()
        assert watched.collect() == []
        counts.append(len(made))
    assert counts == [4] * 4  # weights, and AdamW's three kinds of state, when the first update has made them


def test_large_state_is_watched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinels, "_BYTES_PER_UPDATE", 4 * 1000)
    held = tensors(900, 900, 900)
    sentinel = TrainedSentinel(optimizer_of(held))
    seen: list[Change] = []
    for _ in range(3):
        sentinel.take()
        for tensor in held.values():
            flip(tensor, 1)
        sentinel.queue_check()
        seen += sentinel.collect()
    assert seen == named("t0", "t1", "t2")


def test_the_sentinel_keeps_no_weight_alive() -> None:
    held: dict[str, Tensor] = {"t0": torch.nn.Parameter(torch.rand(1000), requires_grad=False)}
    sentinel = watch(held, 1)
    gone = weakref.ref(held["t0"].untyped_storage())
    held.clear()
    gc.collect()
    assert gone() is None
    assert sentinel.check_all() == [Change("frozen", "t0", "removed")]
