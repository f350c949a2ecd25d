"""The models and ways of training with which predictions of memory are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_rocm_tune.plan import PlanRequest

_SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a way to train it. ``request`` is what the planner is asked; ``fields`` is the configuration."""

    name: str
    fields: Mapping[str, Any] = field(repr=False)
    request: PlanRequest
    accumulation: int = 1

    def label(self) -> str:
        """The way in words."""
        asked = self.request
        ways = (
            (asked.trainer, asked.trainer != "sft"),
            ("packed", asked.packing),
            ("DoRA", asked.dora),
            ("one-pass loss", asked.one_pass_loss),
            (f"{asked.stream} layers streamed", asked.stream),
        )
        more = [word for word, is_on in ways if is_on]
        more += ["adapters on experts"] if asked.target_parameters else []
        more += [f"saves {', '.join(asked.modules_to_save)}"] if asked.modules_to_save else []
        more += [f"evaluation of {asked.eval_batch}"] if asked.eval_batch else []
        more += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        more += [asked.optim] if asked.optim != PlanRequest().optim else []
        more += [asked.attention] if asked.attention != "sdpa" else []
        return ", ".join([asked.dtype_of(asked.methods[0]) + ("+autocast" if asked.autocast else ""), *more])


def _case(name: str, fields: Mapping[str, Any], method: str, batch: int, length: int, check: bool, **more: Any) -> Case:
    accumulation = more.pop("accumulation", 1)
    asked = {"autocast": False, "dtype": "float32", "evaluates": False, "effective_batch": batch * accumulation, **more}
    request = PlanRequest(methods=(method,), length=length, micro_batch=batch, checkpointing=check, **asked)
    return Case(name=name, fields=fields, request=request, accumulation=accumulation)


def _model(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**_SMALL, "model_type": model_type, "architectures": [architecture], **more}


