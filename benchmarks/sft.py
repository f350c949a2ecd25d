"""The same LoRA fine-tuning by a bare loop, by ``trl sft`` and by ours, as whole processes in turns.

    python benchmarks/sft.py [--hidden N --layers N --batch N --seq N] [--model NAME] [--load_in_4bit] [--steps 20]
                             [--turns 3] [--sides bare off full plan] [--gib G] [--device cpu] [--json FILE]

All have the same model, rows, effective batch and precision, and recompute activations, as TRL does by default; only
``--auto_fit plan`` chooses micro-batch and recomputation. A process is measured from outside: when it prints the loss
of a step, wall time and its processor time are read, from the first step to the last. The first turn fills caches.
Tokens per second of processor time vary less on a busy machine; with a card they show the work of the host.
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
from pathlib import Path
from typing import Any

import common
import psutil
import torch

from hf_rocm_tune.errors import UsageError

REFERENCE, UNVERIFIED, VERIFIED, FITTED = "trl sft", "ours, unverified", "ours, verified", "ours, auto_fit plan"
_MODELS = {
    "cpu": {"hidden": 256, "layers": 6, "batch": 8, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 16, "batch": 8, "seq": 1024},
}
# Runs a module or a file; at its end writes its peaks of memory in bytes: of the host, and of the card.
_START = """
import atexit, os, resource, runpy, sys
def leave():
    torch, peaks = sys.modules.get("torch"), [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, 0]
    if torch and torch.cuda.is_initialized():
        peaks[1] = torch.cuda.max_memory_allocated()
    open(os.environ["BENCH_PEAKS"], "w").write(str(peaks))
atexit.register(leave)
name = sys.argv.pop(1)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""


def run(wanted: Namespace) -> common.Figures:
    device = wanted.device
    size = {name: getattr(wanted, name) or value for name, value in _MODELS[device.type].items()}
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as folder:
        scratch = Path(folder)
        model = wanted.model or _write_model(scratch / "model", size)
        _write_rows(scratch / "rows", str(model), size, wanted.steps)
        flags = [*_flags(str(model), scratch, wanted.steps, size, on_cpu=device.type == "cpu")]
        flags += ["--load_in_4bit", "true"] if wanted.load_in_4bit else []
        flags += [] if wanted.own_dropout else ["--lora_dropout", "0.0"]
        sides = _sides(size["batch"], wanted.gib or (16.0 if device.type == "cpu" else None), wanted.sides)
        samples: dict[str, list[common.Figures]] = {name: [] for name in sides}
        failed: dict[str, str] = {}
        for turn, name in common.in_turns(sides, wanted.turns):
            if name in failed:
                continue
            print(f"turn {turn} of {wanted.turns}: {name}", file=sys.stderr, flush=True)
            module, *own = sides[name]
            try:
                sample = _train(module, [*flags, *own], scratch, size["batch"] * size["seq"])
            except UsageError as error:
                failed[name] = str(error)
            else:
                samples[name] += [sample] if turn else []
    rows = [_row(name, taken, samples) for name, taken in samples.items() if name not in failed]
    common.print_table(
        ("side", "tokens/s", "to trl sft", "tokens/CPU s", "to trl sft", "s to 1st step", "host MB", "card MB"),
        (
            (row["side"], common.show(row["tokens_per_second"], 0), _to_trl(row, "tokens_per_second"),
             f"{row['tokens_per_cpu_second']['median']:.0f}", _to_trl(row, "tokens_per_cpu_second"),
             f"{row['seconds_to_first_step']['median']:.1f}", f"{row['host_peak'] / 1e6:.0f}",
             f"{row['device_peak'] / 1e6:.0f}")
            for row in rows
        ),
    )  # fmt: skip
    for row in rows:
        if (apart := row.get("largest_difference_of_losses")) is not None:
            print(f"{row['side']} differs from trl sft by up to {apart:.2g} in a step's loss")
    for name, why in failed.items():
        print(f"{name} FAILED: {why}")
    if not rows:
        raise UsageError("no side has trained; what they printed is above")
    return {"benchmark": "sft", **size, "rows": rows, "failed": failed}


def _sides(batch: int, gib: float | None, wanted: list[str]) -> dict[str, list[str]]:
    """Module and further flags of each side that is wanted, and of the reference, by name."""
    given = ["--gradient_checkpointing", "true", "--per_device_train_batch_size", str(batch)]
    fit = ["--auto_fit", "plan", "--effective_batch", str(batch)]
    fit += ["--auto_fit_gib", f"{gib:g}"] if gib is not None else []
    sides = {
        "bare": ("bare loop", [str(Path(__file__).with_name("sft_bare.py")), *given]),
        "trl": (REFERENCE, ["trl.scripts.sft", *given]),
        "off": (UNVERIFIED, ["hf_rocm_tune.sft", *given, "--verify", "off"]),
        "full": (VERIFIED, ["hf_rocm_tune.sft", *given]),
        "plan": (FITTED, ["hf_rocm_tune.sft", *fit]),
    }
    return dict(row for name, row in sides.items() if name in wanted or name == "trl")


