"""The supervisor with real processes: what is started again, what is not, and that nothing of a start lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_rocm_tune.errors import StallError
from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.lifecycle import supervisor as supervision
from hf_rocm_tune.lifecycle.supervisor import Limits
from hf_rocm_tune.survive.run_directory import read_record

QUICK = Limits(backoff_seconds=0, stall_seconds=2, start_seconds=30, grace_seconds=0.3)
STUB = Path(__file__).with_name("stub_job.py")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the stub acts; a process that outlives the test is ended."""
    (tmp_path / "python-stub").write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    (tmp_path / "python-stub").chmod(0o755)
    monkeypatch.setenv("STUB", str(tmp_path))
    monkeypatch.setattr(supervision, "_POLL_SECONDS", 0.02)
    yield tmp_path
    if (tmp_path / "orphan").exists() and _alive(int((tmp_path / "orphan").read_text())):
        os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def words(place: Path, *story: dict[str, Any]) -> list[str]:
    """The command that acts this story."""
    (place / "story.json").write_text(json.dumps(story))
    return [str(place / "python-stub"), "-m", "hf_rocm_tune.sft"]


def run(place: Path, *story: dict[str, Any], settings: Limits = QUICK) -> int:
    """Supervises the story and returns the code."""
    return supervision.supervise(words(place, *story), settings)


def attempts(place: Path) -> int:
    return len(list(place.glob("attempt-*")))


def told(place: Path) -> list[dict[str, Any]]:
    """The journal."""
    record = read_record(place / "out")
    assert record is not None
    return heartbeat.journal_of(place / "out", record.run_id)


DONE = {"step": 9, "phase": "end", "end": 0}


@pytest.mark.parametrize(("code", "silent"), [(2, True), (3, False)])
def test_an_end_is_not_started_again(place: Path, code: int, silent: bool) -> None:
    assert run(place, {"end": code, "silent": silent}) == code
    assert attempts(place) == 1
    assert (place / "out").exists() != silent, "before the run has begun nothing is written anywhere"


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("SIGSEGV", 139, "ended by SIGSEGV"),
        (137, 137, "ended by SIGKILL"),  # of a launcher above the job
        ({"code": 5, "message": "it does not fit"}, 5, "exit code 5"),
    ],
)
def test_a_death_is_started_again_and_told(
    place: Path, capfd: pytest.CaptureFixture[str], end: Any, code: int, how: str
) -> None:
    assert run(place, {"step": 3, "saves": [2], "end": end}, {**DONE, "resumed": "checkpoint-2"}) == 0
    assert [entry["event"] for entry in told(place)] == ["start", "end", "start", "end"]
    first, death, second, end_entry = told(place)
    assert (first["resumed_from"], second["resumed_from"]) == ("the start", "checkpoint-2")
    assert (death["how"], death["code"], death["step"], death["phase"]) == (how, code, 3, "step")
    assert death["decision"].startswith("restart: died in step 4")
    assert death.get("message") == (end["message"] if isinstance(end, dict) else None)
    assert end_entry["code"] == 0
    out = capfd.readouterr().out
    assert f"{how}; died in step 4; restarting in 0 s from checkpoint-2" in out
    assert all(line.startswith("hf-rocm-tune: run: ") for line in out.splitlines())


def test_the_step_in_which_it_dies_twice_is_left_out_from_then_on(place: Path) -> None:
    assert run(place, {"step": 3, "end": 1, "cured": True}) == 0
    assert attempts(place) == 3
    record = read_record(place / "out")
    assert record is not None and record.skipped_steps == (4,)
    assert [entry.get("skipped_step") for entry in told(place) if entry["event"] == "end"] == [None, 4, None]


@pytest.mark.parametrize("phase", ["step", "save"])
def test_what_always_dies_at_one_place_is_given_up(place: Path, capfd: pytest.CaptureFixture[str], phase: str) -> None:
    assert run(place, {"step": 4, "phase": phase, "saves": [2], "end": "SIGSEGV"}) == 139
    assert attempts(place) == 4
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("hf-rocm-tune: error: run: stopped: ended by SIGSEGV, died 4 times in ")
    assert "checkpoint-2 is intact" in lines[0] and "survival.jsonl" in lines[0]


