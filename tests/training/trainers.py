"""Trainers with a small adapter on a tiny model, on the CPU, for the tests of what stands in front of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer

from hf_rocm_tune import VerifiedTransferMixin

STEPS = 4
Make = Callable[..., Any]


class VerifiedSFT(VerifiedTransferMixin, SFTTrainer):
    """As a user would define it."""


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """The mixin in front of the plain trainer."""


def build(
    kind: Any,
    model: Any,
    rows: Any,
    out: Path,
    *,
    config: Any = None,
    lora: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer.

    Args:
        kind: its class.
        model: or its directory, to load it as plain transformers does.
        rows: to train on.
        out: its output directory.
        config: class of its arguments; None: as SFTTrainer or the plain trainer has it.
        lora: options of the adapter.
        ours: further arguments of the trainer.
        options: of its training arguments.
    """
    torch.manual_seed(3)
    config = config or (SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments)
    of_trl = config is not TrainingArguments
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **({"bf16": False, "activation_checkpointing": False} if of_trl else {}),
        **options,
    }
    peft_config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(lora or {})})
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model)
        model = model if of_trl else get_peft_model(model, peft_config)
    more = {"peft_config": peft_config} if of_trl else {"data_collator": default_data_collator}
    return kind(model=model, args=config(**settings), train_dataset=rows, **{**more, **(ours or {})})


def files(trainer: Any) -> tuple[int, int]:
    """Files that were read back and equal what is live, and tensors and values in files that did not."""
    counted = trainer.transfer_report.to_dict()["files"]
    return counted["verified"], counted["mismatches"]


def names(directory: Path) -> list[str]:
    """Checkpoints and unfinished or set aside directories of an output directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("checkpoint", "_", "damaged")))
