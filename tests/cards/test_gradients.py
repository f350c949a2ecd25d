"""No wrong average of gradients reaches the optimizer, and no right one is accused: two real ranks over gloo, averages
over the group and through the host. Those that are made again must give bit for bit the weights of plain averages: it
is the same division and the same sum of two numbers in the same dtype. Then the rounding bound: it holds for whatever
may happen when gradients are averaged honestly, not for a wrong average.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_rocm_tune.cards.gradients import MAGNITUDE, block_elements, project, rounding_bound
from tests.cards.gradient_rank import CLEAN, MADE_AGAIN, NOT_FINITE, PLAIN, SENT_AGAIN, STEPS, STOPS

Outcomes = list[dict[str, dict[str, Any]]]
"""By rank, then by case."""


def run_both(store: Path, checkout: Path, *more: str) -> list[tuple[int, str, str]]:
    """Exit code and both outputs of two ranks that meet at a file; ranks that hang are killed and fail the test."""
    command = [sys.executable, "-W", "error", "-m", "tests.cards.gradient_rank"]
    ranks = [
        subprocess.Popen(
            [*command, rank, str(store), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=checkout
        )
        for rank in "01"
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as together:  # a rank whose pipe is full would wait, and the other for it
            ended = list(together.map(lambda rank: rank.communicate(timeout=600), ranks))
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to one that has ended
    return [(rank.returncode, *said) for rank, said in zip(ranks, ended, strict=True)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    ended = run_both(tmp_path_factory.mktemp("gradients") / "store", checkout)
    assert [code for code, _, _ in ended] == [0, 0], [error[-2000:] for _, _, error in ended]
    rows = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for _, out, _ in ended]
    return [{row["case"]: row for row in one} for one in rows]


@pytest.mark.parametrize("case", CLEAN)
def test_checking_changes_nothing_and_raises_no_false_alarm(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        row = rank[case]
        assert row["incidents"] == [] and row["gradients"]["mismatches"] == 0 and row["done"] == STEPS
        assert (row["gradients"]["buckets"] >= STEPS) == CLEAN[case].checked
        # an unused parameter makes other buckets, and one more weight
        assert {**row["weights"], "unused": 0} == {**rank[CLEAN[case].like]["weights"], "unused": 0}
        if CLEAN[case].way == "host" and CLEAN[case].checked:
            crossed = row["buckets"]
            assert crossed["tensors"] >= 2 * row["gradients"]["buckets"]
            assert crossed["verified_bytes"] == crossed["bytes"] > 0


def test_the_report_says_how_and_how_much_and_compression_is_in_effect(outcomes: Outcomes) -> None:
    none, bf16, ddp, powersgd = (
        outcomes[0][case]["sync"] for case in ("host", "host bf16", "ddp fp16", "ddp powersgd")
    )
    said = [none[name] for name in ("method", "compression", "judged", "averages", "process_group")]
    assert said == ["host", "none", "projections", STEPS, "gloo"]
    assert none["bytes_to_host_and_back_per_step"] == 2 * none["bytes_between_ranks_per_step"]
    assert bf16["bytes_between_ranks_per_step"] * 2 == none["bytes_between_ranks_per_step"]
    assert outcomes[0]["host unverified"]["sync"]["judged"] == "no"
    assert ddp["method"] == "ddp" and ddp["bytes_to_host_and_back_per_step"] == 0
    assert ddp["bytes_between_ranks_per_step"] == bf16["bytes_between_ranks_per_step"]
    assert powersgd["judged"] == "equal on all ranks" and powersgd["bytes_between_ranks_per_step"] is None
    assert outcomes[0]["plain"]["sync"] is None
    weights = {outcomes[0][case]["weights"]["wide.weight"] for case in PLAIN}
    assert len(weights) == len(PLAIN)


@pytest.mark.parametrize("case", SENT_AGAIN)
def test_a_bucket_that_arrives_wrong_is_sent_again(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        crossed = rank[case]["buckets"]
        assert crossed["mismatches"] == crossed["recovered"] == len(rank[case]["incidents"])
        assert rank[case]["gradients"]["mismatches"] == 0  # it never came to an average
        assert rank[case]["weights"] == rank[SENT_AGAIN[case].like]["weights"]
    harmed, wanted = outcomes[1][case], case.partition(",")[0]
    assert harmed["injected"] >= harmed["buckets"]["recovered"] > 0
    assert all(row["tensor"].endswith(wanted) and row["length"] > 0 for row in harmed["incidents"])


@pytest.mark.parametrize("case", MADE_AGAIN)
def test_a_wrong_average_is_made_again_bit_for_bit(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        found = rank[case]["gradients"]
        assert found["mismatches"] == found["recovered"] > 0
        assert {row["outcome"] for row in rank[case]["incidents"]} == {"recovered"}
        assert rank[case]["weights"] == rank[MADE_AGAIN[case].like]["weights"]
        if not case.startswith(("host", "way back")):
            injected = max(each[case]["injected"] or 0 for each in outcomes)
            assert found["mismatches"] == len(rank[case]["incidents"]) == injected
    if case == "way back":  # the harmed rank's copies of the average that was made again
        assert outcomes[1][case]["buckets"]["recovered"] > 0


def test_the_incident_says_which_rank_what_and_where(outcomes: Outcomes) -> None:
    for rank in outcomes:
        (one,), (both,) = rank["zero on one"]["incidents"], rank["zero on both"]["incidents"]
        assert (one["ranks"], both["ranks"]) == ([1], [0, 1])
        assert one["kind"] == both["kind"] == "zeros"
        (swapped,) = rank["swap on both"]["incidents"]
        assert swapped["kind"] == "wrong average"
        (ranged,) = rank["zero_range on both"]["incidents"]
        assert ranged["tensor"] and ranged["step"] == 2


@pytest.mark.parametrize("case", STOPS)
def test_what_cannot_be_made_right_stops_every_rank_in_the_same_step(outcomes: Outcomes, case: str) -> None:
    weights = [rank[case]["weights"] for rank in outcomes]
    assert weights[0] == weights[1]  # both stopped before the optimizer took the wrong average
    assert STOPS[case].said in outcomes[1][case]["error"], "the reason is told by the rank that has it"
    for rank in outcomes:
        line = rank[case]["error"]
        assert rank[case]["done"] == 1 and rank[case]["gradients"]["recovered"] == 0
        assert "at step 2 on ranks" in line and "was not used" in line and "\n" not in line
        assert rank[case]["incidents"][-1]["outcome"] == ("stopped" if STOPS[case].stop else "failed")


@pytest.mark.parametrize("case", NOT_FINITE)
def test_nan_that_backward_or_a_cast_made_is_named_and_passed_on(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        row = rank[case]
        assert row["done"] == STEPS and row["gradients"]["mismatches"] == row["buckets"]["mismatches"] == 0
        assert {(each["kind"], each["outcome"]) for each in row["incidents"]} == {("not finite", "passed on")}
        if NOT_FINITE[case].poison:
            assert {(each["step"], *each["ranks"]) for each in row["incidents"]} == {(2, 1)}, (
                "once, and not of its sequel"
            )


def test_of_powersgd_what_differs_between_the_ranks_is_replaced_by_the_average(outcomes: Outcomes) -> None:
    case = "powersgd, flip on one"
    for rank in outcomes:
        assert rank[case]["gradients"]["mismatches"] == rank[case]["gradients"]["recovered"] == 1
        assert [row["kind"] for row in rank[case]["incidents"]] == ["differs between ranks"]
    assert outcomes[0][case]["weights"] == outcomes[1][case]["weights"] != outcomes[0]["plain powersgd"]["weights"]


# Each summand is rounded once by the cast, and by the one addition of two ranks; its spacing is 2^-23, 2^-10, 2^-7.
@pytest.mark.parametrize(("compression", "spacing"), [("none", 2**-23), ("fp16", 2**-10), ("bf16", 2**-7)])
def test_an_average_is_as_near_as_its_dtype_allows(outcomes: Outcomes, compression: str, spacing: float) -> None:
    for rank in outcomes:
        worst = rank[f"average {compression}"]["worst"]
        assert worst <= 2 * spacing and (compression == "none" or worst > spacing / 16), "it was not cast"


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_an_average_that_fails_on_one_rank_is_not_replaced_by_its_next_one(
    outcomes: Outcomes, compression: str
) -> None:
    healthy, failed = (rank[f"two averages {compression}"] for rank in outcomes)
    assert (healthy["second"], healthy["error"]) == (0.5, "")
    assert failed["error"] == "no memory for a bucket"


@pytest.mark.long
def test_a_rank_that_dies_in_a_step_leaves_no_other_waiting(tmp_path: Path, checkout: Path) -> None:
    (code, said, complaint), (killed, _, other) = run_both(tmp_path / "store", checkout, "dying")
    assert killed == -signal.SIGKILL, other
    assert code == 0, complaint
    assert said.startswith("RuntimeError")


# ---- the rounding bound ---------------------------------------------------------------------------------------

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
def test_an_accelerator_that_flushes_denormals_or_rounds_towards_zero_is_not_accused(dtype: torch.dtype) -> None:
    kind, generator = torch.finfo(dtype), torch.Generator().manual_seed(0)
    smallest = kind.smallest_normal
    sent = [(torch.randn(5000, generator=generator) * smallest * 4).to(dtype) for _ in range(2)]
    flushed = [each.where(each.abs() >= smallest, 0) / 2 for each in sent]
    one, other = (each.where(each.abs() >= smallest, 0) for each in flushed)
    assert _off(sent, one + other) <= 1
    sent = [torch.full((8192,), value, dtype=dtype) for value in (1.0, 1.0 + 2 * kind.eps)]
    exact = (sent[0].double() + sent[1].double()) / 2
    assert _off(sent, (exact * (1 - kind.eps / 2)).to(dtype)) <= 1


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
