"""Ctrl-C, SIGTERM and the file CHECKPOINT: the step is finished and saved, and the rest equals the undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.run_directory import skip_step
from tests.e2e.command import Result, Running, log_rows
from tests.e2e.conftest import Job, MakeJob, assert_covered, assert_same_run, report_of
from tests.two_ranks import environments

STEPS = 9
SIGNALS = [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """A run of 9 steps that evaluates every second step and would save only at its end."""
    rare = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 100}
    settings = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "lora_dropout": 0.2, **rare}
    return make_job("interrupted", train=12, **settings)


def ended(result: Result, output: Path, by: str) -> int:
    """The step whose checkpoint the interrupted command names as its last words; it is whole."""
    assert result.code == 130, result.stderr[-2000:]
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"hf-rocm-tune: interrupted: stopped by {by}, checkpoint-")
    assert "Traceback" not in result.stderr
    name = last.split(", ")[1].split()[0]
    assert manifest.verify(output / name) == []
    assert manifest.inspect(output).manifest is None, "an interrupted run does not look finished"
    return int(name.split("-")[1])


@pytest.mark.parametrize(("number", "by"), SIGNALS)
def test_a_signal_saves_the_step_and_the_same_command_goes_on_bit_for_bit(
    job: Job, tmp_path: Path, number: signal.Signals, by: str
) -> None:
    output = tmp_path / "out"
    running = job.start(output)
    assert running.after_step(4)
    running.kill(number)
    time.sleep(0.01)  # two pending ones of a kind would be one already
    running.kill(number)  # a terminal or a service manager sends it to every process, and the launcher passes it on
    result = running.wait(60)
    assert ended(result, output, by) >= 4
    assert f"hf-rocm-tune: {by}: the run saves" in result.stderr
    assert not list(output.glob("_staging*"))
    job.done(output)
    assert_same_run(output, job.clean())


@pytest.mark.long
def test_again_and_again_until_it_is_done(job: Job, tmp_path: Path) -> None:
    output, steps = tmp_path / "out", []
    while True:
        running = job.start(output)
        if not running.after_step(2):
            assert running.wait().code == 0
            break
        running.kill(signal.SIGTERM)
        result = running.wait(60)
        if result.code == 0:  # it came after the last step
            break
        steps.append(ended(result, output, "SIGTERM"))
    assert steps == sorted(set(steps)) and len(steps) >= 2
    assert_same_run(output, job.clean())


def test_a_second_ctrl_c_ends_at_once(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    running = job.start(output, crash="step=3,kind=hang")
    assert running.until((output / "_crashes.json").exists)
    running.kill(signal.SIGINT)
    time.sleep(1.3)  # what comes within a second counts as the same press
    assert running.poll() is None, "the first one waits for the end of the step"
    running.kill(signal.SIGINT)
    result = running.wait(20)
    assert result.code == 130
    assert result.stderr.splitlines()[-1] == "hf-rocm-tune: interrupted: stopped by Ctrl-C"
    assert not list(output.glob("checkpoint-*"))


@pytest.mark.parametrize(("number", "by"), SIGNALS)
def test_while_it_loads_it_just_ends(job: Job, tmp_path: Path, number: signal.Signals, by: str) -> None:
    output = tmp_path / "out"
    running = job.start(output)
    assert running.until(lambda: "effective" in running.printed())
    running.kill(number)
    result = running.wait(30)
    assert result.code == 130
    assert result.stderr.splitlines()[-1] == f"hf-rocm-tune: interrupted: stopped by {by}"
    assert "Traceback" not in result.stderr
    assert not list(output.glob("checkpoint-*"))


def test_ctrl_c_ends_the_reader_of_a_pipe_too_and_the_checkpoint_is_written(job: Job, tmp_path: Path) -> None:
    """``sft ... | tee log``: the terminal sends SIGINT to both."""
    output, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    running = job.server.start(*job.argv(output, max_steps=1000), out=str(pipe))
    with pipe.open() as reader:
        while not re.match(r" +2/1000 ", reader.readline()):
            assert running.poll() is None
    running.kill(signal.SIGINT)
    ended(running.wait(60), output, "Ctrl-C")


def test_the_file_asks_for_a_checkpoint_and_the_run_goes_on(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    running = job.start(output)
    assert running.after_step(1)
    (output / "CHECKPOINT").touch()
    assert running.until(lambda: not (output / "CHECKPOINT").exists())
    saved = list(output.glob("checkpoint-*"))
    assert len(saved) == 1 and manifest.verify(saved[0]) == [], "it is whole before the file goes away"
    running.kill()  # what was asked for is something to go on from
    assert running.wait(30).code in (-signal.SIGKILL, 0)
    result = job.done(output)
    assert_same_run(output, job.clean())
    assert "checkpoint" in result.stdout or saved[0].exists()


def test_a_step_that_is_left_out_computes_nothing_and_the_rest_is_trained(job: Job, tmp_path: Path) -> None:
    """The crash strikes whenever the third step's batch is used; run.json says to leave that step out."""
    output, crash = tmp_path / "out", "step=3,kind=exit,times=99"
    assert job.run(output, crash=crash, save_steps=1).code == 1
    skip_step(output, 3)
    result = job.done(output, crash=crash, save_steps=1)
    assert "left out, because the run died in them twice (run.json): steps 3" in result.stdout
    assert "steps left out: 3" in result.stdout.splitlines()[-1]
    report = report_of(output)
    assert report["survival"]["skipped_steps"] == [3]
    assert report["survival"]["crash_injection"] == crash
    assert_covered(report)
    weights = [(output / f"checkpoint-{step}" / "adapter_model.safetensors").read_bytes() for step in (2, 3, 4, STEPS)]
    assert weights[0] == weights[1], "the step that is left out changes no weight"
    assert len(set(weights)) == 3


def test_two_ranks_stop_at_the_same_step_whichever_was_asked(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    exit_file = tmp_path / "exit.json"

    def start() -> list[Running]:
        return [job.start(output, env=env) for env in environments(exit_file)]

    first, second = start()
    assert first.after_step(2)
    second.kill(signal.SIGTERM)  # the first hears of it only from the second
    results = [first.wait(60), second.wait(60)]
    assert [result.code for result in results] == [130, 130], [result.stderr[-2000:] for result in results]
    told = json.loads((tmp_path / "exit.json").read_text())
    saved = list(output.glob("checkpoint-*"))
    assert len(saved) == 1 and manifest.verify(saved[0]) == []
    assert (saved[0] / "rng_state_1.pth").exists()
    assert told["code"] == 130 and f"stopped by SIGTERM, {saved[0].name} is written" in told["message"]
    (tmp_path / "exit.json").unlink()
    results = [running.wait() for running in start()]
    assert [result.code for result in results] == [0, 0], [result.stderr[-2000:] for result in results]
    assert not log_rows(results[1].stdout), "the first rank speaks"
    # On two ranks an epoch has two steps.
    assert len(log_rows(results[0].stdout)) == 6 - int(saved[0].name.split("-")[1])
