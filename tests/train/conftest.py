"""What the tests of trainers share: a tiny model, its rows, and a trainer that saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_rocm_tune.train.faults import STEP_VARIABLE
from tests import tiny
from tests.train.trainers import STEPS, Make, VerifiedPlain, VerifiedSFT
from tests.train.trainers import build as build_trainer

# PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
_OF_PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For all tests of this folder."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(_OF_PEFT)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return tiny.build("llama3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rows() -> Dataset:
    """Sixteen short texts."""
    return Dataset.from_list([{"text": text[:80]} for text in tiny.training_text()[:16]])


@pytest.fixture(scope="session")
def tokens() -> Dataset:
    """Token rows of one length, with unequally many labels."""
    rows = torch.randint(5, 500, (46, 16), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_list(
        [{"input_ids": row, "labels": [-100] * (n % 11) + row[n % 11 :]} for n, row in enumerate(rows)]
    )


@pytest.fixture
def make(model_path: Path, tokens: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Builds a trainer with an adapter that trains on ``tokens``, and harms its steps as a specification says."""

    def make(
        kind: Any = VerifiedPlain, *, fault: str = "", model: Any = None, extra: Any = None, **options: Any
    ) -> Any:
        monkeypatch.setenv(STEP_VARIABLE, fault)
        sizes = {"gradient_accumulation_steps": 2, "max_steps": 4, "seed": 5}
        ours = {"eval_dataset": tokens.select(range(5)), **(extra or {})}
        return build_trainer(kind, model or model_path, tokens, tmp_path / "out", ours=ours, **{**sizes, **options})

    return make


@pytest.fixture
def saver(model_path: Path, rows: Dataset, tmp_path: Path) -> Make:
    """Builds a trainer that writes to ``tmp_path/out``; adapters of another dtype than float32 are cast as TRL does."""

    def build(
        out: str = "out", *, adapter: torch.dtype = torch.float32, ours: Any = None, **options: Any
    ) -> VerifiedSFT:
        kept = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "eval_strategy": "no"} | options
        trainer: VerifiedSFT = build_trainer(
            VerifiedSFT,
            AutoModelForCausalLM.from_pretrained(model_path, dtype=adapter),
            rows,
            tmp_path / out,
            lora={"lora_dropout": 0.1},
            ours={"run_id": "run-1", "eval_dataset": rows.select(range(4)), **(ours or {})},
            max_length=32,
            **kept,
        )
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter)
                trainer.mover.mark_derived(parameter, "cast")
        return trainer

    return build
