"""What ``all-linear`` leaves out: layers whose weights a kernel reads by itself, or that are linear in name only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_rocm_tune.models.adapter import ALL_LINEAR, beside_experts, kept_out

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
_LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
#: By the configuration's class: its values, what is left out of state-space layers and indexers, and what stays.
CASES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "Mamba2Config": ({"num_heads": 4, "n_groups": 1, "state_size": 16}, {"out_proj"}, {"in_proj"}),
    "FalconMambaConfig": ({}, {"out_proj", "x_proj", "dt_proj"}, {"in_proj"}),
    "BambaConfig": ({"attn_layer_indices": [1]}, {"out_proj"}, {"in_proj", "q_proj", "o_proj", "down_proj"}),
    "FalconH1Config": ({}, {"out_proj"}, {"in_proj", "q_proj", "o_proj", "down_proj"}),
    # a gated delta network calls its layers as modules
    "Qwen3NextConfig": ({**_LINEAR, "num_experts": 4, "num_experts_per_tok": 2}, set(), {"out_proj", "in_proj_qkvz"}),
    "DeepseekV32Config": (
        {**_LATENT, **_EXPERTS, "index_head_dim": 32, "index_n_heads": 2},
        {"wq_b", "wk", "weights_proj"},
        {"q_a_proj", "q_b_proj", "o_proj"},
    ),
    # its router derives from a linear layer, and gives two tensors
    "Llama4TextConfig": (
        {"num_local_experts": 4, "intermediate_size_mlp": 128},
        {"router"},
        {"q_proj", "o_proj"},
    ),
    # none of their linear layers is left out, and PEFT would adapt the experts, which are no layers
    "Qwen3MoeConfig": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, set(), {"q_proj"}),
    "MixtralConfig": ({"num_local_experts": 4, "num_experts_per_tok": 2}, set(), {"q_proj"}),
    "LlamaConfig": ({}, set(), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_all_linear_leaves_out_what_would_be_trained_for_nothing(name: str) -> None:
    values, out, stays = CASES[name]
    config = getattr(transformers, name)(**_SMALL | values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kinds = kept_out(model)
    assert {each for kind in kinds.keys() - {"experts"} for each in kinds[kind]} == out
    chosen = beside_experts(model, ALL_LINEAR)
    if not out | stays:
        assert chosen == ALL_LINEAR
        return
    assert not isinstance(chosen, str) and stays <= {*chosen} and not out & {*chosen}
    assert beside_experts(model, ["out_proj"]) == ["out_proj"]  # the user's own
