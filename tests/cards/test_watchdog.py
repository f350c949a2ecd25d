"""Real processes that hang, stop and die under the stall watchdog: the cause is named, and nothing is left running.

A limit below one second stands for one of minutes; the watched processes import no torch, so that they begin at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

LIMIT = 0.6
TIMEOUT = 60.0


class Ranks:
    """Processes that share a meeting place."""

    def __init__(self, directory: Path, checkout: Path) -> None:
        self._directory, self._checkout = directory, checkout
        self.place = directory / "place"
        self.processes: list[subprocess.Popen[str]] = []
        self.alone = False

    def start(self, *script: list[Any], alone: bool = False, **given: Any) -> subprocess.Popen[str]:
        rank, self.alone = len(self.processes), alone
        request = {
            "rank": rank,
            "place": None if alone else str(self.place),
            "report": str(self._directory / f"report-{rank}.json"),
            "limits": {"step": LIMIT, "patient": 30.0},
            "script": script,
            **given,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cards.watched_rank", json.dumps(request)],
            cwd=self._checkout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def begin(self) -> None:
        """Let the ranks that share a place begin, once all have joined."""
        begun = self._directory / "all-joined"
        if not self.alone and not begun.exists():
            until(lambda: len(list(self.place.glob("rank-*"))) == len(self.processes))
            begun.touch()

    def wait(self) -> list[int]:
        """Exit codes of all."""
        self.begin()
        return [process.wait(TIMEOUT) for process in self.processes]

    def report(self) -> dict[str, Any]:
        """What was told of a stall, by whichever rank."""
        (content,) = self.reports()
        return content

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in self._directory.glob("report-*.json")]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path, checkout: Path) -> Any:
    made = Ranks(tmp_path, checkout)
    yield made
    made.end()


def until(happened: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def stopped(process: subprocess.Popen[str]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_process_alone_that_hangs_ends_and_its_stack_names_the_line(ranks: Ranks) -> None:
    ranks.start(["work", 0.3], ["spin"], alone=True)
    assert ranks.wait() == [4]
    found = ranks.report()
    assert "is in stuck_here() in" in found["cause"] and "watched_rank.py:" in found["cause"]
    assert "MainThread (most recent call last):" in found["page"] and ", in stuck_here\n" in found["page"]


def test_a_stopped_rank_is_named_and_ended(ranks: Ranks) -> None:
    ranks.start(["work", 0.3], ["wait"])
    bad = ranks.start(["work", 0.3], ["stop"])
    assert ranks.wait() == [4, -signal.SIGKILL]
    found = ranks.report()
    assert f"rank 1 (pid {bad.pid})" in found["cause"] and "is stopped (state T)" in found["cause"]
    assert found["cause"] in found["page"] and found["page"].count("MainThread (most recent call last):") == 1
    assert f"==== rank 1 (pid {bad.pid}), in step " in found["page"]
    assert not ranks.place.exists()


def test_a_rank_that_can_answer_states_its_own_stack(ranks: Ranks) -> None:
    ranks.start(["work", 0.3], ["wait"])
    ranks.start(["work", 0.3], ["spin"])
    assert ranks.wait() == [4, 4]
    page = ranks.report()["page"]
    assert page.index(", in wait\n") < page.index("==== rank 1") < page.index(", in stuck_here\n")
    assert not ranks.place.exists()


def test_a_rank_that_was_killed_is_said_to_be_gone(ranks: Ranks) -> None:
    ranks.start(["work", 0.3], ["wait"])
    bad = ranks.start(["work", 0.3], ["kill"])
    assert ranks.wait() == [4, -signal.SIGKILL]
    assert f"rank 1 (pid {bad.pid})" in ranks.report()["cause"] and "has ended" in ranks.report()["cause"]
    assert not ranks.place.exists()


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_that_is_stopped_as_a_whole_and_goes_on_does_not_hang(ranks: Ranks, number: int) -> None:
    for _ in range(number):
        ranks.start(["work", 0.4], ["stop"], ["work", 0.4], alone=number == 1)
    ranks.begin()
    until(lambda: all(stopped(process) for process in ranks.processes))
    time.sleep(3 * LIMIT)
    for process in ranks.processes:
        os.kill(process.pid, signal.SIGCONT)
    assert ranks.wait() == [0] * number
    assert not ranks.place.exists()


def test_a_rank_waits_for_one_that_is_allowed_its_time(ranks: Ranks) -> None:
    """Rank 0 exceeds its limit while rank 1 is in what may take long, and then goes on."""
    ranks.start(["work", 0.3], ["sleep", 2.5 * LIMIT], ["work", 0.3])
    ranks.start(["work", 0.3], ["phase", "patient"], ["sleep", 3 * LIMIT], ["work", 0.3])
    assert ranks.wait() == [0, 0]


def test_a_phase_without_a_limit_may_take_as_long_as_it_likes(ranks: Ranks) -> None:
    ranks.start(["phase", "step"], ["sleep", 3 * LIMIT], alone=True, limits={"step": None})
    assert ranks.wait() == [0]


def test_one_that_left_is_not_waited_for(ranks: Ranks) -> None:
    ranks.start(["work", 1.0], ["spin"])
    ranks.start(["work", 0.2])
    assert ranks.wait() == [4, 0]
    assert not ranks.place.exists()


def test_a_stopped_child_is_named_and_ended_too(ranks: Ranks) -> None:
    """A data loader's worker that was stopped never ends by itself."""
    bad = ranks.start(["work", 0.3], ["child"], ["wait"], alone=True)
    until(lambda: psutil.Process(bad.pid).children())
    (child,) = psutil.Process(bad.pid).children()
    assert ranks.wait() == [4]
    assert f"its child process {child.pid} is in state T" in ranks.report()["cause"]
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_where_the_telling_fails_the_job_ends_all_the_same(ranks: Ranks) -> None:
    bad = ranks.start(["work", 0.2], ["spin"], alone=True, on_stall="raise")
    assert ranks.wait() == [4]
    assert bad.stderr is not None and "a bug in what tells of a stall" in bad.stderr.read()


@pytest.mark.parametrize("number", [2, 3])
def test_where_the_rank_that_tells_dies_one_other_does(ranks: Ranks, number: int) -> None:
    for _ in range(number):
        ranks.start(["work", 0.3], ["wait"], on_stall="the first dies")
    codes = ranks.wait()
    assert sorted(codes) == [4] * (number - 1) + [7]
    assert all("is in wait() in " in each["cause"] for each in ranks.reports())
    assert not ranks.place.exists()


def test_a_diagnosis_that_hangs_with_the_lock_of_the_interpreter_ends_with_the_same_code(ranks: Ranks) -> None:
    ranks.start(["work", 0.2], ["spin"], alone=True, on_stall="hold", last_s=1.5)
    assert ranks.wait() == [4]
