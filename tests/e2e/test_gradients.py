"""Averages of gradients that come out wrong in real two-process runs: made again before the optimizer, or all stop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.two_ranks import environments

STEPS = 5
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command for two processes, and the output of an undisturbed run of it."""

    server: CommandServer
    argv: list[str]
    clean: Path

    def run(
        self,
        output: Path,
        faults: tuple[str, str] = ("", ""),
        environ: tuple[dict[str, str], dict[str, str]] = ({}, {}),
        **changed: object,
    ) -> list[Result]:
        """Runs both ranks, each with its own faults and variables."""
        argv = [*self.argv, *flags(output_dir=output, **changed)]
        each = [{"HF_ROCM_TUNE_FAULT": fault, **more} for fault, more in zip(faults, environ, strict=True)]
        ranks = environments(output.with_suffix(".exit.json"), each)
        running = [self.server.start(*argv, env=each) for each in ranks]
        return [each.wait() for each in running]


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """The undisturbed run."""
    root = scratch / "gradients"
    argv = flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(root / "data", train=24, test=4),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_length=64,
        learning_rate=0.01,
        lora_dropout=0.0,
        logging_steps=1,
        save_steps=2,
        eval_strategy="no",
        disable_tqdm=True,
    )
    made = Job(server=server, argv=argv, clean=root / "clean")
    _assert_done(made.run(made.clean))
    return made


def _assert_done(results: list[Result]) -> None:
    assert [result.code for result in results] == [0, 0], [result.stderr[-3000:] for result in results]


def _assert_recovered(output: Path, clean: Path, mismatches: int) -> None:
    """Adapter and losses are bit for bit the undisturbed run's. Both ranks count each wrong bucket."""
    assert (output / ADAPTER).read_bytes() == (clean / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(clean)
    report = report_of(output)
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] == 2 * mismatches
    assert {(row["stage"], row["outcome"]) for row in report["incidents"]} == {("gradients", "recovered")}
    assert all("lora" in row["tensor"] for row in report["incidents"])


def test_every_step_of_a_clean_run_is_checked(job: Job) -> None:
    report = report_of(job.clean)
    assert report["gradients"]["buckets"] >= 2 * STEPS
    assert report["gradients"]["mismatches"] == 0 and report["incidents"] == []


def test_a_wrong_average_on_one_rank_is_made_again(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    _assert_done(job.run(output, ("", "kind=flip,stage=gradients,first=2,count=1")))
    _assert_recovered(output, job.clean, mismatches=1)


@pytest.mark.long
def test_clipping_does_not_pass_for_a_wrong_average_nor_hide_one(job: Job, tmp_path: Path) -> None:
    plain, harmed = tmp_path / "plain", tmp_path / "harmed"
    _assert_done(job.run(plain, max_grad_norm=1e-3))
    assert report_of(plain)["gradients"]["mismatches"] == 0
    _assert_done(job.run(harmed, ("kind=zero_range,stage=gradients,count=2",) * 2, max_grad_norm=1e-3))
    _assert_recovered(harmed, plain, mismatches=2)


@pytest.mark.long
def test_through_the_launcher_an_average_that_is_wrong_alike_on_both_ranks_is_made_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=zero,stage=gradients,first=2,count=1")
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *job.argv]
    command += flags(output_dir=output)
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert launched.returncode == 0, launched.stderr[-3000:]
    _assert_recovered(output, job.clean, mismatches=1)
    assert report_of(output)["fault_injection"]["injected"] == 1
    assert "averages of gradients checked (2 wrong, 2 recovered)" in launched.stdout.splitlines()[-1]


@pytest.mark.parametrize("ranks", [pytest.param("one", marks=pytest.mark.long), "both"])
def test_a_persistent_one_stops_all_ranks_with_one_line(job: Job, tmp_path: Path, ranks: str) -> None:
    output = tmp_path / "out"
    fault = "kind=zero,stage=gradients,first=4,persist=1"
    results = job.run(output, (fault if ranks == "both" else "", fault))
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    said = [line for result in results for line in result.stderr.splitlines()]
    lines = [line for line in said if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]
    assert len(lines) == 1 and not any("Traceback" in line for line in said)
    assert "the average of the gradients in bucket" in lines[0] and "was not used" in lines[0]
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 3
    assert not (output / ADAPTER).exists()
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert manifest.verify(output / "checkpoint-2") == []
    assert report_of(output)["incidents"][-1]["outcome"] == "failed"
    if ranks == "both":
        _assert_done(job.run(output))  # the same command goes on
        assert (output / ADAPTER).read_bytes() == (job.clean / ADAPTER).read_bytes()
