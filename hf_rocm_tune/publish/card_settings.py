"""Which of a run's settings are worth showing first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.publish.history_values import number

_SHOWN = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "num_train_epochs",
    "max_steps",
    "max_length",
    "packing",
    "bf16",
    "fp16",
    "dtype",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "use_dora",
    "use_rslora",
    "loss_type",
    "assistant_only_loss",
    "completion_only_loss",
    "gradient_checkpointing",
    "neftune_noise_alpha",
    "seed",
)
_ONLY_4BIT = ("bnb_4bit_quant_type", "use_bnb_nested_quant")


def chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a model becomes and say something here, by name, and the effective batch.

    What is off, unset, or of no effect beside the others is left out.
    """
    found = {}
    for name in _SHOWN:
        value = settings.get(name)
        if value is None or value is False or value == []:
            continue
        if name.startswith("lora_") and settings.get("use_peft") is False:
            continue
        if name in _ONLY_4BIT and settings.get("load_in_4bit") is not True:
            continue
        found[name] = value
    if (number(settings, "max_steps") or 0) > 0:
        found.pop("num_train_epochs", None)
    else:
        found.pop("max_steps", None)
    parts = [
        number(settings, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    ]
    if None not in parts:
        product = 1
        for part in parts:
            product *= int(part or 0)
        found["effective_batch_size"] = product
    return found
