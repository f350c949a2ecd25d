"""What the doctor says of copies between cards and of sums over them; tests/cards tries the trials themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hf_rocm_tune.cards.preflight import PairTrial, ReduceTrial, Way
from hf_rocm_tune.doctor import pairs
from hf_rocm_tune.doctor.diagnose import MEASURED, run_measured
from hf_rocm_tune.doctor.findings import Check, Finding
from hf_rocm_tune.machine.child import Outcome


def by_name(name: str) -> Check:
    return next(check for check in MEASURED if check.name == name)


CARDS = {"devices": [{"device": "cuda:0"}, {"device": "cuda:1"}]}
WRONG = {"cases": 9, "wrong": 2, "problems": [{"case": "cold"}], "staged_wrong": 0, "peer_access": True}


def judged(result: dict[str, Any] | None, **outcome: Any) -> Finding:
    status = outcome.pop("status", "done")
    trial = PairTrial(
        source="cuda:0", destination="cuda:1", outcomes=(Outcome(status=status, result=result, **outcome),)
    )
    return pairs.judge_pair(trial, "1 right", "copies")


@pytest.mark.parametrize(
    ("result", "outcome", "row"),
    [
        ({**WRONG, "wrong": 0, "problems": []}, {}, "pair_right"),
        (WRONG, {}, "pair_wrong"),
        ({**WRONG, "staged_wrong": 1}, {}, "pair_wrong_through_host"),
        (None, {"status": "timeout", "seconds": 60.0, "code": -9, "step": "copying"}, "pair_hung"),
        (None, {"status": "died", "code": -6}, "pair_died"),
        (None, {"status": "died", "code": 1, "error": "RuntimeError: HIP error: page fault"}, "pair_died"),
    ],
)
def test_a_pair_is_told_for_what_it_is(result: dict[str, Any] | None, outcome: dict[str, Any], row: str) -> None:
    finding = judged(result, **outcome)
    assert (finding.row, finding.subject) == (row, "cuda:0->cuda:1")
    assert finding.read[-1] == "with HSA_ENABLE_PEER_SDMA=0: 1 right"
    if row == "pair_wrong":
        assert "correct when read back" in finding.read[0], "bytes that came late"
        assert "AMD documents two contradictory settings" in finding.fix and "must" not in finding.fix
    if row == "pair_wrong_through_host":
        assert "IOMMU" not in finding.fix, "it is not blamed on the pair"


def scripted(monkeypatch: pytest.MonkeyPatch, verdicts: Sequence[str]) -> list[Way]:
    """All-reduce trials with given verdicts; returns the ways that were tried."""
    tried: list[Way] = []

    def trial(devices: Any, way: Way, **_: Any) -> ReduceTrial:
        verdict = verdicts[len(tried)]
        tried.append(way)
        good = {"cases": 9, "wrong": int(verdict == "wrong"), "problems": [{"case": "a sum"}], "gb_per_s": None}
        statuses = {"hung": "timeout", "died": "died"}
        outcome = Outcome(status=statuses.get(verdict, "done"), result=None if verdict in statuses else good)  # type: ignore[arg-type]
        return ReduceTrial(way=way, outcomes=(outcome, outcome))

    monkeypatch.setattr(pairs, "try_all_reduce", trial)
    return tried


@pytest.mark.parametrize(
    ("verdicts", "row", "how"),
    [
        (["right"], "all_reduce_right", ""),
        (["hung", "right"], "all_reduce_without_p2p", "did not return"),
        (["wrong", "right"], "all_reduce_without_p2p", "gave wrong sums"),
        (["died", "hung", "right"], "all_reduce_over_gloo_only", "ended a rank"),
        (["hung", "hung", "died"], "all_reduce_on_no_way", "did not return"),
    ],
)
def test_where_rccl_fails_it_is_said_what_works(
    verdicts: list[str], row: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = scripted(monkeypatch, verdicts)
    (finding,) = run_measured(by_name("all_reduce"), CARDS)
    assert tried == ["rccl", "rccl_without_p2p", "gloo"][: len(verdicts)]
    assert finding.row == row and how in finding.title
