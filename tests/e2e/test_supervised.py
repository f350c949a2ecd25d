"""`hf-rocm-tune run` around real training: killed, hung, poisoned, and a step that always dies.

Every one ends with a finished adapter or a clear stop. Where no step is left out, the adapter is bit for bit that of
the undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import configs
from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.survive import manifest
from tests.e2e.command import TIMEOUT, Result
from tests.e2e.conftest import Job, MakeJob, assert_same_run, report_of

STEPS = 9


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """A run of 9 steps that saves every second one."""
    settings = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "lora_dropout": 0.2, "save_steps": 2}
    return make_job("supervised", train=12, **settings)


def supervise(job: Job, output: Path, *, flags: tuple[str, ...] = (), **environ: str) -> Result:
    """`hf-rocm-tune run -- python -m hf_rocm_tune.sft ...`; without the launcher a start costs half the time."""
    patience = ["--backoff_seconds", "0", "--stall_seconds", "10", "--grace_seconds", "1", *flags]
    command = [sys.executable, "-m", "hf_rocm_tune", "run", *patience, "--"]
    command += [sys.executable, "-m", "hf_rocm_tune.sft", *job.argv(output)]
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=2 * TIMEOUT
    )
    return Result(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def ends(output: Path) -> list[dict[str, Any]]:
    """How each start ended, by the journal."""
    run_id = json.loads((output / "run.json").read_text())["run_id"]
    return [entry for entry in heartbeat.journal_of(output, run_id) if entry["event"] == "end"]


@pytest.mark.long
def test_killed_at_a_random_step_and_then_hung_it_ends_with_the_same_adapter(job: Job, tmp_path: Path) -> None:
    output, step = tmp_path / "out", random.Random(11).randint(1, 5)
    crashes = f"kind=kill,step={step};kind=hang,step=7"
    result = supervise(job, output, HF_ROCM_TUNE_CRASH=crashes)
    assert result.code == 0, result.stderr[-3000:]
    assert [(end["how"].split(" for ")[0], end["step"], end["code"]) for end in ends(output)] == [
        ("ended by SIGKILL", step - 1, 137),
        ("exit code 4", 6, 4),
        ("exit code 0", STEPS, 0),
    ]
    assert "_hang() in hf_rocm_tune/train/faults.py" in ends(output)[1]["message"], "the job itself knows the cause"
    survival = report_of(output)["survival"]
    assert survival["supervised"] and survival["starts"] == 3 and survival["skipped_steps"] == []
    assert [end["code"] for end in survival["ends"]] == [137, 4]
    assert survival["crash_injection"] == crashes
    assert "2 restarts" in result.stdout.splitlines()[-1] and "on request" in result.stdout.splitlines()[-1]
    assert_same_run(output, job.clean())


def test_gradients_that_are_always_nan_are_a_clear_stop_and_no_loop(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = supervise(job, output, HF_ROCM_TUNE_STEP_FAULT="kind=nan,first=3")
    assert result.code == 3
    assert len(result.error_lines) == 1 and "loss" in result.error_lines[0]
    assert "Traceback" not in result.stderr
    assert len(ends(output)) == 1 and ends(output)[0]["code"] == 3
    assert "not restarted: exit code 3 is final" in result.stdout
    assert manifest.inspect(output).manifest is None
    assert manifest.verify(output / "checkpoint-2") == []


def test_what_a_run_wrote_is_not_overwritten_by_its_own_restart(job: Job, tmp_path: Path) -> None:
    """The supervisor starts the same command line again, `--overwrite_output_dir` included."""
    output = job.clean()
    run_id = json.loads((output / "run.json").read_text())["run_id"]
    told = heartbeat.Supervised(directory=str(tmp_path), start_seconds=0, stall_seconds=0, restart_of=run_id)
    result = job.start(output, "--overwrite_output_dir", env={heartbeat.VARIABLE: told.to_json()}).wait()
    assert result.code == 0 and "already holds this finished run" in result.stdout, result.stderr[-3000:]


@pytest.mark.long
def test_a_step_that_always_dies_is_left_out_and_the_run_ends(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = supervise(
        job, output, HF_ROCM_TUNE_CRASH="kind=exit,step=3,times=99", HF_ROCM_TUNE_STEP_FAULT="kind=nan,first=5,count=1"
    )
    assert result.code == 0, result.stderr[-3000:]
    assert [end["code"] for end in ends(output)] == [1, 1, 0]
    assert report_of(output)["survival"]["skipped_steps"] == [3]
    assert manifest.inspect(output).problems == []


@pytest.mark.long
def test_two_ranks_through_the_launcher_survive_the_death_of_one(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "hf_rocm_tune", "run", "--backoff_seconds", "0", "--"]
    command += ["accelerate", "launch", "--config_file", str(configs.path("cpu_dual")), "-m", "hf_rocm_tune.sft"]
    environ = {"HF_ROCM_TUNE_CRASH": "kind=kill,step=3,rank=1"}
    done = subprocess.run(
        [*command, *job.argv(output)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [end["code"] for end in ends(output)] == [137, 0]
    assert report_of(output)["ranks"] == 2
