"""Remembered operators give what torch gives, and what must be run each time is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.models.shapes_kernels import Kernels

aten: Any = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    return [looks(each) for each in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (meta(3, 4), meta(4, 5))),
        (aten.mm.default, (meta(4, 3).t(), meta(5, 4).t())),
        (aten.mul.Tensor, (meta(2, 1, 4), meta(3, 1))),
        (aten.native_layer_norm.default, (meta(2, 8), [8], meta(8), meta(8), 1e-5)),
        (aten.native_dropout.default, (meta(5), 0.5, True)),
        (aten.empty_strided.default, ((2, 3), (4, 1))),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else "",
)
def test_the_second_time_is_as_the_first(func: Any, args: tuple[Any, ...]) -> None:
    kernels = Kernels()
    kwargs = {"device": torch.device("meta")} if func is aten.empty_strided.default else {}
    (first, flops), (second, again) = (kernels.run(func, args, kwargs) for _ in range(2))
    assert looks(first) == looks(second) == looks(func(*args, **kwargs))
    assert flops == again
    assert (flops == 2 * 3 * 4 * 5) == (func is aten.mm.default)


def test_each_time_gives_new_storages() -> None:
    kernels = Kernels()
    tensor = meta(8)
    made = [kernels.run(aten.neg.default, (tensor,), {})[0] for _ in range(3)]
    assert len({each.untyped_storage()._cdata for each in (tensor, *made)}) == 4


@pytest.mark.parametrize(
    ("func", "args"),
    [(aten.view.default, ([4, 2],)), (aten._unsafe_view.default, ([4, 2],)), (aten.detach.default, ())],
)
def test_a_view_stays_a_view_whatever_its_schema_says(func: Any, args: tuple[Any, ...]) -> None:
    kernels = Kernels()
    for _ in range(3):
        tensor = meta(8)
        out, _ = kernels.run(func, (tensor, *args), {})
        assert out.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_what_is_changed_in_place_is_what_was_given() -> None:
    kernels, tensor = Kernels(), meta(8)
    for _ in range(2):
        assert kernels.run(aten.add_.Tensor, (tensor, 1), {})[0] is tensor


def test_numbers_of_other_types_are_other_arguments() -> None:
    kernels, tensor = Kernels(), meta(4, dtype=torch.int64)
    dtypes = [kernels.run(aten.mul.Tensor, (tensor, other), {})[0].dtype for other in (2, 2.0, True, 2, 2.0)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


def test_what_is_on_a_real_device_is_computed() -> None:
    kernels = Kernels()
    for value in (1.0, 2.0):
        out, _ = kernels.run(aten.neg.default, (torch.tensor([value]),), {})
        assert out.tolist() == [-value]


def test_a_number_is_of_the_content_and_never_remembered() -> None:
    kernels = Kernels()
    for content in (True, True, False, True):
        tensor = torch.tensor([content])
        assert kernels.run(torch.ops.aten._is_all_true.default, (tensor,), {})[0].item() is content
        assert kernels.run(torch.ops.aten.equal.default, (tensor, torch.tensor([True])), {})[0] is content
