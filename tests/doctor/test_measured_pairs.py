"""Copies between cards and sums over them: every fault of their kind is found, told apart, and ended in time.

On the CPU a pair is memory to memory through the same code, and ranks sum over gloo.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.measured import MEASURED, all_reduce, grad_sync, pairs
from hf_rocm_tune.doctor.measured.conduct import Ask, run_measured
from hf_rocm_tune.doctor.measured.faults import DoctorFault
from hf_rocm_tune.doctor.measured.transfer import RANK_FAULTS
from hf_rocm_tune.hardware.child import Outcome
from hf_rocm_tune.ranks import trial_measures
from hf_rocm_tune.ranks.preflight import LIMIT_S, GradSyncChoice, PreflightFault, SyncWay
from hf_rocm_tune.ranks.trials import PairTrial, ReduceTrial, Way, try_all_reduce, try_pairs
from tests.doctor.together import together

CPU = {"device": "cpu"}
TWO = [CPU, CPU]
SMALL = {"largest": (1 << 20) + 4, "repeats": 2}
LATE = 120


def pair_result(fault: dict[str, str] | None = None) -> dict[str, Any]:
    """One pair, measured in this process."""
    return trial_measures.measure_pair({"source": CPU, "destination": CPU, **SMALL, "fault": fault})


def judged(result: dict[str, Any] | None, **outcome: Any) -> Finding:
    """The doctor's word on one pair."""
    trial = PairTrial(
        source="cuda:0",
        destination="cuda:1",
        outcome=Outcome(status=outcome.pop("status", "done"), result=result, **outcome),
    )
    return pairs._finding(Ask(measured=MEASURED["pairs"], request={}), trial, None)


SUMS: dict[str, dict[str, Any] | None] = {
    "right": None,
    "zeros": {"kind": "zeros", "rank": 0, "where": "cold"},
    "kill": {"kind": "kill", "where": "repeat 1"},
}


@pytest.fixture(scope="module")
def summed() -> dict[str, ReduceTrial]:
    """An all-reduce of two ranks for each fault."""
    one = partial(try_all_reduce, TWO, "gloo", deadline_s=LATE, **SMALL)
    return together({name: partial(one, fault=fault) for name, fault in SUMS.items()}, workers=2)


def test_every_ordered_pair_is_tried_in_a_process_of_its_own() -> None:
    trials = try_pairs(TWO, deadline_s=LATE, **SMALL)
    assert [trial.verdict for trial in trials] == ["right", "right"]
    assert all(trial.staged_right and trial.outcome.result["cases"] > 20 for trial in trials if trial.outcome.result)


@pytest.mark.parametrize(
    ("kind", "where", "case"),
    [
        ("zeros", "cold", "cold"),
        ("drop", "repeat 2", "repeat 2"),
        ("flip", "cast", "cast"),
        ("zero_range", "strided source", "strided source"),
        ("zeros", "strided destination", "strided destination"),
        ("unstable", "4,096 bytes, contiguous, non_blocking", "4,096 bytes, contiguous, non_blocking"),
        ("zeros", "both directions at once", "both directions at once"),
        ("stale", "warm, 1,048,580 bytes, contiguous", "1,048,580 bytes, contiguous"),
    ],
)
def test_a_wrong_copy_is_found_with_its_case_while_the_way_through_the_host_is_right(
    kind: str, where: str, case: str
) -> None:
    result = pair_result({"kind": kind, "where": where})
    assert result["wrong"] and not result["staged_wrong"]
    assert all(case in problem["case"] for problem in result["problems"])
    finding = judged(result)
    assert (finding.status, finding.row, finding.needs_cards) == ("fail", "pair_wrong", 2)
    assert case in finding.evidence[0] and "through the host: right" in finding.evidence
    assert "AMD documents two contradictory settings" in finding.cure and "must" not in finding.cure


def test_bytes_that_come_late_are_wrong_and_told_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_measures, "_count", lambda target, number: 5)
    result = pair_result()
    assert result["wrong"] == result["cases"]
    assert "right when it was read back" in judged({**result, "staged_wrong": 0}).evidence[0]


