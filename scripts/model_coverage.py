"""Tries architectures by method and writes docs/models.md: ``python scripts/model_coverage.py [NAME ...]``.

Each is a model of its own configuration class with random weights and few, small layers, trained for two steps on the
CPU by the real commands, every byte verified; and planned for a 20 GB card. What is refused or fails is shown with the
first line that a user would see. With names only those are tried and printed, and nothing is written.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "models.md"
METHODS = {"LoRA": [], "QLoRA": ["--load_in_4bit"], "all weights": ["--use_peft", "false"]}

_SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZE |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "sliding_window": 64}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 64}
_LATENT = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_LATENT |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 32}
#: By the name of the configuration class without ``Config``: what it needs besides the usual sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Olmo2", "Granite", "Starcoder2")},
    **{name: {} for name in ("StableLm", "Cohere2", "Glm4", "Exaone4", "Ernie4_5", "SeedOss", "GPTNeoX")},
    "Gemma2": {"query_pre_attn_scalar": 32},
    "Gemma3Text": {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {"original_max_position_embeddings": 256, "head_dim": None},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "Bloom": {"n_layer": 2, "n_head": 2},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "Mamba2": {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {**_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{name: {**_EXPERTS} for name in ("Qwen2Moe", "Qwen3Moe", "Mixtral", "Olmoe", "GraniteMoe", "Glm4Moe")},
    "GptOss": {**_EXPERTS, "intermediate_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    **{name: {**_EXPERTS, **_LATENT} for name in ("DeepseekV2", "DeepseekV3")},
}


def build(name: str, folder: Path) -> Path:
    """A model of an architecture with its tokenizer; its folder."""
    import torch
    import transformers

    from tests import tiny

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = tiny.build_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    torch.manual_seed(0)
    values = {key: value for key, value in (_SIZE | ARCHITECTURES[name]).items() if (key, value) != ("head_dim", None)}
    config = getattr(transformers, f"{name}Config")(vocab_size=512, **ids, **values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def tried(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Of each architecture: its name, and what came of each method and of the plan."""
    from tests import tiny
    from tests.e2e.command import CommandServer

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        data = tiny.write_dataset_dir(place / "data")
        server = CommandServer(place / "server")
        for name in names:
            try:
                model, cells = build(name, place), []
            except (TypeError, ValueError, AttributeError, ImportError, RuntimeError) as error:
                yield name, [f"not tried: {str(error).splitlines()[0]}"] * 4
                continue
            for number, flags in enumerate(METHODS.values()):
                output = place / f"{name}-{number}"
                usual = f"--model {model} --dataset {data} --output_dir {output} --max_steps 2 --save_strategy no"
                usual += " --batch_size 2 --max_seq_length 64 --disable_tqdm true"
                done = server.run(*usual.split(), *flags)
                cells.append(_line(done) if done.code else _trained(output))
            plan = server.run(
                *("--model", str(model), "--gpu", "rx7900xt", "--seq", "64", "--json"), env={"VERB": "plan"}
            )
            yield name, [*cells, _line(plan) if plan.code else "planned"]
        server.close()


def _trained(output: Path) -> str:
    covered = json.loads((output / "transfer_report.json").read_text())["coverage"]
    whole = covered["verified_bytes"] == covered["device_bytes"] > 0
    return "trained" if whole else f"trained, {covered['unverified']} unverified"


def _line(done: Any) -> str:
    """What a user sees of a refusal or a failure."""
    said = done.error_lines or done.stderr.strip().splitlines()[-1:] or ["?"]
    words = "refused: " if done.error_lines else "fails: "
    text = re.sub(r"(/tmp/[^\s/]+/|model /?)\S*?(?=:|\s|$)", "", said[0].removeprefix("hf-rocm-tune: error: "))
    return words + text.replace("|", "/").strip()


def main() -> int:
    """Tries what is named, or all, and writes the page. Returns 0."""
    names = sys.argv[1:] or list(ARCHITECTURES)
    lines = PAGE.read_text(encoding="utf-8").splitlines() if sys.argv[1:] else []
    rows = {
        line.split(" | ")[0][2:]: line
        for line in lines
        if line.startswith("| ") and line[2:].split(" ")[0] in ARCHITECTURES
    }
    reasons = [line for line in lines if line.startswith("- ") and line[2:].split(",")[0] not in names]
    for name, cells in tried(names):
        rows[name] = f"| {name} | {' | '.join(cell.split(':')[0] for cell in cells)} |"
        found = zip((*METHODS, "plan"), cells, strict=True)
        reasons += [f"- {name}, {what}: {cell}" for what, cell in found if ":" in cell]
        print(rows[name], flush=True)
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in ("transformers", "trl", "peft", "bitsandbytes"))
    head = f"| architecture | {' | '.join((*METHODS, 'plan'))} |\n|---|{'---|' * (len(METHODS) + 1)}\n"
    why = ["", "## Why not", "", *reasons] if reasons else []
    text = (
        "# Models\n\nWritten by `scripts/model_coverage.py` from what it tried: these architectures with random "
        "weights and two small layers,\non a CPU, by the real commands. *trained*: two steps of `sft`, all verified. "
        f"*planned*: for a 20 GB card. No\narchitecture is refused by name. With {versions}.\n\n"
    )
    lines = [rows[name] for name in ARCHITECTURES if name in rows] + why
    PAGE.write_text(text + head + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
