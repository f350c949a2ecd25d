"""Where an adapter can be served as it is, beside its base, and where it must be merged first.

By vLLM's checks of an adapter's configuration (``vllm/lora/peft_helper.py``), its default of ``--max-lora-rank``, and
llama.cpp's ``convert_lora_to_gguf.py``; both load other adapters without a word, or refuse them when they start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.errors import listed

VLLM, LLAMA_CPP = "vLLM", "llama.cpp and Ollama"
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank``; the default is 16."""
_HEADS = ("lm_head", "output", "embed_out", "score")


def obstacles(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Why a program cannot use an adapter as it is, by program, from its ``adapter_config.json``; empty: it can."""
    kind = str(config.get("peft_type"))
    both = [] if kind == "LORA" else [f"{kind} instead of LoRA"]
    if config.get("task_type") == "SEQ_CLS":
        both.append("a reward model")
    for name, what in {"use_dora": "DoRA", "modules_to_save": "modules_to_save"}.items():
        if value := config.get(name):
            both.append(f"{what}: {listed([str(one) for one in value])}" if isinstance(value, list) else what)
    if config.get("trainable_token_indices"):
        both.append("trained tokens")
    if config.get("target_parameters"):
        both.append("experts, which PEFT stores under names of its own")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        both.append("biases")
    targets = config.get("target_modules")
    heads = [name for name in targets if name in _HEADS] if isinstance(targets, list) else []
    vllm = [f"an adapter of {name}" for name in heads]
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        vllm.append("other ranks or alphas for some modules")
    return {VLLM: [*both, *vllm], LLAMA_CPP: both}


def lines(config: Mapping[str, Any], name: str) -> list[str]:
    """What to say of an adapter, in sentences.

    Args:
        config: of its ``adapter_config.json``.
        name: its directory, or its id on the Hub.
    """
    if not config.get("peft_type"):
        return []
    found = obstacles(config)
    said = []
    if not found[VLLM]:
        said.append(f"vLLM serves it as it is: --enable-lora --lora-modules NAME={name}{_rank_flag(config)}")
    if not found[LLAMA_CPP]:
        said.append(
            f"llama.cpp and Ollama take it beside its base's GGUF file after "
            f"`hf-rocm-tune merge {name} OUT --gguf f16 --keep_base`"
        )
    if refused := {program: why for program, why in found.items() if why}:
        because = [f"{program} cannot take it beside its base ({listed(why)})" for program, why in refused.items()]
        said.append(f"{'; '.join(because)}: there it must be merged, `hf-rocm-tune merge {name} OUT`")
    return said


def _rank_flag(config: Mapping[str, Any]) -> str:
    rank = config.get("r")
    if not isinstance(rank, int) or rank <= 16:
        return ""
    return f" --max-lora-rank {next((one for one in _VLLM_RANKS if one >= rank), rank)}"