def test_what_only_the_host_reads_wrong_counts_when_it_reads_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_measures, "_count", lambda target, number: 0)
    assert pair_result({"kind": "zeros", "where": "cold"})["wrong"] == 1
    reads = iter(range(1, 1000))

    def changing(read: torch.Tensor) -> torch.Tensor:
        """Every reading is another one."""
        return read.clone().view(torch.uint8).fill_(next(reads) % 251)

    monkeypatch.setattr(trial_measures, "as_bytes", changing)
    assert pair_result()["wrong"] == 0


def test_what_is_wrong_through_the_host_too_is_not_blamed_on_the_pair() -> None:
    result = pair_result({"kind": "zeros"})
    assert result["wrong"] and result["staged_wrong"]
    finding = judged(result)
    assert finding.row == "pair_wrong_through_host" and "IOMMU" not in finding.cure


@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        ({"status": "timeout", "seconds": 60.0, "code": -9, "step": "copying"}, "pair_hung"),
        ({"status": "died", "code": -6}, "pair_died"),
        ({"status": "died", "code": 1, "error": "RuntimeError: HIP error: page fault"}, "pair_died"),
    ],
)
def test_a_pair_that_gives_no_result_is_a_failure_of_that_pair(outcome: dict[str, Any], row: str) -> None:
    finding = judged(None, **outcome)
    assert (finding.status, finding.row, finding.subject) == ("fail", row, "cuda:0->cuda:1")


def test_only_the_pair_that_fails_is_tried_again_without_the_engines_for_peers() -> None:
    fault = DoctorFault(check="pairs", kind="kill")
    measured = replace(MEASURED["pairs"], deadline_s=LATE)
    findings = run_measured(measured, [{"devices": TWO, **SMALL, "hip": True}], fault=fault)
    assert [finding.row for finding in findings] == ["fault_on_purpose", "pair_died", "pair_died"]
    assert all("HSA_ENABLE_PEER_SDMA=0: copies cpu -> cpu: the trial was" in line.evidence[-1] for line in findings[1:])


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        ("right", "right", "sums right on 2 ranks"),
        ("zeros", "wrong", "rank 0 got 1 of"),
        ("kill", "died", "rank 1 was ended by SIGKILL while summing repeat 1"),
    ],
)
def test_a_sum_that_is_wrong_or_ends_a_rank_is_told(
    fault: str, verdict: str, words: str, summed: dict[str, ReduceTrial]
) -> None:
    trial = summed[fault]
    assert trial.verdict == verdict, trial.reason
    assert words in trial.reason


@pytest.mark.long
def test_a_rank_that_never_joins_holds_the_others_until_the_deadline() -> None:
    deadline_s = 20  # a busy machine takes as long to import
    trial = try_all_reduce(TWO, "gloo", deadline_s=deadline_s, **SMALL, fault={"kind": "absent"})
    assert trial.verdict == "hung"
    assert all(f"rank {rank} had not ended" in trial.reason for rank in (0, 1)) and "joining" in trial.reason


@pytest.mark.parametrize("kind", ["wrong", "zeros"])
def test_the_sums_of_a_rank_are_compared_bit_for_bit(kind: str, tmp_path: Path) -> None:
    try:
        request = {**CPU, "rank": 0, "world": 1, "backend": "gloo", "store": str(tmp_path / "store"), "timeout_s": 60}
        result = trial_measures.measure_sums({**request, "largest": 4096, "repeats": 1, "fault": {"kind": kind}})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert result["wrong"] == result["cases"] > 3


def test_a_sum_to_which_nothing_was_added_is_told_as_that() -> None:
    mine, other = (trial_measures._numbers(5, rank, 999, torch.bfloat16, 2, torch.device("cpu")) for rank in (0, 1))
    assert trial_measures._compare(mine + other, mine, 5, 2) == (None, False)
    damage, own = trial_measures._compare(mine.clone(), mine, 5, 2)
    assert damage is not None and own


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

    monkeypatch.setattr(all_reduce, "try_all_reduce", trial)
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
    cards = {"devices": [{"device": "cuda:0"}, {"device": "cuda:1"}], **SMALL}
    (finding,) = run_measured(MEASURED["all_reduce"], [cards])
    assert tried == ["rccl", "rccl_without_p2p", "gloo"][: len(verdicts)]
    assert finding.row == row and how in finding.title and finding.needs_cards == 2


