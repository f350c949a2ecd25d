"""What the doctor says of copies between cards and of sums over them; tests/cards tries the trials themselves."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.cards.preflight import Preflight, Trial
from hf_rocm_tune.doctor import pairs
from hf_rocm_tune.doctor.diagnose import MEASURED, run_measured
from hf_rocm_tune.doctor.findings import Finding
from hf_rocm_tune.machine.child import Outcome

WRONG = {"cases": 9, "wrong": 2, "problems": [{"case": "cold"}], "staged_wrong": 0, "peer_access": True}


def judged(result: dict[str, Any] | None, **outcome: Any) -> Finding:
    status = outcome.pop("status", "done")
    outcomes = (Outcome(status=status, result=result, **outcome),)
    trial = Trial(subject="cuda:0 -> cuda:1", what="copies", outcomes=outcomes)
    return pairs.assess_pair("cuda:0", "cuda:1", trial, "1 right", "copies")


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


@pytest.mark.parametrize(
    ("preflight", "row"),
    [
        (Preflight(method="ddp", reason="right"), "all_reduce_right"),
        (Preflight(method="ddp", reason="torch was still imported", shown=False), ""),
        (Preflight(method="ddp_without_p2p", reason="rank 1 had not ended"), "all_reduce_without_p2p"),
        (Preflight(method="host", reason="rank 1 had not ended"), "all_reduce_over_gloo_only"),
        (Preflight(method="one_card", reason="rank 1 had not ended", shown=False), "all_reduce_on_no_way"),
    ],
)
def test_where_rccl_fails_it_is_said_what_works(
    preflight: Preflight, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "try_machine", lambda devices, **_: preflight)
    check = next(check for check in MEASURED if check.name == "all_reduce")
    (finding,) = run_measured(check, {"devices": [{"device": "cuda:0"}, {"device": "cuda:1"}]})
    assert (finding.row, finding.status) == (row, "ok" if "right" in row else "fail" if row else "unknown")
    assert row == "all_reduce_right" or preflight.reason in finding.text
