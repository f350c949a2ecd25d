"""Two real ranks over gloo: no wrong average of gradients reaches the optimizer, and no right one is accused.

Averages that are made again through the host must give bit for bit the weights of the undisturbed run: it is the same
division and the same sum of two numbers in the same dtype.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.pair import Outcomes, run_pair


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    return run_pair("tests.ranks.gradient_rank", tmp_path_factory.mktemp("gradients") / "store", checkout)


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
    assert "came from cpu to the host wrong" in second["persistent everywhere on one"]["error"]


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
