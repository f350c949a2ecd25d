"""Plans each architecture of transformers that has a causal language model, in its default configuration.

Prints one line for each: what was planned and how long it took, or why it was refused; as the last line one JSON
object. Each is a whole command, ``hf-rocm-tune plan --model DIRECTORY --gpu rx7900xt``, and seconds are those on the
clock from its start to its end; with ``--in_process`` they are processor time of the planning alone.

    python benchmarks/plan_architectures.py [--only TEXT] [--in_process] [--json FILE]

A default configuration is that of the class in transformers. Where it cannot be built (an expert count that is None,
for example), the fields that a real checkpoint gives are added here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_rocm_tune.errors import UsageError  # noqa: E402
from hf_rocm_tune.machine import process  # noqa: E402
from hf_rocm_tune.plan import (  # noqa: E402
    GIB,
    CardMemory,
    PlanRequest,
)

CARD = CardMemory(name="Radeon RX 7900 XT", usable=int(19.9 * GIB))
IMPORTS = ("hf_rocm_tune.plan", "torch", "transformers.modeling_utils", "peft", "bitsandbytes", "torch._dynamo")
LIMIT = 8.0  # seconds
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


def default_config(model_type: str) -> Any:
    """The default configuration of an architecture.

    Raises:
        UsageError: it has none.
    """
    from huggingface_hub.errors import StrictDataclassError

    from hf_rocm_tune.errors import FOREIGN_ERRORS
    from hf_rocm_tune.plan import config_of

    try:
        config = config_of({"model_type": model_type, **FIELDS.get(model_type, {})})
    except (*FOREIGN_ERRORS, StrictDataclassError) as error:
        raise UsageError(f"no default configuration: {str(error).splitlines()[0]}") from error
    config.architectures = [architectures()[model_type]]
    return config


def plan_one(model_type: str) -> dict[str, Any]:
    """Plans one architecture in this process as the command would without further flags, its text included."""
    from hf_rocm_tune.plan import plan_for
    from hf_rocm_tune.plan.command import command

    row: dict[str, Any] = {"model_type": model_type, "architecture": architectures()[model_type]}
    started = time.process_time()
    try:
        config = default_config(model_type)
        plan = plan_for(PlanRequest(), card=CARD, config=config, within_limit=True)
        command(plan.request, plan.nearest)
    except UsageError as error:
        return row | {"refused": str(error), "seconds": time.process_time() - started}
    seconds = time.process_time() - started
    return row | {"methods": list(plan.variants), "layers": plan.layers, "notes": list(plan.notes), "seconds": seconds}


def command_one(model_type: str) -> dict[str, Any]:
    """Plans one architecture with the command itself."""
    row: dict[str, Any] = {"model_type": model_type, "architecture": architectures()[model_type]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            default_config(model_type).save_pretrained(folder)
        except UsageError as error:
            return row | {"refused": str(error), "seconds": 0.0}
        line = [sys.executable, "-m", "hf_rocm_tune", "plan", "--model", folder, "--gpu", "rx7900xt", "--json"]
        started = time.perf_counter()
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
        seconds = time.perf_counter() - started
    if done.returncode == UsageError.exit_code:
        return row | {"refused": done.stderr.strip(), "seconds": seconds}
    if not done.stdout:
        raise RuntimeError(f"{model_type}: code {done.returncode}: {done.stderr}")
    plan = json.loads(done.stdout)
    methods = sorted({option["method"] for option in plan["grid"]})
    return row | {"methods": methods, "layers": plan["layers"], "notes": plan["notes"], "seconds": seconds}


def walk(model_types: Sequence[str], plan: Callable[[str], dict[str, Any]] = plan_one) -> Iterator[dict[str, Any]]:
    """One row for each."""
    for model_type in model_types:
        row = plan(model_type)
        told = f"refused: {row['refused']}" if "refused" in row else f"{', '.join(row['methods'])}; {row['notes']}"
        print(f"{model_type:<28} {row['seconds']:>6.2f} s  {told}", flush=True)
        yield row


def main() -> None:
    """Walks all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--in_process", action="store_true", help="time the planning alone, without the start")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    process.prepare_process(os.environ)
    for name in IMPORTS if wanted.in_process else ():  # not part of the first architecture's time
        importlib.import_module(name)
    chosen = [each for each in architectures() if wanted.only in each]
    rows = list(walk(chosen, plan_one if wanted.in_process else command_one))
    seconds = [row["seconds"] for row in rows]
    result = {
        "benchmark": "plan_architectures",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")},
        "timed": "planning alone, processor time" if wanted.in_process else "whole commands, on the clock",
        "planned": sum("refused" not in row for row in rows),
        "refused": sum("refused" in row for row in rows),
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
        "slower_than_8_seconds": [row["model_type"] for row in rows if row["seconds"] > LIMIT],
        "rows": rows,
    }
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
