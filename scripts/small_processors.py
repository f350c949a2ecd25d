"""Processors for the small versions of models that read pictures, built from the architecture's own classes.

A processor's sizes are the small configuration's. The tokens that it names, in its source or in the configuration, are
added to the tokenizer, and the configuration gets their numbers. What an architecture needs besides is in `OTHERWISE`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH = 1200  # of a row with one picture
CODES = 16  # of a picture that is made of tokens
SIDE = 4  # patches along a picture's side, as far as a configuration says how large its pictures are
_NAMED = re.compile(r"tokenizer(?:\.|, [\"'])(\w+_token)(?:_id)?\b")
_WRITTEN = re.compile(r"[\"'](<[^\"' {}()\\]{1,40}>|\[[A-Z_]+\]|\|[A-Z]+\|)[\"']")
_OWN = re.compile(r"self\.(\w+_token) = \"(<[^\" {}]+>)\"")
_CONSTANT = re.compile(r"\b[A-Z]+_TOKEN = \"([^\" {}]+)\"")
_TOKEN_FIELD = re.compile(r"(\w+?)_(?:token_(?:id|index)|patch_id|col_id)$")
_TEXT_TOKENS = ("pad", "bos", "eos", "unk", "sep", "cls", "mask", "decoder_start", "user", "forced_bos", "forced_eos")
_PIXELS = 3000  # a "size" beyond it counts pixels of an area

#: Processor classes that transformers does not list for a model type, and what their constructors take besides.
CLASSES: Mapping[str, str] = {
    "cosmos3_omni": "Qwen3VLProcessor",
    "fast_vlm": "LlavaProcessor",
    "glm_ocr": "Glm46VProcessor",
    "glmga": "Glm46VProcessor",
    "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}
#: Image processors that are listed for another model type only.
LOOKERS: Mapping[str, str] = {
    "diffusion_gemma": "gemma4",
    "fast_vlm": "llava",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "instructblipvideo": "instructblip",
    "qwen2_5_omni_thinker": "qwen2_vl",
    "qwen3_omni_moe_thinker": "qwen2_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
#: By model type: what stands in a row for a part of a picture, where that is no token of the processor's.
PLACED: Mapping[str, str] = {
    "llama4": "<|patch|>",
    "molmo2": "<im_patch>",
    "ovis2": "<IMG_ATOM>",
    "pp_chart2table": "<imgpad>",
}
#: By model type: values of the processor (``processor``) or of its part that sees (``image_processor``).
OTHERWISE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "chameleon": {"processor": {"image_seq_length": 16}},
    "idefics2": {"processor": {"image_seq_len": 4}},
    "deepseek_vl_hybrid": {"image_processor": {"high_res_size": {"height": 64, "width": 64}}},
    "video_llava": {
        "image_processor": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
    },
    "ernie4_5_vl_moe": {"video_processor": {"draw_on_frames": False}},
    "deepseek_ocr2": {"image_processor": {"size": {"height": 768, "width": 768}}},  # it has 144 queries
    "molmo2": {"image_processor": {"overlap_margins": [1, 1]}},
    "perception_lm": {
        "processor": {"patch_size": 14, "pooling_ratio": 1},
        "image_processor": {"size": {"height": 56, "width": 56}, "tile_size": 56},
    },
    "dots3_note": {"image_processor": {"temporal_patch_size": 1}},
    "emu3": {"image_processor": {"min_pixels": 64 * 64, "max_pixels": 64 * 64}},
    "fast_vlm": {"processor": {"patch_size": 64, "vision_feature_select_strategy": "full"}},
    "got_ocr2": {"image_processor": {"size": {"height": 1024, "width": 1024}}},
    "inkling2": {"image_processor": {"size": {"height": 40, "width": 40}}},
    "inkling2_loop": {"image_processor": {"size": {"height": 40, "width": 40}}},
    "inkling_mm_model": {"image_processor": {"size": {"height": 40, "width": 40}}},
    "instructblipvideo": {"video_processor": {"size": {"height": 56, "width": 56}}},
    "kosmos-2.5": {"processor": {"num_image_tokens": 16}},
    "paligemma": {"image_processor": {"image_seq_length": SIDE**2}},
    "pp_chart2table": {"image_processor": {"size": {"height": 1024, "width": 1024}}},
    "vipllava": {"processor": {"vision_feature_select_strategy": "default"}},
}


def processor_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = CLASSES.get(model_type) or PROCESSOR_MAPPING_NAMES.get(model_type)
    return getattr(transformers, name) if name else None


def with_small_pictures(fields: dict[str, Any]) -> None:
    """Gives each part of a configuration that says how large its pictures are pictures of `SIDE` patches a side."""
    patch = fields.get("patch_size")
    size = fields.get("image_size")
    if isinstance(size, int) and isinstance(patch, int):
        fields["image_size"] = patch * SIDE
    elif isinstance(size, list) and patch:
        fields["image_size"] = [_first(patch) * SIDE] * len(size)
    seen = fields.get("vision_config")
    if fields.get("image_grid_pinpoints") and isinstance(seen, dict) and isinstance(seen.get("patch_size"), int):
        fields["image_grid_pinpoints"] = [[seen["patch_size"] * SIDE] * 2]
    if "mm_tokens_per_image" in fields:
        fields["mm_tokens_per_image"] = (SIDE // 2) ** 2
    for value in fields.values():
        if isinstance(value, dict):
            with_small_pictures(value)


def add_tokens(tokenizer: Any, kind: Any, fields: Mapping[str, Any]) -> None:
    """Adds the tokens that a processor of this class names, and those of a configuration that it does not name."""
    source = "\n".join(inspect.getsource(sys.modules[each.__module__]) for each in _own_classes(kind))
    found = [*_WRITTEN.findall(source), *_CONSTANT.findall(source)]
    written = [each for each in dict.fromkeys(found) if not each.startswith("<0x")]
    named = {each: f"<|{each.removesuffix('_token')}|>" for each in _NAMED.findall(source)} | dict(_OWN.findall(source))
    own = {
        name: text
        for name, text in named.items()
        if name.removesuffix("_token") not in _TEXT_TOKENS and not name.startswith("add_")
    }
    if "image_token.content" in source or "video_token.content" in source:  # the processor makes them itself
        own = {name: text for name, text in own.items() if name not in ("image_token", "video_token")}
    if fields["model_type"] in PLACED:
        written.append(PLACED[fields["model_type"]])
    known = {name.removesuffix("_token") for name in own}
    for name in _token_fields(fields):
        if name not in known and f"<|{name}|>" not in written:
            written.append(f"<|{name}|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *written, *own.values()]})
    tokenizer._set_model_specific_special_tokens(own)


def set_tokens(fields: dict[str, Any], tokenizer: Any, processor: Any) -> None:
    """Sets the numbers of placeholders in a configuration, and in its parts, to the processor's."""
    placed = PLACED.get(fields.get("model_type", ""))
    for key, value in fields.items():
        found = _TOKEN_FIELD.fullmatch(str(key))
        if isinstance(value, dict):
            set_tokens(value, tokenizer, processor)
        elif found and found[1] not in _TEXT_TOKENS and isinstance(value, int):
            number = _number(found[1], tokenizer, processor)
            if placed and found[1] == "image":
                number = tokenizer.convert_tokens_to_ids(placed)
            if number is not None:
                fields[key] = number


