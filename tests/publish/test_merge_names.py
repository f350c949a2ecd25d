"""Architectures that transformers loads under other names or shapes than they are stored in, and their reversal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.core_model_loading import MergeModulelist, WeightConverter

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge import merge
from hf_rocm_tune.publish.merge_weights import Group, Names
from tests.publish.merge_cases import config_of, logits, randomise, stored_names

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
_TEXT = {**_COMMON, "head_dim": 32, "intermediate_size": 128, "sliding_window": 64}
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma3() -> Any:
    tokens = {"boi_token_index": 500, "eoi_token_index": 501, "image_token_index": 502}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=_TEXT, vision_config=_SIGHT, mm_tokens_per_image=4, **tokens)
    )


def _gpt_oss() -> Any:
    scaling = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(GptOssConfig(**_COMMON, **_EXPERTS, head_dim=32, rope_parameters=scaling))


def _experts(module: str) -> dict[str, Any]:
    return {
        "target_modules": ["o_proj"],
        "target_parameters": [f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"],
    }


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "renamed and stacked": (lambda: MixtralForCausalLM(MixtralConfig(**_COMMON, **_EXPERTS)), _experts("mlp")),
    "other names": (
        lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**_COMMON, **_EXPERTS)),
        _experts("block_sparse_moe"),
    ),
    "a single expert": (
        lambda: MixtralForCausalLM(
            MixtralConfig(**{**_COMMON, **_EXPERTS, "num_local_experts": 1, "num_experts_per_tok": 1})
        ),
        _experts("mlp"),
    ),
    "experts stored as one": (_gpt_oss, _experts("mlp")),
    "a language model within another": (_gemma3, {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}),
    "its tied embedding": (_gemma3, {"target_modules": ["embed_tokens", "q_proj"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_merged_logits_are_those_of_base_plus_adapter(name: str, tmp_path: Path) -> None:
    build, targets = CASES[name]
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = logits(model)
        adapted = get_peft_model(
            type(model).from_pretrained(tmp_path / "base"),
            LoraConfig(task_type="CAUSAL_LM", r=4, **targets),
            autocast_adapter_dtype=False,
        )
        randomise(adapted)
        adapted.save_pretrained(tmp_path / "adapter")
        wanted = logits(adapted.eval())
    merge(str(tmp_path / "adapter"), tmp_path / "out", base_name=str(tmp_path / "base"), say=lambda _: None)
    found = type(model).from_pretrained(tmp_path / "out").eval()
    assert float((logits(found) - wanted).abs().max()) < 1e-5 < 0.02 < float((wanted - alone).abs().max())
    more = {"lm_head.weight"} if "tied" in name else set()
    assert stored_names(tmp_path / "out") - stored_names(tmp_path / "base") == more
    if more:
        config = config_of(tmp_path / "out")
        assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


def test_a_conversion_that_cannot_be_reverted_is_refused_and_not_guessed() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**_COMMON, intermediate_size=64))
    names = Names(model, [])
    stacking = WeightConverter("odd.*.weight", "odd.all", [MergeModulelist(dim=0)])
    group = Group(
        sources=[("odd.0.weight", "odd.*.weight"), ("odd.1.weight", "odd.*.weight")],
        parameters=("odd.all",),
        converter=stacking,
    )
    tensors = {name: torch.zeros(2, 3) for name, _ in group.sources}
    # The model does not know this conversion, so nothing takes the stack apart again.
    with pytest.raises(UsageError, match="cannot take it apart into the same again"):
        names.change(group, tensors, lambda name, value: value)
