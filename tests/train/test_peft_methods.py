"""PEFT methods that write to their own tensors in ways that look like faults train to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import CPTConfig, OFTConfig, PeftConfig, PrefixTuningConfig, PromptEncoderConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_rocm_tune import VerifiedTransferMixin
from hf_rocm_tune.errors import MemoryFaultError
from tests import tiny


class Verified(VerifiedTransferMixin, Trainer):
    """In front of the plain trainer."""


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def collate_typed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "input_type_mask": torch.full_like(batch["input_ids"], 4)}


def cpt(model: Path) -> PeftConfig:
    """Its prompt encoder replaces its trained weights in each forward, and PEFT calls it to save."""
    types = {"cpt_mask": [1] * 8, "cpt_tokens_type_mask": [1, 2, 3, 4] * 2}
    return CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=list(range(9, 17)), tokenizer_name_or_path=str(model), **types
    )


def oft(model: Path) -> PeftConfig:
    """Two of its buffers are parts of one storage."""
    return OFTConfig(task_type="CAUSAL_LM", oft_block_size=8, target_modules=["q_proj", "v_proj"])


def p_tuning(model: Path) -> PeftConfig:
    """Its file has what a trained network makes of its trained embedding."""
    return PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)


def prefixes(model: Path) -> PeftConfig:
    """Likewise."""
    return PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16
    )


def trainer_of(make: Any, place: Path, **settings: Any) -> Verified:
    path = tiny.build("llama3", place / "models")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), make(path))
    rows = Dataset.from_list([{"input_ids": [5 + n % 40, 6, 7, 8, 9, 10]} for n in range(16)])
    args = TrainingArguments(
        output_dir=str(place / "out"),
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        max_steps=4,
        save_steps=2,
        learning_rate=1e-2,
        **settings,
    )
    data = {"train_dataset": rows, "data_collator": collate_typed if make is cpt else collate}
    return Verified(model, args, sentinel_every=2, **data)


# Of torch's compiler; compiled, it takes 20 s of this process and more of its compiler's.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("make", "compiled"), [(cpt, False), (oft, False), pytest.param(oft, True, marks=pytest.mark.long)]
)
def test_a_method_that_writes_to_its_own_tensors_trains(make: Any, compiled: bool, tmp_path: Path) -> None:
    trainer = trainer_of(make, tmp_path, torch_compile=compiled)
    trainer.train()
    report = trainer.transfer_report.to_dict()
    assert report["trained"]["mismatches"] == report["frozen"]["mismatches"] == 0 and report["incidents"] == []
    assert trainer.weight_coverage().complete and report["trained"]["checks"] >= 4
    trained = next(each for each in trainer.model.parameters() if each.requires_grad)
    trained.detach().view(-1)[0:1].numpy()[0] += 1  # torch does not hear of it
    with pytest.raises(MemoryFaultError):
        trainer._save_checkpoint(trainer.model, trial=None)


# PEFT 0.21 asks for a property that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# PEFT's prefixes reach transformers 5.24 under the name that it is to drop in 5.40.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [cpt, p_tuning, prefixes])
def test_a_method_whose_file_does_not_hold_what_it_trains_resumes_to_the_same_bits(make: Any, tmp_path: Path) -> None:
    adapters = []
    for resumed in (False, True):
        torch.manual_seed(int(resumed))
        trainer = trainer_of(make, tmp_path)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resumed else None)
        adapters.append((tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").read_bytes())
        assert trainer.transfer_report.to_dict()["incidents"] == []
    assert adapters[0] == adapters[1]
