"""A device that casts wrongly is caught while a model is loaded, although every byte arrived right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models import loading
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.models.loading import SAMPLE_ELEMENTS, cast_verified
from hf_rocm_tune.transfer import Mover, TransferSettings

BIG = 10 * SAMPLE_ELEMENTS + 7

Harm = Callable[[int, int], None]


@pytest.fixture
def harm(monkeypatch: pytest.MonkeyPatch) -> Harm:
    """The given element comes out with one bit wrong, in the first so many casts; a faulty kernel cannot be had."""

    def install(element: int, times: int) -> None:
        left = [times]
        right = loading.cast_on_device

        def wrong(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            cast = right(tensor, dtype)
            if left[0] > 0:
                left[0] -= 1
                cast.view(-1).view(torch.int16)[element] ^= 1
            return cast

        monkeypatch.setattr(loading, "cast_on_device", wrong)

    return install


def cast(mover: Mover, source: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return cast_verified(mover.move(source, name="w"), source, dtype, name="w", mover=mover)


def counts(mover: Mover) -> tuple[int, int, int]:
    found = mover.report.to_dict()["casts"]
    return found["checked"], found["mismatches"], found["recovered"]


@pytest.mark.parametrize("element", [0, BIG // 2, BIG - 1])
def test_one_wrong_bit_in_the_sample_is_cast_again(mover: Any, harm: Harm, element: int) -> None:
    source = torch.randn(BIG)
    harm(element, 1)
    assert torch.equal(cast(mover, source), source.to(torch.bfloat16))
    assert counts(mover) == (1, 1, 1)
    assert [(row["tensor"], row["kind"], row["outcome"]) for row in mover.report.incidents] == [
        ("w", "wrong cast", "recovered")
    ]


def test_a_device_that_casts_wrongly_twice_stops_with_the_name(mover: Any, harm: Harm) -> None:
    harm(0, 2)
    with pytest.raises(
        CorruptionError,
        match=r"'w': cpu casts float32 to bfloat16 wrongly.*arithmetic, not transfer.*run hf-rocm-tune doctor --full",
    ):
        cast(mover, torch.randn(3, 5))
    assert counts(mover) == (1, 1, 0) and mover.report.incidents[-1]["outcome"] == "stopped"


@pytest.mark.parametrize("size", [0, 1, 3 * SAMPLE_ELEMENTS, 3 * SAMPLE_ELEMENTS + 1, BIG])
def test_right_casts_of_any_size_are_no_false_alarm(mover: Any, size: int) -> None:
    source = torch.randn(2, size)[1:]
    assert torch.equal(cast(mover, source), source.to(torch.bfloat16))
    assert torch.equal(cast(mover, source.t()), source.t().to(torch.bfloat16))
    assert counts(mover) == (2, 0, 0)


def test_the_payload_of_a_nan_is_no_fault_but_a_nan_for_a_number_is(mover: Any, harm: Harm) -> None:
    harm(3, 1)
    source = torch.tensor([1.0, float("inf"), 2.0, float("nan")])
    assert torch.isnan(cast(mover, source)).tolist() == [False, False, False, True]
    assert counts(mover) == (1, 0, 0)
    harm(1, 2)  # infinity with one more bit is a NaN
    with pytest.raises(CorruptionError):
        cast(mover, source)


@pytest.mark.parametrize("verify", ["sample", "off"])
def test_casts_are_compared_under_full_verification_only(
    make_mover: Callable[..., Any], harm: Harm, verify: str
) -> None:
    mover = make_mover(settings=TransferSettings(verify=verify))
    harm(0, 1)
    source = torch.ones(4)
    assert not torch.equal(cast(mover, source), source.to(torch.bfloat16))
    assert counts(mover) == (0, 0, 0)


def test_loading_compares_each_weight_that_it_casts(model_of: Callable[..., Path], make_mover: Any, harm: Harm) -> None:
    directory = model_of("llama3", dtype=torch.float32)

    def load(dtype: torch.dtype) -> Any:
        mover = make_mover()
        load_model(ModelSource(name=str(directory), init={"dtype": dtype}), mover)
        return mover

    assert counts(load(torch.float32)) == (0, 0, 0)
    mover = load(torch.bfloat16)
    files = [name for _, name in mover.moved if name.endswith(".weight")]
    assert counts(mover) == (len(files), 0, 0) and len(files) > 10
    harm(0, 1 << 30)
    with pytest.raises(CorruptionError, match=r"weights tensor '[\w.]+\.weight': cpu casts"):
        load(torch.bfloat16)