def with_codes(fields: dict[str, Any], tokenizer: Any, first: int) -> None:
    """Names the codes of pictures as tokens, where a configuration maps them by their names: Chameleon, Emu3.

    ``first``: a number of a token from which on `CODES` are free.
    """
    if "vocabulary_map" not in fields:
        return
    known = dict(tokenizer.get_vocab())
    for number in range(CODES):
        letters = "".join(chr(ord("A") + int(digit)) for digit in f"{number:04d}")
        is_chameleon = fields["model_type"] == "chameleon"
        known[f"IMGIMG{letters}Z" if is_chameleon else f"<|visual token {number:06d}|>"] = first + number
    shown = getattr(tokenizer, "image_token", None) or "<|image|>"
    known["<image>"] = known.get(shown, first + CODES)
    known.setdefault("<|extra_200|>", first + CODES + 1)
    fields["vocabulary_map"] = known
    for name, key in (("vq_config", "num_embeddings"), ("vq_config", "codebook_size")):
        if key in fields.get(name, {}):
            fields[name][key] = CODES


def build_processor(model_type: str, config: Any, tokenizer: Any, template: str) -> Any:
    """The processor of an architecture for its small configuration; ``template``: with ``<image>`` for a picture."""
    kind = processor_class(model_type)
    fields = config.to_dict()
    own = OTHERWISE.get(model_type, {})
    takes = list(inspect.signature(kind.__init__).parameters)
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    if "image_processor" in takes:
        parts["image_processor"] = image_processor(model_type, fields, own.get("image_processor", {}))
    if "qformer_tokenizer" in takes:
        parts["qformer_tokenizer"] = tokenizer
    if "protein_tokenizer" in takes:
        parts["protein_tokenizer"] = tokenizer
    for part in ("video_processor", "feature_extractor", "audio_processor"):
        if part in takes:
            parts[part] = _listed(part.replace("audio_processor", "feature_extractor"), model_type, own.get(part, {}))
    values = {name: _value(name, fields) for name in takes if name not in (*parts, "self", "kwargs", "chat_template")}
    values = {name: value for name, value in values.items() if value is not None} | dict(own.get("processor", {}))
    made = kind(**parts, **values)
    made.chat_template = template.replace("<image>", _shown(made, tokenizer, fields))
    return made


