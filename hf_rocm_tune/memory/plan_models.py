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
    """A public model's shape.

    Args:
        name: Hub id.
        billions: published number of parameters, in units of 10^9.
        fields: of its ``config.json``; what transformers takes as default is left out.
    """

    name: str
    billions: float
    fields: Mapping[str, Any] = field(repr=False)


def _decoder(
    model_type: str,
    architecture: str,
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int,
    vocabulary: int,
    tied: bool,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        **more,
    }


def _llama(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return _decoder(
        "llama",
        "LlamaForCausalLM",
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        groups=8,
        vocabulary=128256,
        tied=tied,
        positions=131072,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return _decoder(
        "qwen3",
        "Qwen3ForCausalLM",
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        groups=8,
        vocabulary=151936,
        tied=tied,
        positions=40960,
        head_dim=128,
    )


def _mistral(
    hidden: int, inner: int, layers: int, vocabulary: int, positions: int, head_dim: int | None
) -> dict[str, Any]:
    return _decoder(
        "mistral",
        "MistralForCausalLM",
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=32,
        groups=8,
        vocabulary=vocabulary,
        tied=False,
        positions=positions,
        head_dim=head_dim,
        sliding_window=None,
    )


PUBLIC_MODELS: tuple[PublicModel, ...] = (
    PublicModel(name="Qwen/Qwen3-0.6B", billions=0.60, fields=_qwen3(1024, 3072, 28, 16, tied=True)),
    PublicModel(
        name="google/gemma-3-1b-pt",
        billions=1.00,
        fields=_decoder(
            "gemma3_text",
            "Gemma3ForCausalLM",
            hidden=1152,
            inner=6912,
            layers=26,
            heads=4,
            groups=1,
            vocabulary=262144,
            tied=True,
            positions=32768,
            head_dim=256,
            sliding_window=512,
        ),
    ),
    PublicModel(name="meta-llama/Llama-3.2-1B", billions=1.24, fields=_llama(2048, 8192, 16, 32, tied=True)),
    PublicModel(name="Qwen/Qwen3-1.7B", billions=1.72, fields=_qwen3(2048, 6144, 28, 16, tied=True)),
    PublicModel(name="meta-llama/Llama-3.2-3B", billions=3.21, fields=_llama(3072, 8192, 28, 24, tied=True)),
    PublicModel(
        name="microsoft/Phi-4-mini-instruct",
        billions=3.84,
        fields=_decoder(
            "phi3",
            "Phi3ForCausalLM",
            hidden=3072,
            inner=8192,
            layers=32,
            heads=24,
            groups=8,
            vocabulary=200064,
            tied=True,
            positions=131072,
            original_max_position_embeddings=4096,
            pad_token_id=199999,
        ),
    ),
    PublicModel(name="Qwen/Qwen3-4B", billions=4.02, fields=_qwen3(2560, 9728, 36, 32, tied=True)),
    PublicModel(name="mistralai/Mistral-7B-v0.3", billions=7.25, fields=_mistral(4096, 14336, 32, 32768, 32768, None)),
    PublicModel(name="meta-llama/Llama-3.1-8B", billions=8.03, fields=_llama(4096, 14336, 32, 32)),
    PublicModel(name="Qwen/Qwen3-8B", billions=8.19, fields=_qwen3(4096, 12288, 36, 32)),
    PublicModel(
        name="mistralai/Mistral-Nemo-Base-2407", billions=12.25, fields=_mistral(5120, 14336, 40, 131072, 131072, 128)
    ),
    PublicModel(
        name="microsoft/phi-4",
        billions=14.66,
        fields=_decoder(
            "phi3",
            "Phi3ForCausalLM",
            hidden=5120,
            inner=17920,
            layers=40,
            heads=40,
            groups=10,
            vocabulary=100352,
            tied=False,
            positions=16384,
            original_max_position_embeddings=16384,
            pad_token_id=100349,
        ),
    ),
    PublicModel(name="Qwen/Qwen3-14B", billions=14.77, fields=_qwen3(5120, 17408, 40, 40)),
    PublicModel(
        name="mistralai/Mistral-Small-24B-Base-2501",
        billions=23.57,
        fields=_mistral(5120, 32768, 40, 131072, 32768, 128),
    ),
    PublicModel(name="Qwen/Qwen3-32B", billions=32.76, fields=_qwen3(5120, 25600, 64, 64)),
    PublicModel(name="meta-llama/Llama-3.1-70B", billions=70.55, fields=_llama(8192, 28672, 80, 64)),
)

_SAME_SHAPE = ("-instruct", "-it", "-base", "-instruct-2407", "-instruct-2501")


def public_model(name: str) -> PublicModel | None:
    """The entry of a Hub id, also of one that differs only in being tuned for chats."""
    wanted = _stem(name)
    return next((model for model in PUBLIC_MODELS if _stem(model.name) == wanted), None)


def _stem(name: str) -> str:
    """The name without what does not change the shape."""
    plain = name.lower()
    for ending in (*_SAME_SHAPE, "-pt", "-base-2407", "-base-2501"):
        plain = plain.removesuffix(ending)
    return plain
