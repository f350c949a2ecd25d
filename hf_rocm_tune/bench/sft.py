"""``bench sft``: the same LoRA fine-tuning by a bare loop, by ``trl sft`` and by ours, as whole processes in turns.

All have the same model, rows, effective batch and precision, and recompute activations, as TRL does by default; only
``--auto_fit plan`` chooses micro-batch and recomputation. A process is measured from outside: when it prints the loss
of a step, wall time and its processor time are read. The first turn only fills caches.

Rates are measured from the first step to the last, without start and save. Tokens per second of processor time vary
less on a machine that runs other programs; with a card they show the work of the host, not of the card.
Not covered: several cards, rows of different length, waits for the card.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.utils import logging as transformers_logging

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import Figures, Spread, in_turns, ratios, table
from hf_rocm_tune.errors import UsageError

REFERENCE = "trl sft"
UNVERIFIED, VERIFIED, FITTED = "ours, unverified", "ours, verified", "ours, auto_fit plan"
_OURS = "hf_rocm_tune.sft"
_RECOMPUTED = ["--gradient_checkpointing", "true", "--per_device_train_batch_size"]
_MODELS = {
    "cpu": {"hidden": 256, "layers": 6, "batch": 8, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 16, "batch": 8, "seq": 1024},
}
_CPU_GIB = 16.0  # for the planner, where there is no card
_CLOCK_TICK = 0.01  # seconds: the resolution of a process's times; a step of a tiny model may take less
# Runs a module or a file; at its end writes its peaks of memory in bytes: of the host, and of the card.
_START = """
import atexit, os, resource, runpy, sys
def leave():
    torch, peaks = sys.modules.get("torch"), [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10]
    if torch and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks.append(torch.cuda.max_memory_allocated())
    open(os.environ["BENCH_PEAKS"], "w").write(str(peaks))
atexit.register(leave)
name = sys.argv.pop(1)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""


def run(wanted: Namespace) -> None:
    """Trains, prints, writes.

    Raises:
        UsageError: the device is not there, or one of the processes failed.
    """
    device = report.choose_device(wanted.device)
    machine = report.describe(device)
    size = {name: getattr(wanted, name) or value for name, value in _MODELS[device.type].items()}
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as folder:
        scratch = Path(folder)
        model = wanted.model or _write_model(scratch / "model", size)
        _write_rows(scratch / "rows", str(model), size, wanted.steps)
        common = _flags(str(model), scratch, wanted.steps, size, device)
        common += ["--load_in_4bit", "true"] if wanted.load_in_4bit else []
        common += [] if wanted.own_dropout else ["--lora_dropout", "0.0"]
        sides = _sides(size["batch"], wanted.gib or (_CPU_GIB if device.type == "cpu" else None), wanted.sides)
        samples: dict[str, list[Figures]] = {name: [] for name in sides}
        for turn, name in in_turns(sides, wanted.turns):
            report.progress(f"{f'turn {turn} of {wanted.turns}' if turn else 'warming up'}: {name}")
            module, *flags = sides[name]
            sample = _train(name, module, [*common, *flags], scratch, device, size["batch"] * size["seq"])
            samples[name] += [sample] if turn else []
    rows = [_row(name, samples) for name in sides]
    given = ("model", "load_in_4bit", "own_dropout", "gib")
    settings = {**size, **{name: getattr(wanted, name) for name in given}, "device": str(device)}
    report.publish(wanted, machine, settings, rows, _table(rows), _notes(device, size, rows))


def _sides(batch: int, gib: float | None, wanted: Collection[str]) -> dict[str, list[str]]:
    """Module and further flags of each side that is wanted, and of the reference, by name."""
    given = [*_RECOMPUTED, str(batch)]
    fit = ["--auto_fit", "plan", "--effective_batch", str(batch)]
    fit += ["--auto_fit_gib", f"{gib:g}"] if gib is not None else []
    sides = {
        "bare": ("bare loop", [str(Path(__file__).with_name("bare.py")), *given]),
        "trl": (REFERENCE, ["trl.scripts.sft", *given]),
        "off": (UNVERIFIED, [_OURS, *given, "--verify", "off"]),
        "full": (VERIFIED, [_OURS, *given]),
        "plan": (FITTED, [_OURS, *fit]),
    }
    return dict(row for name, row in sides.items() if name in wanted or name == "trl")


def _flags(model: str, scratch: Path, steps: int, size: dict[str, int], device: torch.device) -> list[str]:
    on_cpu = device.type == "cpu"
    settings: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": scratch / "rows",
        "output_dir": scratch / "out",
        "max_steps": steps,
        "max_length": size["seq"],
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "use_peft": "true",
        "lora_target_modules": "all-linear",
        "learning_rate": 2e-4,
        "dtype": "float32" if on_cpu else "bfloat16",
        "bf16": str(not on_cpu).lower(),
        "use_cpu": str(on_cpu).lower(),
        "dataloader_pin_memory": str(not on_cpu).lower(),
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def _write_model(folder: Path, size: dict[str, int]) -> Path:
    report.small_llama(size["hidden"], size["layers"], size["seq"]).save_pretrained(folder)
    report.small_tokenizer().save_pretrained(folder)
    return folder


