"""The rounding bound holds for whatever may happen when gradients are averaged honestly, not for a wrong average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.ranks.projections import MAGNITUDE, block_elements, project, rounding_bound

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RANKS = (2, 3, 4, 7)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _off(sent: list[Tensor], average: Tensor) -> Tensor:
    """How far the projections of `average` are from the mean of those of `sent`, over the bound: above 1 is wrong."""
    expected = torch.stack([project(each) for each in sent]).sum(0) / len(sent)
    bound = rounding_bound(expected[:, MAGNITUDE], dtype=average.dtype, ranks=len(sent))
    return ((project(average) - expected)[:, :MAGNITUDE].abs() / bound[:, None]).max()


def _stock(sent: list[Tensor], order: list[int]) -> Tensor:
    """Divide first, then add in some order, as DistributedDataParallel does."""
    divided = [each / len(sent) for each in sent]
    total = divided[order[0]]
    for rank in order[1:]:
        total = total + divided[rank]
    return total


def _random(generator: torch.Generator, elements: int, dtype: torch.dtype, spread: float) -> Tensor:
    """Normal numbers whose magnitudes spread over many powers of ten, denormals included; one in ten is zero."""
    exponents = torch.randn(elements, generator=generator, dtype=torch.float64) * spread
    limit = torch.finfo(dtype).max / 8
    values = torch.randn(elements, generator=generator, dtype=torch.float64) * 10**exponents
    values[torch.rand(elements, generator=generator) < 0.1] = 0
    return values.clamp(-limit, limit).to(dtype)


@each_dtype
@pytest.mark.parametrize("ranks", RANKS)
def test_an_honest_average_is_never_called_wrong(dtype: torch.dtype, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    for spread in (0.0, 0.5, 2.0, 6.0, 30.0):
        for elements in (1, 7, 255, 256, 257, 5000, 9001):
            sent = [_random(generator, elements, dtype, spread) for _ in range(ranks)]
            order = torch.randperm(ranks, generator=generator).tolist()
            assert _off(sent, _stock(sent, order)) <= 1


@each_dtype
@pytest.mark.parametrize("value", ["one_sign", "denormal", "zero", "cancelling"])
def test_no_false_alarm_where_errors_add_up(dtype: torch.dtype, value: str) -> None:
    kind = torch.finfo(dtype)
    elements, ranks = 3 * block_elements(dtype), 3
    sent = {
        "one_sign": [torch.full((elements,), 1 + number / 7, dtype=dtype) for number in range(ranks)],
        "denormal": [torch.full((elements,), kind.smallest_normal / 2**number, dtype=dtype) for number in range(ranks)],
        "zero": [torch.zeros(elements, dtype=dtype) for _ in range(ranks)],
        "cancelling": [torch.full((elements,), each, dtype=dtype) for each in (1 / 3, -1 / 3, 1e-3)],
    }[value]
    assert _off(sent, _stock(sent, [2, 0, 1])) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accelerator_that_flushes_denormals_is_not_accused(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    smallest = torch.finfo(dtype).smallest_normal
    sent = [(torch.randn(5000, generator=generator) * smallest * 4).to(dtype) for _ in range(2)]
    flushed = [each.where(each.abs() >= smallest, 0) / 2 for each in sent]
    average = sum(each.where(each.abs() >= smallest, 0) for each in flushed)
    assert isinstance(average, Tensor) and _off(sent, average) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_towards_zero_is_not_accused(dtype: torch.dtype) -> None:
    sent = [torch.full((8192,), value, dtype=dtype) for value in (1.0, 1.0 + 2 * torch.finfo(dtype).eps)]
    exact = sum(each.to(torch.float64) for each in sent) / 2
    assert isinstance(exact, Tensor)
    truncated = (exact * (1 - torch.finfo(dtype).eps / 2)).to(dtype)
    assert _off(sent, truncated) <= 1


HARMS = {
    "zeroed": lambda average: average.zero_(),
    "a page zeroed": lambda average: average[2048 : 2048 + 4096 // average.element_size()].zero_(),
    "sum instead of mean": lambda average: average.mul_(2),
    "shifted by one": lambda average: average.set_(average.roll(1)),
    "halves swapped": lambda average: average.set_(average.roll(4096)),
    "sign lost": lambda average: average.abs_(),
    "one rank missing": lambda average: average.sub_(torch.randn(average.shape).to(average.dtype) / 2),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_average_is_called_wrong(dtype: torch.dtype, harm: str) -> None:
    torch.manual_seed(3)
    sent = [torch.randn(8192).to(dtype) for _ in range(2)]
    average = _stock(sent, [0, 1])
    HARMS[harm](average)
    assert _off(sent, average) > 1


@pytest.mark.parametrize("distance", [1, 2, 1000, 4095])
def test_two_elements_that_changed_places_are_seen(distance: int) -> None:
    torch.manual_seed(distance)
    sent = [torch.randn(4096) for _ in range(2)]
    average = _stock(sent, [0, 1])
    average[[0, distance]] = average[[distance, 0]]
    assert _off(sent, average) > 1


def test_a_single_lost_element_of_float32_is_seen() -> None:
    torch.manual_seed(0)
    sent = [torch.randn(4096) for _ in range(2)]
    for place in range(0, 4096, 97):
        average = _stock(sent, [0, 1])
        visible = average[place].abs() > 1e-2
        average[place] = 0
        assert not visible or _off(sent, average) > 1


@each_dtype
def test_projections_are_those_of_plain_sums(dtype: torch.dtype) -> None:
    size = block_elements(dtype)
    flat = torch.randn(2 * size + 3).to(dtype)
    found = project(flat)
    assert found.shape == (3, 3) and found.dtype == torch.float64
    for row, block in zip(found, flat.to(torch.float64).split(size), strict=True):
        assert float(row[0]) == pytest.approx(float(block.sum()), rel=1e-12, abs=1e-9)
        assert float(row[MAGNITUDE]) == pytest.approx(float(block.abs().sum()), rel=1e-12)
        assert abs(float(row[1])) <= float(row[MAGNITUDE])


def test_a_bucket_longer_than_a_slab_is_cut_like_a_short_one() -> None:
    flat = torch.randn((1 << 18) + 5000)
    joined = torch.cat([project(flat[: 1 << 18]), project(flat[1 << 18 :])])
    torch.testing.assert_close(project(flat), joined, rtol=1e-12, atol=1e-9)
