"""Two real ranks: whoever is short of memory, and whenever, nobody waits for a rank that does not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.two_ranks import free_port

TIMEOUT = 120.0
Outcomes = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(checkout: Path) -> Outcomes:
    """What each rank reports, by case. A rank that waits for ever fails all tests here."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.oom_rank"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    try:
        ended = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to one that has ended
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-3000:] for _, error in ended]
    rows = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    return [{row["case"]: row for row in one} for one in rows]


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_know_of_a_shortage_and_every_gather_has_what_the_ranks_there_had(
    outcomes: Outcomes, seed: int
) -> None:
    rounds = zip(*(rank[f"micro-steps {seed}"]["rounds"] for rank in outcomes), strict=True)
    shorts = uneven = 0
    for mine, theirs in rounds:
        short = mine["short"] or theirs["short"]
        assert mine["most"] == theirs["most"]
        assert mine["most"] == (None if short else max(mine["gathers"], theirs["gathers"]))
        shorts += short
        common = min(len(mine["results"]), len(theirs["results"]))
        for number in range(common):
            both = [[float(number), 10.0 + number], [0, number, 1, number]]
            assert mine["results"][number] == theirs["results"][number] == both
        for rank, each in enumerate((mine, theirs)):
            assert short or len(each["results"]) == each["gathers"]
            for number in range(common, len(each["results"])):
                assert each["results"][number] == [[float(10 * rank + number)], [rank, number]]
                uneven += 1
    assert shorts > 5 and uneven > 5


def test_each_rank_is_heard_by_all(outcomes: Outcomes) -> None:
    assert all(rank["speaks"]["heard"] == ["rank 0 speaks", "rank 1 speaks"] for rank in outcomes)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "some unused"])
def test_averages_made_after_backward_are_those_made_during_it_bit_for_bit(
    outcomes: Outcomes, unused: bool, view: bool
) -> None:
    for rank in outcomes:
        late, stock = (rank[f"{when} unused={unused} view={view}"] for when in ("late", "stock"))
        assert late["weights"] == stock["weights"]
        assert late["gradients"]["buckets"] >= 4 * 2 and late["gradients"]["mismatches"] == 0


@pytest.mark.parametrize("case", ["host late", "host views"])
def test_averages_through_the_host_after_backward_are_the_same_ones(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        assert rank[case]["weights"] == rank["stock unused=True view=False"]["weights"]
        assert rank[case]["gradients"]["buckets"] >= 4 * 2 and rank[case]["gradients"]["mismatches"] == 0


@pytest.mark.parametrize("case", ["short", "host short of copies", "host short on return"])
def test_a_rank_without_memory_for_the_averaging_makes_both_do_the_step_again(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        assert rank[case]["tries"] == [1, 1, 2, 1]
        assert rank[case]["weights"] == rank["late unused=True view=False"]["weights"]
        assert rank[case]["gradients"]["mismatches"] == 0
