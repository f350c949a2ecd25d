"""A frozen tensor whose bits change in place is found within one period, whatever the sizes, and nothing else is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_rocm_tune.integrity.sentinels import FrozenSentinel
from hf_rocm_tune.transfer import digest

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)


def tensors(*sizes: int) -> dict[str, Tensor]:
    return {f"t{number}": torch.rand(size) for number, size in enumerate(sizes)}


def watch(held: dict[str, Tensor], period: int) -> FrozenSentinel:
    return FrozenSentinel(list_tensors=lambda: list(held.items()), period=period)


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
    name = data.draw(st.sampled_from(sorted(held)))
    flip(held[name], data.draw(st.integers(0, held[name].numel() * 32 - 1)))
    found = [sentinel.check_slice() for _ in range(period)]
    assert [names for names in found if names] == [[name]]
    assert sentinel.check_all() == [name]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=12), period=st.integers(1, 20))
def test_the_slices_of_a_period_cover_everything_once_and_are_even(sizes: list[int], period: int) -> None:
    held = tensors(*sizes)
    sentinel = watch(held, period)
    slices = sentinel._slices
    assert len(slices) == period
    assert sorted(name for names in slices for name in names) == sorted(held)
    share = sum(sizes) / period + max(sizes, default=0)
    assert all(sum(held[name].numel() for name in names) <= share for names in slices)
    for _ in range(3 * period):
        assert sentinel.check_slice() == []
    assert (sentinel.passes, sentinel.tensors) == (3, len(sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_watched_to_its_last_byte(dtype: torch.dtype) -> None:
    held = {"w": torch.zeros(33).to(dtype), "view": torch.zeros(8, 10).to(dtype)[2:5, ::3]}
    sentinel = watch(held, 1)
    for name, last in (("w", 33 * 8 * held["w"].element_size() - 1), ("view", 0)):
        flip(held[name], last)
        assert sentinel.check_all() == [name]
        flip(held[name], last)
        assert sentinel.check_all() == []


def test_a_zeroed_segment_and_swapped_words_are_found() -> None:
    held = {"w": torch.arange(1, 4097, dtype=torch.int32), "ones": torch.ones(64, dtype=torch.int64)}
    sentinel = watch(held, 4)
    held["w"][100:200] = 0
    held["ones"][:] = 0
    assert sorted(sentinel.check_all()) == ["ones", "w"]
    held["w"][100:200] = torch.arange(101, 201)
    held["ones"][:] = 1
    assert sentinel.check_all() == []
    held["w"][[7, 9]] = held["w"][[9, 7]]
    assert sentinel.check_all() == ["w"]


def test_a_tensor_that_the_model_replaced_takes_a_new_baseline_and_is_recorded() -> None:
    """A rotary table that grows, or a weight that a merge made anew."""
    held = tensors(10, 20)
    sentinel = watch(held, 2)
    held["t1"] = torch.rand(40)
    assert sentinel.check_all() == []
    assert sentinel.rebaselined == ["t1"]
    flip(held["t1"], 3)
    assert sentinel.check_all() == ["t1"], "the new one is watched like the old"
    assert sentinel.rebaselined == ["t1"]


def test_new_memory_at_the_old_address_is_a_replacement_and_not_a_fault() -> None:
    held = tensors(1000)
    sentinel = watch(held, 1)
    for _ in range(20):
        del held["t0"]
        held["t0"] = torch.rand(1000)  # the allocator likes to give the same memory again
        assert sentinel.check_all() == []
    assert len(sentinel.rebaselined) == 20


def test_what_changed_between_the_load_and_the_first_step_is_found() -> None:
    """A baseline that is taken at the start would take the fault for the truth."""
    held = tensors(10, 20, 30)
    arrived = {id(tensor): digest(tensor) for tensor in held.values()}
    del arrived[id(held["t2"])]  # not known how it arrived
    for name in ("t1", "t2"):
        flip(held[name], 5)
    sentinel = FrozenSentinel(
        list_tensors=lambda: list(held.items()), period=3, arrived_with=lambda tensor: arrived.get(id(tensor))
    )
    assert sentinel.changed_at_start == ["t1"]
    assert sentinel.check_all() == ["t1"], "what is wrong is never adopted"
    flip(held["t1"], 5)
    assert sentinel.check_all() == []


def test_the_sentinel_keeps_no_tensor_alive() -> None:
    held = tensors(1000)
    sentinel = watch(held, 1)
    gone = weakref.ref(held["t0"].untyped_storage())
    held.clear()
    gc.collect()
    assert gone() is None
    assert sentinel.check_all() == []
