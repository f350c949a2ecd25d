"""The preflight in two real processes: with every fault each rank ends in time, with the right decision or message.

A rank here is a process that does nothing else (`preflight_rank`); `tests/e2e/test_preflight.py` does the same in whole
runs. There are no cards here: sums run over gloo between processes on the CPU, and pairs are memory to memory. What
that cannot show is what RCCL and peer copies do; the order of their trials is tried in `test_choice`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from hf_rocm_tune.distributed.preflight import LIMIT_S
from hf_rocm_tune.distributed.preflight_fault import VARIABLE
from tests.doctor.together import together
from tests.two_ranks import free_port

PATIENCE_S = 240.0  # for the process that is looked at, its imports included
# Of trials that end by themselves: a busy machine takes longer than the real limit to import torch, which is "untried".
AMPLE = {"limit_s": 180}

Answers = dict[int, dict[str, Any]]


def ranks(
    fault: str = "", *, machines: Sequence[int] = (0, 0), stays: frozenset[int] = frozenset(), **settings: Any
) -> Answers:
    """What each rank printed, with its exit code.

    Args:
        fault: what is harmed.
        machines: of each rank the number of its machine, as torchrun has it in GROUP_RANK.
        stays: ranks that never end, and are killed afterwards.
        settings: of ``preflight_rank``.
    """
    port = free_port()
    common = {"WORLD_SIZE": str(len(machines)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), VARIABLE: fault}
    command = [sys.executable, "-m", "tests.distributed.preflight_rank", json.dumps(settings)]
    answers: Answers = {}
    with ExitStack() as stack:
        running = []
        for rank, machine in enumerate(machines):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": str(machine)}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=own)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for rank, process in enumerate(running):
            if rank not in stays:
                printed, _ = process.communicate(timeout=PATIENCE_S)
                answers[rank] = {**json.loads(printed or "{}"), "exit": process.returncode}
    return answers


FAULTS: dict[str, dict[str, Any]] = {
    "none": AMPLE,
    "wrong": {"fault": "trial=ddp,kind=wrong", **AMPLE},
    "refused": {"fault": "trial=ddp,kind=zeros,rank=0", "asked": "ddp", **AMPLE},
    "kill": {"fault": "trial=ranks,kind=kill"},
    "absent": {"fault": "trial=ranks,kind=absent", "stays": frozenset({1}), "meet_s": 4},
}
LONG_FAULTS: dict[str, dict[str, Any]] = {
    "hang": {"fault": "trial=ddp,kind=hang"},
    "crash": {"fault": "trial=ddp,kind=crash"},
    "never joins": {"fault": "trial=ddp,kind=absent"},
    "own": {"fault": "trial=ddp,kind=own,where=repeat 1"},
    "garbage": {"fault": "trial=ddp,kind=garbage"},
    "pair of zeros": {"fault": "trial=pairs,kind=zeros,where=cold"},
    "pair that hangs": {"fault": "trial=pairs,kind=hang"},
    "gloo": {"fault": "trial=host,kind=crash", "asked": "host"},
    "stop": {"fault": "trial=ranks,kind=stop", "stays": frozenset({0}), "limit_s": 1},
    "two machines": {"fault": "trial=ddp,kind=wrong", "machines": (0, 0, 1), **AMPLE},
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Answers]:
    return together({name: partial(ranks, **fault) for name, fault in FAULTS.items()}, workers=2)


@pytest.fixture(scope="module")
def ended_long() -> dict[str, Answers]:
    return together({name: partial(ranks, **fault) for name, fault in LONG_FAULTS.items()}, workers=2)


def agreed(answers: Answers) -> dict[str, Any]:
    """What all ranks say, which must be the same."""
    first, *others = ({key: said[key] for key in said if key not in ("seconds", "lines")} for said in answers.values())
    assert all(other == first for other in others)
    return first


def test_where_all_is_right_both_ranks_hear_so_and_join_over_the_same_store(ended: dict[str, Answers]) -> None:
    said = agreed(ended["none"])
    assert (said["exit"], said["way"], said["shown"], said["fault_injection"]) == (0, "ddp", True, None)
    (line,) = ended["none"][0]["lines"]
    assert "sums right on 2 ranks" in line


def test_wrong_sums_lead_to_the_host_on_both_ranks(ended: dict[str, Answers]) -> None:
    said = agreed(ended["wrong"])
    assert (said["exit"], said["way"]) == (0, "host") and said["fault_injection"] == "trial=ddp,kind=wrong"
    assert "rank 1 got 13 of 13 sums wrong" in said["evidence"][0] and "instead of" in said["evidence"][0]
    assert "harmed on request" in ended["wrong"][0]["lines"][0]


def test_a_way_that_the_user_insists_on_ends_both_ranks_when_it_fails(ended: dict[str, Answers]) -> None:
    said = agreed(ended["refused"])
    assert said["exit"] == said["code"] == 4
    assert "--grad_sync ddp failed the preflight" in said["message"] and "--grad_sync host" in said["message"]


def test_a_rank_that_tries_the_cards_and_is_killed_is_named_by_the_other(ended: dict[str, Answers]) -> None:
    killed, other = ended["kill"][0], ended["kill"][1]
    assert killed["exit"] == -9
    assert other["exit"] == 4
    # Without a launcher's agent rank 0 hosts the store, so it is its store that is missed, or the process itself.
    assert "rank 0" in other["message"] and "ended" in other["message"]


def test_a_rank_that_never_joins_is_named(ended: dict[str, Answers]) -> None:
    said = ended["absent"][0]
    assert said["exit"] == 4 and "rank 1 of 2 did not come to the preflight within 4 s" in said["message"]


@pytest.mark.long
def test_a_rank_that_is_stopped_while_it_tries_holds_nobody_up_for_ever(ended_long: dict[str, Answers]) -> None:
    said = ended_long["stop"][1]
    assert said["exit"] == 4 and "rank 0" in said["message"] and "no decision within 6 s" in said["message"]


@pytest.mark.long
def test_the_weakest_machine_decides_for_a_machine_that_has_nothing_to_try(ended_long: dict[str, Answers]) -> None:
    said = agreed(ended_long["two machines"])
    assert (said["exit"], said["way"], len(ended_long["two machines"])) == (0, "host", 3)
    assert sorted(said["machines"].values()) == ["ddp", "host"]
    assert "(from rank 0)" in said["reason"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "way", "words"),
    [
        ("hang", "host", "rank 1 had not ended after"),
        ("crash", "host", "rank 1 was ended by SIGSEGV"),
        ("never joins", "host", "while joining a process group of 2 over gloo"),
        ("own", "host", "this rank's own numbers, nothing was added"),
        ("garbage", "host", "left a result that cannot be read"),
        ("pair of zeros", "host", "copies cpu -> cpu: 1 of"),
        ("pair that hangs", "host", "the trial had not ended after"),
    ],
)
def test_each_fault_leads_to_its_decision_within_the_limit(
    fault: str, way: str, words: str, ended_long: dict[str, Answers]
) -> None:
    said = agreed(ended_long[fault])
    assert (said["exit"], said["way"]) == (0, way)
    assert words in " ".join(said["evidence"])
    assert all(each["seconds"] < LIMIT_S for each in ended_long[fault].values())


@pytest.mark.long
def test_where_not_even_gloo_works_both_ranks_are_told_how_to_train_on_one_card(ended_long: dict[str, Answers]) -> None:
    said = agreed(ended_long["gloo"])
    assert said["exit"] == 4 and "`one card`" in said["message"] and "SIGSEGV" in said["message"]
