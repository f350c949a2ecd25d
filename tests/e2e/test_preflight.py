"""Whole runs of two processes behind a preflight that is harmed: the decision holds for the run, or ends it with 4.

On the CPU, where sums run over gloo; `tests/cards/test_preflight.py` tries more faults on ranks that do no more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.e2e.command import TIMEOUT, CommandServer, Result
from tests.e2e.conftest import flags, report_of
from tests.notebooks.test_notebook_launcher import LAUNCH
from tests.two_ranks import environments

FAULT = "HF_ROCM_TUNE_PREFLIGHT_FAULT"
WRONG = "trial=ddp,kind=wrong"


@pytest.fixture
def argv(model_of: Callable[[str], Path], base_flags: list[str]) -> list[str]:
    return [*base_flags, *flags(model_name_or_path=model_of("llama3"), preflight="always")]


def two_ranks(server: CommandServer, tmp_path: Path, argv: list[str], env: Mapping[str, str]) -> list[Result]:
    """Both ranks of a job, to their ends."""
    limit = {"PREFLIGHT_LIMIT": "180"}  # a busy machine takes longer than the real limit to import torch
    running = [server.start(*argv, env=each) for each in environments(tmp_path / "exit.json", **{**env, **limit})]
    return [each.wait() for each in running]


def launched(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env={**os.environ, **env}
    )


def preflight_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hf-rocm-tune: preflight: ")]


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]


def test_a_run_goes_on_through_the_host_where_the_sums_were_wrong(
    argv: list[str], server: CommandServer, tmp_path: Path
) -> None:
    results = two_ranks(server, tmp_path, argv, {FAULT: WRONG})
    assert [result.code for result in results] == [0, 0], results[0].stderr[-3000:]
    (line,) = preflight_lines(results[0].stdout)
    assert "averaged through host memory" in line and "sums wrong" in line
    assert not preflight_lines(results[1].stdout), "one rank speaks"
    report = report_of(tmp_path / "out")
    assert report["preflight"]["way"] == report["grad_sync"]["way"] == "host"
    assert report["preflight"]["fault_injection"] == WRONG and "instead of" in report["preflight"]["evidence"][0]
    assert report["gradients"]["buckets"] > 0 and report["gradients"]["mismatches"] == 0


@pytest.mark.long
def test_what_the_user_insists_on_ends_the_run_before_a_model_is_loaded(
    argv: list[str], server: CommandServer, tmp_path: Path
) -> None:
    results = two_ranks(server, tmp_path, [*argv, "--grad_sync", "ddp"], {FAULT: WRONG})
    assert [result.code for result in results] == [4, 4]
    (line,) = [line for result in results for line in error_lines(result.stderr)]
    assert "--grad_sync ddp failed the preflight" in line and "--grad_sync host" in line
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "averaged over the process group as it is"),
        ("trial=ddp,kind=hang", "rank 1 had not ended after"),
        ("trial=ddp,kind=crash,rank=0", "rank 0 was ended by SIGSEGV"),
    ],
)
def test_the_launcher_ends_as_the_preflight_decides(fault: str, words: str, argv: list[str], tmp_path: Path) -> None:
    done = launched([sys.executable, "-m", "hf_rocm_tune", "sft", "--num_processes", "2", *argv], {FAULT: fault})
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = preflight_lines(done.stdout)
    assert words in said
    assert report_of(tmp_path / "out")["preflight"]["way"] == ("host" if fault else "ddp")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "notebook"])
def test_plain_launchers_get_the_same_decision(launcher: str, argv: list[str], tmp_path: Path) -> None:
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
    assert report_of(tmp_path / "out")["preflight"]["way"] == "host"
