"""The log of a run: its curves, its key figures, and the settings that decide its result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_rocm_tune.publish.values import count, figure, number

Row = Mapping[str, Any]

_LAST_STEP = 1e15
_LEAST = 1e-100
_LARGEST = 1e100


def series(rows: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric in the order of the steps; the newest of a step counts, NaN is a gap in a curve.

    Left out are steps that no run reaches, and a value that cannot be drawn beside others is a gap.
    """
    known: dict[float, float] = {}
    for row in rows:
        step = number(row, "step")
        if key in row and step is not None and 0 <= step <= _LAST_STEP:
            known[step] = _drawable(number(row, key))
    return sorted(known.items())


def _drawable(value: float | None) -> float:
    if value is None or abs(value) > _LARGEST:
        return math.nan
    if abs(value) < _LEAST:
        return 0.0
    return value


def last(rows: Iterable[Row], key: str) -> float | None:
    """The newest finite value of a metric."""
    return next((value for _, value in reversed(series(rows, key)) if not math.isnan(value)), None)


_FIGURES = {
    "training loss (last)": "loss",
    "evaluation loss (last)": "eval_loss",
    "token accuracy (last)": "mean_token_accuracy",
    "evaluation, token accuracy": "eval_mean_token_accuracy",
    "reward (last)": "reward",
    "reward margin (last)": "rewards/margins",
    "evaluation, reward margin": "eval_rewards/margins",
    "epochs": "epoch",
    "tokens": "num_tokens",
    "tokens a second (last)": "speed/tokens_per_second",
    "training time (s), from the last start": "train_runtime",
}


def figures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The key figures of a log, by name."""
    values = {name: last(rows, key) for name, key in _FIGURES.items()}
    return [(name, figure(value)) for name, value in values.items() if value is not None]


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
    idle = {"max_steps"}
    if count(settings, "max_steps") > 0:
        idle = {"num_train_epochs"}
    if settings.get("use_peft") is False:
        idle |= {name for name in _SHOWN_SETTINGS if name.startswith("lora_")}
    if settings.get("load_in_4bit") is not True:
        idle |= {"bnb_4bit_quant_type", "use_bnb_nested_quant"}
    shown = {}
    for name in _SHOWN_SETTINGS:
        value = settings.get(name)
        if name not in idle and value is not None and value is not False and value != []:
            shown[name] = value
    batch = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if settings.get("tensor_parallel") is not True:  # there all ranks get the same rows
        batch.append("world_size")
    rows = math.prod(count(settings, name) for name in batch)
    if rows:
        shown["effective_batch_size"] = rows
    return shown
