"""Ctrl-C, SIGTERM and the file CHECKPOINT: the step is finished and saved, and the rest equals the undisturbed run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import CommandServer, Result, Running, log_rows
from tests.e2e.test_killed import Job, assert_same_result, wait_for
from tests.two_ranks import environments

STEPS = 9
SIGNALS = [(signal.SIGINT, "Ctrl-C"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """A run of 9 steps that evaluates every second step and would save only at its end; undisturbed once."""
    root = scratch / "interrupted"
    settings = {
        "model_name_or_path": model_of("llama3"),
        "dataset_name": tiny.write_dataset_dir(root / "data", train=12, test=4),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
        "learning_rate": 0.01,
        "lora_dropout": 0.2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 100,
        "disable_tqdm": True,
    }
    made = Job(server=server, settings=settings, method="lora", whole=root / "whole")
    made.finish(made.whole)
    return made


def after_step(running: Running, step: int) -> bool:
    """Waits for the log line of a step; False if the command ended before."""
    return wait_for(running, lambda: len(log_rows(running.printed())) >= step)


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
    assert after_step(running, 4)
    running.kill(number)
    result = running.wait(60)
    assert ended(result, output, by) >= 4
    assert f"hf-rocm-tune: {by}: the run saves" in result.stderr
    assert not list(output.glob("_staging*"))
    job.finish(output)
    assert_same_result(job, output)


@pytest.mark.long
def test_again_and_again_until_it_is_done(job: Job, tmp_path: Path) -> None:
    output, steps = tmp_path / "out", []
    while True:
        running = job.start(output)
        if not after_step(running, 2):
            assert running.wait().code == 0
            break
        running.kill(signal.SIGTERM)
        result = running.wait(60)
        if result.code == 0:  # it came after the last step
            break
        steps.append(ended(result, output, "SIGTERM"))
    assert steps == sorted(set(steps)) and len(steps) >= 2
    assert_same_result(job, output)


@pytest.mark.parametrize(("number", "by"), SIGNALS)
def test_one_signal_that_arrives_twice_is_one(job: Job, tmp_path: Path, number: signal.Signals, by: str) -> None:
    """A terminal or a service manager sends it to every process, and the launcher passes it on."""
    output = tmp_path / "out"
    running = job.start(output)
    assert after_step(running, 2)
    running.kill(number)
    time.sleep(0.01)  # two pending ones of a kind would be one already
    if running.poll() is None:
        running.kill(number)
    assert ended(running.wait(60), output, by) >= 2


def test_a_second_ctrl_c_ends_at_once(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    running = job.server.start(*job.argv(output), env={"HF_ROCM_TUNE_CRASH": "step=3,kind=hang"})
    assert wait_for(running, (output / "_crashes.json").exists)
    running.kill(signal.SIGINT)
    time.sleep(1.3)  # what comes within a second counts as the same press
    assert running.poll() is None, "the first one waits for the end of the step"
    running.kill(signal.SIGINT)
    result = running.wait(20)
    assert result.code == 130
    assert result.stderr.splitlines()[-1] == "hf-rocm-tune: interrupted: stopped by Ctrl-C"
    assert not list(output.glob("checkpoint-*"))
    job.finish(output)
    (output / "_crashes.json").unlink()
    assert_same_result(job, output)


@pytest.mark.parametrize(("number", "by"), SIGNALS)
def test_while_it_loads_it_just_ends(job: Job, tmp_path: Path, number: signal.Signals, by: str) -> None:
    output = tmp_path / "out"
    running = job.start(output)
    assert wait_for(running, lambda: "effective" in running.printed())
    running.kill(number)
    result = running.wait(30)
    assert result.code == 130
    assert result.stderr.splitlines()[-1] == f"hf-rocm-tune: interrupted: stopped by {by}"
    assert "Traceback" not in result.stderr
    assert not list(output.glob("checkpoint-*"))


def test_ctrl_c_ends_the_reader_of_a_pipe_too_and_the_checkpoint_is_written(job: Job, tmp_path: Path) -> None:
    """``sft ... | tee log``: the terminal sends SIGINT to both."""
    output = tmp_path / "out"
    settings = job.settings | {"output_dir": output, "max_steps": 1000}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "hf_rocm_tune.sft", *flags, "--use_peft"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        while not re.match(r" +2/1000 ", process.stdout.readline()):
            assert process.poll() is None, process.stderr.read()
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        ended(Result(code=process.wait(60), stdout="", stderr=said), output, "Ctrl-C")


def test_the_file_asks_for_a_checkpoint_and_the_run_goes_on(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    running = job.start(output)
    assert after_step(running, 1)
    (output / "CHECKPOINT").touch()
    assert wait_for(running, lambda: not (output / "CHECKPOINT").exists())
    saved = list(output.glob("checkpoint-*"))
    assert len(saved) == 1 and manifest.verify(saved[0]) == [], "it is whole before the file goes away"
    running.kill()  # what was asked for is something to go on from
    assert running.wait(30).code in (-signal.SIGKILL, 0)
    result = job.finish(output)
    assert_same_result(job, output)
    assert "checkpoint" in result.stdout or saved[0].exists()


def test_a_step_that_is_left_out_computes_nothing_and_the_rest_is_trained(job: Job, tmp_path: Path) -> None:
    """The crash strikes whenever the third step's batch is used; run.json says to leave that step out."""
    output, env = tmp_path / "out", {"HF_ROCM_TUNE_CRASH": "step=3,kind=exit,times=99"}
    argv = job.argv(output, save_steps=1)
    for _ in range(2):
        assert job.server.run(*argv, env=env).code == 1
    from hf_rocm_tune.survive.run_directory import skip_step

    skip_step(output, 3)
    result = job.server.run(*argv, env=env)
    assert result.code == 0, result.stderr[-2000:]
    assert "left out, because the run died in them twice (run.json): steps 3" in result.stdout
    assert "steps left out: 3" in result.stdout.splitlines()[-1]
    report = json.loads((output / "transfer_report.json").read_text())
    assert report["survival"]["skipped_steps"] == [3]
    assert report["survival"]["crash_injection"] == env["HF_ROCM_TUNE_CRASH"]
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"]
    weights = [(output / f"checkpoint-{step}" / "adapter_model.safetensors").read_bytes() for step in (2, 3, 4, STEPS)]
    assert weights[0] == weights[1], "the step that is left out changes no weight"
    assert len(set(weights)) == 3


def test_two_ranks_stop_at_the_same_step_whichever_was_asked(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    exit_file = tmp_path / "exit.json"

    def start() -> list[Running]:
        return [job.server.start(*job.argv(output), env=env) for env in environments(exit_file)]

    first, second = start()
    assert after_step(first, 2)
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
    assert len(log_rows(results[0].stdout)) == 6 - int(
        saved[0].name.split("-")[1]
    )  # on two ranks an epoch has two steps