def test_what_dies_before_it_says_anything_is_given_up(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(place, {"silent": True, "end": 1}) == 1
    assert attempts(place) == 2, "an exception at the start comes again"
    assert "no checkpoint was written" in capfd.readouterr().err
    assert not (place / "out").exists()


def test_a_hang_is_ended_with_everything_it_started(place: Path) -> None:
    assert run(place, {"step": 3, "orphan": True, "end": "hang"}, DONE) == 0
    assert json.loads((place / "heard").read_text()) == [signal.SIGTERM], "it was asked first"
    assert not _alive(int((place / "orphan").read_text()))
    death = next(entry for entry in told(place) if entry["event"] == "end")
    assert death["code"] == 4 and "no heartbeat" in death["how"] and death["phase"] == "step"


def test_what_a_crashed_start_left_running_is_ended_before_the_next(place: Path) -> None:
    assert run(place, {"step": 3, "orphan": True, "end": "SIGKILL"}, DONE) == 0
    assert not _alive(int((place / "orphan").read_text()))


def test_a_process_that_cannot_be_ended_stops_everything(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = supervision.end_all
    monkeypatch.setattr(supervision, "end_all", lambda *arguments: [*end(*arguments), 4711])
    with pytest.raises(StallError, match=r"\[4711\].*restart the machine"):
        run(place, {"step": 3, "end": 1})
    assert attempts(place) == 1


# ---- signals to the supervisor ------------------------------------------------------------------------------


def supervisor(*command: str, **flags: str) -> list[str]:
    """`hf-rocm-tune run` of a command, without patience unless told."""
    usual = {"backoff_seconds": "0", "stall_seconds": "20", "grace_seconds": "0.3"} | flags
    given = [word for name, value in usual.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "hf_rocm_tune", "run", *given, "--", *command]


def _until(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def heard(place: Path) -> list[int]:
    """The signals that the job has noted; none while it writes them."""
    with suppress(FileNotFoundError, ValueError):
        found: list[int] = json.loads((place / "heard").read_text())
        return found
    return []


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_is_passed_on_once_and_the_checkpoint_is_waited_for(place: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        supervisor(*words(place, {"step": 3, "end": "wait"})), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    _until((place / "ready").exists)
    os.killpg(process.pid, number)  # as a terminal does: the job is in a session of its own
    time.sleep(0.1)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads((place / "heard").read_text()) == [number]
    assert attempts(place) == 1 and "restarting" not in out
    assert told(place)[-1]["code"] == 130


def test_the_third_ctrl_c_ends_a_job_that_does_not_react(place: Path) -> None:
    process = subprocess.Popen(
        supervisor(*words(place, {"step": 3, "end": "hang"}), stall_seconds="0"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    _until((place / "ready").exists)
    for presses in (1, 2):
        process.send_signal(signal.SIGINT)
        _until(lambda presses=presses: heard(place) == [signal.SIGINT] * presses)  # type: ignore[misc]
        time.sleep(0.5)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert attempts(place) == 1


def test_a_job_that_was_stopped_as_a_whole_has_not_hung(place: Path) -> None:
    process = subprocess.Popen(supervisor(*words(place, {"step": 3, "end": "wait"}), stall_seconds="2.5"))
    _until((place / "ready").exists)
    time.sleep(0.5)  # it has seen the job's heartbeat
    both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    for each in both:
        each.suspend()
    time.sleep(3.5)
    for each in reversed(both):
        each.resume()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert attempts(place) == 1 and json.loads((place / "heard").read_text()) == [signal.SIGINT]


# ---- what it reads and writes -------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_written_or_is_the_users_file_stops_nothing(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "thesis.tex").write_text("three years of work")
    (place / "out").mkdir()
    (place / "out" / heartbeat.JOURNAL_FILE).symlink_to(place / "thesis.tex")
    assert run(place, {"step": 3, "end": 1}, DONE) == 0
    assert f"{heartbeat.JOURNAL_FILE} could not be written" in capfd.readouterr().out
    assert (place / "thesis.tex").read_text() == "three years of work"


def test_the_journal_has_several_runs_and_nonsense_is_passed_over(tmp_path: Path) -> None:
    heartbeat.enter(tmp_path, {"run_id": "a", "event": "start"})
    with open(tmp_path / heartbeat.JOURNAL_FILE, "a") as file:
        file.write('{"run_id": "a", "eve\n')
    heartbeat.enter(tmp_path, {"run_id": "a", "event": "end", "code": 1, "how": "x"})
    heartbeat.enter(tmp_path, {"run_id": "b", "event": "start"})
    assert [entry["event"] for entry in heartbeat.journal_of(tmp_path, "a")] == ["start", "end"]
    summary = heartbeat.survival(tmp_path, "a", skipped_steps=[4], crash_injection=None)
    assert (summary["starts"], summary["ends"]) == (1, [{"how": "x", "code": 1}])
