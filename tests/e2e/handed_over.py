"""Trains models that were made in different ways and places, and prints one JSON line for each.

Arguments: model directory, output directory. Run on the simulated card by `test_handed_over`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import hf_rocm_tune  # isort: skip  # before torch, as README says
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, SFTConfig

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models import recompute

PATH, OUT = sys.argv[1:3]
ROWS = Dataset.from_list([{"text": f"this is the text of row {number}"} for number in range(8)])


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")


def loaded(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(PATH, **options)


def made() -> Any:
    config = AutoConfig.from_pretrained(PATH)
    config._name_or_path = ""
    return AutoModelForCausalLM.from_config(config)


class VerifiedDPOTrainer(hf_rocm_tune.VerifiedTransferMixin, DPOTrainer):
    """As a user would define it."""


SETTINGS: dict[str, Any] = {
    "output_dir": OUT,
    "max_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "bf16": False,
    recompute.SETTING: False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def trained(model: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    if "ref_model" in more:
        pairs = [{"prompt": "is this", "chosen": f" row {number}", "rejected": " not"} for number in range(8)]
        args, rows, kind = DPOConfig(**SETTINGS), Dataset.from_list(pairs), VerifiedDPOTrainer
    else:
        args, rows, kind = SFTConfig(**SETTINGS), ROWS, hf_rocm_tune.VerifiedSFTTrainer
    trainer = kind(model=model, args=args, processing_class=tokenizer, train_dataset=rows, **more)
    try:
        trainer.train()
    finally:
        trainer.mover.close()  # the next model reaches the card before anything verifies its copies
    return trainer


def quantised(bits: int) -> Any:
    options = {4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}
    settings = BitsAndBytesConfig(**options.get(bits, {"load_in_8bit": True}))
    return loaded(quantization_config=settings, device_map={"": 0}, dtype=torch.float32)


def harmed(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj.weight.quant_state.state2.absmax[0] *= 2
    return model


def changed(where: Callable[[Any], torch.Tensor]) -> Any:
    model = loaded().to("cuda")
    where(model).data[0] += 1
    return trained(model, peft_config=lora())


CASES: dict[str, Callable[[], Any]] = {
    "host": lambda: trained(loaded(), peft_config=lora()),
    "card, 4 bit": lambda: trained(quantised(4), peft_config=lora()),
    "card, 8 bit": lambda: trained(quantised(8), peft_config=lora()),
    "card, 4 bit, changed": lambda: trained(harmed(quantised(4)), peft_config=lora()),
    "card, trained before": lambda: trained(kept["host"].model),
    "host, with a reference": lambda: trained(loaded(), ref_model=made()),
    "card": lambda: trained(loaded(device_map={"": 0}), peft_config=lora()),
    "card, get_peft_model": lambda: trained(get_peft_model(loaded().to("cuda"), lora())),
    "card, from_config": lambda: trained(made().to("cuda"), peft_config=lora()),
    "card, from_config, consent": lambda: trained(made().to("cuda"), peft_config=lora(), consent_unverified=True),
    "card, changed weight": lambda: changed(lambda model: model.model.norm.weight),
    "card, changed table": lambda: changed(lambda model: model.model.rotary_emb.inv_freq),
}

kept: dict[str, Any] = {}
for name, case in CASES.items():
    try:
        trainer = kept[name] = case()
        found = trainer.weight_coverage()
        answer = {
            "device": trainer.model.device.type,
            "complete": found.complete,
            "verified_by": found.verified_by,
            "bytes": found.device_bytes,
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        }
    except UsageError as error:
        answer = {"refused": str(error)}
    print(json.dumps({"case": name, **answer}), flush=True)
