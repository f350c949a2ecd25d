"""The preflight: no way is taken that a trial has shown to be wrong, what was not tried decides nothing, and a rank
that is gone or stands still holds nobody up for ever. Whole runs are in `tests/e2e/test_preflight.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.cards.preflight import (
    IMPORTING,
    VARIABLE,
    Preflight,
    PreflightFault,
    SyncMethod,
    Trial,
    Verdict,
    choose,
    insist,
    try_machine,
)
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import Outcome
from tests.two_ranks import environments

DAMAGE = {"kind": "zeros", "wrong": 8, "nbytes": 64, "first_offset": 16, "found": "0000", "right": "abcd"}
CARDS = [{"device": "cuda:0", "address": None}, {"device": "cuda:1", "address": None}]


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


def sums(over: str, verdict: Verdict) -> Trial:
    return Trial(subject=f"all-reduce over {over}", what="sums", outcomes=(outcome("right"), outcome(verdict)))


def scripted(monkeypatch: pytest.MonkeyPatch, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Trials with given verdicts by backend; returns what was tried."""
    tried: list[str] = []

    def one_sum(devices: Any, over: str, *, deadline_s: float, **_: Any) -> Trial:
        assert deadline_s > 0
        tried.append(over)
        return sums(over, verdicts[over])

    monkeypatch.setattr(preflight, "try_all_reduce", one_sum)
    return tried


P2P = {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(
    ("gloo", "rccl", "without", "environ", "tried", "way"),
    [
        ("right", "right", "-", {}, 2, "ddp"),
        ("right", "hung", "right", {}, 3, "ddp_without_p2p"),
        ("right", "wrong", "died", {}, 3, "host"),
        ("right", "untried", "-", {}, 2, "host"),
        ("untried", "right", "-", {}, 2, "ddp"),
        ("untried", "wrong", "wrong", {}, 3, "one_card"),
        ("died", "-", "-", {}, 1, "one_card"),
        ("right", "right", "-", P2P, 2, "ddp"),
        ("right", "wrong", "-", P2P, 2, "host"),  # the user's own variable is kept and counts
    ],
)
def test_ways_are_tried_in_turn_and_the_fastest_that_was_shown_to_work_is_taken(
    gloo: Verdict,
    rccl: Verdict,
    without: Verdict,
    environ: dict[str, str],
    tried: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = scripted(monkeypatch, {"host": gloo, "ddp": rccl, "ddp_without_p2p": without})
    chosen = try_machine(CARDS, environ=environ)
    assert (chosen.method, told) == (way, ["host", "ddp", "ddp_without_p2p"][:tried])
    assert chosen.shown == (way != "one_card") and len(chosen.evidence) == tried
    assert "\n" not in chosen.reason


@pytest.mark.parametrize(
    ("asked", "gloo", "way", "shown"),
    [("auto", "right", "ddp", True), ("host", "right", "host", True), ("host", "untried", "host", False)],
)
def test_on_the_cpu_and_where_the_host_is_asked_for_only_gloo_is_tried(
    asked: Any, gloo: Verdict, way: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = scripted(monkeypatch, {"ddp": gloo, "host": gloo})
    devices = CARDS if asked == "host" else [{"device": "cpu", "address": None}] * 2
    chosen = try_machine(devices, asked=asked, environ={})
    assert (chosen.method, chosen.shown, told) == (way, shown, [way])


def test_where_nothing_could_be_tried_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scripted(monkeypatch, {})
    alone = try_machine(CARDS[:1], environ={})
    assert (alone.method, alone.shown, told) == ("ddp", False, [])
    late = try_machine(CARDS, environ={}, limit_s=1.0)
    assert (late.method, late.shown, told) == ("ddp", False, []) and "no time" in late.reason


def test_the_evidence_says_what_stood_there_instead_and_for_how_long() -> None:
    chosen = choose({"host": sums("gloo", "wrong"), "ddp": sums("rccl", "died")})
    first, died = chosen.evidence
    assert "8 of 64 bytes (zeros)" in first and "0000 instead of abcd" in first and first.endswith("(2.0 s)")
    assert "SIGSEGV" in died and "gloo" in chosen.reason


# ---- what the user asked for -----------------------------------------------------------------------------------


def done(asked: Any, way: SyncMethod) -> Preflight:
    return Preflight(asked=asked, method=way, reason="the reason", seconds=3.0)


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
def test_a_way_that_failed_is_refused_with_its_cure(asked: str, way: SyncMethod, cure: str) -> None:
    with pytest.raises(StallError) as caught:
        insist(done(asked, way), one_card="`one card`")
    assert cure in str(caught.value) and "the reason" in str(caught.value) and caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trial=ddp", "'kind' is missing"),
        ("kind=hang", "'trial' is missing"),
        ("trial=ddp,kind=flip", "expected one of wrong hang"),
        ("trial=other,kind=hang", "expected one of ddp"),
        ("trial=ddp,kind=hang,rank=x", "rank=x.*whole number from 0 on"),
        ("trial=ddp,trial=ddp,kind=hang", "is given twice"),
        ("nonsense", "is not understood"),
    ],
)
def test_a_fault_that_does_not_exist_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PreflightFault.from_environment({VARIABLE: text})


# ---- in two processes that do nothing else ---------------------------------------------------------------------


@contextmanager
def ranks(tmp_path: Path, *, number: int = 2, **settings: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of a job of two that make the preflight; ``settings`` of ``preflight_rank``."""
    running = []
    command = [sys.executable, "-m", "tests.cards.preflight_rank", json.dumps(settings)]
    for environ in environments(tmp_path / "exit.json")[:number]:
        own = {**os.environ, **environ}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    printed, _ = process.communicate(timeout=240)
    return {**json.loads(printed), "exit": process.returncode}


@pytest.mark.long  # tests/e2e/test_preflight.py has two ranks that agree
def test_where_all_is_right_both_ranks_hear_so(tmp_path: Path) -> None:
    with ranks(tmp_path, limit_s=180) as running:  # a busy machine takes long to import torch
        first, second = map(answer, running)
    assert (first["exit"], first["method"], first["shown"], first["fault_injection"]) == (0, "ddp", True, None)
    assert {**first, "seconds": 0, "lines": 0} == {**second, "seconds": 0, "lines": 0}
    assert len(first["lines"]) == 1 and "sums right on 2 ranks" in first["lines"][0]


def test_a_rank_that_never_joins_or_dies_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    """Also where the other one has not yet heard of its card when it dies."""
    with (
        ranks(tmp_path, number=1, meet_s=3) as (alone,),
        ranks(tmp_path / "two", dies=True) as (_, left),
        ranks(tmp_path / "late", dies=True, late=2) as (_, late),
    ):
        said = answer(alone)
        assert said["exit"] == said["code"] == 4
        assert "not all of 2 ranks joined the preflight within 3 s" in said["message"]
        for said in map(answer, (left, late)):
            assert said["exit"] == said["code"] == 4 and "rank 0 ended while it tried the cards" in said["message"]
