"""What can be refused before torch and TRL are imported, which takes seconds: values out of range, missing files,
columns that fit no format.

Everything here is checked again where it is read; a value that cannot be read here is left to that.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_rocm_tune.data.formats import Method, recognise
from hf_rocm_tune.data.sources import refuse_missing
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.paths import expand_user, require_model

_Bound = tuple[Callable[[Any], bool], str]
_AT_LEAST_ONE: _Bound = (lambda value: value >= 1, "1 or more")
_NOT_NEGATIVE: _Bound = (lambda value: 0 <= value < math.inf, "0 or more, and finite")
_POSITIVE: _Bound = (lambda value: 0 < value < math.inf, "more than 0, and finite")
_SEED: _Bound = (lambda value: 0 <= value < 2**32, "0 or more and below 2**32")
_BELOW_ONE: _Bound = (lambda value: 0 <= value < 1, "0 or more and below 1")
_OFF_OR_MORE: _Bound = (lambda value: value >= 0, "0 (off) or more")  # a NaN is neither

BOUNDS: dict[str, _Bound] = {
    "sentinel_every": _OFF_OR_MORE,
    "prefetch_batches": _OFF_OR_MORE,
    "telemetry_every": _NOT_NEGATIVE,
    "sample_every": _AT_LEAST_ONE,
    "effective_batch": _AT_LEAST_ONE,
    "loraplus_lr_ratio": _POSITIVE,
    "embedding_learning_rate": _NOT_NEGATIVE,
    "auto_fit_gib": _POSITIVE,
    "max_skipped_steps": _NOT_NEGATIVE,
    "early_stopping_patience": _AT_LEAST_ONE,
    "early_stopping_threshold": _NOT_NEGATIVE,
    "eval_split_size": (
        lambda size: 0 < size < 1 or (1 <= size < math.inf and size == int(size)),
        "a share between 0 and 1 or a number of rows",
    ),
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    # transformers treats 0 like -1, "no limit"
    "max_steps": (lambda value: value == -1 or value >= 1, "1 or more, or -1 for no limit"),
    "num_train_epochs": _POSITIVE,
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": (lambda value: value >= 0, "0 or more"),  # inf: no clipping
    "warmup_steps": _NOT_NEGATIVE,
    "logging_steps": _NOT_NEGATIVE,
    "eval_steps": _NOT_NEGATIVE,
    "save_steps": _NOT_NEGATIVE,
    "save_total_limit": _NOT_NEGATIVE,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "max_length": _AT_LEAST_ONE,
    "lora_r": _AT_LEAST_ONE,
    "lora_alpha": _AT_LEAST_ONE,
    "seed": _SEED,
    "data_seed": _SEED,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _NOT_NEGATIVE,
    "eval_accumulation_steps": _AT_LEAST_ONE,
    "lora_dropout": _BELOW_ONE,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "pad_to_multiple_of": (
        lambda value: bool(re.fullmatch(r"auto|none|null|[1-9]\d{0,6}", str(value).lower())),
        "1 or more, or auto",
    ),
    "dataset_num_proc": _NOT_NEGATIVE,
}


def out_of_range(given: Mapping[str, Any]) -> list[str]:
    """One sentence for each value that is out of its range."""
    return [
        f"--{name} must be {expected}, got {given[name]}"
        for name, (holds, expected) in BOUNDS.items()
        if given.get(name) is not None and not holds(given[name])
    ]


def check(method: Method, given: Mapping[str, Any]) -> None:
    """Refuses what is wrong in any case.

    Args:
        method: of the training.
        given: flags as typed, or a recipe's values, by name.
    """
    if faults := out_of_range({name: number for name in BOUNDS if (number := _number(given.get(name))) is not None}):
        raise UsageError("; ".join(faults))
    model, data = given.get("model_name_or_path"), given.get("dataset_name")
    if isinstance(model, str):
        require_model(model)
    if not isinstance(data, str):
        return
    refuse_missing(data)
    if given.get("datasets") is None and (row := _first_row(expand_user(data))) is not None:
        recognise([*row], row, method, str(given.get("dataset_text_field") or "text"), "train")


def _number(value: Any) -> float | int | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() and not isinstance(value, float) else number


def _first_row(file: Path) -> dict[str, Any] | None:
    """The first row of a data file that a person would write; None where it is not plainly one."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            if file.suffix.lower() == ".csv":
                return next(csv.DictReader(lines), None)
            row = json.loads(next(lines)) if file.suffix.lower() == ".jsonl" else None
    except (OSError, ValueError, StopIteration, csv.Error):
        return None
    return row if isinstance(row, dict) and row else None
