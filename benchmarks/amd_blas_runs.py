"""LoRA and QLoRA trainings by the command line whose products are AMD's code, beside the CPU's; executed, not measured.

    python benchmarks/amd_blas_runs.py [--methods lora qlora] [--steps 20] [--kill 13] [--json FILE]

A small Llama (two layers, 64 wide, 512 words) is trained on the simulated card: products by Debian's rocBLAS and
hipBLASLt, 4-bit work by bitsandbytes' ROCm library, digests and losses by Triton's kernels, each executed as gfx1100
machine code; everything else by torch's code for CPUs. Every product with a frozen weight is checked in every step.
A second run is killed and goes on; its adapter is compared with that of the first, byte for byte. The library of the
loss's gradient is chosen, as on a card, by timing products, but by smaller ones: emulated, the real ones take minutes.

The result names each kernel and each operator, how often it ran, and who wrote its code. `python -m
tests.gfx1100.rocm_libs` fetches the libraries first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.amd_blas import EXECUTED, ROOT, machine, packages_or_exit

ADAPTER = "adapter_model.safetensors"
METHODS: dict[str, list[str]] = {
    "lora": ["--bf16", "true", "--optim", "adamw_torch"],
    "qlora": ["--load_in_4bit", "true", "--optim", "adamw_8bit"],
}
SAVED = 5
"""Steps between checkpoints."""
TIMED = """
import runpy, sys
from hf_rocm_tune.models import products
products._SHAPES = ((64, 512, 64),)
runpy.run_module("hf_rocm_tune.sft", run_name="__main__", alter_sys=True)
"""


def train(argv: list[str], *, card: bool, code: int = 0, **variables: str) -> float:
    """Runs a training, on the card or the CPU; its processor seconds."""
    from tests import simcard
    from tests.gfx1100 import rocm_libs

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *argv]
    if card:
        environment |= {**simcard.environment(gfx1100=True), **rocm_libs.environment()}
        command = rocm_libs.command(argv)
    before = os.times()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode != code:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-3000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def losses(output: Path) -> list[float]:
    """Of each step."""
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


def author(kernel: str) -> str:
    """Who wrote the code of a kernel, by its name."""
    if kernel.startswith("Cijk_"):
        return "AMD's hipBLASLt" if "UserArgs" in kernel else "AMD's rocBLAS"
    return "bitsandbytes" if kernel.startswith("_Z") else "Triton's, of this project"


def executed(log: Path) -> list[dict[str, Any]]:
    """The kernels that ran as gfx1100 code, by name; products are put together by library and kind."""
    from tests.gfx1100.hip import ran

    calls: Counter[tuple[str, str]] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    instructions: Counter[tuple[str, str]] = Counter()
    for each in ran(log):
        name = each.name
        if name.startswith("Cijk_"):
            name = f"{name.partition('_MT')[0]}{', WMMA' if '_MI16x16' in name else ''}"
        key = author(each.name), re.sub(r"^_Z\d+([A-Za-z0-9]+?)I.*", r"\1", name)
        calls[key] += 1
        seconds[key] += each.seconds
        instructions[key] += each.counts["instructions"]
    return [
        {"author": who, "kernel": name, "calls": count, "instructions": instructions[who, name],
         "seconds of interpretation": round(seconds[who, name], 2)}
        for (who, name), count in calls.most_common()
    ]  # fmt: skip


def operators(file: Path) -> list[dict[str, Any]]:
    """What torch's code for CPUs has computed."""
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    found = [{"operator": name, "calls": int(calls), "bytes": int(size)} for name, calls, size in rows]
    return sorted(found, key=lambda row: -row["bytes"])


def one_method(method: str, wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The whole run, the CPU's, and the one that is killed and goes on."""
    from tests import tiny

    model = tiny.build("llama3", scratch / "models")
    rows = tiny.write_dataset_dir(scratch / "rows", train=48, test=9)
    begun = time.monotonic()

    def argv(name: str) -> list[str]:
        return [
            "-c", TIMED, "--model_name_or_path", str(model), "--dataset_name", str(rows),
            "--output_dir", str(scratch / f"{method}-{name}"), "--max_steps", str(wanted.steps),
            "--save_steps", str(SAVED), "--per_device_train_batch_size", "2", "--max_length", "64",
            "--learning_rate", "0.01", "--lora_dropout", "0.0", "--logging_steps", "1", "--disable_tqdm", "true",
            "--doctor", "off", "--check_arithmetic", "every", *METHODS[method],
        ]  # fmt: skip

    log, counted = scratch / f"{method}.kernels", scratch / f"{method}.operators"
    noted = {"SIMCARD_GFX1100_LOG": str(log), "SIMCARD_OPERATORS": str(counted)}
    seconds = train(argv("card"), card=True, **noted)
    train(argv("cpu"), card=False)
    card, cpu = scratch / f"{method}-card", scratch / f"{method}-cpu"
    report = json.loads((card / "transfer_report.json").read_text())
    far = max(abs(a - b) / abs(b) for a, b in zip(losses(card), losses(cpu), strict=True))
    found = {
        "steps": wanted.steps,
        "losses": losses(card),
        "losses on the CPU": losses(cpu),
        "largest relative difference": far,
        "coverage": report["coverage"],
        "arithmetic": {
            name: report["arithmetic"][name]
            for name in ("mode", "products", "checked", "residuals", "disagreements", "cleared", "replays", "attention")
            if name in report["arithmetic"]
        },
        "kernels": executed(log),
        "operators": operators(counted),
        "cpu_seconds": seconds,
    }
    print(f"{method}: {wanted.steps} steps, losses differ by {far:.2e} at most, {found['arithmetic']}", flush=True)
    for row in found["kernels"]:
        print(f"  {row['author']:18s} {row['kernel']:60s} {row['calls']:6d}", flush=True)
    if wanted.kill:
        killed = {"HF_ROCM_TUNE_CRASH": f"step={wanted.kill},kind=kill"}
        again = scratch / f"{method}-again"
        train(argv("again"), card=True, code=-9, **killed)
        assert not (again / ADAPTER).exists()
        train(argv("again"), card=True, **killed)
        found["killed at step"] = wanted.kill
        found["losses equal after the kill"] = losses(again) == losses(card)
        found["adapter equal after the kill"] = (again / ADAPTER).read_bytes() == (card / ADAPTER).read_bytes()
        print({name: value for name, value in found.items() if "kill" in name}, flush=True)
    found["seconds"] = time.monotonic() - begun
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", type=int, default=13, help="the step in which the second run is killed; 0: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result goes here")
    wanted = parser.parse_args()
    packages = packages_or_exit()
    from importlib.metadata import version

    found: dict[str, Any] = {
        "note": EXECUTED,
        "machine": machine(),
        "packages": packages,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft", "bitsandbytes")},
        "command": sys.argv,
        "methods": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for method in wanted.methods:
            found["methods"][method] = one_method(method, wanted, Path(scratch))
            if wanted.json is not None:
                wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
