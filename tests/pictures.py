"""Small image-text models, and rows with pictures. Only Qwen3-VL's processor needs torchvision."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import tiny

PART = "{%- if part['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- part['text'] }}{%- endif %}"
CONTENT = (
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    f"{{%- for part in message['content'] %}}{PART}{{%- endfor %}}{{%- endif %}}"
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    f"{CONTENT}{{{{- '<|im_end|>\n' }}}}{{%- endfor %}}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TOKENS = 4  # of a picture


def _save(config: Any, processor: Any, directory: Path) -> Path:
    """A model with the same random weights each time, and its processor."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def build_llava(directory: Path, placeholder: str = "<image>") -> Path:
    """CLIP's vision tower on 28 x 28 pixels (4 patches), a projector, and Llama; ``placeholder``: its token."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
    )

    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", placeholder]})
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=28, patch_size=14, projection_dim=64),
        text_config=LlamaConfig(**size, vocab_size=576, max_position_embeddings=256, **ids),
        image_token_index=tokenizer.convert_tokens_to_ids(placeholder),
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=placeholder,
        chat_template=TEMPLATE.replace("<image>", placeholder),
    )
    return _save(config, processor, directory)


def build_mllama(directory: Path) -> Path:
    """Llama 3.2 Vision: its tokens look at those of a picture as a mask says that its processor makes."""
    from transformers import MllamaConfig, MllamaImageProcessorPil, MllamaProcessor
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|image|>"]})
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    seen = {"image_size": 28, "patch_size": 14, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    config = MllamaConfig(
        vision_config=MllamaVisionConfig(
            **size,
            **seen,
            attention_heads=4,
            num_global_layers=1,
            intermediate_layers_indices=[0],
            vision_output_dim=128,
        ),
        text_config=MllamaTextConfig(**size, **heads, **ids, vocab_size=576, max_position_embeddings=256),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    looking = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=1)
    processor = MllamaProcessor(looking, tokenizer, chat_template=TEMPLATE.replace("<image>", "<|image|>"))
    return _save(config, processor, directory)


def build_paligemma(directory: Path) -> Path:
    """SigLIP on 28 x 28 pixels (4 patches), and a Gemma that reads a prompt in both directions."""
    from transformers import (
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaProcessor,
        SiglipImageProcessorPil,
        SiglipVisionConfig,
    )

    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    tokenizer._set_model_specific_special_tokens({"image_token": "<image>"})
    seeing = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    seeing.image_seq_length = TOKENS
    processor = PaliGemmaProcessor(image_processor=seeing, tokenizer=tokenizer, chat_template=TEMPLATE)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    vocabulary = -(-len(tokenizer) // 64) * 64
    more = {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": vocabulary, "max_position_embeddings": 256}
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(
            **size, image_size=28, patch_size=14, projection_dim=64, vision_use_head=False
        ),
        text_config=GemmaConfig(**size, **more, **ids),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        vocab_size=vocabulary,
        **ids,
    )
    return _save(config, processor, directory)


def build_gemma3(directory: Path) -> Path:
    """SigLIP on 28 x 28 pixels (4 patches), and a Gemma 3 whose pictures read themselves in both directions."""
    from transformers import (
        Gemma3Config,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *named.values()]})
    tokenizer._set_model_specific_special_tokens(named)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS,
        chat_template=TEMPLATE.replace("<image>", "<start_of_image>"),
    )
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 576}
    window = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    indices = {f"{name[:5].rstrip('_')}_token_index": tokenizer.convert_tokens_to_ids(named[name]) for name in named}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**size, **more, **window, **ids, max_position_embeddings=256),
        vision_config=SiglipVisionConfig(**size, image_size=28, patch_size=14),
        mm_tokens_per_image=TOKENS,
        **indices,
        **ids,
    )
    return _save(config, processor, directory)


def build_qwen3_vl(directory: Path) -> Path:
    """A tower that takes pictures of any size as patches, in one tensor for all rows, and a Qwen3."""
    from transformers import (
        Qwen2VLImageProcessorPil,
        Qwen3VLConfig,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    named = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    named |= {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *named.values()]})
    shown = f"{named['vision_start']}{named['image']}{named['vision_end']}"
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128}, patch_size=16, merge_size=2
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE.replace("<image>", shown),
    )
    size = {"hidden_size": 64, "intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    seeing = {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 64, "patch_size": 16}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = Qwen3VLConfig(
        vision_config={**size, **seeing, "deepstack_visual_indexes": [0, 1]},
        text_config={**size, **text, **ids, "vocab_size": 576, "max_position_embeddings": 256, "rope_parameters": rope},
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
        **ids,
    )
    return _save(config, processor, directory)


def picture(number: int, size: tuple[int, int] = (40, 32), mode: str = "RGB") -> Any:
    from PIL import Image

    chooser = random.Random(number)
    return Image.new("RGB", size, tuple(chooser.randrange(256) for _ in range(3))).convert(mode)


def question(number: int) -> str:
    return f"What colour is picture {number}?"


def answer(number: int) -> str:
    return f"It is {random.Random(number).randrange(256)} of red."


def turns(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(number)}, {"role": "assistant", "content": answer(number)}]


def write_rows(directory: Path, count: int = 16) -> Path:
    """A Parquet file of conversations about pictures that are in it."""
    from datasets import Dataset, Features, Image, List, Value

    kinds = {"images": List(Image()), "messages": List({"role": Value("string"), "content": Value("string")})}
    rows = [{"images": [picture(number)], "messages": turns(number)} for number in range(count)]
    directory.mkdir()
    Dataset.from_list(rows, features=Features(kinds)).to_parquet(str(directory / "train.parquet"))
    return directory


def write_files(
    directory: Path, count: int = 16, sizes: Sequence[tuple[int, int]] = ((40, 32),), first: int = 0
) -> list[str]:
    """Pictures as PNG files ``0.png`` ..., their sizes by turns, from picture ``first``; returns their names."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture(first + number, sizes[number % len(sizes)]).save(directory / f"{number}.png")
    return [f"{number}.png" for number in range(count)]


def write_jsonl(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
