"""Two ranks of which one stops, hangs or dies: the job ends with code 4 and the cause, and the same command goes on.

The stalls are real ones of real processes, at a step that is known; a limit of seconds stands for one of minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_rocm_tune import configs
from hf_rocm_tune.survive import manifest
from tests.e2e.command import TIMEOUT, CommandServer, Result, log_rows
from tests.e2e.conftest import Job, MakeJob, report_of

STEPS = 6
TOGETHER = {"tensor_parallel": True}
WAYS = pytest.mark.parametrize(
    "way", [{}, pytest.param(TOGETHER, marks=pytest.mark.long)], ids=["ddp", "tensor-parallel"]
)
LAUNCHED = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual"]


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """A run of 6 steps on two ranks that saves every second one."""
    return make_job("stalled", max_steps=STEPS, lora_dropout=0.2, save_steps=2)


def run(command: list[str], tmp_path: Path, **environ: str) -> Result:
    """A command line of a user, with a temporary directory of its own."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=2 * TIMEOUT)
    return Result(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def nothing_is_left(output: Path, tmp_path: Path) -> bool:
    """No process of this run, and no file where its ranks met."""
    if [*tmp_path.glob("tmp/hf-rocm-tune*"), *tmp_path.glob("**/*-ranks")]:
        return False
    for process in psutil.process_iter():
        try:
            if str(output) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.Error:
            continue
    return True


@pytest.mark.parametrize(
    ("way", "waits"),
    [({}, "the backward pass"), pytest.param(TOGETHER, "all_gather", marks=pytest.mark.long)],
    ids=["ddp", "tensor-parallel"],
)
def test_a_stopped_rank_ends_the_job_and_the_same_command_goes_on(
    job: Job, tmp_path: Path, way: dict[str, Any], waits: str
) -> None:
    output = tmp_path / "out"
    crash, settings = "kind=stop,step=4,rank=1", {"stall_timeout": 3, **way}
    result, stopped = job.ranks(output, crash=crash, **settings)
    assert (result.code, stopped.code) == (4, -signal.SIGKILL)
    (line,) = result.error_lines
    assert "in step 4: rank 1 (pid " in line and "is stopped (state T)" in line
    assert f"waits for it in {waits}" in line
    assert "Traceback" not in result.stderr
    assert nothing_is_left(output, tmp_path)
    assert str(output / "stall_report.txt") in line
    page = (output / "stall_report.txt").read_text()
    assert page.count("MainThread (most recent call last):") == 1, "a stopped process cannot answer"
    (cause,) = {text for text in page.splitlines() if text.startswith("rank 1 (pid ")}
    assert cause in line
    (incident,) = report_of(output)["incidents"]
    assert (incident["kind"], incident["step"], incident["cause"]) == ("stall", 4, cause)
    assert manifest.verify(output / "checkpoint-2") == []
    results = job.ranks(output, crash=crash, **settings)  # it has struck
    assert [result.code for result in results] == [0, 0], [result.stderr[-2000:] for result in results]
    assert len(log_rows(results[0].stdout)) == STEPS - 2
    assert nothing_is_left(output, tmp_path)


@pytest.mark.long
@WAYS
def test_an_endless_loop_is_named_with_its_line(job: Job, tmp_path: Path, way: dict[str, Any]) -> None:
    output = tmp_path / "out"
    results = job.ranks(output, crash="kind=spin,step=5,rank=1", stall_timeout=2, **way)
    assert [result.code for result in results] == [4, 4], [result.stderr[-2000:] for result in results]
    assert "Traceback" not in results[0].stderr + results[1].stderr
    page = (output / "stall_report.txt").read_text()
    assert "is in _spin() in hf_rocm_tune/train/faults.py:" in page
    assert "waits for it in " in page and page.count("MainThread (most recent call last):") == 2
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 4
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-ranks")) == []


@pytest.mark.parametrize(
    "by", ["server", pytest.param("card_server", marks=pytest.mark.long)], ids=["processes", "simulated-cards"]
)
def test_a_rank_that_stops_while_summands_of_a_backward_pass_are_added_up(
    by: str, job: Job, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On cards the backward pass runs in a thread of autograd's, and the main thread waits for that."""
    server: CommandServer = request.getfixturevalue(by)
    settings = {**TOGETHER, "stall_timeout": 3, "grad_sync": "host", "preflight": "off"}
    two_cards = replace(job, server=server, env={"SIMCARD_DEVICES": "2"})
    ended = two_cards.ranks(tmp_path / "out", each=({}, {"STOPS_IN_SUM": "75"}), **settings)
    assert [result.code for result in ended] == [4, -signal.SIGKILL], [each.stderr[-2000:] for each in ended]
    (line,) = ended[0].error_lines
    where = "all_gather" if by == "server" else "the backward pass"
    assert "is stopped (state T)" in line and f"waits for it in {where}" in line


@WAYS
def test_the_death_of_a_rank_is_one_line_of_the_other(job: Job, tmp_path: Path, way: dict[str, Any]) -> None:
    output = tmp_path / "out"
    first, second = job.ranks(output, crash="kind=kill,step=3,rank=1", **way)
    assert (first.code, second.code) == (4, -signal.SIGKILL)
    assert "Traceback" not in first.stderr
    told = json.loads(output.with_suffix(".exit.json").read_text())
    assert told["code"] == 4 and told["follows"], "a launcher that knows of the signal says that instead"
    assert "rank 1 (pid " in told["message"] and "ended without a message" in told["message"]
    assert not (output / "stall_report.txt").exists()


@pytest.mark.long
@WAYS
def test_a_killed_rank_is_named_by_the_launcher_alone(job: Job, tmp_path: Path, way: dict[str, Any]) -> None:
    output = tmp_path / "out"
    result = run([*LAUNCHED, *job.argv(output, **way)], tmp_path, HF_ROCM_TUNE_CRASH="kind=kill,step=3,rank=1")
    assert result.code == 137
    (line,) = result.error_lines
    assert "the training process of rank 1 was ended by SIGKILL" in line
    assert "Traceback" not in result.stderr
    assert nothing_is_left(output, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_supervised_it_goes_on_by_itself_to_the_same_adapter(job: Job, tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "hf_rocm_tune", "run", "--backoff_seconds", "0", "--stall_seconds", "10", "--"]
    command += ["accelerate", "launch", "--config_file", str(configs.path("cpu_dual")), "-m", "hf_rocm_tune.sft"]
    outputs = tmp_path / "whole", tmp_path / "out"
    for output, crash in zip(outputs, ("", f"kind={kind},step=4,rank=1"), strict=True):
        result = run([*command, *job.argv(output)], tmp_path, HF_ROCM_TUNE_CRASH=crash)
        assert result.code == 0, result.stderr[-3000:]
    whole, restarted = ((output / "adapter_model.safetensors").read_bytes() for output in outputs)
    assert whole == restarted
    survival = report_of(outputs[1])["survival"]
    assert [end["code"] for end in survival["ends"]] == [4]
    assert "rank 1 (pid " in survival["ends"][0]["message"], "the watchdog came before the supervisor"
    assert nothing_is_left(outputs[1], tmp_path)


@pytest.mark.long
def test_torchrun_starts_the_group_again(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"]
    command = [*launcher, "-m", "hf_rocm_tune.sft", *job.argv(output, stall_timeout=3)]
    crash = {"HF_ROCM_TUNE_CRASH": "kind=stop,step=4,rank=0"}
    # Else torch's agent keeps one store over all tries, in which a new try may meet the addresses of the last one.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = run(command, tmp_path, **crash, **own_store)
    assert result.code == 0, result.stderr[-3000:]
    assert "[rank 1] error: no progress" in result.stderr and "rank 0 (pid " in result.stderr
    assert manifest.inspect(output).problems == []
    assert not list((tmp_path / "tmp").glob("*-ranks"))
