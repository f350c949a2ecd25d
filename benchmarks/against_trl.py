"""Time to the first optimizer step, steps a second and peak memory: ours beside stock ``trl sft``.

Both run as whole processes with the same *resolved* configuration (ours prints it, TRL reads it), interleaved, after
one uncounted run of each. Prints a table and, as the last line, one JSON object.

    python benchmarks/against_trl.py --model DIR --data DIR [--steps 60] [--runs 5] [--json FILE] [-- flags of sft]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

#: A line that logs a step: TRL prints a dictionary, we a row that begins with step and epoch.
_STEP = re.compile(r"\{'loss'|\s*\d+/\d+\s+[\d.]+\s+[\d.]+\s")
OURS = ("verify", "on_corruption", "consent_unverified", "sentinel_every", "overwrite_output_dir", "eval_split_size")
OURS += ("early_stopping_patience", "early_stopping_threshold", "compare_optimizer_every", "prefetch_batches")


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("rest", nargs="*", help="further flags of sft, behind --")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        recipe = _recipe(wanted, Path(scratch))
        samples: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
        for run in range(wanted.runs + 1):
            for side in samples:
                sample = _measure(side, recipe, Path(scratch) / f"{side}-{run}")
                if run:  # the first of each only warms the caches
                    samples[side].append(sample)
    result = {"machine": _machine(), "steps": wanted.steps, "flags": wanted.rest, **_summary(samples)}
    _print_table(result)
    text = json.dumps(result)
    if wanted.json:
        wanted.json.write_text(text + "\n")
    print(text)


def _recipe(wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    flags = [
        *("--model_name_or_path", wanted.model, "--dataset_name", wanted.data, "--output_dir", str(scratch / "none")),
        *("--max_steps", str(wanted.steps), "--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "true"),
        *wanted.rest,
        "--print_config",
    ]
    shown = subprocess.run(
        [sys.executable, "-m", "hf_rocm_tune.sft", *flags], capture_output=True, text=True, check=True
    )
    content: dict[str, Any] = yaml.safe_load(shown.stdout)
    return content


def _measure(side: str, recipe: dict[str, Any], output: Path) -> dict[str, float]:
    content = {**recipe, "output_dir": str(output)}
    if side == "trl":
        content = {key: value for key, value in content.items() if key not in OURS}
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(content))
    module = "hf_rocm_tune.sft" if side == "ours" else "trl.scripts.sft"
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", module, "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    logged = [time.perf_counter() for line in process.stdout if _STEP.match(line)]
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{module} failed: run `{sys.executable} -m {module} --config {file}` to see why")
    return {
        "seconds_to_first_step": logged[0] - started,
        "steps_per_second": (len(logged) - 1) / (logged[-1] - logged[0]),
        "peak_memory_mb": usage.ru_maxrss / 1000,
        "whole_seconds": time.perf_counter() - started,
    }


def _summary(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in samples["ours"][0]:
        sides = {side: [row[name] for row in rows] for side, rows in samples.items()}
        ratios = [ours / trl for ours, trl in zip(sides["ours"], sides["trl"], strict=True)]
        figures[name] = {side: _spread(values) for side, values in sides.items()} | {"ours/trl": _spread(ratios)}
    return {"runs": len(samples["ours"]), "figures": figures}


def _spread(values: list[float]) -> dict[str, float]:
    middle = statistics.median(values)
    return {"median": round(middle, 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def _machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft", "accelerate")}
    return {"device": device, "cores": os.cpu_count(), "system": platform.platform(), "versions": versions}


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'':24}{'ours':>28}{'trl sft':>28}{'ours/trl, pair by pair':>28}")
    for name, sides in result["figures"].items():
        cells = [f"{row['median']:.3f} ({row['min']:.3f} .. {row['max']:.3f})" for row in sides.values()]
        print(f"{name:24}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
