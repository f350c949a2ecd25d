"""Two real ranks over gloo: what one of them holds otherwise stops both, and is named on both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Outcomes = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    store = tmp_path_factory.mktemp("replicas") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.replica_rank", str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        for rank in (0, 1)
    ]
    ended = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-2000:] for _, error in ended]
    rows = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    return [{row["case"]: row for row in one} for one in rows]


def test_equal_replicas_pass_with_their_number(outcomes: Outcomes) -> None:
    for rank in outcomes:
        assert rank["equal"]["compared"] == 8
        assert rank["nothing"]["compared"] == 0


@pytest.mark.parametrize("case", ["one_bit", "missing", "longer"])
def test_a_difference_stops_every_rank_with_the_same_line(outcomes: Outcomes, case: str) -> None:
    lines = {rank[case]["error"] for rank in outcomes}
    assert len(lines) == 1
    (line,) = lines
    assert "at step 3" in line
    assert "w3 (ranks [1])" in line
    assert "w2" not in line


def test_many_differences_are_named_in_part_and_counted(outcomes: Outcomes) -> None:
    for rank in outcomes:
        assert "w0 (ranks [1])" in rank["many"]["error"]
        assert "and 3 more" in rank["many"]["error"]
