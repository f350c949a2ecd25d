"""Plans each architecture of transformers that has a causal language model, in its default configuration.

Prints one line for each: what was planned and how long it took, or why it was refused; as the last line one JSON
object. Seconds are processor time of the planning alone; ``start_seconds`` is that of the imports, once a process.

    python benchmarks/plan_architectures.py [--only TEXT] [--json FILE]

A default configuration is that of the class in transformers. Where it cannot be built (an expert count that is None,
for example), the fields that a real checkpoint gives are added here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_rocm_tune import process  # noqa: E402
from hf_rocm_tune.errors import UsageError  # noqa: E402
from hf_rocm_tune.memory.plan import GIB, CardMemory  # noqa: E402
from hf_rocm_tune.plan_request import PlanRequest  # noqa: E402

CARD = CardMemory(name="Radeon RX 7900 XT", usable=int(19.9 * GIB))
IMPORTS = ("hf_rocm_tune.plan_job", "torch", "transformers.modeling_utils", "peft", "bitsandbytes", "torch._dynamo")
#: What a real checkpoint says and the default configuration leaves out.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
}


def architectures() -> dict[str, str]:
    """Class names by model type, as transformers maps them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {kind: name if isinstance(name, str) else name[0] for kind, name in NAMES.items()}


def plan_one(model_type: str) -> dict[str, Any]:
    """Plans one architecture as ``hf-rocm-tune plan`` would without further flags, its text included."""
    from huggingface_hub.errors import StrictDataclassError

    from hf_rocm_tune.models.shapes_config import config_of
    from hf_rocm_tune.models.shapes_model import FOREIGN_ERRORS
    from hf_rocm_tune.plan_job import plan_for
    from hf_rocm_tune.plan_text import as_text

    name = architectures()[model_type]
    row: dict[str, Any] = {"model_type": model_type, "architecture": name}
    started = time.process_time()
    try:
        config = config_of({"model_type": model_type, **FIELDS.get(model_type, {})})
        config.architectures = [name]
    except (*FOREIGN_ERRORS, StrictDataclassError) as error:
        return row | {"refused": f"no default configuration: {str(error).splitlines()[0]}", "seconds": 0.0}
    try:
        plan = plan_for(PlanRequest(), card=CARD, config=config, within_limit=True)
        as_text(plan, "")
    except UsageError as error:
        return row | {"refused": str(error), "seconds": time.process_time() - started}
    seconds = time.process_time() - started
    return row | {"methods": list(plan.variants), "layers": plan.layers, "notes": list(plan.notes), "seconds": seconds}


def walk(model_types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for each."""
    for model_type in model_types:
        row = plan_one(model_type)
        told = f"refused: {row['refused']}" if "refused" in row else f"{', '.join(row['methods'])}; {row['notes']}"
        print(f"{model_type:<28} {row['seconds']:>6.2f} s  {told}", flush=True)
        yield row


def start_seconds() -> float:
    """Processor time of a process that imports what planning needs."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import {', '.join(IMPORTS)}"], check=True, cwd=ROOT, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Walks all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    process.prepare_process(os.environ)
    start = start_seconds()
    for name in IMPORTS:  # not part of the first architecture's time
        importlib.import_module(name)
    rows = list(walk([each for each in architectures() if wanted.only in each]))
    result = {
        "benchmark": "plan_architectures",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")},
        "start_seconds": start,
        "planned": sum("refused" not in row for row in rows),
        "refused": sum("refused" in row for row in rows),
        "slower_than_8_seconds": [row["model_type"] for row in rows if row["seconds"] + start > 8],
        "rows": rows,
    }
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
