"""No wrong average of gradients reaches the optimizer, and no right one is accused: two real ranks over gloo.

Averages that are made again through the host must give bit for bit the weights of the undisturbed run: it is the same
division and the same sum of two numbers in the same dtype. Then the rounding bound: it holds for whatever may happen
when gradients are averaged honestly, not for a wrong average.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.cards.gradients import MAGNITUDE, block_elements, project, rounding_bound
from tests.cards.pair import Outcomes, run_pair


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    return run_pair("tests.cards.gradient_rank", tmp_path_factory.mktemp("gradients") / "store", checkout)


@pytest.mark.parametrize(
    ("case", "plain"),
    [("clean", "unchecked"), ("clean long", "clean long unchecked"), ("clean views", "unchecked")],
)
def test_checking_changes_nothing_and_raises_no_false_alarm(outcomes: Outcomes, case: str, plain: str) -> None:
    for rank in outcomes:
        found = rank[case]["gradients"]
        assert found["buckets"] > rank[case]["done"] and found["mismatches"] == 0
        assert rank[case]["incidents"] == []
        assert rank[case]["weights"] == rank[plain]["weights"]


@pytest.mark.parametrize("case", ["clean bf16", "clean unused"])
def test_no_false_alarm(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        assert rank[case]["gradients"]["buckets"] > 0 == rank[case]["gradients"]["mismatches"]


def test_unchecked_counts_nothing(outcomes: Outcomes) -> None:
    assert all(rank["unchecked"]["gradients"]["buckets"] == 0 for rank in outcomes)


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("zero on one", "unchecked"),
        ("flip on one", "unchecked"),
        ("zero on both", "unchecked"),
        ("zero_range on both", "unchecked"),
        ("swap on both", "unchecked"),
        ("stale on both", "unchecked"),
        ("every bucket of both", "unchecked"),
        ("views, zero on both", "unchecked"),
        ("bf16, zero on both", "bf16, unchecked"),
    ],
)
def test_a_wrong_average_is_made_again_bit_for_bit(outcomes: Outcomes, case: str, plain: str) -> None:
    faults = max(rank[case]["injected"] or 0 for rank in outcomes)
    assert faults > 0
    for rank in outcomes:
        found = rank[case]["gradients"]
        assert found["mismatches"] == found["recovered"] == faults == len(rank[case]["incidents"])
        assert {(row["stage"], row["outcome"]) for row in rank[case]["incidents"]} == {("gradients", "recovered")}
        assert rank[case]["weights"] == rank[plain]["weights"]


def test_the_incident_says_which_rank_what_and_where(outcomes: Outcomes) -> None:
    for rank in outcomes:
        (one,), (both,) = rank["zero on one"]["incidents"], rank["zero on both"]["incidents"]
        assert (one["ranks"], both["ranks"]) == ([1], [0, 1])
        assert one["kind"] == both["kind"] == "zeros"
        (swapped,) = rank["swap on both"]["incidents"]
        assert swapped["kind"] == "wrong average"
        assert swapped["first_offset"] % 16384 == 0 and 0 < swapped["length"] <= 2 * 16384  # one block, or two
        (ranged,) = rank["zero_range on both"]["incidents"]
        assert ranged["tensor"] and ranged["step"] == 2


def test_a_fault_on_the_way_back_is_recovered_as_well(outcomes: Outcomes) -> None:
    healthy, harmed = (rank["way back"] for rank in outcomes)
    assert healthy["done"] == harmed["done"] == 1
    assert harmed["buckets"]["mismatches"] == harmed["buckets"]["recovered"] == 1
    assert harmed["gradients"]["recovered"] == 1
    assert harmed["weights"] == healthy["weights"]


@pytest.mark.parametrize(
    ("case", "before"),
    [
        ("persistent on both", 1),
        ("persistent on one", 1),
        ("persistent everywhere on one", 1),
        ("asked to stop", 1),
        ("copy spoilt", 0),
    ],
)
def test_what_cannot_be_made_right_stops_every_rank_in_the_same_step(
    outcomes: Outcomes, case: str, before: int
) -> None:
    weights = [rank[case]["weights"] for rank in outcomes]
    assert weights[0] == weights[1]  # both stopped before the optimizer took the wrong average
    for rank in outcomes:
        assert rank[case]["done"] == before
        line = rank[case]["error"]
        assert f"at step {before + 1} on ranks" in line and "was not used" in line and "\n" not in line
        last = rank[case]["incidents"][-1]
        assert last["outcome"] == ("stopped" if case == "asked to stop" else "failed")
        assert rank[case]["gradients"]["recovered"] == 0


def test_the_reason_is_told_by_the_rank_that_has_it(outcomes: Outcomes) -> None:
    _, second = outcomes
    assert "--on_corruption stop" in second["asked to stop"]["error"]
    assert "changed in memory" in second["copy spoilt"]["error"]
    assert "from cpu arrived wrong on the host" in second["persistent everywhere on one"]["error"]


def test_nan_that_backward_made_is_named_once_and_passed_on(outcomes: Outcomes) -> None:
    for rank in outcomes:
        case = rank["not finite"]
        assert case["done"] == 4 and case["gradients"]["mismatches"] == 0
        assert {(row["kind"], row["outcome"]) for row in case["incidents"]} == {("not finite", "passed on")}
        assert {row["step"] for row in case["incidents"]} == {2}
        assert {tuple(row["ranks"]) for row in case["incidents"]} == {(1,)}


def test_a_kind_that_needs_a_copy_harms_no_average(outcomes: Outcomes) -> None:
    for rank in outcomes:
        assert rank["kind of a copy"]["injected"] == rank["kind of a copy"]["gradients"]["mismatches"] == 0
        assert rank["kind of a copy"]["weights"] == rank["unchecked"]["weights"]


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
