"""Small versions of all architectures of transformers: their own configurations, with every size divided.

Heads keep their width and are divided in number, and all widths by the same divisor, so that the relations between them
hold. Of layers one of each kind stays. What an architecture needs besides is in `NEEDS`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import small_processors

VOCABULARY = 704
FIRST_FREE = 512  # tokens of the tests' tokenizer are below; placeholders of pictures and sounds are above
LENGTH = 64

_HEADS = re.compile(r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads|num_attn_heads|attention_heads")
_KEY_HEADS = re.compile(r"num_key_value_heads|\w*n_kv_heads|(?!dim_)\w*(?<!_d)_heads?|\w*n_groups|mamba_n_\w+")
_LAYERS = re.compile(
    r"(num_(hidden_|decoder_|encoder_|blocks?)?layers?|n_layers?|depth|(encoder|decoder)_layers|num_blocks)$"
)
_COUNT_OF_EXPERTS = re.compile(r"(n_routed_experts|num_(local_|routed_)?experts|moe_num_experts|num_experts)$")
_EXPERTS_A_TOKEN = re.compile(
    r"(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_top_k)$"
)
_KEPT = re.compile(
    r"head_dim|rope|token|vocab|position|max_|image_size|patch|window|bins?$|kernel|_id$|_index$|version|chunk|seed|"
    r"num_channels|n_mels|mel_|stride|label|sample|conv|state_size|d_state|dt_rank|rank$|beam|length|num_buckets"
)
_VOCABULARY = re.compile(r"vocab_size|\w*vocab_size\w*")
#: What is as wide as the language part, in the parts that see or hear.
_OF_TEXT: tuple[str, ...] = (
    "out_hidden_size",
    "projection_dim",
    "output_proj_dims",
    "mm_embed_dim",
    "text_hidden_size",
)
_OF_TEXT += ("adapter_out_dim",)
#: What is as wide as the part that sees, or as so many of its patches.
_OF_VISION = ("vision_hidden_size", "out_hidden_size", "merged_hidden_size", "projector_input_size")
_LEAST = 96  # widths from here on are divided


def model_types(kind: str) -> dict[str, str]:
    """The architectures of transformers by model type; ``kind``: ``causal`` or ``image-text``."""
    from transformers.models.auto import modeling_auto

    names = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }[kind]
    return {each: name if isinstance(name, str) else name[0] for each, name in names.items()}


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
INDEXER = {f"indexer_{name}": value for name, value in {"n_heads": 2, "kv_heads": 1, "head_dim": 256}.items()}
INDEXER |= {"indexer_budget": 32, "indexer_compress_ratio": 4}
SENSES = {f"{name}_start_token_id": 600 for name in ("vision", "audio")}
GLM_ROPE = {".text_config.rope_parameters.partial_rotary_factor": 0.5}
#: By model type: fields that its class leaves open; those that begin with a dot are set in the small version.
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        ".vision_config.codebook_size": 64,
        ".image_token_offset": 560,
        ".audio_token_offset": 624,
        ".audio_config.codebook_size": 64,
    },
    "aya_vision": {".vision_config.num_attention_heads": 8},
    "aria": {".vision_config.image_size": 490, ".vision_config.patch_size": 14},
    "blt": {".encoder_hash_byte_group_vocab": 512},
    "codegen": {".n_head": 4},
    "cohere2_vision": {".vision_config.patch_size": 4, ".vision_config.image_size": 32},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {".attn_config.rope_theta": 10000.0, ".attn_config.clip_qkv": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_vl_hybrid": {".high_res_vision_config.global_attn_indexes": [1]},
    "diffusion_gemma": {"text_config": {"moe_intermediate_size": 64, "num_experts": 4, "top_k_experts": 2}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {".num_kv_shared_layers": 0},
    "gemma3n": {".text_config.num_kv_shared_layers": 0},
    "gemma4_assistant": {".text_config.hidden_size_per_layer_input": 0},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "glm46v": GLM_ROPE,
    "glm4v": GLM_ROPE,
    "glm4v_moe": {"text_config": {"head_dim": 128}, **GLM_ROPE},
    "glm_ocr": {"text_config": {"head_dim": 128}, **GLM_ROPE},
    "glmga": GLM_ROPE,
    "gpt_oss": {".hidden_size": 192, ".intermediate_size": 192},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "2/4"},
    "dory": {  # its file counts attention and MLP as layers of their own
        **{f".{name}_layers": 2 for name in ("n_input", "n_recurrent", "n_output")},
        ".num_hidden_layers": 6,
        ".layer_types": ["sliding_attention", "mlp", "sliding_attention", "mlp", "full_attention", "mlp"],
    },
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 16, 16, 16]},
        }
    },
    "idefics2": {".perceiver_config.hidden_size": 256, ".perceiver_config.resampler_n_latents": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 32},
    "step3p7": {"text_config": {"sliding_window": 32}},
    "vipllava": {".vision_feature_layers": [-1, -2]},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_vl": {".vision_config.hidden_size": 256},
    "mllama": {
        ".text_config.cross_attention_layers": [1],
        ".vision_config.intermediate_layers_indices": [0],
        ".vision_config.vision_output_dim": 640,
    },
    "ovis2": {".hidden_size": 256},
    "llama4": {".vision_config.intermediate_size": 768, ".vision_config.vision_output_dim": 1024},
    "nemotron_h_omni": {"image_token_id": 600},
    "kosmos-2.5": {".latent_query_num": 16},
    "xlnet": {".d_head": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {".layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], ".num_hidden_layers": 4},
    "zamba2": {".n_mamba_heads": 8, ".hybrid_layer_ids": [1]},
    "reformer": {"is_decoder": True, ".axial_pos_embds": False},
    "molmo2": {".vision_config.num_position_embeddings": 16, ".adapter_config.vision_feature_layer": [1, 0]},
    "blip-2": {"image_token_index": 600},
    "instructblip": {"image_token_index": 600},
    "instructblipvideo": {"video_token_index": 600},
    "qwen2_5_omni_thinker": SENSES,
    "qwen3_omni_moe_thinker": {**SENSES, ".text_config.num_attention_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "hunyuan_vl_text": {"head_dim": 128},
    "hrm_text": {".num_layers_per_stack": 2, ".num_hidden_layers": 16},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": [56, 56], "global_pool": ""},
            "do_pooling": False,
        }
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, **EXPERTS},
        ".vision_config.sam_config.downsample_channels": [128, 256],
        ".vision_config.sam_config.image_size": 768,
    },
    "unlimited_ocr": {".vision_config.sam_config.downsample_channels": [64, 128]},
    "got_ocr2": {".vision_config.image_size": 1024},
    "pp_chart2table": {".vision_config.image_size": 1024},
    "mistral3": {"text_config": {"model_type": "ministral3"}},
}


def small_config(model_type: str, architecture: str, ids: Mapping[str, int], *, pictures: bool = False) -> Any:
    """The small configuration of an architecture, with a tokenizer's special tokens; ``pictures``: small ones."""
    from transformers import AutoConfig

    needs = NEEDS.get(model_type, {})
    config = AutoConfig.for_model(model_type, **{key: each for key, each in needs.items() if key[0] != "."})
    found = shrunk(config.to_dict(), ids, FreeTokens())
    if pictures:
        small_processors.with_small_pictures(found)
    for key, value in needs.items():
        if key[0] != ".":
            continue
        *path, last = key[1:].split(".")
        part = found
        for name in path:
            part = part[name]
        part[last] = value
    found.pop("transformers_version", None)
    made = type(config).from_dict(found)
    made.architectures = [architecture]
    return made


