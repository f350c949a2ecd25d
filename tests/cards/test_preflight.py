"""The preflight: no way is taken that a trial has shown to be wrong, what was not tried decides nothing, and a rank
that is gone or stands still holds nobody up for ever. Whole runs are in `tests/e2e/test_preflight.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.cards.preflight import (
    IMPORTING,
    VARIABLE,
    GradSyncChoice,
    PairTrial,
    Preflight,
    PreflightFault,
    ReduceTrial,
    SyncWay,
    Verdict,
    choose,
    insist,
    try_machine,
)
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import Outcome
from tests.doctor.together import together

DAMAGE = {"kind": "zeros", "wrong": 8, "nbytes": 64, "first_offset": 16, "found": "0000", "right": "abcd"}
CARDS = [{"device": "cuda:0", "address": None}, {"device": "cuda:1", "address": None}]
OVER = {"ddp": "rccl", "ddp_without_p2p": "rccl_without_p2p", "host": "gloo"}


def outcome(verdict: Verdict) -> Outcome:
    """How a child ends that leads to a verdict."""
    if verdict in ("right", "wrong"):
        problems = [{"case": "a case", "damage": DAMAGE}] if verdict == "wrong" else []
        result = {"cases": 9, "wrong": len(problems), "problems": problems, "staged_wrong": 0}
        return Outcome(status="done", result=result, seconds=2.0)
    if verdict == "died":
        return Outcome(status="died", code=-11, step="summing", seconds=2.0)
    step = IMPORTING if verdict == "untried" else "summing"
    return Outcome(status="timeout", code=-9, step=step, seconds=9.0)


def pair(verdict: Verdict) -> PairTrial:
    return PairTrial(source="cuda:0", destination="cuda:1", outcome=outcome(verdict))


def sums(way: SyncWay, verdict: Verdict) -> ReduceTrial:
    return ReduceTrial(way=OVER[way], outcomes=(outcome("right"), outcome(verdict)))  # type: ignore[arg-type]


def all_sums(verdicts: Mapping[SyncWay, Verdict]) -> dict[SyncWay, ReduceTrial]:
    return {way: sums(way, verdict) for way, verdict in verdicts.items()}


@pytest.mark.parametrize(
    ("pairs", "verdicts", "way"),
    [
        (["right", "right"], {"host": "right", "ddp": "right"}, "ddp"),
        (["right", "wrong"], {"host": "right", "ddp": "right", "ddp_without_p2p": "right"}, "ddp_without_p2p"),
        (["hung", "right"], {"host": "right", "ddp_without_p2p": "right"}, "ddp_without_p2p"),
        (["right", "right"], {"host": "right", "ddp": "hung", "ddp_without_p2p": "right"}, "ddp_without_p2p"),
        (["right", "right"], {"host": "right", "ddp": "wrong", "ddp_without_p2p": "died"}, "host"),
        (["died", "right"], {"host": "right", "ddp_without_p2p": "hung"}, "host"),
        (["right", "right"], {"host": "died", "ddp": "right"}, "one_card"),
        (["wrong", "wrong"], {"host": "hung", "ddp_without_p2p": "hung"}, "one_card"),
        (["right", "right"], {"host": "right", "ddp": "untried"}, "host"),
        (["untried", "right"], {"host": "untried", "ddp": "right"}, "ddp"),
        ([], {"ddp": "right"}, "ddp"),
        ([], {"ddp": "wrong", "host": "right"}, "host"),
        ([], {"ddp": "wrong", "host": "untried"}, "one_card"),
    ],
)
def test_the_strongest_way_that_was_shown_to_work_is_taken(
    pairs: list[Verdict], verdicts: dict[SyncWay, Verdict], way: str
) -> None:
    chosen = choose([pair(one) for one in pairs], all_sums(verdicts))
    assert chosen.way == way
    assert chosen.shown == (way != "one_card")
    assert len(chosen.evidence) == len(pairs) + len(verdicts)


def test_where_nothing_could_be_tried_nothing_is_claimed() -> None:
    chosen = choose([pair("untried")], all_sums({"ddp": "untried", "host": "untried"}))
    assert (chosen.way, chosen.shown) == ("ddp", False) and "gave no result" in chosen.reason
    assert not choose([], {}).shown


def test_wrong_peer_copies_do_not_matter_to_rccl_that_may_not_use_them() -> None:
    assert choose([pair("wrong")], all_sums({"ddp": "right"}), peers=False).way == "ddp"


def test_the_evidence_says_which_pair_what_stood_there_instead_and_for_how_long() -> None:
    chosen = choose([pair("wrong")], all_sums({"host": "right", "ddp_without_p2p": "died"}))
    first, _, died = chosen.evidence
    assert "cuda:0 -> cuda:1" in first and "8 of 64 bytes (zeros)" in first and "0000 instead of abcd" in first
    assert first.endswith("(2.0 s)") and "SIGSEGV" in died
    assert "cuda:0 -> cuda:1" in chosen.reason and "\n" not in chosen.reason


# ---- the order of the trials -----------------------------------------------------------------------------------


def scripted(
    monkeypatch: pytest.MonkeyPatch, pairs: Sequence[Verdict], verdicts: Mapping[str, Sequence[Verdict]]
) -> list[str]:
    """Trials with given verdicts, one after the other where a way is tried again; returns what was tried."""
    tried: list[str] = []
    left = {over: list(each) for over, each in verdicts.items()}

    def at_once(devices: Any, *, sums: Mapping[str, str], **_: Any) -> tuple[list[PairTrial], dict[str, ReduceTrial]]:
        tried.append("pairs")
        return [pair(one) for one in pairs], {name: one_sum(devices, way) for name, way in sums.items()}

    def one_sum(devices: Any, way: str, *, deadline_s: float = 1.0, **_: Any) -> ReduceTrial:
        assert deadline_s > 0
        tried.append(way)
        return ReduceTrial(way=way, outcomes=(outcome(left[way].pop(0)),))  # type: ignore[arg-type]

    monkeypatch.setattr(preflight, "try_at_once", at_once)
    monkeypatch.setattr(preflight, "try_all_reduce", one_sum)
    return tried


@pytest.mark.parametrize(
    ("pairs", "verdicts", "tried", "way"),
    [
        (["right"], {"rccl": ["right"], "gloo": ["right"]}, "pairs gloo rccl", "ddp"),
        (
            ["wrong"],
            {"rccl_without_p2p": ["right"], "gloo": ["right"]},
            "pairs gloo rccl_without_p2p",
            "ddp_without_p2p",
        ),
        (
            ["right"],
            {"rccl": ["hung"], "rccl_without_p2p": ["hung"], "gloo": ["right"]},
            "pairs gloo rccl rccl_without_p2p",
            "host",
        ),
        # gloo beside a card that hangs is tried again alone
        (
            ["hung"],
            {"rccl_without_p2p": ["hung"], "gloo": ["hung", "right"]},
            "pairs gloo rccl_without_p2p gloo",
            "host",
        ),
        (["right"], {"rccl": ["right"], "gloo": ["died", "right"]}, "pairs gloo rccl gloo", "ddp"),
        (["right"], {"rccl": ["right"], "gloo": ["died", "died"]}, "pairs gloo rccl gloo", "one_card"),
    ],
)
def test_only_what_can_still_decide_is_tried(
    pairs: list[Verdict],
    verdicts: dict[str, list[Verdict]],
    tried: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = scripted(monkeypatch, pairs, verdicts)
    assert try_machine(CARDS, environ={}).way == way
    assert " ".join(told) == tried


def test_the_users_own_variable_is_kept_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scripted(monkeypatch, ["wrong"], {"rccl": ["right"], "gloo": ["right"]})
    assert try_machine(CARDS, environ={"NCCL_P2P_DISABLE": "1"}).way == "ddp" and told[-1] == "rccl"
    told = scripted(monkeypatch, ["wrong"], {"gloo": ["right"]})
    assert try_machine(CARDS, environ={"NCCL_P2P_DISABLE": "0"}).way == "host" and "rccl_without_p2p" not in told


def test_of_a_host_that_is_asked_for_only_the_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scripted(monkeypatch, [], {"gloo": ["right"]})
    assert try_machine(CARDS, asked="host", environ={}).way == "host" and told == ["gloo"]
    scripted(monkeypatch, [], {"gloo": ["untried"]})
    assert not try_machine(CARDS, asked="host", environ={}).shown


def test_one_rank_has_no_pair_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scripted(monkeypatch, [], {})
    alone = try_machine(CARDS[:1], environ={})
    assert (alone.way, alone.shown, told) == ("ddp", False, [])


def test_no_trial_begins_that_could_not_end_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scripted(monkeypatch, ["right"], {"gloo": ["right"], "rccl": ["right"]})
    first = ([pair("hung")], {"host": sums("host", "right")})
    monkeypatch.setattr(preflight, "try_at_once", lambda *_, **__: first)
    assert try_machine(CARDS, environ={}, limit_s=3.0).way == "host" and told == []


# ---- what the user asked for -----------------------------------------------------------------------------------


def done(asked: Any, way: SyncWay) -> Preflight:
    return Preflight(asked=asked, choice=GradSyncChoice(way=way, reason="the reason"), seconds=3.0)


@pytest.mark.parametrize(
    ("asked", "way", "cure"),
    [
        ("auto", "one_card", "`one card`"),
        ("ddp", "one_card", "`one card`"),
        ("host", "one_card", "`one card`"),
        ("ddp", "ddp_without_p2p", "NCCL_P2P_DISABLE=1"),
        ("ddp", "host", "--grad_sync host"),
    ],
)
def test_a_way_that_failed_is_refused_with_its_cure(asked: str, way: SyncWay, cure: str) -> None:
    with pytest.raises(StallError) as caught:
        insist(done(asked, way), one_card="`one card`")
    assert cure in str(caught.value) and "the reason" in str(caught.value) and caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("asked", "way"), [("auto", "ddp"), ("auto", "ddp_without_p2p"), ("auto", "host"), ("ddp", "ddp"), ("host", "host")]
)
def test_a_way_that_works_is_let_pass(asked: str, way: SyncWay) -> None:
    insist(done(asked, way), one_card="")
    first, *more = done(asked, way).lines()
    assert "the reason" in first
    if way == "ddp_without_p2p":  # what it does not cure is said with it
        assert len(more) == 1 and "legacy-rocm-build#6505" in more[0] and "--grad_sync host" in more[0]
    else:
        assert more == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trial=ddp", "'kind' is missing"),
        ("kind=hang", "'trial' is missing"),
        ("trial=ddp,kind=flip", "expected one of wrong zeros own absent hang"),
        ("trial=other,kind=hang", "expected one of pairs ddp"),
        ("trial=ddp,kind=hang,rank=x", "rank=x.*whole number from 0 on"),
        ("trial=ddp,trial=ddp,kind=hang", "is given twice"),
        ("nonsense", "is not understood"),
    ],
)
def test_a_fault_that_does_not_exist_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PreflightFault.from_environment({VARIABLE: text})


def test_a_fault_hits_its_trial_only() -> None:
    fault = PreflightFault.from_environment({VARIABLE: "trial=host, kind=hang, rank=0"})
    assert fault is not None and fault.of("ddp") is None
    assert fault.of("host") == {"kind": "hang", "where": "summing", "rank": 0}
    assert PreflightFault.from_environment({}) is None


# ---- in two processes that do nothing else ---------------------------------------------------------------------

PATIENCE_S = 240.0  # for the process that is looked at, its imports included
# Of trials that end by themselves: a busy machine takes longer than the real limit to import torch, which is "untried".
AMPLE = {"limit_s": 180}

Answers = dict[int, dict[str, Any]]


def ranks(fault: str = "", *, stays: frozenset[int] = frozenset(), **settings: Any) -> Answers:
    """What each rank printed, with its exit code.

    Args:
        fault: what is harmed.
        stays: ranks that never end, and are killed afterwards.
        settings: of ``preflight_rank``.
    """
    answers: Answers = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "place"
        settings["place"] = str(place)
        command = [sys.executable, "-m", "tests.cards.preflight_rank", json.dumps(settings)]
        running = []
        for rank in (0, 1):
            own = {**os.environ, VARIABLE: fault, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=own)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for rank, process in enumerate(running):
            if rank not in stays:
                printed, _ = process.communicate(timeout=PATIENCE_S)
                answers[rank] = {**json.loads(printed or "{}"), "exit": process.returncode}
        assert stays or not place.exists(), "nothing is left where they met"
    return answers


FAULTS: dict[str, dict[str, Any]] = {
    "none": AMPLE,
    "kill": {"fault": "trial=ranks,kind=kill"},
    "absent": {"fault": "trial=ranks,kind=absent", "stays": frozenset({1}), "meet_s": 4},
    "stop": {"fault": "trial=ranks,kind=stop", "stays": frozenset({0}), "limit_s": 1},
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Answers]:
    return together({name: partial(ranks, **fault) for name, fault in FAULTS.items()}, workers=2)


def test_where_all_is_right_both_ranks_hear_so(ended: dict[str, Answers]) -> None:
    first, second = (
        {key: said[key] for key in said if key not in ("seconds", "lines")} for said in ended["none"].values()
    )
    assert first == second
    assert (first["exit"], first["way"], first["shown"], first["fault_injection"]) == (0, "ddp", True, None)
    (line,) = ended["none"][0]["lines"]
    assert "sums right on 2 ranks" in line


@pytest.mark.parametrize(
    ("fault", "teller", "words"),
    [
        ("kill", 1, "rank 0 (process"),
        ("absent", 0, "rank 1 of 2 did not join the preflight within 4 s"),
        ("stop", 1, "made no decision within 6 s"),
    ],
)
def test_a_rank_that_is_gone_or_stands_still_is_named_by_the_other(
    fault: str, teller: int, words: str, ended: dict[str, Answers]
) -> None:
    said = ended[fault][teller]
    assert said["exit"] == said["code"] == 4 and words in said["message"]
    if fault == "kill":
        assert ended[fault][0]["exit"] == -9 and "ended while it tried the cards" in said["message"]


def test_what_is_left_of_another_job_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir(mode=0o700)
    note = {"rank": 1, "pid": os.getpid(), "born": 1.0, "device": {}}
    (tmp_path / "place" / "rank-1").write_text(json.dumps(note))
    (tmp_path / "place" / "left-0").touch()
    environ = {"WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(StallError, match="rank 1 of 2 did not join"):
        preflight.run(asked="auto", device={"device": "cpu"}, environ=environ, place=tmp_path / "place", meet_s=0.2)
    assert not (tmp_path / "place").exists()
