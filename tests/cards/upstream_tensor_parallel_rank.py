"""One rank of `test_upstream_tensor_parallel.py`: LoRA on a model that transformers has cut, and a JSON line a case."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

COLWISE = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
CASES: dict[str, dict[str, Any]] = {
    "colwise": {"targets": COLWISE},
    "rowwise": {"targets": [*COLWISE, "o_proj", "down_proj"]},
    "4-bit": {"targets": COLWISE, "quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
    "8-bit": {"targets": COLWISE, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
}


def _gradients(model: Any, targets: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)  # both ranks, and both models, begin with the same adapters
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.fill_(0.01)
            elif "lora_A" in name:
                each.copy_(torch.linspace(-0.1, 0.1, each.numel()).view(each.shape) if not _cut(each) else each)
    tokens = torch.arange(32)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: _whole(each.grad) for name, each in model.named_parameters() if each.requires_grad}


def _cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if _cut(tensor) else tensor
    return whole


def _run(model: str, targets: list[str], **more: Any) -> dict[str, Any]:
    try:
        cut = AutoModelForCausalLM.from_pretrained(model, distributed_config=DistributedConfig(tp_size=2), **more)
        loss, gradients = _gradients(cut, targets)
    except Exception as error:  # whatever upstream does instead is what the test wants to know
        return {"error": f"{type(error).__name__}: {error}"}
    alone, expected = _gradients(AutoModelForCausalLM.from_pretrained(model), targets)
    off = max((gradients[name] - each).abs().max().item() for name, each in expected.items())
    return {"error": None, "losses": [loss, alone], "off": off}


def main(rank: int, store: str, model: str) -> None:
    warnings.simplefilter("ignore")  # upstream's own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, case in CASES.items():
        print(json.dumps({"case": name, **_run(model, **case)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