@pytest.mark.parametrize(
    ("way", "shown", "row", "status"),
    [
        ("ddp", True, "grad_sync_ddp", "ok"),
        ("ddp_without_p2p", True, "grad_sync_without_p2p", "info"),
        ("host", True, "grad_sync_host", "info"),
        ("one_card", False, "grad_sync_one_card", "fail"),
        ("ddp", False, "", "unknown"),
    ],
)
def test_the_decision_that_training_would_take_is_named(
    way: SyncWay, shown: bool, row: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def chosen(devices: Any, *, fault: Any, limit_s: float, **_: Any) -> GradSyncChoice:
        asked.append((devices, fault, limit_s))
        return GradSyncChoice(way=way, reason="the reason", evidence=("a trial",), shown=shown)

    monkeypatch.setattr(grad_sync, "try_machine", chosen)
    fault = DoctorFault(check="grad_sync", kind="hang", where="cold")
    marked, finding = run_measured(MEASURED["grad_sync"], [{"devices": TWO}], fault=fault)
    assert (marked.row, finding.row, finding.status) == ("fault_on_purpose", row, status)
    assert "the reason" in finding.text and "a trial" in finding.evidence
    assert asked == [(TWO, PreflightFault(trial="ddp", kind="hang", where="cold"), LIMIT_S)], "as training does"


def test_sums_are_exact_for_any_number_of_ranks_and_depend_on_place_and_rank() -> None:
    for world in (2, 3, 8, 64):
        for dtype in trial_measures._DTYPES:
            parts = [trial_measures._numbers(1, rank, 5000, dtype, world, torch.device("cpu")) for rank in range(world)]
            assert torch.equal(sum(part.double() for part in parts), sum(parts).double())  # type: ignore[union-attr]
            assert world > 8 or not torch.equal(parts[0], parts[1])
            assert parts[0][:100].unique().numel() > 3 or world > 8


def test_trials_and_checks_are_made_without_torch() -> None:
    program = (
        "import sys, hf_rocm_tune.ranks.trials, hf_rocm_tune.doctor.measured.conduct as conduct\n"
        "from importlib import import_module\n"
        "from hf_rocm_tune.doctor.measured import MEASURED, PACKAGE\n"
        "modules = [import_module(f'{PACKAGE}.{one.module}') for one in MEASURED.values()]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    assert RANK_FAULTS == trial_measures.SUM_FAULTS, "a copy of what cannot be imported without torch"


def test_each_half_can_be_tried_by_hand() -> None:
    module = "hf_rocm_tune.ranks.trials"
    done = subprocess.run([sys.executable, "-m", module, "nothing"], input=b"{}", capture_output=True, timeout=60)
    assert done.returncode == 2 and b"give pair or rank" in done.stdout


@pytest.mark.gpu
def test_a_pair_of_one_gpu_with_itself_is_right_and_a_fault_is_found() -> None:
    gpu = {"device": "cuda:0"}
    sizes = {"largest": 64 << 20, "repeats": 4}
    assert [trial.verdict for trial in try_pairs([gpu, gpu], deadline_s=LATE, **sizes)] == ["right", "right"]
    for where in ("cold", "cast", "both"):
        first = try_pairs([gpu, gpu], deadline_s=LATE, **sizes, fault={"kind": "zeros", "where": where})[0]
        assert first.verdict == "wrong" and first.staged_right


@pytest.mark.gpu
def test_one_rank_sums_over_rccl_or_nccl() -> None:
    trial = try_all_reduce([{"device": "cuda:0"}], "rccl", deadline_s=LATE, largest=1 << 20)
    assert trial.verdict == "right", trial.reason


@pytest.mark.gpu
def test_two_gpus_are_measured() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two accelerators")
    devices = [{"device": "cuda:0"}, {"device": "cuda:1"}]
    for name in ("pairs", "all_reduce"):
        measured = MEASURED[name]
        for finding in run_measured(measured, [{**measured.options, "devices": devices}]):
            # What the machine's own copies are worth is not ours to assert; that there is a word on each is.
            assert finding.status in ("ok", "fail") and finding.evidence