def _write_rows(folder: Path, model: str, size: dict[str, int], steps: int) -> None:
    """Rows of random tokens, all of the full length."""
    from transformers import AutoConfig

    try:
        vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {model}: {(str(error).strip() or '?').splitlines()[0]}") from error
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, vocabulary, (steps * size["batch"], size["seq"]), generator=generator).tolist()
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def _train(name: str, module: str, flags: list[str], scratch: Path, device: torch.device, step_tokens: int) -> Figures:
    """Run one side once.

    Raises:
        UsageError: it failed; the message has the last line of its standard error, all of which is printed.
    """
    peaks, errors, logged = scratch / "peaks", scratch / "stderr", []
    shutil.rmtree(scratch / "out", ignore_errors=True)
    environ = {**os.environ, "BENCH_PEAKS": str(peaks)}
    if device.type == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = str(device.index)  # HIP reads it too
    command = [sys.executable, "-u", "-c", _START, module, *flags]
    with errors.open("w") as stderr:
        begun = time.perf_counter()
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ)
        for line in process.stdout:
            if (loss := _loss_in(line)) is not None:
                spent = process.cpu_times()
                logged.append((time.perf_counter(), spent.user + spent.system, loss))
        code = process.wait()
    if code or len(logged) < 2:
        text = errors.read_text(errors="replace").strip() or f"exit code {code}"
        print(text, file=sys.stderr)  # its files are deleted, so the command cannot be run again
        raise UsageError(f"{name} failed: {text.splitlines()[-1]}; what it printed is above")
    (first, first_cpu, _), (last, last_cpu, loss) = logged[0], logged[-1]
    tokens, cpu_seconds = (len(logged) - 1) * step_tokens, max(last_cpu - first_cpu, _CLOCK_TICK)
    host_peak, *device_peak = json.loads(peaks.read_text())
    file = scratch / "out" / "transfer_report.json"
    return {
        "steps": len(logged),
        "seconds_to_first_step": first - begun,
        "seconds": last - first,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / (last - first),
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "host_peak": host_peak,
        "device_peak": device_peak[0] if device_peak else None,
        "loss": loss,
        "losses": [each for *_, each in logged],
        "chosen": json.loads(file.read_text())["auto_fit"] if "--auto_fit" in flags else None,
    }


def _loss_in(line: str) -> float | None:
    """The loss in a line of a log: TRL prints a dictionary, we a row of step, epoch, loss and more."""
    if line.startswith("{'loss'"):
        return float(ast.literal_eval(line)["loss"])
    found = re.match(r"\s*\d+/\d+\s+[\d.]+\s+([\d.]+)\s", line)
    return float(found[1]) if found else None


def _row(name: str, samples: dict[str, list[Figures]]) -> Figures:
    own, other = samples[name], samples[REFERENCE]
    spreads = ("seconds_to_first_step", "seconds", "cpu_seconds", "tokens_per_second", "tokens_per_cpu_second")
    row: Figures = {key: Spread.of([one[key] for one in own]) for key in spreads}
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        row[f"{key}_to_trl"] = ratios([one[key] for one in own], [one[key] for one in other])
    row |= {"host_peak": max(one["host_peak"] for one in own)}
    row |= {"device_peak": max((one["device_peak"] for one in own if one["device_peak"]), default=None)}
    if name == VERIFIED and UNVERIFIED in samples:
        key, off = "tokens_per_cpu_second", samples[UNVERIFIED]
        row[f"{key}_to_unverified"] = ratios([one[key] for one in own], [one[key] for one in off])
    apart = (abs(one - two) for one, two in zip(own[-1]["losses"], other[-1]["losses"], strict=True))
    row["largest_difference_of_losses"] = max(apart)
    return {"side": name, **row, **{key: own[-1][key] for key in ("steps", "loss", "chosen")}}


def _table(rows: list[Figures]) -> str:
    def to_trl(name: str) -> Callable[[Figures], str]:
        return lambda row: "reference" if row["side"] == REFERENCE else row[f"{name}_to_trl"].show(2)

    columns = {
        "side": lambda row: row["side"],
        "tokens/s (min .. max)": lambda row: row["tokens_per_second"].show(0),
        "to trl sft": to_trl("tokens_per_second"),
        "CPU s (wall s)": lambda row: f"{row['cpu_seconds'].median:.1f} ({row['seconds'].median:.1f})",
        "tokens/CPU s": lambda row: f"{row['tokens_per_cpu_second'].median:.0f}",
        "the same to trl sft": to_trl("tokens_per_cpu_second"),
        "s to 1st step": lambda row: f"{row['seconds_to_first_step'].median:.1f}",
        "host MB": lambda row: f"{row['host_peak'] / 1e6:.0f}",
        "card MB": lambda row: "-" if row["device_peak"] is None else f"{row['device_peak'] / 1e6:.0f}",
        "steps": lambda row: row["steps"],
    }
    return table(columns, rows)


def _notes(device: torch.device, size: dict[str, int], rows: list[Figures]) -> list[str]:
    by_side = {row["side"]: row for row in rows}
    notes = [f"{size['batch']} x {size['seq']} tokens a step; ratios are taken in pairs of the same turn"]
    verified = by_side.get(VERIFIED)
    if verified is not None and UNVERIFIED in by_side:
        same = verified["loss"] == by_side[UNVERIFIED]["loss"]
        notes.append(
            f"verified to unverified: {verified['tokens_per_cpu_second_to_unverified'].show(3)} in tokens per CPU "
            f"second; both end with {'the same loss' if same else 'DIFFERENT LOSSES'}"
        )
    notes += [
        f"{name} differs from trl sft by up to {by_side[name]['largest_difference_of_losses']:.2g} in a step's loss"
        for name in (VERIFIED, FITTED)
        if name in by_side
    ]
    if "bare loop" in by_side:
        notes.append("the bare loop reads the rows in another order")
    if FITTED in by_side:
        notes.append(f"auto_fit chose {json.dumps(by_side[FITTED]['chosen'])}")
    if device.type == "cpu":
        notes.append("no accelerator: these are figures of a CPU, not of a card")
    return notes
