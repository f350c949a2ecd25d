"""Verification changes nothing about training: the stock `trl sft` script with the same settings is the witness.

TRL's process is real and never imports this package. Its settings are what our `--print_config` says, without our own
flags. LoRA is compared with evaluation and accumulation on; the last accumulation window of an epoch is incomplete and
the evaluation rows are no multiple of the batch. QLoRA is compared without evaluation, because on a CPU with
AVX512-BF16 stock bitsandbytes repacks the 4-bit weights at the first one (see `test_qlora_evaluation.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer
from tests.e2e.conftest import flags, settings_for_trl

EVALUATION = {"eval_strategy": "steps", "eval_steps": 5}
METHODS: dict[str, dict[str, Any]] = {"lora": EVALUATION, "qlora": {"load_in_4bit": True}}
ROWS, BATCH, WINDOW, EVAL_ROWS, EVAL_BATCH = 43, 2, 4, 9, 4
# Read from each row of the log; the others are times.
LOGGED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "num_tokens")
LOGGED += ("entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left: the rows of its log without times, and its adapter."""

    log: list[dict[str, float]]
    adapter: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["lora", pytest.param("qlora", marks=pytest.mark.long)])
def both(
    request: pytest.FixtureRequest, server: CommandServer, model_of: Callable[[str], Path], scratch: Path
) -> tuple[str, Outcome, Outcome]:
    """The method, what stock TRL made of it, and what we made of it."""
    method = request.param
    folder = scratch / f"same-as-trl-{method}"
    ours = [
        *flags(
            model_name_or_path=model_of("llama3"),
            dataset_name=tiny.write_dataset_dir(scratch / "odd", train=ROWS, test=EVAL_ROWS),
            output_dir=folder / "ours",
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=WINDOW,
            per_device_eval_batch_size=EVAL_BATCH,
            max_length=64,
            logging_steps=1,
            disable_tqdm=True,
            **METHODS[method],
        )
    ]
    printed = server.run(*ours, "--print_config")
    assert printed.code == 0, printed.stderr
    folder.mkdir()
    recipe = folder / "trl.yaml"
    recipe.write_text(yaml.safe_dump(settings_for_trl(printed.stdout, folder / "trl")))
    command = [sys.executable, "-m", "trl.scripts.sft", "--config", str(recipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder) as stock:
        try:
            result = server.run(*ours)
            said, _ = stock.communicate(timeout=TIMEOUT)
        finally:
            stock.kill()  # does nothing to one that has ended
    assert stock.returncode == 0, said[-3000:]
    assert result.code == 0, result.stderr[-3000:]
    return method, _outcome(folder / "trl"), _outcome(folder / "ours")


def _outcome(output: Path) -> Outcome:
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    log = [{name: row[name] for name in LOGGED if name in row} for row in history]
    return Outcome(log=log, adapter=load_file(output / "adapter_model.safetensors"))


def test_the_runs_exercise_what_they_claim(both: tuple[str, Outcome, Outcome]) -> None:
    method, stock, _ = both
    trained = [row for row in stock.log if "loss" in row]
    batches = -(-ROWS // BATCH)
    assert len(trained) == 2 * -(-batches // WINDOW)
    assert batches % WINDOW != 0 and ROWS % BATCH != 0 and EVAL_ROWS % EVAL_BATCH != 0
    assert len({row["loss"] for row in trained}) > len(trained) // 2
    evaluated = [row["step"] for row in stock.log if "eval_loss" in row]
    assert evaluated == ([5, 10, 12] if method == "lora" else [])


def test_loss_gradient_norm_learning_rate_and_evaluation_are_equal_bit_for_bit(
    both: tuple[str, Outcome, Outcome],
) -> None:
    _, stock, ours = both
    assert ours.log == stock.log


def test_the_adapters_are_equal_bit_for_bit(both: tuple[str, Outcome, Outcome]) -> None:
    _, stock, ours = both
    assert ours.adapter.keys() == stock.adapter.keys()
    different = {
        name: (tensor.double() - ours.adapter[name].double()).abs().max().item()
        for name, tensor in stock.adapter.items()
        if not (tensor.dtype == ours.adapter[name].dtype and torch.equal(tensor, ours.adapter[name]))
    }
    assert different == {}
