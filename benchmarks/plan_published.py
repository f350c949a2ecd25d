"""Plans setups of which others published memory or speed, and prints the ratio of the plan to what they measured.

    python benchmarks/plan_published.py [--json FILE]

Only setups whose model, length and micro-batch the source states. What a source does not state (rank, targets, dropout,
optimizer, loss) is planned with the planner's defaults, so a ratio tells of these settings as well. Memory is compared
with the card's total less the desktop, in units of 10^9 bytes; a source's "GB" may mean 2^30, which is 1.07 times that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_rocm_tune.machine import process  # noqa: E402
from hf_rocm_tune.plan import PUBLIC_MODELS, CardMemory, PlanRequest, card_memory, config_of, plan_for  # noqa: E402

QWEN25_3B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
LLAMA2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA31_8B = next(dict(model.fields) for model in PUBLIC_MODELS if model.name == "meta-llama/Llama-3.1-8B")
XTX = "llm-training-on-consumer-amd (RX 7900 XTX, ROCm 7.2.4, torch 2.12.1)"
LITGPT = "litgpt config_hub/finetune/README.md (A10G)"
LOSS = "rank, targets, optimizer and loss not stated"
OTHER = "litgpt's own model and loss, not PEFT and TRL; rank, targets and recomputation not stated"
#: Name, configuration, method, micro-batch, length, recomputed, published GB and tokens a second, source, reason.
SETUPS: tuple[tuple[Any, ...], ...] = (
    ("Qwen2.5-3B LoRA", QWEN25_3B, "lora", 2, 256, False, 12.5, 1493, XTX, LOSS),
    ("Qwen2.5-3B LoRA", QWEN25_3B, "lora", 2, 256, True, 8.1, 1098, XTX, LOSS),
    ("Llama-3.1-8B LoRA", LLAMA31_8B, "lora", 1, 512, False, 19.73, None, LITGPT, OTHER),
    ("Llama-3.1-8B QLoRA", LLAMA31_8B, "qlora", 2, 512, False, 17.41, None, LITGPT, OTHER),
    ("Llama-2-7B LoRA", LLAMA2_7B, "lora", 2, 512, False, 19.77, None, LITGPT, OTHER),
    ("Llama-2-7B QLoRA", LLAMA2_7B, "qlora", 2, 512, False, 13.68, None, LITGPT, OTHER),
)


def compare(card: CardMemory, setup: tuple[Any, ...]) -> dict[str, Any]:
    """One row: what was published, what is planned, and the ratios."""
    name, config, method, micro_batch, length, recomputed, gigabytes, tokens, source, reason = setup
    request = PlanRequest(
        methods=(method,),
        length=length,
        effective_batch=micro_batch,
        micro_batch=micro_batch,
        checkpointing=recomputed,
        platform="hip" if source == XTX else "cuda",
    )
    found = plan_for(request, card=card, config=config_of(config), grid=False).nearest
    planned = (found.total - found.parts["desktop"]) / 1e9
    row = {"setup": name, "micro_batch": micro_batch, "length": length, "recomputed": recomputed}
    row |= {"published_gb": gigabytes, "planned_gb": round(planned, 2), "memory_ratio": round(planned / gigabytes, 2)}
    if tokens:
        speed = found.tokens_per_second
        row |= {"published_tokens_s": tokens, "planned_tokens_s": round(speed), "speed_ratio": round(speed / tokens, 2)}
    return row | {"source": source, "reason": reason}


def main() -> None:
    """Prints the table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    process.prepare_process(os.environ)
    card = card_memory(name="rx7900xtx", desktop_gib=0)
    rows = [compare(card, setup) for setup in SETUPS]
    for row in rows:
        how = f"{row['micro_batch']} x {row['length']}{', recomputed' if row['recomputed'] else ''}"
        speed = f"{row['planned_tokens_s']} of {row['published_tokens_s']} tokens/s" if "speed_ratio" in row else ""
        memory = f"{row['planned_gb']:5.1f} of {row['published_gb']:5.1f} GB ({row['memory_ratio']:.2f})"
        print(f"{row['setup']:<19} {how:<20} {memory}  {speed:<26} {row['source']}: {row['reason']}")
    result = json.dumps({"benchmark": "plan_published", "rows": rows})
    print(result)
    if wanted.json:
        wanted.json.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
