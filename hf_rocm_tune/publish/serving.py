"""Where an adapter can be served as it is, beside its base, and where it must be merged first.

By vLLM's checks of an adapter's configuration (``vllm/lora/peft_helper.py``, version 0.33) and its default of
``--max-lora-rank``, and llama.cpp's ``convert_lora_to_gguf.py``; both load other adapters without a word, or refuse
them when they start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.errors import listed
from hf_rocm_tune.upstream import REWRITES_BASE

VLLM, LLAMA_CPP = "vLLM", "llama.cpp and Ollama"
_VLLM_RANKS = (32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank`` above its default, 16."""
_HEADS = ("lm_head", "output", "embed_out", "score")


def obstacles(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Why a program cannot use an adapter as it is, by program, from its ``adapter_config.json``; empty: it can."""
    kind = str(config.get("peft_type"))
    both = [] if kind == "LORA" else [f"{kind} instead of LoRA"]
    scheme = config.get("init_lora_weights")
    if isinstance(scheme, str) and scheme.lower().startswith(REWRITES_BASE):
        both.append(f"init_lora_weights={scheme}, which changed the base")
    if config.get("task_type") == "SEQ_CLS":
        both.append("a reward model")
    for name, what in {"use_dora": "DoRA", "modules_to_save": "modules_to_save"}.items():
        if value := config.get(name):
            both.append(f"{what}: {listed([str(one) for one in value])}" if isinstance(value, list) else what)
    if config.get("trainable_token_indices"):
        both.append("trained tokens")
    experts = ["experts, which PEFT stores under names of its own"] if config.get("target_parameters") else []
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        both.append("biases")
    targets = config.get("target_modules")
    heads = [name for name in targets if name in _HEADS] if isinstance(targets, list) else []
    vllm = [f"an adapter of {name}" for name in heads]
    if _rank(config) > _VLLM_RANKS[-1]:
        vllm.append(f"a rank above {_VLLM_RANKS[-1]}")
    return {VLLM: [*both, *vllm], LLAMA_CPP: [*both, *experts]}


def _for_new_vllm(config: Mapping[str, Any]) -> list[str]:
    """What versions of vLLM before 0.33 ignore or refuse."""
    found = []
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        found.append("other ranks or alphas for some modules")
    if config.get("target_parameters"):
        found.append("adapters of experts, of some mixtures only")
    return found


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
        newer = _for_new_vllm(config)
        how = f"from version 0.33 on ({listed(newer)}; merge it for an earlier one)" if newer else "as it is"
        said.append(f"vLLM serves it {how}: --enable-lora --lora-modules NAME={name}{_rank_flag(config)}")
    if not found[LLAMA_CPP]:
        said.append(
            f"llama.cpp and Ollama take it beside its base's GGUF file after "
            f"`hf-rocm-tune merge {name} OUT --gguf f16 --keep_base`"
        )
    if refused := {program: why for program, why in found.items() if why}:
        because = [f"{program} cannot take it beside its base ({listed(why)})" for program, why in refused.items()]
        said.append(f"{'; '.join(because)}: there it must be merged, `hf-rocm-tune merge {name} OUT`")
    return said


def _rank(config: Mapping[str, Any]) -> int:
    """The largest rank of an adapter; 0 where that is not known."""
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    return max((one for one in ranks if isinstance(one, int)), default=0)


def _rank_flag(config: Mapping[str, Any]) -> str:
    rank = _rank(config)
    return "" if rank <= 16 else f" --max-lora-rank {next(one for one in _VLLM_RANKS if one >= rank)}"
