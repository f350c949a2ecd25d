"""Attacks on a user's files: nothing that a run has not written is changed, read as data, or left half made."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.survive import manifest
from tests.e2e.conftest import Job, MakeJob

THESIS = "three years of work"
USERS_FILES = ("config.json", "tokenizer.json", "run.json", "loss.png", "transfer_report.json", "survival.jsonl")


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("user-files", train=12, max_steps=2, save_steps=1, doctor="off")


def write(path: Path, text: str = THESIS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(job: Job, room: Path, *more: str, output: Path) -> str:
    """The one line of a start that is refused; it has changed nothing and left nothing."""
    before = snapshot(room)
    result = job.run(output, *more)
    assert result.code == 2 and "Traceback" not in result.stderr, result.stderr[-3000:]
    assert len(result.error_lines) == 1 and snapshot(room) == before
    return result.error_lines[0]


def snapshot(room: Path) -> dict[str, str]:
    """What is in a directory: kind of each name, where a link points, SHA-256 of each file."""
    found = {}
    for path in sorted(room.rglob("*")):
        name = path.relative_to(room).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "directory" if path.is_dir() else "special"
    return found


# ---- refused starts -----------------------------------------------------------------------------------------


def test_a_directory_of_the_users_own_files_is_refused(job: Job, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    for name in (*USERS_FILES, "model.safetensors", "README.md", "checkpoint-99/thesis.tex"):
        write(mine / name, "{}")
    assert "run.json cannot be read" in refused(job, tmp_path, "--overwrite_output_dir", output=mine)
    (mine / "run.json").unlink()
    line = refused(job, tmp_path, "--overwrite_output_dir", output=mine)
    assert "no run of hf-rocm-tune has written" in line and "checkpoint-99" in line and "config.json" in line


def test_a_name_with_a_line_break_and_an_escape_sequence_is_one_line(job: Job, tmp_path: Path) -> None:
    wild = tmp_path / "a\nb\x1b[2Jc"
    write(wild / "config.json", "{}")
    assert "\x1b" not in refused(job, tmp_path, output=wild)


# ---- runs ---------------------------------------------------------------------------------------------------


def test_overwriting_and_rotation_delete_what_the_run_wrote_and_nothing_else(job: Job, tmp_path: Path) -> None:
    out, thesis = tmp_path / "out", write(tmp_path / "thesis.tex")
    job.done(out)
    for name in ("checkpoint-1/thesis.tex", "checkpoint-2/thesis.tex", "checkpoint-99/thesis.tex", "notes/model.txt"):
        write(out / name)
    (out / "checkpoint-7").symlink_to(tmp_path)
    again = job.done(out, "--overwrite_output_dir", learning_rate=0.1, save_total_limit=1)
    told = next(line for line in again.stdout.splitlines() if "--overwrite_output_dir deletes" in line)
    assert "adapter_model.safetensors" in told
    left = {path.relative_to(out).as_posix() for path in out.rglob("thesis.tex")}
    assert left == {"kept-checkpoint-1/thesis.tex", "kept-checkpoint-2/thesis.tex", "checkpoint-99/thesis.tex"}
    assert (out / "notes" / "model.txt").read_text() == thesis.read_text() == THESIS
    assert (out / "checkpoint-7").is_symlink() and not (out / "checkpoint-1").exists()
    assert manifest.inspect(out).problems == [] and not list(out.glob("_*"))


SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGHUP))]
)


@SIGNALS
def test_a_signal_at_any_moment_leaves_no_half_made_file(job: Job, tmp_path: Path, number: signal.Signals) -> None:
    running = job.start(tmp_path / "out", max_steps=40, save_steps=3)
    time.sleep(random.uniform(0.2, 4.0))
    running.kill(number)
    result = running.wait(120)
    assert result.code in (0, 130) and "Traceback" not in result.stderr, (result.code, result.stderr[-2000:])
    assert not list(tmp_path.rglob("_*"))


@SIGNALS
def test_a_signal_after_the_result_is_sealed_changes_nothing(job: Job, tmp_path: Path, number: signal.Signals) -> None:
    running = job.start(tmp_path / "out", max_steps=1)
    while (result := running.poll(0.005)) is None:
        if (tmp_path / "out" / "integrity.json").exists():
            running.kill(number)
            result = running.wait(60)
            break
    assert result.code == 0 and result.error_lines == [], result.stderr[-2000:]


@pytest.mark.long
def test_a_terminal_that_is_closed_ends_the_supervised_job_with_a_checkpoint(job: Job, tmp_path: Path) -> None:
    master, slave = os.openpty()
    out = tmp_path / "out"

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "hf_rocm_tune", "run", "--", sys.executable, "-m", "hf_rocm_tune.sft"]
    command += job.argv(out, max_steps=5000)
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal, cwd=tmp_path)
    os.close(slave)
    try:
        deadline = time.monotonic() + 200
        while not (out / "checkpoint-2").exists():
            os.read(master, 65536)
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        os.close(master)
    assert process.wait(120) == 130
    run_id = json.loads((out / "run.json").read_text())["run_id"]
    assert [entry["code"] for entry in heartbeat.journal_of(out, run_id) if entry["event"] == "end"] == [130]
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert manifest.verify(newest) == [] and not list(out.glob("_*"))


def test_a_terminal_that_is_closed_without_a_signal_does_not_end_the_job(job: Job, tmp_path: Path) -> None:
    master, slave = os.openpty()
    terminal = os.ttyname(slave)
    argv = job.argv(tmp_path / "out", max_steps=40, save_strategy="no")
    running = job.server.start(*argv, cwd=tmp_path, out=terminal, err=terminal)
    seen = b""
    while not re.search(rb" 1/40 +\d", seen):
        seen += os.read(master, 65536)
    os.close(slave)
    os.close(master)
    assert running.wait().code == 0 and manifest.inspect(tmp_path / "out").problems == []
