"""Two real ranks with FSDP2 over gloo: shards are the rows they should be, and nothing wrong between them is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.cards.fsdp_rank import CASES, EMBEDDINGS
from tests.cards.pair import Outcomes, run_pair

pytestmark = pytest.mark.long  # tests/e2e/test_fsdp.py has the sample


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    folder = tmp_path_factory.mktemp("fsdp")
    for arch in {case.arch for case in CASES.values()}:
        (folder / arch).symlink_to(tiny.build(arch, folder / "models"))
    return run_pair("tests.cards.fsdp_rank", folder / "store", checkout, str(folder))


@pytest.mark.parametrize("case", ["clean", "tied"])
def test_each_rank_has_its_own_rows_and_knows_every_byte(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        row = rank[case]
        assert row["error"] is None and row["all_sharded"] and row["own_rows"] and row["unknown"] == []
        assert row["share"] == pytest.approx(0.5, abs=0.05)
        assert row["moved"]["verified_bytes"] == row["moved"]["bytes"] > 0


@pytest.mark.parametrize("case", ["clean", "tied"])
def test_all_that_crosses_is_judged_without_a_false_alarm(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        row = rank[case]
        assert row["gathered"]["checked"] > row["averages"]["buckets"] > 0 and len(row["losses"]) == CASES[case].steps
        assert row["gathered"]["mismatches"] == row["averages"]["mismatches"] == 0 and row["incidents"] == []


def test_checking_changes_nothing(outcomes: Outcomes) -> None:
    for rank in outcomes:
        assert rank["clean"]["weights"] == rank["unchecked"]["weights"]
        assert rank["unchecked"]["gathered"]["checked"] == 0


@pytest.mark.parametrize("case", ["clean", "tied"])
def test_what_is_saved_is_what_the_ranks_have_together(outcomes: Outcomes, case: str) -> None:
    assert [rank[case]["saved_right"] for rank in outcomes] == [True, True]


def test_a_shard_that_changed_is_named_and_sent_again(outcomes: Outcomes) -> None:
    first = outcomes[0]["one shard changes"]
    assert first["error"] is None and first["own_rows"] and first["moved"]["recovered"] == 1
    assert [(row["tensor"], row["kind"], row["ranks"]) for row in first["incidents"]] == [
        (EMBEDDINGS, "wrong shard", [0, 1])
    ]
    assert outcomes[1]["one shard changes"]["own_rows"]


@pytest.mark.parametrize(
    ("case", "said"),
    [("one shard always changes", "do not make the tensor"), ("ranks read other bytes", "the ranks have read")],
)
def test_shards_that_do_not_make_the_whole_stop_every_rank(outcomes: Outcomes, case: str, said: str) -> None:
    for rank in outcomes:
        assert EMBEDDINGS in rank[case]["error"] and said in rank[case]["error"]


def test_weights_that_arrive_wrong_stop_every_rank_before_the_optimizer(outcomes: Outcomes) -> None:
    for rank in outcomes:
        row = rank["gathered, one bit"]
        assert "gathered from the other cards arrived wrong" in row["error"] and row["gathered"]["mismatches"] >= 1
        assert row["incidents"][0]["stage"] == "gathered" and row["incidents"][0]["outcome"] == "stopped"


@pytest.mark.parametrize("case", ["average zeroed", "average with two words swapped"])
def test_a_wrong_average_is_made_again_bit_for_bit(outcomes: Outcomes, case: str) -> None:
    for rank in outcomes:
        row = rank[case]
        assert row["error"] is None and row["averages"]["mismatches"] == row["averages"]["recovered"] > 0
        assert row["weights"] == rank["clean"]["weights"]


def test_an_average_that_stays_wrong_stops_every_rank(outcomes: Outcomes) -> None:
    for rank in outcomes:
        assert "the average of the gradients" in rank["average always wrong"]["error"]


def test_a_bit_that_flips_in_one_ranks_shard_is_found_there(outcomes: Outcomes) -> None:
    assert [rank["memory"]["changed"] for rank in outcomes] == [[[], []], [[], [EMBEDDINGS]]]
    assert all(rank["memory"]["watched"] > 0 for rank in outcomes)


def test_after_an_evaluation_the_shards_are_looked_at_and_its_weights_judged(outcomes: Outcomes) -> None:
    for rank in outcomes:
        row = rank["evaluation"]
        assert row["left_gathered"] > 0 and row["same"] and row["pending"] == [True, False]
