"""A small image-text model, created on this machine without a network, for the notebook about pictures.

A LLaVA from the real config classes: CLIP's vision tower on pictures of 32 x 32 pixels, a projector, and a Llama. Its
weights are random, so it has to be trained whole where a published model needs adapters only. Its processor needs no
torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from hf_rocm_tune.demo.assets import train_tokenizer
from hf_rocm_tune.survive.atomic import staged_directory

SIDE, PATCH = 32, 8  # pixels
TOKENS = (SIDE // PATCH) ** 2  # of a picture
_IMAGE = "<image>"
_TEMPLATE = (
    "{%- macro text(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for part in content %}"
    "{%- if part['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}"
    "{%- endif %}{%- endmacro %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- text(message['content']) + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- text(message['content']) + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def prepare(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Create the model unless it exists; its tokenizer is trained on the texts. Returns its directory."""
    stamp = folder / "recipe.json"
    wanted = json.dumps({"seed": seed, "texts": sorted(set(texts))})
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return folder
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
    )

    tokenizer = train_tokenizer(json.loads(wanted)["texts"])
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE]})
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=SIDE, patch_size=PATCH, projection_dim=128),
        # Wider than usual: with adapters the head stays as it is, and must be able to prefer one token to all others.
        text_config=LlamaConfig(
            **size, vocab_size=vocabulary, max_position_embeddings=512, initializer_range=0.1, **ids
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        image_seq_length=TOKENS,
        vision_feature_layer=-1,
    )
    sides = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=sides, crop_size=sides),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=_IMAGE,
        chat_template=_TEMPLATE,
    )
    with staged_directory(folder) as scratch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForImageTextToText.from_config(config).save_pretrained(scratch)
        processor.save_pretrained(scratch)
        (scratch / stamp.name).write_text(wanted, encoding="utf-8")
    return folder