class FreeTokens:
    """Numbers of tokens that no text has, for placeholders."""

    def __init__(self) -> None:
        self._next = FIRST_FREE

    def __call__(self) -> int:
        self._next += 1
        return self._next


def shrunk(fields: dict[str, Any], ids: Mapping[str, int], free: FreeTokens) -> dict[str, Any]:
    """The fields of a configuration, each part of it divided by what brings its attention to two heads."""
    found = copy.deepcopy(fields)
    divisor = _divisor(fields)
    kept = _kept_layers(fields)
    for key, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")) and key != "per_layer_config":
            found[key] = shrunk(value, ids, free)
        elif key in ids and not isinstance(value, list):
            found[key] = ids[key]
        elif isinstance(value, list) and kept and len(value) == len(kept[1]):
            found[key] = [value[number] for number in kept[0]]
        elif isinstance(value, dict) and key == "per_layer_config" and kept:
            by_layer = {int(number): each for number, each in value.items()}
            found[key] = {new: by_layer[old] for new, old in enumerate(kept[0]) if old in by_layer}
        elif isinstance(value, int) and not isinstance(value, bool):
            found[key] = _small(key, value, divisor, kept, free)
    _consistent(found, fields)
    return found


def _small(key: str, value: int, divisor: int, kept: tuple[list[int], list[Any]] | None, free: FreeTokens) -> int:
    if _VOCABULARY.fullmatch(key):
        return VOCABULARY
    if _LAYERS.search(key):
        return len(kept[0]) if kept and value == len(kept[1]) else min(value, 2)
    if _COUNT_OF_EXPERTS.search(key):
        return min(value, 4)
    if _EXPERTS_A_TOKEN.search(key):
        return min(value, 2)
    if key in ("n_group", "topk_group", "num_group", "num_expert_group"):
        return 1
    if re.search(r"token_id$|token_index$|_token$", key):
        return free() if value >= FIRST_FREE else value
    if key in ("first_k_dense_replace", "moe_layer_start_index"):
        return min(value, 1)
    if _HEADS.fullmatch(key) or _KEY_HEADS.fullmatch(key):
        return max(1, value // divisor)
    if _KEPT.search(key) or value < _LEAST:
        return value
    if value % divisor == 0 and not re.search(r"intermediate|ffn|moe|expert", key):
        return max(8, value // divisor)
    return -(-value // divisor // 64) * 64  # a block of a 4-bit weight does not cross rows, as in models of use


def _divisor(fields: Mapping[str, Any]) -> int:
    """The largest of `_divisors` that leaves a width of whole blocks of a 4-bit weight, or else the largest."""
    found = list(_divisors(fields)) or [1]
    width = next((fields[name] for name in ("hidden_size", "d_model", "n_embd", "dim") if fields.get(name)), 0)
    whole = (each for each in found if isinstance(width, int) and width % (64 * each) == 0)
    return next(whole, found[0])


def _divisors(fields: Mapping[str, Any]) -> Iterator[int]:
    """What divides the number of heads and leaves two to eight, the largest first; all of them where that is prime."""
    heads = next((value for key, value in fields.items() if _HEADS.fullmatch(key) and isinstance(value, int)), 0)
    yield from (each for each in range(heads // 2, 0, -1) if heads % each == 0 and heads // each <= 8)
    if heads:
        yield heads


def _kept_layers(fields: Mapping[str, Any]) -> tuple[list[int], list[Any]] | None:
    """The layers that stay, the first of each kind in the lists that have an entry for each; and one such list."""
    count = next((value for key, value in fields.items() if _LAYERS.search(key) and isinstance(value, int)), 0)
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == count > 2]
    if not lists:
        return None
    kinds = [repr([each[number] for each in lists]) for number in range(count)]
    first = sorted({kinds.index(kind) for kind in kinds})
    while len(first) < 2:
        first.append(next(number for number in range(count) if number not in first))
    return sorted(first), lists[0]


def _consistent(fields: dict[str, Any], whole: Mapping[str, Any]) -> None:
    """Sizes that a part has of another, which was divided otherwise; ``whole``: the fields before any was divided."""
    _rotated(fields)
    text, vision = (fields.get(f"{name}_config") for name in ("text", "vision"))
    if not isinstance(text, dict) or not isinstance(vision, dict):
        return
    width = _width(text)
    for name in _OF_TEXT:
        for part in (*(part for part in fields.values() if isinstance(part, dict)), fields):
            if part is not text and name in part and width:
                part[name] = width
    if "projection_hidden_size" in fields and "hidden_size" in vision:
        fields["projection_hidden_size"] = vision["hidden_size"]
    if whole.get("hidden_size") and whole["hidden_size"] == _width(whole["text_config"]):
        fields["hidden_size"] = width
    before = whole["vision_config"].get("hidden_size")
    for name in _OF_VISION:
        value = whole.get(name)
        if value and before and value % before == 0 and value != _width(whole["text_config"]):
            fields[name] = value // before * vision["hidden_size"]


def _width(fields: Mapping[str, Any]) -> Any:
    return fields.get("hidden_size") or fields.get("d_model")


def _rotated(fields: dict[str, Any]) -> None:
    """The parts of a head that positions in time, height and width turn fill what is turned of a small head."""
    rope = fields.get("rope_parameters")
    heads = fields.get("num_attention_heads")
    if not isinstance(rope, dict) or not rope.get("mrope_section") or not heads:
        return
    width = fields.get("head_dim") or fields["hidden_size"] // heads
    half = int(width * (rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1)) // 2
    sections = rope["mrope_section"]
    other = [section * half // sum(sections) for section in sections[1:]]
    rope["mrope_section"] = [half - sum(other), *other]


def build(model_type: str, kind: str, folder: Path, tokenizer: Any, template: str | None = None) -> Path:
    """A small model with random weights, and its tokenizer or, where pictures are read, its processor, in a new folder.

    ``template``: the chat template of a processor, in which ``<image>`` stands for a picture.
    """
    import torch
    import transformers

    architecture = model_types(kind)[model_type]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = small_config(model_type, architecture, ids, pictures=kind != "causal")
    model_class = getattr(transformers, architecture)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(text, model_class.config_class):
        config = text  # a language model of a configuration that describes more
    processor_class = small_processors.processor_class(config.model_type)
    saved = tokenizer
    if processor_class is not None:
        small_processors.add_tokens(tokenizer, processor_class, config.to_dict())
        saved = small_processors.build_processor(model_type, config, tokenizer, template or "")
        fields = config.to_dict()
        small_processors.set_tokens(fields, tokenizer, saved)
        small_processors.with_codes(fields, tokenizer, VOCABULARY - 2 * small_processors.CODES)
        config = type(config).from_dict(fields)
        config.architectures = [architecture]
    config.architectures = [architecture]
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    saved.save_pretrained(folder)
    return folder
