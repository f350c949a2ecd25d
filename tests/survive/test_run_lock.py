"""Attacks on the ownership of a directory: with locks, without them, within one process, over a crash and a theft."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.survive import run_lock
from hf_rocm_tune.survive.run_directory import prepare_output_dir
from hf_rocm_tune.survive.run_lock import LEASE_FILE, LEASE_SECONDS, LOCK_FILE, RunLock, require_owned

# A start that holds the directory until its input closes; with "none" on a file system that has no locks.
_HOLD = """
import errno, fcntl, os, sys
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
if sys.argv[2] == "none":
    fcntl.flock = fcntl.lockf = refuse
from hf_rocm_tune.survive.run_directory import prepare_output_dir
from hf_rocm_tune.errors import UsageError
try:
    plan = prepare_output_dir(sys.argv[1], {"seed": 1})
except UsageError as error:
    print(f"refused: {error}", flush=True)
    sys.exit(2)
print("owns it", flush=True)
sys.stdin.read()
plan.close()
"""

Start = Callable[[Path, str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def one(directory: Path, locks: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        begun.append(subprocess.Popen([sys.executable, "-c", _HOLD, str(directory), locks], text=True, **pipes))
        return begun[-1]

    yield one
    for each in begun:
        each.kill()
        each.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_of_starts_at_the_same_time_one_owns_the_directory(tmp_path: Path, start: Start, locks: str) -> None:
    lines = [said(process) for process in [start(tmp_path, locks) for _ in range(4)]]
    assert sorted(line.split()[0] for line in lines) == ["owns", "refused:", "refused:", "refused:"], lines
    assert all("is in use by process" in line or "another process" in line for line in lines if "refused" in line)


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_a_killed_owner_blocks_nobody(tmp_path: Path, start: Start, locks: str) -> None:
    first = start(tmp_path, locks)
    assert said(first) == "owns it\n"
    assert said(start(tmp_path, locks)).startswith("refused")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert said(start(tmp_path, locks)) == "owns it\n"


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_an_owner_that_ends_leaves_nothing(tmp_path: Path, start: Start, locks: str) -> None:
    first = start(tmp_path / "out", locks)
    assert said(first) == "owns it\n"
    first.communicate()
    assert not (tmp_path / "out").exists()


def test_a_machine_that_sees_no_locks_and_one_that_does_exclude_each_other(tmp_path: Path, start: Start) -> None:
    assert said(start(tmp_path / "a", "none")) == "owns it\n"
    assert said(start(tmp_path / "a", "locks")).startswith("refused")


def lease_of_elsewhere(directory: Path, age: float) -> None:
    """A lease that another machine has renewed so many seconds ago."""
    directory.mkdir(exist_ok=True)
    lease = directory / LEASE_FILE
    lease.write_text(json.dumps({"token": "0", "pid": 1, "started": 1, "host": "elsewhere", "place": "elsewhere"}))
    os.utime(lease, (time.time() - age,) * 2)


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_the_lease_of_another_machine_counts_until_it_has_run_out(tmp_path: Path, start: Start, locks: str) -> None:
    lease_of_elsewhere(tmp_path, LEASE_SECONDS / 4)
    assert "in use by process 1 on elsewhere" in said(start(tmp_path, locks))
    lease_of_elsewhere(tmp_path, LEASE_SECONDS * 2)
    lines = [said(process) for process in [start(tmp_path, locks) for _ in range(4)]]
    assert sorted(line.split()[0] for line in lines) == ["owns", "refused:", "refused:", "refused:"], lines


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"host": "\\u001b[2J"}'])
def test_a_lease_that_was_not_written_to_its_end_runs_out(tmp_path: Path, start: Start, content: str) -> None:
    (tmp_path / LEASE_FILE).write_text(content)
    line = said(start(tmp_path, "none"))
    assert line.startswith("refused") and "\x1b" not in line
    os.utime(tmp_path / LEASE_FILE, (time.time() - 2 * LEASE_SECONDS,) * 2)
    assert said(start(tmp_path, "none")) == "owns it\n"


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(UsageError, match="in use by process"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


def test_a_lock_outlives_whoever_opens_and_closes_its_file(tmp_path: Path, start: Start) -> None:
    lock = RunLock(tmp_path)
    for _ in range(3):
        (tmp_path / LOCK_FILE).read_bytes()
    assert said(start(tmp_path, "locks")).startswith("refused")
    lock.release()


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_who_has_lost_the_directory_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    if locks == "none":

        def refuse(*_: object) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    plan = prepare_output_dir(tmp_path, {"seed": 1})
    require_owned(tmp_path)
    name = LEASE_FILE if locks == "none" else LOCK_FILE
    (tmp_path / name).unlink()
    if locks == "none":
        lease_of_elsewhere(tmp_path, 0)
    else:
        (tmp_path / name).write_text("process 1 on elsewhere")
    with pytest.raises(UsageError, match="has been taken by"):
        require_owned(tmp_path)
    plan.close()
    assert (tmp_path / name).exists(), "what another process has written stays"
    require_owned(tmp_path)
