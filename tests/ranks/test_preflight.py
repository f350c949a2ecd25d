"""The preflight in two processes that do nothing else: a rank that is gone or stands still holds nobody up for ever.

What follows from a harmed trial is in `test_choice`, and in whole runs in `tests/e2e/test_preflight.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.errors import StallError
from hf_rocm_tune.ranks import meeting, preflight
from hf_rocm_tune.ranks.preflight import VARIABLE
from tests.doctor.together import together

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
        command = [sys.executable, "-m", "tests.ranks.preflight_rank", json.dumps(settings)]
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
        ("absent", 0, "rank 1 of 2 did not come to the preflight within 4 s"),
        ("stop", 1, "gave no decision within 6 s"),
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
    meeting.make_place(tmp_path / "place")
    meeting.write(tmp_path / "place" / "rank-1", {"rank": 1, "pid": os.getpid(), "born": 1.0, "device": {}})
    (tmp_path / "place" / "left-0").touch()
    environ = {"WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(StallError, match="rank 1 of 2 did not come"):
        preflight.run(asked="auto", device={"device": "cpu"}, environ=environ, place=tmp_path / "place", meet_s=0.2)
    assert not (tmp_path / "place").exists()