def has_template(folder: Path) -> bool:
    """Whether the processor, or the tokenizer, that is saved there makes conversations into text."""
    from transformers import AutoProcessor

    return bool(getattr(AutoProcessor.from_pretrained(folder), "chat_template", None))


def placeholder(folder: Path) -> str:
    """What stands for a picture in a text, for the processor that is saved there; nothing where it says so itself."""
    from PIL import Image
    from transformers import AutoConfig, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    if "self.image_token + sample" in inspect.getsource(type(processor)):  # Fuyu's writes it itself
        return ""
    shown = _shown(processor, processor.tokenizer, AutoConfig.from_pretrained(folder).to_dict())
    with suppress(Exception):  # most refuse a picture of which the text says nothing; others say it themselves
        made = processor(images=[[Image.new("RGB", (64, 64))]], text=["a"])["input_ids"][0]
        number = processor.tokenizer.convert_tokens_to_ids(shown)
        if number in made and number not in processor.tokenizer("a")["input_ids"]:
            return ""
    return shown


def image_processor(model_type: str, fields: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """The part of a processor that turns pictures into tensors, for small pictures."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = IMAGE_PROCESSOR_MAPPING_NAMES[LOOKERS.get(model_type, model_type)]
    kind = getattr(transformers, names.get("torchvision") or names["pil"])
    seen = next((fields[name] for name in _SEEING if isinstance(fields.get(name), dict)), fields)
    patch = _first(seen.get("patch_size") or fields.get("patch_size") or getattr(kind, "patch_size", None) or 16)
    merge = next((seen[name] for name in ("spatial_merge_size", "merge_size") if isinstance(seen.get(name), int)), None)
    merge = merge or fields.get("spatial_merge_size") or getattr(kind, "merge_size", None) or 1
    side = _first(seen.get("image_size") or fields.get("image_size") or patch * SIDE)
    values: dict[str, Any] = {}
    for name in ("size", "crop_size", "max_image_size"):
        if (stock := getattr(kind, name, None)) is not None:
            values[name] = _size(stock, side, patch * merge)
    if hasattr(kind, "patch_size"):
        values["patch_size"] = {"height": patch, "width": patch} if isinstance(kind.patch_size, dict) else patch
    if hasattr(kind, "merge_size"):
        values["merge_size"] = merge
    if hasattr(kind, "temporal_patch_size"):
        values["temporal_patch_size"] = seen.get("temporal_patch_size") or kind.temporal_patch_size
    for name in ("do_image_splitting", "crop_to_patches", "split_image"):
        if hasattr(kind, name):
            values[name] = False
    few = (("max_patches", 1), ("image_grid_pinpoints", [[side, side]]), ("tile_size", side), ("max_image_tokens", 16))
    for name, value in few:
        if getattr(kind, name, None):
            values[name] = value
    if getattr(kind, "min_image_tokens", None):
        values["min_image_tokens"] = 1
    return kind(**values | dict(own))


_SEEING = ("vision_config", "visual_config", "vq_config")


def _size(stock: Any, side: int, unit: int) -> Any:
    """A "size" of an image processor as its class gives it, for pictures of a side, or of 2 x 2 units."""
    if not isinstance(stock, Mapping):
        return side
    area = (2 * unit) ** 2
    return {
        name: (area if "pixels" in name or value > _PIXELS else side)
        if name != "longest_edge" or len(stock) == 1 or value <= _PIXELS
        else 4 * area
        for name, value in stock.items()
    }


def _value(name: str, fields: Mapping[str, Any]) -> Any:
    """A value that a processor takes, of the configuration."""
    other = {
        "img_size": "image_size",
        "pooling_ratio": "projector_pooling_ratio",
        "image_seq_len": "image_seq_length",
        "num_image_tokens": "image_seq_length",
        "downsample_rate": "downsample_ratio",
    }
    if name in ("image_seq_length", "image_seq_len", "num_image_tokens"):
        return _tokens_of_picture(fields)
    for part in (fields, *(fields[each] for each in _SEEING if isinstance(fields.get(each), dict))):
        for key in (name, other.get(name, name)):
            if part.get(key) is not None:
                return _first(part[key]) if key in ("image_size", "patch_size") else part[key]
    if name == "num_additional_image_tokens":  # the class token of CLIP's tower
        return int((fields.get("vision_config") or {}).get("model_type") == "clip_vision_model")
    return None


def _tokens_of_picture(fields: Mapping[str, Any]) -> int | None:
    """Placeholders of a picture: what a configuration says, or its patches, merged."""
    if isinstance(fields.get("mm_tokens_per_image"), int):
        return int(fields["mm_tokens_per_image"])
    seen = next((fields[name] for name in _SEEING if isinstance(fields.get(name), dict)), fields)
    side, patch = seen.get("image_size"), seen.get("patch_size")
    if not side or not patch:
        return None
    count = (_first(side) // _first(patch)) ** 2
    ratio = fields.get("downsample_ratio") or fields.get("pixel_shuffle_ratio")
    if ratio:
        return int(count * ratio**2)
    factor = fields.get("scale_factor") or fields.get("downsample_factor") or seen.get("scale_factor")
    return int(count // (factor or 1) ** 2)


def _shown(processor: Any, tokenizer: Any, fields: Mapping[str, Any]) -> str:
    """What stands for a picture in a text."""
    if hasattr(processor, "image_placeholder_token"):  # what it replaces by others of its own
        return str(processor.image_placeholder_token)
    token = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None)
    if not token and fields.get("model_type") in PLACED:  # PP-Chart2Table's rows have one for each part
        return PLACED[fields["model_type"]] * 256
    shown = getattr(token, "content", token) or ""
    for name in ("vision", "image"):
        known = f"{name}_start" in set(_token_fields(fields)) or hasattr(tokenizer, f"{name}_start_token")
        ends = [_number(f"{name}_{end}", tokenizer, processor) for end in ("start", "end")]
        if shown and known and None not in ends:
            start, end = tokenizer.convert_ids_to_tokens(ends)
            return f"{start}{shown}{end}"
    return str(shown)


def _number(name: str, tokenizer: Any, processor: Any) -> int | None:
    names = {name, name.replace("image_", "img_"), {"boi": "boi", "eoi": "eoi"}.get(name, name)}
    owners = (processor, tokenizer) if name in ("image", "video") else (tokenizer, processor)
    if hasattr(tokenizer, "boi_token_id"):  # what Gemma 3's processor calls the picture's token begins one
        owners = (tokenizer, processor)
    for owner in owners:
        for each in names:
            found = getattr(owner, f"{each}_token_id", None)
            if isinstance(found, int) and found != tokenizer.unk_token_id:
                return found
            text = getattr(owner, f"{each}_token", None)
            text = getattr(text, "content", text)
            if isinstance(text, str):
                return int(tokenizer.convert_tokens_to_ids(text))
    number = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    return None if number == tokenizer.unk_token_id else int(number)


def _token_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, value in fields.items():
        found = _TOKEN_FIELD.fullmatch(str(key))
        if isinstance(value, dict):
            yield from _token_fields(value)
        elif found and found[1] not in _TEXT_TOKENS and isinstance(value, int):
            yield found[1]


def _own_classes(kind: Any) -> list[Any]:
    return [each for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]


def _listed(part: str, model_type: str, own: Mapping[str, Any]) -> Any:
    """A processor of videos or sounds as transformers lists it for a model type, with its own values."""
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    names = {"video_processor": VIDEO_PROCESSOR_MAPPING_NAMES, "feature_extractor": FEATURE_EXTRACTOR_MAPPING_NAMES}
    for each in (model_type, LOOKERS.get(model_type, model_type)):
        name = names[part].get(each)
        name = name.get("torchvision") or name.get("pil") if isinstance(name, dict) else name
        if name:
            return getattr(transformers, name)(**own)
    return transformers.WhisperFeatureExtractor() if part == "feature_extractor" else None


def _first(value: Any) -> int:
    if isinstance(value, Mapping):
        return int(next(iter(value.values())))
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)
