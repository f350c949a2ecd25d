"""Two processes with batch B train like one with batch 2B, and no rank's frozen weights come from another rank.

Accelerate deals batches out in turn, so the two batches of a step on two processes are together the one batch of that
step on one process (the rows are a multiple of 2B here), and the loss is divided by the label tokens of all ranks. What
differs is the order of float sums and how far a batch is padded.

TRL's evaluation loss is the mean over rows of the mean of each row's batch, so it compares at batch size 1 only. Nine
rows on two processes make Accelerate repeat one: the loss is equal only where the repeated row is dropped again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.command import TIMEOUT, error_lines
from tests.e2e.conftest import Job, MakeJob, assert_covered, report_of
from tests.two_ranks import environments

BATCH, ROWS, EVAL_ROWS = 2, 48, 9
TOLERANCE = 1e-5
COMPARED = ("loss", "grad_norm", "learning_rate", "num_tokens", "eval_loss", "epoch")


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job(
        "two-processes",
        train=ROWS,
        test=EVAL_ROWS,
        max_steps=8,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=4,
        lora_dropout=0.0,
    )


@pytest.fixture(scope="module")
def outputs(job: Job) -> tuple[Path, Path]:
    """Output directories of one process with batch 2B, and of two with batch B through the real launcher."""
    one, two = job.root / "one", job.root / "two"
    launched = job.launched("cpu_dual", two)
    assert launched.returncode == 0, launched.stderr[-3000:]
    job.done(one, per_device_train_batch_size=2 * BATCH)
    return one, two


def _log(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    return [{name: row[name] for name in COMPARED if name in row} for row in history]


def test_the_trajectory_is_that_of_one_process_with_twice_the_batch(outputs: tuple[Path, Path]) -> None:
    one, two = (_log(output) for output in outputs)
    assert sum("loss" in row for row in one) == 8 and len(one) == len(two)
    assert one[0]["loss"] - one[-2]["loss"] > 1000 * TOLERANCE  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_the_evaluation_counts_every_row_once(outputs: tuple[Path, Path]) -> None:
    one, two = ([row["eval_loss"] for row in _log(output) if "eval_loss" in row] for output in outputs)
    assert len(one) == 2
    assert one == pytest.approx(two, rel=TOLERANCE)


def test_the_adapters_agree(outputs: tuple[Path, Path]) -> None:
    one, two = (load_file(output / "adapter_model.safetensors") for output in outputs)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-4)


def test_the_report_covers_and_compares_both_ranks(outputs: tuple[Path, Path]) -> None:
    one, two = (report_of(output) for output in outputs)
    assert two["ranks"] == 2
    assert_covered(two)
    assert two["weights"]["tensors"] == 2 * one["weights"]["tensors"]  # each rank loads its own
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]
    assert two["replicas"]["checks"] > 0
    assert two["replicas"]["mismatches"] == two["frozen"]["mismatches"] == 0


def _assert_stopped_for_unequal_ranks(codes: list[int], lines: list[str], tmp_path: Path) -> None:
    assert codes == [3, 3]
    assert len(lines) == 1 and "ranks differ from rank 0" in lines[0]
    assert not list((tmp_path / "out").glob("**/adapter_model.safetensors"))
    said = json.loads((tmp_path / "out.exit.json").read_text())
    assert said["code"] == 3 and said["message"] in lines[0]


def test_a_weight_that_changed_on_one_rank_stops_both(job: Job, tmp_path: Path) -> None:
    harmed = "layers.1.mlp.up_proj"
    fault = {"HF_ROCM_TUNE_FAULT": f"kind=after,stage=weights,tensor=*{harmed}.weight,count=1"}
    results = job.ranks(tmp_path / "out", each=[{}, fault])
    lines = error_lines(result.stderr for result in results)
    _assert_stopped_for_unequal_ranks([result.code for result in results], lines, tmp_path)
    assert "before DistributedDataParallel" in lines[0] and harmed in lines[0] and "(ranks [1])" in lines[0]


@pytest.mark.long
def test_frozen_weights_are_not_broadcast_at_start(job: Job, tmp_path: Path) -> None:
    """Were they, rank 1's changed copy would be overwritten, and this run would end as if nothing had happened."""
    argv, ranks = job.argv(tmp_path / "out"), environments(tmp_path / "out.exit.json")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.unequal_ranks", *argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | rank,
        )
        for rank in ranks
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT)[1] for each in running]
    finally:
        for each in running:
            each.kill()  # does nothing to one that has ended
    lines = error_lines(said)
    _assert_stopped_for_unequal_ranks([each.returncode for each in running], lines, tmp_path)
    assert "after DistributedDataParallel" in lines[0]
