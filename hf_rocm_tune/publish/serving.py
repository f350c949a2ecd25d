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

VLLM = "vLLM"
LLAMA_CPP = "llama.cpp and Ollama"
_VLLM_RANKS = (32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank`` above its default, 16."""
_HEADS = ("lm_head", "output", "embed_out", "score")


def obstacles(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Why a program cannot use an adapter as it is, by program, from its ``adapter_config.json``; empty: it can."""
    both = []  # programs
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        both.append(f"{kind} instead of LoRA")
    scheme = config.get("init_lora_weights")
    if isinstance(scheme, str) and scheme.lower().startswith(REWRITES_BASE):
        both.append(f"init_lora_weights={scheme}, which changed the base")
    if config.get("task_type") == "SEQ_CLS":
        both.append("a reward model")
    for name, what in {"use_dora": "DoRA", "modules_to_save": "modules_to_save"}.items():
        value = config.get(name)
        if isinstance(value, list) and value:
            both.append(f"{what}: {listed([str(module) for module in value])}")
        elif value:
            both.append(what)
    if config.get("trainable_token_indices"):
        both.append("trained tokens")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        both.append("biases")
    vllm = [*both]
    targets = config.get("target_modules")
    if isinstance(targets, list):
        vllm += [f"an adapter of {name}" for name in targets if name in _HEADS]
    if _rank(config) > _VLLM_RANKS[-1]:
        vllm.append(f"a rank above {_VLLM_RANKS[-1]}")
    llama_cpp = [*both]
    if config.get("target_parameters"):
        llama_cpp.append("experts, which PEFT stores under names of its own")
    return {VLLM: vllm, LLAMA_CPP: llama_cpp}


def _for_new_vllm(config: Mapping[str, Any]) -> list[str]:
    """What versions of vLLM before 0.33 ignore or refuse."""
    needs = []
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        needs.append("other ranks or alphas for some modules")
    if config.get("target_parameters"):
        needs.append("adapters of experts, of some mixtures only")
    return needs


def lines(config: Mapping[str, Any], name: str) -> list[str]:
    """What to say of an adapter, in sentences.

    Args:
        config: of its ``adapter_config.json``.
        name: its directory, or its id on the Hub.
    """
    if not config.get("peft_type"):
        return []
    reasons = obstacles(config)
    sentences = []
    if not reasons[VLLM]:
        newer = _for_new_vllm(config)
        how = "as it is"
        if newer:
            how = f"from version 0.33 on ({listed(newer)}; merge it for an earlier one)"
        sentences.append(f"vLLM serves it {how}: --enable-lora --lora-modules NAME={name}{_rank_flag(config)}")
    if not reasons[LLAMA_CPP]:
        sentences.append(
            f"llama.cpp and Ollama take it beside its base's GGUF file after "
            f"`hf-rocm-tune merge {name} OUT --gguf f16 --keep_base`"
        )
    refusals = []
    for program, why in reasons.items():
        if why:
            refusals.append(f"{program} cannot take it beside its base ({listed(why)})")
    if refusals:
        sentences.append(f"{'; '.join(refusals)}: there it must be merged, `hf-rocm-tune merge {name} OUT`")
    return sentences


def _rank(config: Mapping[str, Any]) -> int:
    """The largest rank of an adapter; 0 where that is not known."""
    ranks = [config.get("r")]
    patterns = config.get("rank_pattern")
    if isinstance(patterns, Mapping):
        ranks += patterns.values()
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


def _rank_flag(config: Mapping[str, Any]) -> str:
    rank = _rank(config)
    if rank <= 16:  # vLLM's default
        return ""
    accepted = next(known for known in _VLLM_RANKS if known >= rank)
    return f" --max-lora-rank {accepted}"
