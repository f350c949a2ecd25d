"""An evaluation in mid-run changes nothing about the QLoRA training after it, on the CPU either.

On a CPU with AVX512-BF16 bitsandbytes (0.50.2) repacks a 4-bit weight in place, lossily, at its first forward in
evaluation mode, and later training steps then take a kernel without autograd. `keep_trainable_on_cpu` prevents that;
the last test shows that the trap is still there without it, so the others keep their teeth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig

from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.transfer import Mover, TransferSettings
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


def _logits_before_and_after_an_evaluation(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(5, 37)[None]

    def trained() -> torch.Tensor:
        model.train()
        result: torch.Tensor = model(input_ids=tokens, use_cache=False).logits.detach().clone()
        return result

    before = trained()
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return before, trained()


@pytest.fixture
def four_bit(model_of: Callable[[str], Path]) -> Any:
    """A 4-bit model as our loading leaves it, on the CPU."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    source = ModelSource(name=str(model_of("llama3")), init={"dtype": torch.bfloat16}, quantization=quantization)
    with Mover(torch.device("cpu"), settings=TransferSettings()) as mover:
        yield load_model(source, mover)[0]


def test_an_evaluation_leaves_4_bit_weights_as_they_are(four_bit: Any) -> None:
    before, after = _logits_before_and_after_an_evaluation(four_bit)
    assert torch.equal(before, after)


def test_without_our_setting_bitsandbytes_repacks_them(four_bit: Any) -> None:
    from bitsandbytes.functional import has_avx512bf16

    if not has_avx512bf16():
        pytest.skip("bitsandbytes repacks 4-bit weights only on a CPU with AVX512-BF16")
    for module in four_bit.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True
    before, after = _logits_before_and_after_an_evaluation(four_bit)
    assert not torch.equal(before, after)
