"""LoRA fine-tuning with torch, transformers and PEFT alone: the loop that ``sft.py`` compares the trainers with.

It is run as a file, so that nothing of ours is imported, and reads a few flags of ``trl sft``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Train, and print each step's loss as TRL does."""
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "dataset_name", "dtype", "use_cpu", "lora_target_modules", "load_in_4bit"):
        parser.add_argument(f"--{name}")
    for name in ("max_steps", "per_device_train_batch_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--learning_rate", type=float)
    wanted, _ = parser.parse_known_args(argv)

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = torch.device("cpu" if wanted.use_cpu == "true" else "cuda")
    if wanted.load_in_4bit == "true":
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=wanted.dtype)
        more = {"quantization_config": nf4, "device_map": {"": device}}
    else:
        more = {}
    model = AutoModelForCausalLM.from_pretrained(wanted.model_name_or_path, dtype=wanted.dtype, **more)
    if not more:
        model.to(device)  # device: the stock way, which is what is measured here
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=wanted.lora_target_modules))
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=wanted.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, wanted.max_steps)
    lines = Path(wanted.dataset_name, "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows, size = [json.loads(line)["input_ids"] for line in lines], wanted.per_device_train_batch_size
    for step in range(wanted.max_steps):
        batch = torch.tensor(rows[step * size : (step + 1) * size]).to(device)  # device: as above
        with torch.autocast(device.type, torch.bfloat16, enabled=wanted.dtype == "bfloat16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print({"loss": loss.item()}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
