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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.survive import heartbeat, manifest
from tests import tiny
from tests.e2e.command import CommandServer, Result, Running
from tests.e2e.conftest import flags

THESIS = "three years of work"
USERS_FILES = ("config.json", "tokenizer.json", "run.json", "loss.png", "transfer_report.json", "survival.jsonl")


class Place:
    """A directory of the user's, with the command that would train in ``out``."""

    def __init__(self, server: CommandServer, model: Path, data: Path, room: Path) -> None:
        self.server, self.model, self.data, self.room, self.out = server, model, data, room, room / "out"
        self.thesis = self.file("thesis.tex")

    def file(self, name: str, text: str = THESIS) -> Path:
        path = self.room / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def argv(self, *more: str, **changed: Any) -> list[str]:
        usual = {
            "model_name_or_path": self.model,
            "dataset_name": self.data,
            "output_dir": self.out,
            "max_steps": 2,
            "save_steps": 1,
            "per_device_train_batch_size": 2,
            "max_length": 64,
            "disable_tqdm": True,
            "doctor": "off",
        }
        return [*flags(**{name: value for name, value in (usual | changed).items() if value is not None}), *more]

    def run(self, *more: str, **changed: Any) -> Result:
        return self.server.run(*self.argv(*more, **changed), cwd=self.room)

    def start(self, *more: str, **changed: Any) -> Running:
        return self.server.start(*self.argv(*more, **changed), cwd=self.room)

    def refused(self, *more: str, **changed: Any) -> str:
        """The one line of a start that is refused; it has changed nothing and left nothing."""
        before = snapshot(self.room)
        result = self.run(*more, **changed)
        assert result.code == 2 and "Traceback" not in result.stderr, result.stderr[-3000:]
        assert len(result.error_lines) == 1 and snapshot(self.room) == before
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


@pytest.fixture
def place(server: CommandServer, model_of: Callable[[str], Path], scratch: Path, tmp_path: Path) -> Place:
    data = tiny.write_dataset_dir(scratch / "user-files", train=12, test=4)
    return Place(server, model_of("llama3"), data, tmp_path)


# ---- refused starts -----------------------------------------------------------------------------------------


def test_a_directory_of_the_users_own_files_is_refused(place: Place) -> None:
    for name in (*USERS_FILES, "model.safetensors", "README.md", "checkpoint-99/thesis.tex"):
        place.file(f"mine/{name}", "{}")
    line = place.refused("--overwrite_output_dir", output_dir=place.room / "mine")
    assert "run.json cannot be read" in line or "no run of hf-rocm-tune has written" in line
    (place.room / "mine" / "run.json").unlink()
    line = place.refused("--overwrite_output_dir", output_dir=place.room / "mine")
    assert "no run of hf-rocm-tune has written" in line and "checkpoint-99" in line and "config.json" in line


def test_a_name_with_a_line_break_and_an_escape_sequence_is_one_line(place: Place) -> None:
    wild = place.room / "a\nb\x1b[2Jc"
    wild.mkdir()
    (wild / "config.json").write_text("{}")
    assert "\x1b" not in place.refused(output_dir=wild)


# ---- runs ---------------------------------------------------------------------------------------------------


def test_overwriting_and_rotation_delete_what_the_run_wrote_and_nothing_else(place: Place) -> None:
    first = place.run()
    assert first.code == 0, first.stderr[-3000:]
    mine = ["checkpoint-1/thesis.tex", "checkpoint-2/thesis.tex", "checkpoint-99/thesis.tex", "notes/model.txt"]
    for name in mine:
        place.file(f"out/{name}")
    (place.out / "checkpoint-7").symlink_to(place.room)
    again = place.run("--overwrite_output_dir", learning_rate=0.1, save_total_limit=1)
    assert again.code == 0, again.stderr[-3000:]
    told = next(line for line in again.stdout.splitlines() if "--overwrite_output_dir deletes" in line)
    assert "adapter_model.safetensors" in told
    left = {path.relative_to(place.out).as_posix() for path in place.out.rglob("thesis.tex")}
    assert left == {"kept-checkpoint-1/thesis.tex", "kept-checkpoint-2/thesis.tex", "checkpoint-99/thesis.tex"}
    assert (place.out / "notes" / "model.txt").read_text() == place.thesis.read_text() == THESIS
    assert (place.out / "checkpoint-7").is_symlink() and not (place.out / "checkpoint-1").exists()
    assert manifest.inspect(place.out).problems == [] and not list(place.out.glob("_*"))


SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGHUP))]
)


@SIGNALS
def test_a_signal_at_any_moment_leaves_no_half_made_file(place: Place, number: signal.Signals) -> None:
    chance = random.Random()
    running = place.start(max_steps=40, save_steps=3)
    time.sleep(chance.uniform(0.2, 4.0))
    running.kill(number)
    result = running.wait(120)
    assert result.code in (0, 130) and "Traceback" not in result.stderr, (result.code, result.stderr[-2000:])
    assert not list(place.room.rglob("_*"))


@SIGNALS
def test_a_signal_after_the_result_is_sealed_changes_nothing(place: Place, number: signal.Signals) -> None:
    running = place.start(max_steps=1)
    while (result := running.poll(0.005)) is None:
        if (place.out / "integrity.json").exists():
            running.kill(number)
            result = running.wait(60)
            break
    assert result.code == 0 and result.error_lines == [], result.stderr[-2000:]


@pytest.mark.long
def test_a_terminal_that_is_closed_ends_the_supervised_job_with_a_checkpoint(place: Place) -> None:
    master, slave = os.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "hf_rocm_tune", "run", "--", sys.executable, "-m", "hf_rocm_tune.sft"]
    process = subprocess.Popen(
        [*command, *place.argv(max_steps=5000, logging_steps=1)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=own_terminal,
        cwd=place.room,
    )
    os.close(slave)
    try:
        deadline = time.monotonic() + 200
        while not (place.out / "checkpoint-2").exists():
            os.read(master, 65536)
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        os.close(master)
    assert process.wait(120) == 130
    run_id = json.loads((place.out / "run.json").read_text())["run_id"]
    assert [entry["code"] for entry in heartbeat.journal_of(place.out, run_id) if entry["event"] == "end"] == [130]
    newest = max(place.out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert manifest.verify(newest) == [] and not list(place.out.glob("_*"))


def test_a_terminal_that_is_closed_without_a_signal_does_not_end_the_job(place: Place) -> None:
    master, slave = os.openpty()
    terminal = os.ttyname(slave)
    argv = place.argv(max_steps=40, logging_steps=1, save_strategy="no")
    running = place.server.start(*argv, cwd=place.room, out=terminal, err=terminal)
    seen = b""
    while not re.search(rb" 1/40 +\d", seen):
        seen += os.read(master, 65536)
    os.close(slave)
    os.close(master)
    assert running.wait().code == 0 and manifest.inspect(place.out).problems == []


@pytest.mark.long
def test_a_damaged_checkpoint_is_refused_once_by_the_supervised_job(place: Place) -> None:
    assert place.run(max_steps=1).code == 0
    foreign = (place.out / "checkpoint-1").rename(place.room / "checkpoint-1")
    (foreign / "integrity.json").unlink()
    (foreign / "optimizer.pt").write_bytes(b"not a state")
    command = [sys.executable, "-m", "hf_rocm_tune", "run", "--backoff_seconds", "0", "--", sys.executable, "-m"]
    job = ["hf_rocm_tune.sft", *place.argv(output_dir=place.room / "new", resume_from_checkpoint=foreign)]
    done = subprocess.run([*command, *job], capture_output=True, text=True, cwd=place.room, timeout=200)
    assert done.returncode == 2 and done.stdout.count("run: start ") == 1, done.stderr[-2000:]
    assert done.stderr.count("hf-rocm-tune: error:") == 1 and "Traceback" not in done.stderr