def _flags(model: str, scratch: Path, steps: int, size: dict[str, int], *, on_cpu: bool) -> list[str]:
    settings: dict[str, Any] = {
        "model_name_or_path": model, "dataset_name": scratch / "rows", "output_dir": scratch / "out",
        "max_steps": steps, "max_length": size["seq"], "logging_steps": 1, "eval_strategy": "no",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": "true", "use_peft": "true",
        "lora_target_modules": "all-linear", "learning_rate": 2e-4, "dtype": "float32" if on_cpu else "bfloat16",
        "bf16": not on_cpu, "use_cpu": on_cpu, "dataloader_pin_memory": not on_cpu,
    }  # fmt: skip
    return [
        part
        for name, value in settings.items()
        for part in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def _write_model(folder: Path, size: dict[str, int]) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    common.small_llama(size["hidden"], size["layers"], size["seq"]).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
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


def _train(module: str, flags: list[str], scratch: Path, step_tokens: int) -> common.Figures:
    """One side once, on the card that importing our package has chosen for this process.

    Raises:
        UsageError: it failed; has the last line of its standard error, all of which is printed.
    """
    peaks, errors, logged = scratch / "peaks", scratch / "stderr", []
    shutil.rmtree(scratch / "out", ignore_errors=True)
    environ = {**os.environ, "BENCH_PEAKS": str(peaks)}
    if torch.version.cuda and torch.cuda.device_count() > 1:  # there no card is chosen, and TRL would split the model
        environ["CUDA_VISIBLE_DEVICES"] = "0"
    with errors.open("w") as stderr:
        begun = time.perf_counter()
        command = [sys.executable, "-u", "-c", _START, module, *flags]
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ)
        for line in process.stdout:
            if (loss := _loss_in(line)) is not None:
                spent = process.cpu_times()
                logged.append((time.perf_counter(), spent.user + spent.system, loss))
        code = process.wait()
    if code or len(logged) < 2:
        text = errors.read_text(errors="replace").strip() or f"exit code {code}"
        print(text, file=sys.stderr)  # its files are deleted, so the command cannot be run again
        raise UsageError(text.splitlines()[-1][-300:])
    (first, first_cpu, _), (last, last_cpu, _) = logged[0], logged[-1]
    tokens, cpu_seconds = (len(logged) - 1) * step_tokens, max(last_cpu - first_cpu, 0.01)  # of the clock's resolution
    host_peak, device_peak = json.loads(peaks.read_text())
    report = scratch / "out" / "transfer_report.json"
    return {
        "seconds_to_first_step": first - begun,
        "tokens_per_second": tokens / (last - first),
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "host_peak": host_peak,
        "device_peak": device_peak,
        "losses": [each for *_, each in logged],
        "chosen": json.loads(report.read_text())["auto_fit"] if "--auto_fit" in flags else None,
    }


def _loss_in(line: str) -> float | None:
    """The loss in a line of a log: TRL prints a dictionary, we a row of step, epoch, loss and more."""
    if line.startswith("{'loss'"):
        return float(ast.literal_eval(line)["loss"])
    found = re.match(r"\s*\d+/\d+\s+[\d.]+\s+([\d.]+)\s", line)
    return float(found[1]) if found else None


def _row(name: str, own: list[common.Figures], samples: dict[str, list[common.Figures]]) -> common.Figures:
    rates = ("tokens_per_second", "tokens_per_cpu_second")
    row: common.Figures = {key: common.spread([one[key] for one in own]) for key in ("seconds_to_first_step", *rates)}
    row |= {key: max(one[key] for one in own) for key in ("host_peak", "device_peak")}
    for title, side in (("trl", REFERENCE), ("unverified", UNVERIFIED)):
        if (other := samples.get(side)) and len(other) == len(own):
            row |= {
                f"{key}_to_{title}": common.ratios([one[key] for one in own], [one[key] for one in other])
                for key in rates
            }
    if name in (VERIFIED, FITTED) and (other := samples[REFERENCE]):
        pairs = zip(own[-1]["losses"], other[-1]["losses"], strict=True)
        row["largest_difference_of_losses"] = max(abs(one - two) for one, two in pairs)
    return {"side": name, **row, "loss": own[-1]["losses"][-1], "chosen": own[-1]["chosen"]}


def _to_trl(row: common.Figures, key: str) -> str:
    found = row.get(f"{key}_to_trl")
    return "-" if found is None else common.show(found)


if __name__ == "__main__":
    sides = ("bare", "off", "full", "plan")
    common.main(
        run,
        __doc__,
        {
            **{name: {"type": int} for name in ("hidden", "layers", "batch", "seq")},
            "model": {"help": "Hub id or directory (default: a small, untrained Llama)"},
            "load_in_4bit": {"action": "store_true", "help": "QLoRA: NF4 on all sides"},
            "own_dropout": {"action": "store_true", "help": "each side's own --lora_dropout (default: 0 for all)"},
            "steps": {"type": int, "default": 20, "help": "of a run, 2 or more (default: 20)"},
            "turns": {"type": int, "default": 3, "help": "runs of each side (default: 3)"},
            "sides": {"nargs": "+", "choices": sides, "default": sides, "help": "beside trl sft (default: all)"},
            "gib": {"type": float, "help": "memory that auto_fit plans for (default: the card's; 16 on the CPU)"},
        },
    )
