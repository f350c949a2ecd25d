"""Tokens a second: the choice of ``--auto_fit plan`` beside the defaults of ``trl sft`` at the same effective batch.

Both are whole processes with the same model, data and settings, interleaved, after one uncounted run of each. TRL's
defaults are a micro-batch of 8 with activations recomputed. Each row has ``--tokens`` tokens: with rows of a few words
a step is spent on starting operations, whatever it recomputes. The clock runs from the first logged step to the last.
At last TRL runs once with what auto-fit chose, without dropout, and losses and adapters are compared: nothing is gained
by doing less. Prints a table and, as the last line, one JSON object.

    python benchmarks/auto_fit.py [--steps 12] [--runs 5] [--tokens 256] [--gib 16] [--qlora] [--json FILE]

On a CPU the time is that of a CPU, where a step waits for arithmetic more and for memory less than on a card; the
budget is then the figure of ``--gib``, which is no card's memory. It says what recomputation costs there, nothing about
a 7900 XT. On a machine that does other work at the same time, tokens to a second of the process's own processor time
are the steadier figure.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_rocm_tune.demo.assets import Recipe, prepare, read_pairs  # noqa: E402

TRL_MICRO_BATCH = 8
SIDES = {"auto_fit": "hf_rocm_tune.sft", "trl": "trl.scripts.sft"}


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of each row")
    parser.add_argument("--gib", type=float, default=16.0, help="GiB to fit into where there is no card")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--qlora", action="store_true", help="4-bit weights")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        assets = prepare(Path(scratch) / "assets", recipe=Recipe(hidden=wanted.hidden, layers=wanted.layers, steps=0))
        rows = _write_rows(Path(scratch) / "rows", wanted)
        for run in range(wanted.runs + 1):
            for side in SIDES if run % 2 else reversed(SIDES):
                sample = _measure(side, assets.model, rows, Path(scratch) / f"{side}-{run}", wanted)
                print(f"run {run} {side}: {sample['tokens_per_second']:.0f} tokens a second", file=sys.stderr)
                if run:  # the first of each only warms the caches
                    samples[side].append(sample)
        output = Path(scratch) / f"auto_fit-{wanted.runs}"
        same = _same_flags(samples["auto_fit"][-1], output, assets.model, rows, wanted)
    result = _result(samples, wanted) | {"largest_difference_from_trl_at_the_same_flags": same}
    _print_table(result)
    text = json.dumps(result)
    if wanted.json:
        wanted.json.write_text(text + "\n")
    print(text)


def _write_rows(folder: Path, wanted: argparse.Namespace) -> Path:
    """Texts from the demo's corpus, each long enough to be cut at the wanted number of tokens."""
    pairs = read_pairs()
    texts = (f"{pair.question}\n{pair.answer}\n\n" for pair in itertools.cycle(pairs))
    folder.mkdir()
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(TRL_MICRO_BATCH * wanted.steps):
            text = ""
            while len(text) < 8 * wanted.tokens:  # a token of this tokenizer has 4 characters or so
                text += next(texts)
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def _same_flags(
    ours: dict[str, Any], output: Path, model: Path, rows: Path, wanted: argparse.Namespace
) -> dict[str, float]:
    """How far TRL ends from us where it gets what auto-fit chose: in any logged loss and any value of the adapter."""
    import torch
    from safetensors.torch import load_file

    way = ours["chosen"]
    more = {
        "lora_dropout": 0.0,
        "per_device_train_batch_size": way["micro_batch"],
        "gradient_accumulation_steps": way["accumulation"],
        "gradient_checkpointing": way["checkpointing"],
    }
    theirs = _measure("trl", model, rows, output.with_name("same"), wanted, **more)
    mine, other = (load_file(each / "adapter_model.safetensors") for each in (output, output.with_name("same")))
    return {
        "loss": max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
        "adapter": max(float((mine[name].float() - other[name].float()).abs().max()) for name in other),
        "adapter_largest": max(float(torch.as_tensor(tensor).abs().max()) for tensor in other.values()),
    }


