"""Loads saved adapters with plain transformers and PEFT and compares logits. Never imports this package.

Reads JSON lines {"base", "adapter", "logits", "four_bit"} from standard input and prints, for each, one JSON line with
the largest difference from the logits that the training process wrote.

Load arguments (the same as the model card's snippet): the base in float32 on the CPU; for a 4-bit base bfloat16 and
BitsAndBytesConfig(load_in_4bit=True, nf4, double quantisation, bfloat16 compute), and the adapter with
autocast_adapter_dtype=False, because it was trained in bfloat16.
"""

from __future__ import annotations

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.e2e.probe import logits


def main() -> None:
    """Answers each line."""
    for line in sys.stdin:
        job = json.loads(line)
        arguments = {"dtype": torch.bfloat16 if job["four_bit"] else torch.float32}
        if job["four_bit"]:
            arguments["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
        base = AutoModelForCausalLM.from_pretrained(job["base"], **arguments)
        model = PeftModel.from_pretrained(base, job["adapter"], autocast_adapter_dtype=not job["four_bit"])
        expected = torch.load(job["logits"], weights_only=True)
        found = logits(model)
        ours = [name for name in sys.modules if name.split(".")[0] == "hf_rocm_tune"]
        answer = {
            "equal": torch.equal(found, expected),
            "difference": (found - expected).abs().max().item(),
            "our_modules": ours,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
