"""Whole runs of two processes behind a preflight that is harmed: the decision holds for the run, or ends it with 4.

On the CPU, where sums run over gloo; `tests/cards/test_preflight.py` tries more faults on ranks that do no more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.command import TIMEOUT, error_lines
from tests.e2e.conftest import Job, MakeJob, report_of
from tests.notebooks.test_notebook_launcher import LAUNCH

FAULT = "HF_ROCM_TUNE_PREFLIGHT_FAULT"
WRONG = "trial=ddp,kind=wrong"


# A busy machine takes longer than the real limit to import torch.
LIMIT = {"PREFLIGHT_LIMIT": "180"}


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    more = {"max_steps": 4, "lora_dropout": 0.0, "save_strategy": "no", "preflight": "always"}
    return make_job("preflight", **more)


def launched(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env={**os.environ, **env}
    )


def preflight_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hf-rocm-tune: preflight: ")]


def test_a_run_goes_on_through_the_host_where_the_sums_were_wrong(job: Job, tmp_path: Path) -> None:
    results = job.ranks(tmp_path / "out", each=[{FAULT: WRONG, **LIMIT}] * 2)
    assert [result.code for result in results] == [0, 0], results[0].stderr[-3000:]
    (line,) = preflight_lines(results[0].stdout)
    assert "averaged through host memory" in line and "sums wrong" in line
    assert not preflight_lines(results[1].stdout), "one rank speaks"
    report = report_of(tmp_path / "out")
    assert report["preflight"]["method"] == report["grad_sync"]["method"] == "host"
    assert report["preflight"]["fault_injection"] == WRONG and "instead of" in report["preflight"]["evidence"][0]
    assert report["gradients"]["buckets"] > 0 and report["gradients"]["mismatches"] == 0


@pytest.mark.long
def test_what_the_user_insists_on_ends_the_run_before_a_model_is_loaded(job: Job, tmp_path: Path) -> None:
    results = job.ranks(tmp_path / "out", grad_sync="ddp", each=[{FAULT: WRONG, **LIMIT}] * 2)
    assert [result.code for result in results] == [4, 4]
    (line,) = error_lines(result.stderr for result in results)
    assert "--grad_sync ddp failed the preflight" in line and "--grad_sync host" in line
    assert json.loads((tmp_path / "out.exit.json").read_text())["code"] == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "averaged over the process group as it is"),
        ("trial=ddp,kind=hang", "had not ended after"),
        ("trial=ddp,kind=crash,rank=0", "rank 0 was ended by SIGSEGV"),
    ],
)
def test_the_launcher_ends_as_the_preflight_decides(fault: str, words: str, job: Job, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--num_processes", "2", *job.argv(tmp_path / "out")]
    done = launched(command, {FAULT: fault})
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = preflight_lines(done.stdout)
    assert words in said
    assert report_of(tmp_path / "out")["preflight"]["method"] == ("host" if fault else "ddp")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "notebook"])
def test_plain_launchers_get_the_same_decision(launcher: str, job: Job, tmp_path: Path) -> None:
    argv = job.argv(tmp_path / "out")
    script = tmp_path / "launch.py"
    script.write_text(LAUNCH)
    commands = {
        "accelerate": ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_dual.yaml"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
    }
    command = [*commands[launcher], "-m", "hf_rocm_tune.sft", *argv] if launcher in commands else []
    done = launched([sys.executable, *(command or [str(script), json.dumps(argv)])], {FAULT: WRONG})
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(preflight_lines(done.stdout)) == 1
    assert report_of(tmp_path / "out")["preflight"]["method"] == "host"