def _measure(
    side: str, model: Path, rows: Path, output: Path, wanted: argparse.Namespace, **more: object
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": rows,
        "output_dir": output,
        "max_steps": wanted.steps,
        "max_length": wanted.tokens,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "learning_rate": 2e-4,
    }
    if wanted.qlora:
        settings |= {"load_in_4bit": True, "use_bnb_nested_quant": True, "dtype": "float32"}
    if not _has_card():
        settings |= {"bf16": False, "use_cpu": True, "dataloader_pin_memory": False}
    if side == "auto_fit":
        settings |= {"auto_fit": "plan", "effective_batch": TRL_MICRO_BATCH}
        settings |= {} if _has_card() else {"auto_fit_gib": wanted.gib}
    settings |= more
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", SIDES[side], *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    logged = [
        {"loss": loss, "at": time.perf_counter(), "cpu": _cpu_seconds(process.pid)}
        for line in process.stdout
        if (loss := _loss_in(line)) is not None
    ]
    if process.wait():
        raise SystemExit(f"{SIDES[side]} failed: run `{sys.executable} -m {SIDES[side]} {' '.join(flags)}` to see why")
    first, last = logged[0], logged[-1]
    a_step = TRL_MICRO_BATCH * wanted.tokens  # each row is cut at its limit
    tokens = (len(logged) - 1) * a_step
    report = output / "transfer_report.json"
    chosen = json.loads(report.read_text())["auto_fit"] if report.exists() else None
    return {
        "tokens_per_second": tokens / (last["at"] - first["at"]),
        "tokens_per_cpu_second": tokens / (last["cpu"] - first["cpu"]),
        "tokens": len(logged) * a_step,
        "loss": last["loss"],
        "losses": [row["loss"] for row in logged],
        "chosen": chosen,
    }


def _loss_in(line: str) -> float | None:
    """The loss that a line logs: TRL prints a dictionary, we a row of step, epoch, loss and more."""
    if line.startswith("{'loss'"):
        return float(ast.literal_eval(line)["loss"])
    found = re.match(r"\s*\d+/\d+\s+[\d.]+\s+([\d.]+)\s", line)
    return float(found[1]) if found else None


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _result(samples: dict[str, list[dict[str, Any]]], wanted: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "auto_fit",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": "python benchmarks/auto_fit.py "
        + " ".join(f"--{name} {value}" for name, value in vars(wanted).items() if name != "json"),
        "machine": _machine(),
        "note": None if _has_card() else "figures of a CPU, not of a card: what recomputation costs there",
        "model": {
            "hidden": wanted.hidden,
            "layers": wanted.layers,
            "method": f"{'q' * wanted.qlora}lora r=16 all-linear, float32",
        },
        "effective_batch": TRL_MICRO_BATCH,
        "steps": wanted.steps,
        "runs": wanted.runs,
        "trl": {"micro_batch": TRL_MICRO_BATCH, "checkpointing": True, "lora_dropout": 0.05},
        "chosen": samples["auto_fit"][-1]["chosen"],
        "tokens": {side: rows[-1]["tokens"] for side, rows in samples.items()},
        "last_loss": {side: rows[-1]["loss"] for side, rows in samples.items()},
        "figures": {name: _sides(name, samples) for name in ("tokens_per_second", "tokens_per_cpu_second")},
    }


def _sides(name: str, samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    values = {side: [row[name] for row in rows] for side, rows in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(values["auto_fit"], values["trl"], strict=True)]
    return {side: _spread(each) for side, each in values.items()} | {"auto_fit/trl": _spread(ratios)}


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "samples": [round(value, 3) for value in values],
    }


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


def _machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if _has_card() else platform.processor() or platform.machine()
    names = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "device": device,
        "accelerator": _has_card(),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "system": platform.platform(),
        "versions": {name: metadata.version(name) for name in names},
    }


def _print_table(result: dict[str, Any]) -> None:
    print(f"{'':36}{'median':>10}{'min':>10}{'max':>10}")
    for name, sides in result["figures"].items():
        for side, row in sides.items():
            print(f"{name + ' ' + side:36}{row['median']:>10.2f}{row['min']:>10.2f}{row['max']:>10.2f}")
    print(f"chosen: {result['chosen']}")
    print(f"largest difference from TRL at the same flags: {result['largest_difference_from_trl_at_the_same_flags']}")


if __name__ == "__main__":
    main()
