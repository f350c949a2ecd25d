"""The files of a run, finished or not, and the verdict on its transfer report.

A file that is missing, truncated or invalid is reported, and the others are still read. Missing entries of a report
count as unknown, never as good.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any, Literal

from rich.filesize import decimal as size

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import write_text_atomic

LOG_NAME = "training_log.json"
REPORT_NAME = "transfer_report.json"
_TRANSFERS = ("weights", "batches", "adapter", "optimizer", "casts", "gradients")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What was trained, without names and paths."""

    method: str  # in a few words, such as "LoRA, r=16, alpha=32"
    model_class: str  # of the base model, such as "LlamaForCausalLM"
    trainable: int  # parameters that were trained
    parameters: int  # of the model with its adapter
    dtype: str  # of the base model's weights, such as "bfloat16"; the compute dtype where they are quantised
    adapter_dtype: str | None = None  # of the adapter while it was trained; None without an adapter
    quantization: Mapping[str, Any] | None = None  # arguments of ``BitsAndBytesConfig``
    chat_template: bool = False  # whether the tokenizer has one
    packed_experts: bool = False  # whether experts were trained in 4 bit, which only this package loads


def write_log(
    directory: Path, *, run_id: str, step: int, max_steps: int, trained: Trained | None, rows: Iterable[Row]
) -> Path:
    """Write ``training_log.json``, in which numbers that are not finite are null. It names no file and no directory."""
    log = [
        {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in row.items()}
        for row in rows
    ]
    told = asdict(trained) if trained is not None else {}
    content = {"schema": 1, "run_id": run_id, "step": step, "max_steps": max_steps, "trained": told, "log": log}
    write_text_atomic(directory / LOG_NAME, json.dumps(content, indent=1) + "\n")
    return directory / LOG_NAME


