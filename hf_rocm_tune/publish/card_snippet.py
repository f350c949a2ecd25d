"""The code in a model card that loads what was trained, with the arguments that give the logits of the training.

TRL trains the adapters of quantised models in bfloat16; PEFT loads every adapter as float32 unless it is told not to.
The base model is loaded on one device: ``device_map="auto"`` would split it over two cards by copies between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.publish.history_values import text

if TYPE_CHECKING:
    from hf_rocm_tune.publish.card import CardFacts

_QUANTIZATION = (
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype",
)
_DTYPES = frozenset({"float32", "float16", "bfloat16"})


def loading(facts: CardFacts) -> str:
    """Python that leaves ``tokenizer`` and ``model``, ready for use, on the first card or the processor."""
    trained = facts.trained
    auto = "AutoModelForCausalLM" if trained.model_class.endswith("ForCausalLM") else trained.model_class
    from_transformers = sorted({auto, "AutoTokenizer"} | ({"BitsAndBytesConfig"} if trained.quantization else set()))
    there = facts.repo_id or "."
    lines = [
        "import torch",
        *(["from peft import PeftModel"] if facts.is_adapter else []),
        f"from transformers import {', '.join(from_transformers)}",
        "",
    ]
    hint = "" if facts.repo_id else "  # this directory, or its id on the Hub"
    if facts.is_adapter:
        if not facts.base_model_id:
            lines.append("# It was loaded from a directory of this name: give its path here, or its id on the Hub.")
        lines.append(f"base_model = {_quoted(facts.base_model)}")
        lines.append(f"adapter = {_quoted(there)}{hint}")
    else:
        lines.append(f"trained = {_quoted(there)}{hint}")
    lines += [
        'device = "cuda" if torch.cuda.is_available() else "cpu"  # torch calls ROCm cards "cuda" as well',
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({'adapter' if facts.is_adapter else 'trained'})",
        f"model = {auto}.from_pretrained(",
        *(f"    {argument}," for argument in _arguments(facts)),
        ")",
    ]
    if facts.is_adapter:
        kept = "" if trained.adapter_dtype == "float32" else ", autocast_adapter_dtype=False"
        lines.append(f"model = PeftModel.from_pretrained(model, adapter{kept})")
    return "\n".join([*lines, "model.eval()"])


def generating(facts: CardFacts) -> str:
    """Python that goes on after `loading` and prints an answer."""
    if facts.trained.chat_template:
        lines = [
            'messages = [{"role": "user", "content": "What is a checksum?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ").to(device)",
        ]
    else:
        lines = ['inputs = tokenizer("A checksum is", return_tensors="pt").to(device)']
    return "\n".join(
        [
            *lines,
            "generated = model.generate(**inputs, max_new_tokens=64)",
            'print(tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    )


def _arguments(facts: CardFacts) -> list[str]:
    """Of ``from_pretrained`` of the base model."""
    trained, settings = facts.trained, facts.settings
    arguments = ["base_model" if facts.is_adapter else "trained"]
    if facts.is_adapter and facts.base_model_id and facts.revision not in (None, "main"):
        arguments.append(f"revision={_quoted(str(facts.revision))}")
    arguments.append(f"dtype={_dtype(trained.dtype)}")
    if trained.quantization:
        inner = "".join(f"        {argument},\n" for argument in _quantization(trained.quantization))
        arguments.append(f"quantization_config=BitsAndBytesConfig(\n{inner}    )")
    if attention := text(settings, "attn_implementation"):
        arguments.append(f"attn_implementation={_quoted(attention)}")
    if settings.get("trust_remote_code") is True:
        arguments.append("trust_remote_code=True")
    return [*arguments, "device_map=device"]


def _quantization(config: Mapping[str, Any]) -> list[str]:
    shown = []
    for key in _QUANTIZATION:
        value = config.get(key)
        if value in (None, False) or (key.startswith("bnb_4bit") and not config.get("load_in_4bit")):
            continue
        written = _dtype(str(value)) if key.endswith("dtype") else str(value) if value is True else _quoted(str(value))
        shown.append(f"{key}={written}")
    return shown


def _dtype(name: str) -> str:
    """A dtype as code; one that is no dtype of weights is left to the model's own configuration."""
    bare = name.removeprefix("torch.")
    return f"torch.{bare}" if bare in _DTYPES else '"auto"'


def _quoted(value: str) -> str:
    return json.dumps(value)
