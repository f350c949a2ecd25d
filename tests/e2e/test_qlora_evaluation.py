"""An evaluation in mid-run changes nothing about the QLoRA training after it, on the CPU either.

On a CPU with AVX512-BF16 bitsandbytes (0.50.2) repacks a 4-bit weight in place, lossily, at its first forward in
evaluation mode, and later training steps then take a kernel without autograd. `keep_trainable_on_cpu` prevents that;
tests/models/test_quantised.py shows that the trap is still there without it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import MakeJob

STEPS = 6


@pytest.fixture(scope="module")
def outputs(make_job: MakeJob) -> tuple[Path, Path]:
    """Output directories of the same QLoRA run without evaluations, and with one after each second step."""
    # Without dropout: a loader draws from the generator that dropout draws from.
    job = make_job("qlora-evaluation", train=48, test=9, load_in_4bit=True, max_steps=STEPS, lora_dropout=0.0)
    return job.clean(), job.clean(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)


def _log(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return list(history)


def test_losses_and_gradient_norms_after_an_evaluation_are_equal_bit_for_bit(outputs: tuple[Path, Path]) -> None:
    without, evaluated = (
        [(row["step"], row["loss"], row["grad_norm"]) for row in _log(output) if "loss" in row] for output in outputs
    )
    assert evaluated == without and len(without) == STEPS
    assert sum("eval_loss" in row for row in _log(outputs[1])) == 3


def test_adapters_are_equal_bit_for_bit(outputs: tuple[Path, Path]) -> None:
    without, evaluated = (load_file(output / "adapter_model.safetensors") for output in outputs)
    assert without.keys() == evaluated.keys()
    assert [name for name in without if not torch.equal(without[name], evaluated[name])] == []
    assert any(tensor.abs().max() > 0.01 for name, tensor in without.items() if "lora_B" in name)  # it learned
