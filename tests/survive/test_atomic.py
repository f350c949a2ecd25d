"""Attacks: whatever interrupts a write, the old state or the new one is there, whole."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import (
    clean_leftovers,
    create_staging,
    staged_directory,
    write_text_atomic,
)

_SAVE_FOR_EVER = """
import os, sys
from pathlib import Path
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import clean_leftovers, staged_directory
out = Path(sys.argv[1])
clean_leftovers(out)
step = max([int(p.name.split("-")[1]) for p in out.glob("checkpoint-*")], default=0)
print("ready", flush=True)
while True:
    # every other time the same one again, so that replacing is interrupted as well
    step += 1 if step % 2 else 0
    with staged_directory(out / f"checkpoint-{step}") as staging:
        for name in ("weights", "optimizer"):
            (staging / name).write_bytes(os.urandom(30000))
        manifest.write(staging, run_id="r", step=step, status="checkpoint")
    if step % 2 == 0:
        step += 1
"""


def test_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    moments = random.Random(1)
    newest = 0
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.02, 0.25))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        clean_leftovers(tmp_path)
        steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir())
        for step in steps:
            assert manifest.verify(tmp_path / f"checkpoint-{step}") == []
        assert max(steps, default=0) >= newest, "a checkpoint that was there has gone"
        newest = max(steps, default=0)
    assert newest > 0


def test_a_kill_between_the_two_renames_gives_the_old_directory_back(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from hf_rocm_tune.survive.atomic import staged_directory
final = Path(sys.argv[1])
rename, calls = Path.rename, []
def counted(self, target):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    return rename(self, target)
Path.rename = counted
with staged_directory(final) as staging:
    (staging / "a").write_text("new")
"""
    final = tmp_path / "checkpoint-1"
    final.mkdir()
    (final / "a").write_text("old")
    assert subprocess.run([sys.executable, "-c", script, str(final)]).returncode == -signal.SIGKILL
    assert not final.exists()
    clean_leftovers(tmp_path)
    assert (final / "a").read_text() == "old" and os.listdir(tmp_path) == ["checkpoint-1"]


def test_leftovers_of_a_living_process_and_foreign_names_are_left_alone(tmp_path: Path) -> None:
    mine = create_staging(tmp_path / "checkpoint-3")
    foreign = [tmp_path / name for name in ("_staging", "_staging.notes", ".staging.x.1-2-3", "_other.a.1-1-1")]
    for path in foreign:
        path.mkdir()
    clean_leftovers(tmp_path)
    assert mine.is_dir() and all(path.is_dir() for path in foreign)


def test_a_reused_pid_does_not_protect_a_leftover(tmp_path: Path) -> None:
    mine = create_staging(tmp_path / "checkpoint-3")
    stem, _, token = mine.name.rpartition(".")
    other = mine.with_name(f"{stem}.{token.split('-')[0]}-12345-0")
    mine.rename(other)
    clean_leftovers(tmp_path)
    assert not other.exists()


def test_an_exception_leaves_the_old_directory_and_no_trace(tmp_path: Path) -> None:
    final = tmp_path / "a"
    with staged_directory(final) as staging:
        (staging / "file").write_text("old")

    def fill() -> None:
        with staged_directory(final) as staging:
            (staging / "file").write_text("new")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert (final / "file").read_text() == "old" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "run.json"
    write_text_atomic(path, "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open" if call == "open" else f"os.{call}", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write_text_atomic(path, "new")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run.json"]
