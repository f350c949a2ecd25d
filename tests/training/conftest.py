"""What the tests of saving share: a tiny model, its rows, and a trainer with an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from tests import tiny
from tests.training.savers import STEPS, Make, VerifiedSFT


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return tiny.build("llama3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rows() -> Dataset:
    """Sixteen short texts."""
    return Dataset.from_list([{"text": text[:80]} for text in tiny.training_text()[:16]])


@pytest.fixture
def saver(model_path: Path, rows: Dataset, tmp_path: Path) -> Make:
    """Builds a trainer that writes to ``tmp_path/out``; adapters of another dtype than float32 are cast as TRL does."""

    def build(
        out: str = "out", *, adapter: torch.dtype = torch.float32, ours: Any = None, **options: Any
    ) -> VerifiedSFT:
        torch.manual_seed(3)
        kept = {"save_steps": 2, "max_steps": STEPS, "eval_strategy": "no", "learning_rate": 1e-2} | options
        args = SFTConfig(
            output_dir=str(tmp_path / out),
            per_device_train_batch_size=2,
            max_length=32,
            report_to="none",
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_steps=1,
            **kept,
        )
        trainer = VerifiedSFT(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=adapter),
            args=args,
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"),
            **{"run_id": "run-1", **(ours or {})},
        )
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter)
                trainer.mover.mark_derived(parameter, "cast")
        return trainer

    return build
