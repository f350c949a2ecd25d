"""Real processes that hang, stop and die under the stall watchdog: the cause is named, and nothing is left running.

A limit below one second stands for one of minutes; the watched processes import no torch, so that they begin at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle.watchdog import RankStatus

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
            [sys.executable, "-m", "tests.lifecycle.watched_rank", json.dumps(request)],
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


STOPPED, SPINS, GONE = "is stopped (state T)", "is in stuck_here() in ", "has ended: it was killed"


@pytest.mark.parametrize(
    ("bad", "codes", "said", "stacks"),
    [
        (["stop"], [4, -signal.SIGKILL], STOPPED, 1),
        (["spin"], [4, 4], SPINS, 2),
        (["kill"], [4, -signal.SIGKILL], GONE, 1),
        (["leave"], [4, 0], "the process", 1),
    ],
    ids=["stopped", "spins", "killed", "left"],
)
def test_the_rank_that_hangs_is_named_and_nothing_is_left(
    ranks: Ranks, bad: list[Any], codes: list[int], said: str, stacks: int
) -> None:
    ranks.start(["work", 0.6], ["wait"])
    harmed = ranks.start(["work", 0.3], *([] if bad == ["leave"] else [bad]))
    assert ranks.wait() == codes
    found = ranks.report()
    assert said in found["cause"] and found["cause"] in found["page"]
    if bad != ["leave"]:
        assert f"rank 1 (pid {harmed.pid}) {said}" in found["cause"]
        assert f"==== rank 1 (pid {harmed.pid}) {said}" in found["page"]
    assert found["page"].count("MainThread (most recent call last):") == stacks
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


def test_a_rank_waits_for_one_that_is_allowed_its_time_and_a_phase_may_have_no_limit(ranks: Ranks) -> None:
    """Rank 0 exceeds its limit while rank 1 is in what may take long, and then goes on."""
    ranks.start(["work", 0.3], ["sleep", 2.5 * LIMIT], ["work", 0.3])
    ranks.start(["work", 0.3], ["phase", "patient"], ["sleep", 3 * LIMIT], ["work", 0.3], limits={
        "step": LIMIT, "patient": None})  # fmt: skip
    assert ranks.wait() == [0, 0]


def test_a_stopped_child_is_ended_and_a_service_in_a_session_of_its_own_lives_on(ranks: Ranks) -> None:
    """A data loader's worker that was stopped never ends by itself; a logger's service outlives its parent."""
    bad = ranks.start(["work", 0.3], ["child", False], ["child", True], ["wait"], alone=True)
    until(lambda: len(psutil.Process(bad.pid).children()) == 2)
    own, apart = sorted(psutil.Process(bad.pid).children(), key=lambda each: os.getsid(each.pid) == each.pid)
    try:
        assert ranks.wait() == [4]
        until(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE)
        assert apart.is_running() and apart.status() == psutil.STATUS_STOPPED
    finally:
        apart.kill()


@pytest.mark.parametrize("harm", ["raise", "hold"])
def test_where_the_telling_fails_or_hangs_with_the_lock_of_the_interpreter_it_ends_with_4(
    ranks: Ranks, harm: str
) -> None:
    bad = ranks.start(["work", 0.2], ["spin"], alone=True, on_stall=harm, last_s=1.5)
    assert ranks.wait() == [4]
    assert bad.stderr is not None and ("a bug in what tells of a stall" in bad.stderr.read()) == (harm == "raise")


def test_ranks_that_leave_at_once_do_not_stumble_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that sees nobody left deletes the directory while the other still looks into it."""
    place = tmp_path / "place"
    one, other = RankStatus(place, 0), RankStatus(place, 1)
    stock = os.scandir

    def scandir(path: Any) -> Any:
        monkeypatch.setattr(os, "scandir", stock)
        if Path(path) == place:
            other.leave()
            shutil.rmtree(place)
        return stock(path)

    monkeypatch.setattr(os, "scandir", scandir)
    one.leave()
    assert not place.exists() and os.scandir is stock


def test_a_torn_file_is_nobody_and_a_place_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    board = RankStatus(tmp_path / "place", 0)
    for content in (b"", b"12", b"\xff" * 2000, b"[]"):
        (tmp_path / "place" / "rank-1").write_bytes(content)
        assert board.others() == []
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        with pytest.raises(UsageError, match="not a directory that only you can access"):
            RankStatus(tmp_path / name, 0)
