"""Adapters that take a layer's input as it is train bit for bit as PEFT's, and keep less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rocm_tune.models.adapter import share_inputs

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LAYERS, HIDDEN, TOKENS = 2, 64, 2 * 24


def model_with(**options: Any) -> Any:
    """A small Llama in bfloat16 with adapters in float32, whose second matrix is not zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=50,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    settings = {"r": 4, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(base, LoraConfig(**settings)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def step(model: Any) -> tuple[list[Tensor], int]:
    """Logits and all gradients, and the bytes of activations that were kept for backward."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known and tensor.numel() >= TOKENS:
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    ids = torch.arange(TOKENS).reshape(2, -1) % 50
    model.zero_grad()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids).logits
        loss = logits.float().square().mean()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach(), *gradients], size


def test_results_are_the_same_and_four_copies_of_a_layer_are_not_kept() -> None:
    model = model_with()
    before, kept = step(model)
    assert share_inputs(model) == 7 * LAYERS
    after, less = step(model)
    assert len(before) == len(after) == 1 + 2 * 7 * LAYERS
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    # of the inputs of q, k, v and o three, of gate and up one: bfloat16
    assert kept - less == LAYERS * 4 * TOKENS * HIDDEN * 2


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=["dora", "dropout"])
def test_what_computes_with_the_float32_input_is_left_alone(options: dict[str, Any]) -> None:
    assert share_inputs(model_with(**options)) == 0
