"""Shapes of public models, for the largest that fits and for a Hub that cannot be reached. Data only.

From the ``config.json`` of each on the Hub; that the fields give the published number of parameters is tested. Models
that were derived from these without another shape (instruction-tuned ones) are planned by the same entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PublicModel:
    """A public model's shape."""

    name: str  # Hub id
    billions: float  # published number of parameters, in units of 10^9
    # of its ``config.json``; what transformers takes as default is left out
    fields: Mapping[str, Any] = field(repr=False)


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "head_dim": 128,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 131072,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
}


def _model(
    name: str, billions: float, family: str, widths: tuple[int, ...], *, tied: bool = False, **more: Any
) -> PublicModel:
    """``widths``: hidden, intermediate, layers, heads, heads of keys and values."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, widths, strict=True))
    fields = {**_FAMILIES[family], **sizes, "tie_word_embeddings": tied, **more}
    return PublicModel(name=name, billions=billions, fields=fields)


PUBLIC_MODELS: tuple[PublicModel, ...] = (
    _model("Qwen/Qwen3-0.6B", 0.60, "qwen3", (1024, 3072, 28, 16, 8), tied=True),
    _model("google/gemma-3-1b-pt", 1.00, "gemma3", (1152, 6912, 26, 4, 1), tied=True),
    _model("meta-llama/Llama-3.2-1B", 1.24, "llama", (2048, 8192, 16, 32, 8), tied=True),
    _model("Qwen/Qwen3-1.7B", 1.72, "qwen3", (2048, 6144, 28, 16, 8), tied=True),
    _model("meta-llama/Llama-3.2-3B", 3.21, "llama", (3072, 8192, 28, 24, 8), tied=True),
    _model(
        "microsoft/Phi-4-mini-instruct",
        3.84,
        "phi3",
        (3072, 8192, 32, 24, 8),
        tied=True,
        pad_token_id=199999,
        vocab_size=200064,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    ),
    _model("Qwen/Qwen3-4B", 4.02, "qwen3", (2560, 9728, 36, 32, 8), tied=True),
    _model("mistralai/Mistral-7B-v0.3", 7.25, "mistral", (4096, 14336, 32, 32, 8), vocab_size=32768, head_dim=None),
    _model("meta-llama/Llama-3.1-8B", 8.03, "llama", (4096, 14336, 32, 32, 8)),
    _model("Qwen/Qwen3-8B", 8.19, "qwen3", (4096, 12288, 36, 32, 8)),
    _model(
        "mistralai/Mistral-Nemo-Base-2407", 12.25, "mistral", (5120, 14336, 40, 32, 8), max_position_embeddings=131072
    ),
    _model(
        "microsoft/phi-4",
        14.66,
        "phi3",
        (5120, 17920, 40, 40, 10),
        pad_token_id=100349,
        vocab_size=100352,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
    ),
    _model("Qwen/Qwen3-14B", 14.77, "qwen3", (5120, 17408, 40, 40, 8)),
    _model("mistralai/Mistral-Small-24B-Base-2501", 23.57, "mistral", (5120, 32768, 40, 32, 8)),
    _model("Qwen/Qwen3-32B", 32.76, "qwen3", (5120, 25600, 64, 64, 8)),
    _model("meta-llama/Llama-3.1-70B", 70.55, "llama", (8192, 28672, 80, 64, 8)),
)

_TUNED = ("-instruct", "-it", "-base", "-instruct-2407", "-instruct-2501", "-pt", "-base-2407", "-base-2501")


def public_model(name: str) -> PublicModel | None:
    """The entry of a Hub id, also of one that differs only in being tuned for chats."""
    return next((model for model in PUBLIC_MODELS if _stem(model.name) == _stem(name)), None)


def _stem(name: str) -> str:
    """The name without what does not change the shape."""
    plain = name.lower()
    for ending in _TUNED:
        plain = plain.removesuffix(ending)
    return plain
