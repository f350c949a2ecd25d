"""What can be refused before torch and TRL are imported, which takes seconds: values out of range, missing files and
directories, columns that fit no format.

A value that cannot be read here is left to the parser.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_rocm_tune.data.formats import Method, recognise
from hf_rocm_tune.data.sources import refuse_missing
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.paths import expand_user, require_model

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "1 or more",
        lambda value: value >= 1,
        "sample_every effective_batch early_stopping_patience per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps max_length lora_r lora_alpha eval_accumulation_steps",
    ),
    (
        "0 or more, and finite",
        lambda value: 0 <= value < math.inf,
        "telemetry_every embedding_learning_rate max_skipped_steps early_stopping_threshold learning_rate weight_decay "
        "warmup_steps logging_steps eval_steps save_steps save_total_limit dataloader_num_workers adam_epsilon "
        "neftune_noise_alpha dataset_num_proc",
    ),
    ("0 (off) or more", lambda value: value >= 0, "sentinel_every prefetch_batches"),
    ("0 or more", lambda value: value >= 0, "max_grad_norm"),  # inf: no clipping
    ("more than 0, and finite", lambda value: 0 < value < math.inf, "loraplus_lr_ratio auto_fit_gib num_train_epochs"),
    ("0 or more and below 2**32", lambda value: 0 <= value < 2**32, "seed data_seed"),
    ("0 or more and below 1", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2 lora_dropout"),
    # transformers treats 0 like -1
    ("1 or more, or -1 for no limit", lambda value: value == -1 or value >= 1, "max_steps"),
    (
        "a share between 0 and 1 or a number of rows",
        lambda size: 0 < size < 1 or (1 <= size < math.inf and size == int(size)),
        "eval_split_size",
    ),
    ("1 or more, or auto", lambda value: value >= 1, "pad_to_multiple_of"),
)


def out_of_range(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with these values, which may still be text."""
    numbers = {name: _number(value) for name, value in given.items()}
    return [
        f"--{name} must be {expected}, got {given[name]}"
        for expected, holds, names in _RANGES
        for name in names.split()
        if numbers.get(name) is not None and not holds(numbers[name])
    ]


def _number(value: Any) -> Any:
    """The number that a text stands for; None for words that a flag may have instead, nan for others."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return None if value.lower() in ("none", "null", "auto") else math.nan


def check(method: Method, given: Mapping[str, Any]) -> None:
    """Refuses what is wrong in any case; ``given``: flags as typed, or a recipe's values, by name."""
    if faults := out_of_range(given):
        raise UsageError("; ".join(faults))
    model, data = given.get("model_name_or_path"), given.get("dataset_name")
    if isinstance(model, str):
        require_model(model)
    if isinstance(data, str):
        refuse_missing(data)
        split = str(given.get("dataset_train_split") or "train")
        if given.get("datasets") is None and (row := _first_row(expand_user(data), split)) is not None:
            recognise([*row], row, method, str(given.get("dataset_text_field") or "text"), "train")


def _first_row(file: Path, split: str) -> dict[str, Any] | None:
    """The first row of a data file that a person would write, or of the split's in a folder; None where it is not
    plainly one."""
    try:
        if file.is_dir():
            file = next((each for kind in ("jsonl", "csv") if (each := file / f"{split}.{kind}").is_file()), file)
        with file.open(encoding="utf-8", newline="") as lines:
            if file.suffix.lower() == ".csv":
                return next(csv.DictReader(lines), None)
            row = json.loads(next(lines)) if file.suffix.lower() == ".jsonl" else None
    except (OSError, ValueError, StopIteration, csv.Error):
        return None
    return row if isinstance(row, dict) and row else None
