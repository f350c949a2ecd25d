"""``training_log.json``: a trainer's log history and what was trained, as a run leaves them, and curves out of it.

A finished run lists the file in its manifest. It names no file and no directory, so it may be published as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish.history_values import number

LOG_NAME = "training_log.json"
SCHEMA = 1

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What was trained, without names and paths.

    Args:
        method: in a few words, such as "LORA, r=16, alpha=32".
        model_class: of the base model, such as "LlamaForCausalLM".
        trainable: parameters that were trained.
        parameters: of the model with its adapter.
        dtype: of the base model's weights, such as "bfloat16"; the compute dtype where they are quantised.
        adapter_dtype: of the adapter while it was trained; None without an adapter.
        quantization: arguments of ``BitsAndBytesConfig``; None for weights that are not quantised.
        chat_template: whether the tokenizer has one.
    """

    method: str
    model_class: str
    trainable: int
    parameters: int
    dtype: str
    adapter_dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    chat_template: bool = False


def write_log(
    directory: Path, *, run_id: str, step: int, max_steps: int, trained: Trained | None, rows: Iterable[Row]
) -> Path:
    """Write ``training_log.json``; numbers that are not finite become null.

    Raises:
        OSError: as the operating system gave it; an older file is still there.
    """
    content = {
        "schema": SCHEMA,
        "run_id": run_id,
        "step": step,
        "max_steps": max_steps,
        "trained": asdict(trained) if trained is not None else {},
        "log": [{key: _finite(value) for key, value in row.items()} for row in rows],
    }
    target = directory / LOG_NAME
    write_text_atomic(target, json.dumps(content, indent=1) + "\n")
    return target


def series(rows: Iterable[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of one metric in the order of the steps; the newest value of a step counts.

    Rows without the metric are passed over; a value that is no finite number is NaN, a gap in a curve.
    """
    found: dict[float, float] = {}
    for row in rows:
        step = number(row, "step")
        if step is not None and key in row:
            value = number(row, key)
            found[step] = math.nan if value is None else value
    return sorted(found.items())


def last(rows: Iterable[Row], key: str) -> float | None:
    """The newest finite value of a metric."""
    values = [value for _, value in series(rows, key) if not math.isnan(value)]
    return values[-1] if values else None


def training_seconds(rows: Iterable[Row]) -> float:
    """Seconds that all steps took, over all starts of a run; 0 where nothing tells.

    The trainer's own ``train_runtime`` is of the last start only, and counts evaluations and saves too; it is taken
    where the pace was not logged.
    """
    rows = list(rows)
    total, before = 0.0, 0.0
    for step, seconds in series(rows, "speed/seconds_per_step"):
        if not math.isnan(seconds):
            total += seconds * (step - before)
        before = step
    return total or sum(number(row, "train_runtime") or 0.0 for row in rows)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
