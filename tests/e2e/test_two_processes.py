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
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, report_of
from tests.two_ranks import environments

BATCH, ROWS, EVAL_ROWS = 2, 48, 9
TOLERANCE = 1e-5
COMPARED = ("loss", "grad_norm", "learning_rate", "num_tokens", "eval_loss", "epoch")


@pytest.fixture(scope="module")
def shared(model_of: Callable[[str], Path], scratch: Path) -> list[str]:
    """Flags of both runs; without batch size and output directory."""
    return flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(scratch / "two-processes", train=ROWS, test=EVAL_ROWS),
        max_steps=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=4,
        max_length=64,
        learning_rate=0.01,
        lora_dropout=0.0,
        logging_steps=1,
        disable_tqdm=True,
    )


@pytest.fixture(scope="module")
def outputs(shared: list[str], server: CommandServer, scratch: Path) -> tuple[Path, Path]:
    """Output directories of one process with batch 2B, and of two with batch B through the real launcher."""
    one, two = scratch / "one-process", scratch / "two-processes-out"
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *shared]
    command += flags(per_device_train_batch_size=BATCH, output_dir=two)
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert launched.returncode == 0, launched.stderr[-3000:]
    result = server.run(*shared, *flags(per_device_train_batch_size=2 * BATCH, output_dir=one))
    assert result.code == 0, result.stderr[-3000:]
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
    assert two["coverage"]["unverified"] == []
    assert two["coverage"]["verified_bytes"] == two["coverage"]["device_bytes"]
    assert two["weights"]["tensors"] == 2 * one["weights"]["tensors"]  # each rank loads its own
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]
    assert two["replicas"]["checks"] > 0
    assert two["replicas"]["mismatches"] == two["frozen"]["mismatches"] == 0


@pytest.fixture
def ranks(tmp_path: Path) -> list[dict[str, str]]:
    """What a launcher would put into the environment of two ranks."""
    return environments(tmp_path / "exit.json")


def _error_lines(texts: Iterable[str]) -> list[str]:
    """The lines of all ranks together that our boundary printed; a rank but the first names itself in them."""
    found = (line for text in texts for line in text.splitlines())
    return [line for line in found if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]


def _assert_stopped_for_unequal_ranks(codes: list[int], lines: list[str], tmp_path: Path) -> None:
    assert codes == [3, 3]
    assert len(lines) == 1 and "ranks differ from rank 0" in lines[0]
    assert not list((tmp_path / "out").glob("**/adapter_model.safetensors"))
    said = json.loads((tmp_path / "exit.json").read_text())
    assert said["code"] == 3 and said["message"] in lines[0]


def test_a_weight_that_changed_on_one_rank_stops_both(
    shared: list[str], server: CommandServer, ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    harmed = "layers.1.mlp.up_proj"
    fault = {"HF_ROCM_TUNE_FAULT": f"kind=after,stage=weights,tensor=*{harmed}.weight,count=1"}
    argv = [*shared, *flags(per_device_train_batch_size=BATCH, output_dir=tmp_path / "out")]
    running = [server.start(*argv, env=ranks[0]), server.start(*argv, env=ranks[1] | fault)]
    results = [each.wait() for each in running]
    lines = _error_lines(result.stderr for result in results)
    _assert_stopped_for_unequal_ranks([result.code for result in results], lines, tmp_path)
    assert "before DistributedDataParallel" in lines[0] and harmed in lines[0] and "(ranks [1])" in lines[0]


@pytest.mark.long
def test_frozen_weights_are_not_broadcast_at_start(
    shared: list[str], ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    """Were they, rank 1's changed copy would be overwritten, and this run would end as if nothing had happened."""
    argv = [*shared, *flags(per_device_train_batch_size=BATCH, output_dir=tmp_path / "out")]
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
    lines = _error_lines(said)
    _assert_stopped_for_unequal_ranks([each.returncode for each in running], lines, tmp_path)
    assert "after DistributedDataParallel" in lines[0]
