"""Adapters of every kind for tiny bases, with random values, and the logits of base plus adapter by stock PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests import tiny

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An adapter for an architecture of `tests.tiny`: arguments of a `LoraConfig`, or what makes another config."""

    arch: str
    config: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], PeftConfig] | None = None
    base_dtype: torch.dtype = torch.float32
    shards: int = 1

    def peft_config(self) -> PeftConfig:
        if self.make is not None:
            return self.make()
        return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **self.config})


def lora(arch: str, *, base_dtype: torch.dtype = torch.float32, shards: int = 1, **config: Any) -> Case:
    """A LoRA case on the attention's and the MLP's projections, unless other targets are given."""
    if "target_modules" not in config and "target_parameters" not in config:
        config["target_modules"] = LINEAR
    return Case(arch=arch, config=config, base_dtype=base_dtype, shards=shards)


def build_base(case: Case, scratch: Path) -> Path:
    return tiny.build(case.arch, scratch / "models", dtype=case.base_dtype, shards=case.shards)


def load_base(base: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()


def randomise(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Values as if training had gone far: every trainable tensor moved by random amounts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * noise)
                else:
                    parameter.add_(scale * noise)


def write_adapter(case: Case, base: Path, out: Path, *, seed: int = 0) -> Path:
    """Save a random adapter with stock PEFT."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on ties and on embeddings that it saves
        model = get_peft_model(load_base(base), case.peft_config(), autocast_adapter_dtype=False)
        randomise(model, seed)
        model.save_pretrained(out)
    return out


def ids() -> Tensor:
    return torch.tensor([[1, 17, 300, 42, 5, 6, 250, 99, 3, 511], [7, 7, 8, 490, 20, 33, 44, 100, 101, 102]])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False).logits.float()


def reference(base: Path, adapter: Path) -> tuple[Tensor, Tensor]:
    """Logits of the base alone, and of base plus adapter by stock PEFT, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_base(base)
        alone = logits(model)
        return alone, logits(PeftModel.from_pretrained(model, str(adapter)))


def stored_names(directory: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def merged(case: Case, scratch: Path, name: str, **settings: Any) -> tuple[Path, Path, Path, list[str]]:
    """Build base and adapter, merge them: directories of base, adapter and result, and the lines that were said."""
    from hf_rocm_tune.publish.merge import merge

    base = build_base(case, scratch)
    adapter = write_adapter(case, base, scratch / "adapters" / name)
    out = scratch / "merged" / name
    lines: list[str] = []
    merge(str(adapter), out, base_name=str(base), **settings, say=lines.append)
    return base, adapter, out, lines
