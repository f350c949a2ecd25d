"""4-bit models keep training after an evaluation, and a damaged code table does not decode a single weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.quantised import keep_trainable_on_cpu, require_bitsandbytes

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TOKENS = torch.arange(64).reshape(2, 32) + 7


@pytest.fixture
def make_model(model_of: Callable[..., Path], quantisation: Callable[[int], BitsAndBytesConfig]) -> Callable[[], Any]:
    """A 4-bit model with an adapter that is not zero."""

    def make() -> Any:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(
            model_of("llama3"), dtype=torch.bfloat16, quantization_config=quantisation(4)
        )
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(base, config)

    return make


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the adapter for fixed tokens."""
    model.train()
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False)


def test_gradients_after_an_evaluation_equal_those_before_bit_for_bit(make_model: Callable[[], Any]) -> None:
    model = make_model()
    assert keep_trainable_on_cpu(model) > 0
    before = gradients(model)
    evaluate(model)
    after = gradients(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes repacks 4-bit weights only on a CPU with AVX512-BF16")
def test_without_the_switch_an_evaluation_changes_them(make_model: Callable[[], Any]) -> None:
    """What the switch is for; once upstream has mended it, this fails and the switch can go."""
    model = make_model()
    before = gradients(model)
    evaluate(model)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        after = gradients(model)
    assert before.keys() != after.keys() or any(not torch.equal(before[name], after[name]) for name in before)


def test_a_model_without_4_bit_layers_is_told_nothing(model_of: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    assert keep_trainable_on_cpu(model) == 0


def test_bitsandbytes_without_a_library_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    require_bitsandbytes(torch.device("cpu"), "--load_in_4bit")
    from bitsandbytes import cextension

    broken = cextension.ErrorHandlerMockBNBNativeLibrary("no library for this device")
    monkeypatch.setattr(cextension, "lib", broken)
    with pytest.raises(UsageError, match=r"--optim adamw_8bit: bitsandbytes has no native library for cpu"):
        require_bitsandbytes(torch.device("cpu"), "--optim adamw_8bit")
