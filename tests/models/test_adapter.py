"""LoRA targets are matched as PEFT matches them, and trainable parameters are counted for what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.adapter import adaptable, check_targets, trainable_parameters

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = (
    ["q_proj"],
    ["q_proj", "lm_head"],
    ["model.layers.0.self_attn.q_proj"],
    ["proj"],
    ["q_pro"],
    ["self_attn.q_proj"],
    r".*\.layers\.1\..*_proj",
    r".*\.nothing",
    "q_proj",
)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_a_target_is_refused_exactly_when_peft_finds_nothing(
    model_of: Callable[..., Path], targets: str | list[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    try:
        check_targets(model, targets)
        message = ""
    except UsageError as error:
        message = str(error)
    try:
        get_peft_model(model, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        peft_accepts = True
    except ValueError:
        peft_accepts = False
    assert (not message) == peft_accepts
    assert peft_accepts or "gate_proj" in message, "what exists is listed"


def test_one_target_of_several_that_matches_nothing_is_named(model_of: Callable[..., Path]) -> None:
    """PEFT takes this in silence."""
    model = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    with pytest.raises(UsageError, match="query_key_value match no module"):
        check_targets(model, ["q_proj", "query_key_value"])


def test_a_broken_expression_is_a_usage_error(model_of: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of("gpt2"))
    with pytest.raises(UsageError, match="regular expression"):
        check_targets(model, "c_attn[")
    with pytest.raises(UsageError, match="c_attn"):  # GPT-2's layers are Conv1D
        check_targets(model, ["q_proj"])
    for nothing_to_check in (None, "all-linear"):
        check_targets(model, nothing_to_check)
    assert "lm_head" not in adaptable(model)


def test_packed_weights_count_as_what_they_stand_for(
    model_of: Callable[..., Path], quantisation: Callable[[int], BitsAndBytesConfig]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
    total = sum(parameter.numel() for parameter in plain.parameters())
    packed = AutoModelForCausalLM.from_pretrained(model_of("llama3"), quantization_config=quantisation(4))
    assert trainable_parameters(packed)[1] == total
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    extra = adapted.get_nb_trainable_parameters()[0]
    assert trainable_parameters(adapted) == (extra, total + extra)