LLAMA = _model("llama", "LlamaForCausalLM", tie_word_embeddings=False)
QWEN3 = _model("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True)
MISTRAL = _model("mistral", "MistralForCausalLM", sliding_window=96)
GEMMA3 = _model(
    "gemma3_text", "Gemma3ForCausalLM", sliding_window=64, query_pre_attn_scalar=64, tie_word_embeddings=True
)
PHI3 = _model(
    "phi3",
    "Phi3ForCausalLM",
    num_key_value_heads=6,
    original_max_position_embeddings=2048,
    pad_token_id=0,
    tie_word_embeddings=False,
)
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 384,
    "n_layer": 6,
    "n_head": 6,
    "n_positions": 1024,
    "vocab_size": 4096,
}
OLMO2 = _model("olmo2", "Olmo2ForCausalLM", num_key_value_heads=6)
SMOLLM3 = _model("smollm3", "SmolLM3ForCausalLM", pad_token_id=0)
MOE = _model(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    mlp_only_layers=[0],
    tie_word_embeddings=False,
)
# Nearly all of it is experts.
GPT_OSS = _model(
    "gpt_oss",
    "GptOssForCausalLM",
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=64,
    tie_word_embeddings=False,
)
# Few wide layers and a small vocabulary: what a layer takes outweighs the loss.
WIDE = _model(
    "llama",
    "LlamaForCausalLM",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=512,
    tie_word_embeddings=False,
)
# Most of it is layers.
DEEP = {**WIDE, "num_hidden_layers": 12}
# Matrices so small that the memory in which the CPU's operators unpack them, which a card does not take, is little.
NARROW = {**DEEP, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
WIDE_GEMMA3 = {**GEMMA3, **{key: WIDE[key] for key in WIDE if key.endswith(("_size", "_layers", "_heads"))}}
_BF16 = {"autocast": True, "dtype": "bfloat16"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_EXPERTS = {"targets": _ATTENTION, "target_parameters": ("experts.gate_up_proj", "experts.down_proj")}

_EAGER = {"attention": "eager", "dropout": 0.0, "platform": "cuda", "triton": False}
#: For the simulated card, which computes by the CPU's operators, without Triton. Attention is eager, because only that
#: is the same operators everywhere.
SIMULATED_CASES: tuple[Case, ...] = (
    _case("Llama", LLAMA, "lora", 2, 256, False, **_EAGER),
    _case("Llama", LLAMA, "lora", 4, 256, True, **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 192, False, **_BF16, **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 192, True, accumulation=2, **_BF16, **_EAGER),
    _case("Qwen3", QWEN3, "lora", 1, 256, False, accumulation=2, **_EAGER),
    _case("Qwen3", QWEN3, "lora", 2, 192, True, **_BF16, **_EAGER),
    _case("Llama, mix", LLAMA, "lora", 2, 192, True, recompute=(1, 3), **_BF16, **_EAGER),
    _case("Qwen3, mix", QWEN3, "lora", 2, 256, True, recompute=(0, 6), **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 256, False, one_pass_loss=True, **_EAGER),
    _case("Llama, mix", LLAMA, "lora", 2, 192, True, recompute=(1, 3), one_pass_loss=True, **_BF16, **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 256, True, eval_batch=16, **_EAGER),
    _case("Llama", LLAMA, "lora", 1, 192, False, eval_batch=8, accumulation=2, **_BF16, **_EAGER),
    _case("Qwen3", QWEN3, "full", 1, 128, True, eval_batch=32, **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 192, False, trainer="dpo", **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 256, True, trainer="dpo", accumulation=2, **_BF16, **_EAGER),
    _case("Qwen3", QWEN3, "full", 1, 192, True, trainer="dpo", **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 192, True, trainer="dpo", eval_batch=8, **_BF16, **_EAGER),
    _case("Llama", LLAMA, "lora", 2, 256, False, trainer="kto", **_EAGER),
    _case("Qwen3", QWEN3, "lora", 4, 192, True, trainer="kto", accumulation=2, **_BF16, **_EAGER),
    _case("Llama", LLAMA, "full", 2, 128, False, trainer="kto", **_EAGER),
    _case("Llama, wide", WIDE, "full", 1, 64, True, trainer="dpo", **{**_EAGER, "autocast": True}),
    _case("Qwen3-MoE", MOE, "qlora", 2, 256, True, **_BF16, **_EAGER, targets=_ATTENTION),
    _case("gpt-oss", GPT_OSS, "qlora", 2, 256, False, **_BF16, **_EAGER, targets=_ATTENTION),
    _case("Qwen3-MoE, experts", MOE, "qlora", 2, 256, True, **_BF16, **_EAGER, **_EXPERTS),
    _case("gpt-oss, experts", GPT_OSS, "qlora", 2, 256, False, **_BF16, **_EAGER, **_EXPERTS),
    _case("Llama, deep", DEEP, "lora", 6, 128, True, **_BF16, **_EAGER, stream=12),
    _case("Llama, deep", DEEP, "lora", 1, 256, True, accumulation=2, **_BF16, **_EAGER, stream=6),
    _case("Llama, narrow", NARROW, "qlora", 2, 256, True, **_BF16, **_EAGER, stream=12),
)

CPU_CASES: tuple[Case, ...] = (
    _case("Llama", LLAMA, "lora", 2, 256, False),
    _case("Llama", LLAMA, "lora", 4, 256, True),
    _case("Llama", LLAMA, "lora", 2, 512, False, **_BF16),
    _case("Llama", LLAMA, "lora", 3, 200, False, **_BF16, dora=True, rank=8),
    _case("Llama", LLAMA, "full", 2, 256, False),
    _case("Llama", LLAMA, "full", 2, 128, True, autocast=True),
    _case("Llama", LLAMA, "full", 2, 192, True, accumulation=2, optim="adamw_torch"),
    _case("Llama", LLAMA, "qlora", 2, 256, False, **_BF16),
    _case("Llama", LLAMA, "qlora", 4, 384, True, **_BF16, nested=False),
    _case("Llama", LLAMA, "lora", 2, 256, False, modules_to_save=("lm_head", "embed_tokens")),
    _case("Llama", LLAMA, "lora", 2, 256, False, packing=True, **_BF16),
    _case("Llama", LLAMA, "lora", 2, 256, False, attention="eager"),
    _case("Qwen3", QWEN3, "lora", 1, 768, False, dropout=0.0),
    _case("Qwen3", QWEN3, "full", 2, 256, True),
    _case("Qwen3", QWEN3, "qlora", 2, 320, True, **_BF16),
    _case("Mistral, window", MISTRAL, "lora", 1, 256, False),
    _case("Gemma 3", GEMMA3, "lora", 2, 256, False, targets=_ATTENTION, rank=32),
    _case("Gemma 3", GEMMA3, "full", 1, 384, False),
    _case("Phi-3", PHI3, "lora", 2, 320, True),
    _case("Phi-3", PHI3, "qlora", 1, 512, False, **_BF16),
    _case("GPT-2", GPT2, "lora", 2, 256, False),
    _case("GPT-2", GPT2, "full", 4, 128, True),
    _case("OLMo 2", OLMO2, "lora", 2, 256, False, **_BF16),
    _case("SmolLM3", SMOLLM3, "lora", 2, 384, True, **_BF16),
    _case("Qwen3-MoE", MOE, "lora", 2, 256, False, targets=_ATTENTION),
    _case("Qwen3-MoE", MOE, "full", 2, 192, True),
    _case("Qwen3-MoE", MOE, "qlora", 2, 320, True, **_BF16, targets=_ATTENTION),
    _case("gpt-oss", GPT_OSS, "qlora", 2, 320, True, **_BF16, dropout=0.0, targets=_ATTENTION),
    _case("Llama, wide", WIDE, "lora", 4, 256, True, **_BF16),
    _case("Llama, wide", WIDE, "qlora", 4, 256, True, **_BF16),
    _case("Llama, wide", WIDE, "full", 1, 64, True, optim="adamw_torch"),
    _case("Llama, wide", WIDE, "full", 1, 128, True, **_BF16),
    _case("Gemma 3, wide", WIDE_GEMMA3, "lora", 2, 384, True, attention="eager"),
    _case("Llama, wide", WIDE, "lora", 3, 192, False, **_BF16, dora=True),
    _case("Llama, wide", WIDE, "full", 2, 96, True, **_BF16, optim="adamw_8bit"),
    _case("Llama, mix", LLAMA, "lora", 2, 256, True, recompute=(2, 3)),
    _case("Llama, mix", LLAMA, "lora", 2, 512, True, recompute=(0, 6), accumulation=2, **_BF16),
    _case("Llama, mix", LLAMA, "lora", 2, 256, True, recompute=(3, 0), dropout=0.05, packing=True, **_BF16),
    _case("Llama, mix", LLAMA, "qlora", 2, 384, True, recompute=(1, 3), **_BF16),
    _case("Llama, wide, mix", WIDE, "qlora", 4, 256, True, recompute=(1, 1), **_BF16),
    _case("Llama, mix", LLAMA, "full", 2, 192, True, recompute=(2, 2)),
    _case("Qwen3, mix", QWEN3, "lora", 2, 256, True, recompute=(0, 4), dropout=0.05, attention="eager"),
    _case("Gemma 3, mix", GEMMA3, "lora", 2, 256, True, recompute=(2, 2), dora=True),
    _case("GPT-2, mix", GPT2, "lora", 2, 256, True, recompute=(2, 3)),
    _case("Qwen3-MoE, mix", MOE, "lora", 2, 256, True, recompute=(1, 4), targets=_ATTENTION),
    _case("Llama", LLAMA, "lora", 2, 256, False, one_pass_loss=True),
    _case("Llama", {**LLAMA, "vocab_size": 65536}, "qlora", 3, 200, True, one_pass_loss=True, **_BF16),
    _case("Qwen3, mix", QWEN3, "lora", 2, 256, True, recompute=(0, 4), one_pass_loss=True),
    _case("Llama", LLAMA, "lora", 2, 256, False, one_pass_loss=True, modules_to_save=("lm_head",)),
)


def gpu_cases() -> tuple[Case, ...]:
    """1B, 3B and 8B shapes in bfloat16, as they are trained on a 20 GB card."""
    import torch

    from hf_rocm_tune.plan import public_model

    found = []
    for name, method, batch, length, check in (
        ("meta-llama/Llama-3.2-1B", "lora", 2, 1024, False),
        ("meta-llama/Llama-3.2-1B", "lora", 4, 2048, True),
        ("meta-llama/Llama-3.2-1B", "full", 2, 1024, True),
        ("meta-llama/Llama-3.2-3B", "lora", 1, 1024, False),
        ("meta-llama/Llama-3.2-3B", "lora", 4, 2048, True),
        ("meta-llama/Llama-3.2-3B", "qlora", 2, 1024, False),
        ("meta-llama/Llama-3.1-8B", "lora", 2, 2048, True),
        ("meta-llama/Llama-3.1-8B", "qlora", 2, 2048, True),
        ("meta-llama/Llama-3.1-8B", "qlora", 1, 1024, False),
        ("Qwen/Qwen3-4B", "qlora", 4, 2048, True),
        ("google/gemma-3-1b-pt", "lora", 2, 2048, True),
        ("microsoft/Phi-4-mini-instruct", "lora", 1, 2048, True),
    ):
        model = public_model(name)
        assert model is not None, name
        asked = {"platform": "hip" if torch.version.hip else "cuda", "autocast": True, "dtype": "bfloat16"}
        found.append(_case(name.rpartition("/")[2], model.fields, method, batch, length, check, **asked))
    return tuple(found)
