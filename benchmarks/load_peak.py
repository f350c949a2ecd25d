"""Peak of the card while a model is loaded, beside the plan's: fused experts are joined from their parts there.

    SIMCARD=1 PYTHONPATH=$PWD:$PWD/tests/simcard/boot .venv/bin/python benchmarks/load_peak.py --json FILE

On the simulated card, which quantises by plain torch operators: what these take, and a card's kernel does not, is left
out, and digests, which take the same there without Triton, are off.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan_cases import GPT_OSS, LLAMA, MOE
from benchmarks.plan_errors import quiet
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.plan import CardMemory, PlanRequest, config_of, plan_for
from hf_rocm_tune.transfer import Mover, TransferSettings

SIZE = {"num_hidden_layers": 4, "vocab_size": 512}
MODELS = {
    "Llama": {**LLAMA, **SIZE},
    "gpt-oss": {**GPT_OSS, **SIZE, "num_local_experts": 16},
    "Qwen3-MoE": {**MOE, **SIZE, "mlp_only_layers": [], "num_experts": 16, "moe_intermediate_size": 512},
}


class Peak:
    """The highest level outside of `quantize_4bit`, whose results count and whose temporary memory does not."""

    def __init__(self) -> None:
        self._stock, self.highest = bitsandbytes.functional.quantize_4bit, 0
        bitsandbytes.functional.quantize_4bit = self._quantise
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def _quantise(self, *given: Any, **more: Any) -> Any:
        self._note()
        found = self._stock(*given, **more)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return found

    def _note(self) -> None:
        torch.cuda.synchronize()
        self.highest = max(self.highest, torch.cuda.max_memory_allocated() - self._before)

    def end(self) -> int:
        """The highest level, in bytes."""
        self._note()
        bitsandbytes.functional.quantize_4bit = self._stock
        return self.highest


def compare(name: str, method: str) -> dict[str, Any]:
    """Planned and measured."""
    request = PlanRequest(methods=(method,), length=64, micro_batch=1, checkpointing=True, dtype="bfloat16")
    card = CardMemory(name="any", usable=1 << 40, desktop=0, context=0)
    planned = plan_for(request, card=card, config=config_of(MODELS[name])).nearest.moments["loading"]
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": request.nested}
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **nf4)
    with tempfile.TemporaryDirectory() as folder, quiet():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(MODELS[name]), dtype=torch.bfloat16).save_pretrained(folder)
        source = ModelSource(
            name=folder, init={"dtype": torch.bfloat16}, quantization=packed if method == "qlora" else None
        )
        with Mover(torch.device("cuda", 0), settings=TransferSettings(verify="off")) as mover:
            peak = Peak()
            model, _ = load_model(source, mover)
            measured = peak.end()
            del model
    error = 100 * (planned / measured - 1)
    return {"model": name, "method": method, "planned": planned, "measured": measured, "error_percent": error}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = [compare(name, method) for name in MODELS for method in ("lora", "qlora")]
    for row in rows:
        sizes = f"{row['planned'] / 2**20:>8.1f} {row['measured'] / 2**20:>8.1f} MiB"
        print(f"{row['model']:>10} {row['method']:>6} {sizes} {row['error_percent']:+.2f} %")
    text = json.dumps({"benchmark": "load_peak", "torch": torch.__version__, "rows": rows})
    print(text)
    if wanted.json is not None:
        wanted.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
