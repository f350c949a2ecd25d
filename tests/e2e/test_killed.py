"""Killed at any moment and started again with the same command: the result is that of the uninterrupted run.

Not covered: the loss of power (what was flushed is not lost there, but no test can pull the plug), and several nodes.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_same_run, checkpoint, losses_of, report_of

STEPS = 9  # 12 rows, batch 2, 2 accumulated: three steps an epoch, three epochs
METHODS = ("lora", "qlora")


@pytest.fixture(scope="module")
def jobs(make_job: MakeJob) -> dict[str, Job]:
    """By method."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    settings = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "lora_dropout": 0.2, **evaluated}
    return {
        method: make_job(f"killed-{method}", train=12, load_in_4bit=method == "qlora", **settings) for method in METHODS
    }


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file, but for the lock, which names the process that last looked."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "_run.lock"
    }


def assert_same_result(job: Job, output: Path) -> None:
    """The result is bit for bit that of the uninterrupted run, and so is the way to it."""
    assert_same_run(output, job.clean())
    assert len(losses_of(output)) == STEPS


def killed_until_done(job: Job, output: Path, chance: random.Random, whole: float) -> int:
    """Starts the command again and again, kills it at random moments, and lets the last start finish.

    Returns:
        The number of kills; 0 when it was done before the first one.
    """
    kills = 0
    while kills < 6:
        running = job.start(output)
        result = running.poll(chance.uniform(0.25, 0.95) * whole)
        if result is None:
            running.kill()
            result = running.wait(30)
        if result.code != -signal.SIGKILL:  # done, perhaps just before the kill
            assert result.code == 0, result.stderr[-2000:]
            return kills
        kills += 1
    job.done(output)
    return kills


@pytest.mark.long
@pytest.mark.parametrize("wanted", [5, 100])
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments_until_it_is_done(
    jobs: dict[str, Job], tmp_path: Path, method: str, wanted: int
) -> None:
    job, chance = jobs[method], random.Random(20)
    started = time.monotonic()
    job.done(tmp_path / "timed")
    whole = time.monotonic() - started
    kills = rounds = 0
    while kills < wanted:
        output = tmp_path / f"out-{rounds}"
        rounds += 1
        now = killed_until_done(job, output, chance, whole)
        whole = whole if now else whole / 2  # it is faster than when it was timed
        kills += now
        assert_same_result(job, output)


@pytest.mark.parametrize("limit", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_in_the_midst_of_each_save(jobs: dict[str, Job], tmp_path: Path, limit: int) -> None:
    job, output, chance = jobs["lora"], tmp_path / "out", random.Random(limit)

    def being_written() -> bool:
        return output.is_dir() and any(path.name.startswith("_staging.") for path in output.iterdir())

    kills = 0
    for _ in range(3):
        running = job.start(output, save_total_limit=limit)
        # what the last process left is still there: wait until it has been cleaned up
        running.until(lambda: output.is_dir() and not being_written())
        for _ in range(chance.randint(1, 2)):
            running.until(being_written)
            time.sleep(chance.uniform(0, 0.03))
        if running.poll() is None:
            running.kill()
            running.wait(30)
            kills += 1
    assert kills > 0
    job.done(output, save_total_limit=limit)
    assert len(list(output.glob("checkpoint-*"))) <= limit
    assert_same_result(job, output)


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.long) for step in (3, 4, 5, 8))])
def test_killed_after_a_step(jobs: dict[str, Job], tmp_path: Path, step: int) -> None:
    job, output = jobs[METHODS[step % 2]], tmp_path / "out"
    running = job.start(output)
    assert running.after_step(step)
    running.kill()
    assert running.wait(30).code == -signal.SIGKILL
    assert manifest.inspect(output).manifest is None  # nothing looks finished
    job.done(output)
    assert_same_result(job, output)


def test_killed_while_the_result_is_written(jobs: dict[str, Job], tmp_path: Path) -> None:
    job, chance = jobs["lora"], random.Random()
    output = tmp_path / "out"
    running = job.start(output)
    running.until(checkpoint(output, STEPS).exists)
    time.sleep(chance.uniform(0, 0.12))
    running.kill()
    if running.wait(30).code == -signal.SIGKILL:
        state = manifest.inspect(output)
        assert state.manifest is None or state.problems == []
    job.done(output)
    assert_same_result(job, output)


def test_the_same_command_after_the_end_changes_nothing(jobs: dict[str, Job], tmp_path: Path) -> None:
    job, output = jobs["lora"], tmp_path / "out"
    shutil.copytree(job.clean(), output)
    before = hashes(output)
    again = job.done(output)
    assert "finished" in again.stdout and str(output) in again.stdout
    assert hashes(output) == before


def test_batches_after_a_resume_are_verified_too(jobs: dict[str, Job], interrupted: Path, tmp_path: Path) -> None:
    job, output = jobs["lora"], tmp_path / "out"
    shutil.copytree(interrupted, output)
    job.done(output)
    assert_same_result(job, output)
    resumed, whole = report_of(output), report_of(job.clean())
    # each step: two micro-batches of three tensors; each evaluation: one batch
    tensors = {"step": 2 * 3, "evaluation": 3}
    assert whole["batches"]["tensors"] == 9 * tensors["step"] + 5 * tensors["evaluation"]
    assert resumed["batches"]["tensors"] == 5 * tensors["step"] + 3 * tensors["evaluation"]
    assert resumed["batches"]["verified_bytes"] == resumed["batches"]["bytes"] > 0
    matrices = 2 * tiny.LAYERS * 7  # of the adapter: two for each linear layer
    assert whole["adapter"]["tensors"] == matrices and whole["optimizer"]["tensors"] == 0
    assert resumed["adapter"]["tensors"] == 2 * matrices  # fresh ones, then those of the checkpoint
    assert resumed["optimizer"]["tensors"] == 3 * matrices  # two moments and the step of each
    assert resumed["weights"] | _TIMES == whole["weights"] | _TIMES


_TIMES = dict.fromkeys(
    ("seconds", "load_seconds", "gb_per_s", "transfer_seconds", "verify_seconds", "load_gb_per_s"), None
)


@pytest.fixture(scope="module")
def interrupted(jobs: dict[str, Job], scratch: Path) -> Path:
    """A LoRA run that was killed in the second epoch; it holds checkpoints 2 and 4."""
    output = scratch / "killed" / "interrupted"
    running = jobs["lora"].start(output)
    assert running.until(checkpoint(output, 4).exists), running.wait().stderr[-2000:]
    running.kill()
    running.wait(30)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    return output


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    jobs: dict[str, Job], interrupted: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(interrupted, output)
    adapter = checkpoint(output, 4) / ADAPTER
    adapter.write_bytes(adapter.read_bytes()[:-7])
    result = jobs["lora"].done(output)
    notes = [line for line in result.stdout.splitlines() if "checkpoint-4 is damaged" in line]
    assert len(notes) == 1 and ADAPTER in notes[0]
    assert "continuing from checkpoint-2" in result.stdout
    assert_same_result(jobs["lora"], output)
