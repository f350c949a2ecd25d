"""Builds a trainer on the simulated card for one PEFT method after another; prints what each moved, as JSON lines.

python -m tests.e2e.adapters_on_card MODEL LOG NAME... (SIMCARD_LOG=LOG; NAME: of `VARIANTS` or a peft.PeftType)
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from transformers import AutoTokenizer
from trl import SFTConfig

from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.train.trainer import VerifiedSFTTrainer
from hf_rocm_tune.transfer import Mover
from tests.simcard.log import Log

VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "token indices": {"trainable_token_indices": [1, 2, 3]},
    "modules to save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "expert parameters": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "new tensors": {},
    "flipped copy": {"modules_to_save": ["lm_head", "embed_tokens"]},
}
"""LoRA in its kinds; everything else is a ``peft.PeftType`` with the smallest settings that fit a model of 64 units."""
SMALL = {
    "r": 4,
    "num_virtual_tokens": 4,
    "block_size": 16,
    "vector_length": 32,
    "total_step": 4,
    "oft_block_size": 16,
    "n_frequency": 16,
    "token_indices": [1, 2],
}


def config_of(name: str) -> Any:
    """A small configuration of a variant of LoRA, or of a PEFT type."""
    variant = VARIANTS.get(name)
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING["LORA" if variant is not None else name]
    known = inspect.signature(config_class).parameters
    settings = {key: value for key, value in SMALL.items() if key in known}
    if name == "OFT":
        settings.pop("r")
    if "target_modules" in known:
        settings["target_modules"] = ["embed_tokens"] if name == "TRAINABLE_TOKENS" else ["q_proj", "v_proj"]
    if "feedforward_modules" in known:
        settings["feedforward_modules"] = []
    return config_class(task_type="CAUSAL_LM", **settings, **(variant or {}))


def flip_copies() -> None:
    """From here on one bit of each copy that PEFT makes for ``modules_to_save`` is wrong."""
    stock = ModulesToSaveWrapper.update

    def update(self: Any, adapter_name: str, *rest: Any, **more: Any) -> None:
        stock(self, adapter_name, *rest, **more)
        weight = self.modules_to_save[adapter_name].weight.data
        weight.view(torch.int32).view(-1)[777] ^= 1 << 9

    ModulesToSaveWrapper.update = update


def place_as_new_tensors() -> None:
    """From here on LoRA's weights are placed by ``new_tensor`` of the weight that they adapt: torch's own copy."""

    def place(self: Any, adapter_name: str, device: Any = None) -> None:
        for parts in (self.lora_A, self.lora_B):
            if adapter_name in parts:
                weight = parts[adapter_name].weight
                weight.data = self.get_base_layer().weight.new_tensor(weight.data.cpu())

    BaseTunerLayer._move_adapter_to_device_of_base_layer = place


def build(model: str, name: str, output: str) -> dict[str, Any]:
    """Loads, builds the trainer, and says what is not verified; what upstream itself refuses is told too."""
    try:
        config = config_of(name)
    except (ValueError, ImportError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    mover = Mover(torch.device("cuda", 0))
    with mover:
        try:
            trainer = VerifiedSFTTrainer(
                model=load_model(ModelSource(name=model, init={"dtype": torch.float32}), mover)[0],
                args=SFTConfig(output_dir=output, report_to="none", bf16=False, max_length=32),
                train_dataset=Dataset.from_list([{"text": "one two three"}] * 4),
                processing_class=AutoTokenizer.from_pretrained(model),
                peft_config=config,
                mover=mover,
            )
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"unverified": trainer.weight_coverage().unverified, "trainable": trainer.get_num_trainable_parameters()}


def main() -> None:
    """See the module's description."""
    model, log, *names = sys.argv[1:]
    for name in names:
        if name == "flipped copy":
            flip_copies()
        if name == "new tensors":
            stock = BaseTunerLayer._move_adapter_to_device_of_base_layer
            place_as_new_tensors()
        before = len(Log(Path(log)).events) if Path(log).exists() else 0
        found = build(model, name, f"{log}.out")
        moved = Log(Path(log)).events[before:]
        stray = sorted({event.caller for event in moved if event.kind == "to_card" and not event.engine})
        if name == "new tensors":
            BaseTunerLayer._move_adapter_to_device_of_base_layer = stock
        print(json.dumps({"name": name, "stray": stray, **found}), flush=True)


if __name__ == "__main__":
    main()