def series(rows: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric in the order of the steps; the newest of a step counts, NaN is a gap in a curve."""
    values = ((number(row, "step"), number(row, key)) for row in rows if key in row)
    return sorted({step: math.nan if value is None else value for step, value in values if step is not None}.items())


def last(rows: Iterable[Row], key: str) -> float | None:
    """The newest finite value of a metric."""
    values = [value for _, value in series(rows, key) if not math.isnan(value)]
    return values[-1] if values else None


def training_seconds(rows: Iterable[Row]) -> float:
    """Seconds of all steps, over all starts of a run; the trainer's own ``train_runtime`` is of the last start only."""
    rows = list(rows)
    total, before = 0.0, 0.0
    for step, seconds in series(rows, "speed/seconds_per_step"):
        if not math.isnan(seconds):
            total += seconds * (step - before)
        before = step
    return total or sum(number(row, "train_runtime") or 0.0 for row in rows)


# ---- values out of JSON that may be of any form ----------------------------------------------------------------------


def find(content: Any, *path: str) -> Any:
    """The value at a path of keys; None if a part of the path is missing."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def number(content: Any, *path: str) -> float | None:
    """A finite number; None for anything else."""
    value = find(content, *path)
    with suppress(OverflowError):  # a whole number that no float holds
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def count(content: Any, *path: str) -> int:
    """A count; 0 if there is none."""
    return int(number(content, *path) or 0)


def text(content: Any, *path: str) -> str:
    """A string; empty for anything else."""
    return value if isinstance(value := find(content, *path), str) else ""


def mapping(content: Any, *path: str) -> dict[str, Any]:
    """An object; empty for anything else."""
    return value if isinstance(value := find(content, *path), dict) else {}


def items(content: Any, *path: str) -> list[Any]:
    """A list; empty for anything else."""
    return value if isinstance(value := find(content, *path), list) else []


def plain(value: Any, *, depth: int = 4) -> str:
    """One value in a line: numbers to four digits, lists and objects written out to a depth."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple | dict) and not depth:
        return "..."
    if isinstance(value, list | tuple):
        return ", ".join(plain(one, depth=depth - 1) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={plain(one, depth=depth - 1)}" for key, one in value.items())
    return str(value)


def figure(value: float | None) -> str:
    """A number to four digits, whole ones in full; empty for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds in their usual unit."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 3600 else f"{seconds / 3600:.4g} h"


def figures(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """The key figures of a log, by name."""
    rows = list(rows)
    newest = {
        "training loss, last": "loss",
        "evaluation loss, last": "eval_loss",
        "token accuracy, last": "mean_token_accuracy",
        "evaluation, token accuracy": "eval_mean_token_accuracy",
        "reward, last": "reward",
        "reward margin, last": "rewards/margins",
        "evaluation, reward margin": "eval_rewards/margins",
        "epochs": "epoch",
        "tokens": "num_tokens",
    }
    speeds = [value for _, value in series(rows, "speed/tokens_per_second") if not math.isnan(value)]
    seconds = training_seconds(rows)
    found = {name: figure(last(rows, key)) for name, key in newest.items()}
    found["tokens a second, median"] = figure(median_high(speeds) if speeds else None)
    found["time of all steps"] = duration(seconds) if seconds else ""
    return [(name, value) for name, value in found.items() if value]


_SHOWN_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "num_train_epochs", "max_steps"),
    *("max_length", "packing", "bf16", "fp16", "dtype"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_dora", "use_rslora"),
    *("loss_type", "assistant_only_loss", "completion_only_loss", "gradient_checkpointing", "neftune_noise_alpha"),
    "seed",
)


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the result and have an effect, by name, and the effective batch."""
    given = {name: settings.get(name) for name in _SHOWN_SETTINGS}
    found = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    idle = {"num_train_epochs" if (number(settings, "max_steps") or 0) > 0 else "max_steps"}
    idle |= {name for name in found if name.startswith("lora_") and settings.get("use_peft") is False}
    idle |= set() if settings.get("load_in_4bit") is True else {"bnb_4bit_quant_type", "use_bnb_nested_quant"}
    batch = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    batch += [] if settings.get("tensor_parallel") is True else ["world_size"]  # there all ranks get the same rows
    parts = [number(settings, name) for name in batch]
    if None not in parts:
        found["effective_batch_size"] = math.prod(int(part or 0) for part in parts)
    return {name: value for name, value in found.items() if name not in idle}


# ---- a directory -----------------------------------------------------------------------------------------------------


_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRACES = (LOG_NAME, REPORT_NAME, _STATE, "run.json", manifest.MANIFEST_NAME, "adapter_config.json", "survival.jsonl")


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run; empty or None if missing."""

    directory: Path
    inspection: manifest.Inspection
    run_id: str = ""
    rows: Sequence[Row] = ()  # the log history, oldest first
    step: int | None = None  # optimizer steps done
    max_steps: int | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)  # `Trained` as plain values
    report: Mapping[str, Any] = field(default_factory=dict)  # the transfer report
    settings: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()  # files that are missing or could not be read, in words

    @property
    def verdict(self) -> Verdict:
        """Files that differ from what was written count as damage; a model card may be edited."""
        found = self.inspection.manifest
        finished = found is not None and found.status == "final"
        changed = [one for one in self.inspection.problems if found is None or not one.file.endswith(".md")]
        damaged = [str(one) for one in changed if found is not None or one.kind != "missing"]
        return judge(self.report, finished=finished, damaged=damaged)


def collect(directory: Path) -> RunFiles:
    """Read the files of a run; a ``UsageError`` if there are none."""
    try:
        found = checkpoints(directory)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = f"cannot be read ({error})" if os.path.isdir(directory) else "does not exist"
        why = "is a file" if os.path.isfile(directory) else why
        raise UsageError(f"{directory} {why}: name the --output_dir of a run") from error
    if not found and not any((directory / name).exists() for name in _TRACES):
        raise UsageError(f"{directory} has no file of a training run: name the --output_dir of a run")
    missing: list[str] = []
    inspection = manifest.inspect(directory)
    record = read_json(directory / "run.json", missing)
    run_id = text(record, "run_id") or (inspection.manifest.run_id if inspection.manifest else "")
    report, log = (read_json(directory / name, missing, run_id) for name in (REPORT_NAME, LOG_NAME))
    for path in [directory / _STATE, *(path / _STATE for path in found[-1:])]:
        state = read_json(path, missing) if path.is_file() else {}
        if (number(state, "global_step") or 0) > (number(log, "step") or 0):
            # A trainer's state does not say what was trained, which does not change over a run.
            if path.parent == directory:  # a user's own script leaves this one
                missing = [line for line in missing if not line.startswith(LOG_NAME)]
            log = {**log, "max_steps": state.get("max_steps")}
            log |= {"step": state.get("global_step"), "log": state.get("log_history")}
    if inspection.manifest is None:
        bad = inspection.problems[0]
        missing.append(f"{manifest.MANIFEST_NAME}: the run has not finished" if bad.kind == "missing" else str(bad))
    return RunFiles(
        directory=directory,
        run_id=run_id or text(log, "run_id") or text(report, "run_id"),
        rows=[row for row in items(log, "log") if isinstance(row, dict)],
        step=count(log, "step") if number(log, "step") is not None else None,
        max_steps=count(log, "max_steps") or None,
        trained=mapping(log, "trained"),
        report=report,
        settings=mapping(record, "settings") | mapping(record, "names"),
        inspection=inspection,
        missing=missing,
    )


def read_json(path: Path, missing: list[str] | None = None, run_id: str = "") -> dict[str, Any]:
    """A JSON object of this run, or nothing and a line about why."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        other = text(content, "run_id")
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        if run_id and other and other != run_id:
            raise ValueError(f"it belongs to another run, {other}")
        return content
    except (OSError, ValueError, RecursionError) as error:
        why = "it is missing" if isinstance(error, FileNotFoundError) else f"it is not used ({error})"
        if missing is not None:
            missing.append(f"{path.name}: {why}")
        return {}


def run_settings(directory: Path) -> dict[str, Any]:
    """Of the run that wrote a directory, or the directory above a checkpoint; empty if unknown."""
    found = (mapping(read_json(folder / "run.json"), "settings") for folder in (directory, directory.parent))
    return next(filter(None, found), {})


def checkpoints(directory: Path) -> list[Path]:
    """Directories of checkpoints, the oldest first."""
    found = [(int(name[1]), path) for path in directory.iterdir() if (name := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


# ---- the verdict -----------------------------------------------------------------------------------------------------


# Section of the report: its title, the key of its counter, and the unit of that.
_SECTIONS = {
    "weights": ("model weights", "tensors", "tensors"),
    "batches": ("batches", "tensors", "tensors"),
    "adapter": ("adapter weights", "tensors", "tensors"),
    "optimizer": ("optimizer state", "tensors", "tensors"),
    "activations": ("activations between cards, or to host memory and back", "tensors", "tensors"),
    "casts": ("casts of weights", "checked", "checked"),
    "gradients": ("averaged gradients", "buckets", "buckets checked"),
    "frozen": ("frozen weights in memory", "passes", "passes"),
    "replicas": ("equal weights on all ranks", "checks", "comparisons"),
    "files": ("files read back", "verified", "verified"),
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    "good": finished, all of it verified, nothing was wrong; "note": corruption that was recovered, or other remarks;
    "bad": the result contains corruption or differs from what was written; "unknown": no evidence.
    """

    level: Literal["good", "note", "bad", "unknown"]
    headline: str  # one sentence
    notes: tuple[str, ...]  # remarks, one sentence each


def judge(report: Mapping[str, Any], *, finished: bool, damaged: Sequence[str] = ()) -> Verdict:
    """The verdict on a run."""
    verdict = partial(Verdict, notes=_notes(report, finished=finished))
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return verdict("bad", f"The result differs from what was written: {damaged[0]}{more}.")
    if not report:
        return verdict("unknown", "It is unknown what was verified: there is no transfer report.")
    try:
        wrong = unrecovered(report)
    except (KeyError, TypeError, AttributeError):
        return verdict("unknown", "The transfer report does not have the expected form, so it is no evidence.")
    if wrong:
        return verdict("bad", f"Wrong bytes were found that could not be recovered: {'; '.join(wrong[:3])}.")
    share, wrong_once = coverage(report), mismatches(report)
    if share is None or text(report, "verify") == "off":
        return verdict("unknown", "Transfers were not verified in this run.")
    times = "once" if wrong_once == 1 else f"{wrong_once:,} times"
    found = f". Corruption was found {times} and recovered before it was used."
    complete = finished and share >= 100 and text(report, "verify") == "full" and not wrong_once
    end = found if wrong_once else ", and none of them was wrong."
    return verdict("good" if complete else "note", f"{share:g} % of the bytes on the device were verified{end}")


def unrecovered(report: Mapping[str, Any]) -> list[str]:
    """Corruption that a report lists as not recovered; KeyError, TypeError or AttributeError for another form."""
    found = [
        f"{row['stage']}{' ' + str(row['tensor']) if 'tensor' in row else ''} at step {row.get('step', '?')}"
        for row in report["incidents"]
        if row.get("outcome") == "stopped"
    ]
    for name in _TRANSFERS:
        section = report[name]
        lost = section["mismatches"] - section["recovered"]
        if lost > 0 and not found:
            found.append(f"{name}: {lost} of {section['mismatches']} mismatches")
    return found


def coverage(report: Mapping[str, Any]) -> float | None:
    """Verified bytes of those on the device in percent, never rounded up to 100; None where that is unknown."""
    if number(report, "coverage", "verified_bytes") is None or number(report, "coverage", "device_bytes") is None:
        return None
    # Whole numbers: as floats, all but one byte of an exabyte would be everything.
    verified, there = int(find(report, "coverage", "verified_bytes")), int(find(report, "coverage", "device_bytes"))
    return verified * 10**6 // there / 1e4 if there > 0 else None


def mismatches(report: Mapping[str, Any]) -> int:
    """How often a check found something wrong."""
    return sum(count(report, name, "mismatches") for name in _SECTIONS)


def counted(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Every kind of check that ran: what, how much of it, how often it was wrong, and of these recovered."""
    rows = []
    for name, (what, key, noun) in _SECTIONS.items():
        section = mapping(report, name)
        looked_at, wrong = count(section, key), count(section, "mismatches")
        amount = f"{looked_at:,} {noun}"
        if nbytes := count(section, "bytes"):
            verified = count(section, "verified_bytes")
            amount += f", {size(nbytes)}" + (f" ({size(verified)} verified)" if verified < nbytes else "")
        if name == "frozen":
            amount += f" over {count(section, 'tensors'):,} tensors"
        if looked_at or wrong:
            rows.append((what, amount, f"{wrong:,}", f"{count(section, 'recovered'):,}" * ("recovered" in section)))
    return rows


def data_row(row: Any) -> dict[str, str]:
    """What one split was trained on, in words."""
    share = 100 * count(row, "trained") / max(count(row, "kept"), 1)
    names = ("rows", "tokens", "median", "p95", "longest", "cut", "lost", "dropped")
    return {"split": text(row, "split"), **{name: f"{count(row, name):,}" for name in names}, "share": f"{share:.3g} %"}


def events(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Restarts, skipped steps and shortages, by name."""
    restarts, cut = count(report, "survival", "starts") - 1, count(report, "memory", "micro_batch_divisor")
    shortages, overcome = count(report, "memory", "shortages"), count(report, "memory", "recovered")
    unused, warnings = count(report, "guard", "skipped_steps"), count(report, "guard", "warnings")
    rows = [
        ("restarts by the supervisor", f"{restarts:,}" if restarts > 0 else ""),
        ("steps skipped, because the run crashed in them", plain(items(report, "survival", "skipped_steps"))),
        ("out of memory", f"{shortages:,}, recovered {overcome:,}" if shortages else ""),
        ("micro-batches split into", f"up to {cut} parts" if cut > 1 else ""),
        ("updates skipped, because they were not finite", f"{unused:,}" if unused else ""),
        ("warnings about loss and gradients", f"{warnings:,}" if warnings else ""),
    ]
    return [(name, value) for name, value in rows if value]


def device(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run ran on, by name."""
    found, memory = mapping(report, "device"), number(report, "device", "memory_bytes")
    about = [(key, plain(value)) for key, value in found.items() if key != "memory_bytes"]
    if memory is not None:
        about.append(("memory", f"{memory / 2**30:.2f} GiB"))
    return [*about, ("processes", f"{count(report, 'ranks')}")] if found else about


def explained(report: Mapping[str, Any]) -> str:
    """How transfers were verified; empty if they were not."""
    what = {"full": "Every byte is", "sample": "Of a sample of the transfers, every byte is"}
    begin = what.get(text(report, "verify"))
    if begin is None:
        return ""
    sentence = f"{begin} digested on the host and again on the device, and both digests are compared before it is used."
    if count(report, "frozen", "passes"):
        sentence += " Frozen weights are digested again during training and before each save."
    return f"{sentence} Files are read back and compared with the live tensors."


def _notes(report: Mapping[str, Any], *, finished: bool) -> tuple[str, ...]:
    notes = [] if finished else ["The run has not finished: these are its files so far."]
    asked = {
        "Faults": find(report, "fault_injection"),
        "Faults of steps": find(report, "step_fault_injection"),
        "Crashes": find(report, "survival", "crash_injection"),
    }
    notes += [f"{what} were injected on request: {plain(value)}." for what, value in asked.items() if value]
    mode, share = text(report, "verify"), coverage(report)
    if mode == "sample":
        notes.append("Only a sample of the transfers was verified (--verify sample).")
    elif mode == "full" and share is not None and share < 100:
        notes.append("Not every byte was verified; the run continued with the user's consent.")
    if names := items(report, "weights", "not_attested"):
        files = f"{len(names)} file{'s' if len(names) > 1 else ''}"
        notes.append(f"{files} of the base model had no recorded digest, so the content is not attested.")
    return tuple(notes)
