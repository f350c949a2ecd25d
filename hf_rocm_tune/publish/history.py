"""What a run leaves of how it went, and the reading of it, whatever state it is in.

``training_log.json`` holds the trainer's log history and what was trained; a finished run lists it in its manifest. It
names no file and no directory, so it may be published as it is. Where it is missing (the run was killed, or another
program trained), the newest ``trainer_state.json`` takes its place.

`collect` never raises on what it finds in a directory: a file that is missing, torn or of another form is told in
words, and the rest is still read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.publish.history_values import number, table, text

LOG_NAME = "training_log.json"
REPORT_NAME = "transfer_report.json"
SCHEMA = 1

_LARGEST_BYTES = 256 << 20
_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRACES = (LOG_NAME, REPORT_NAME, _STATE, "run.json", manifest.MANIFEST_NAME, "adapter_config.json", "survival.jsonl")

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


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is in a run's directory.

    Attributes:
        directory: the run's.
        run_id: empty where nothing tells it.
        rows: the log history, oldest first.
        rows_from: the file that they are from; empty without any.
        step, max_steps: optimizer steps done and wanted; None where unknown.
        trained: `Trained` as plain values; empty where unknown.
        report: the transfer report; empty without one.
        settings: of the run; empty where unknown.
        journal: entries of ``survival.jsonl`` of this run.
        inspection: of the manifest.
        missing: what is not there or could not be read, in words.
    """

    directory: Path
    run_id: str = ""
    rows: Sequence[Row] = ()
    rows_from: str = ""
    step: int | None = None
    max_steps: int | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    journal: Sequence[Row] = ()
    inspection: manifest.Inspection
    missing: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, and its result is in place."""
        found = self.inspection.manifest
        return found is not None and found.status == "final"

    @property
    def damaged(self) -> list[str]:
        """What of the result is not as it was written; a model card may be edited."""
        if self.inspection.manifest is None:
            return [str(one) for one in self.inspection.problems if one.kind != "missing"]
        return [str(one) for one in self.inspection.problems if not one.file.endswith(".md")]


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


def collect(directory: Path) -> Left:
    """Read what a run left.

    Raises:
        UsageError: there is no such directory, or nothing in it that a run leaves.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"{directory} {what}: name the --output_dir of a run")
    try:
        checkpoints = _checkpoints(directory)
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}; name the --output_dir of a run") from error
    if not checkpoints and not any((directory / name).exists() for name in _TRACES):
        raise UsageError(f"{directory} holds nothing that a training run leaves: name the --output_dir of a run")
    missing: list[str] = []
    record = _read(directory / "run.json", missing)
    inspection = manifest.inspect(directory)
    known = text(record, "run_id") or (inspection.manifest.run_id if inspection.manifest else "")
    report = _of_run(known, _read(directory / REPORT_NAME, missing), REPORT_NAME, missing)
    log = _of_run(known, _read(directory / LOG_NAME, missing), LOG_NAME, missing)
    log, rows_from = _newest_log(directory, log, checkpoints, missing)
    run_id = known or text(log, "run_id") or text(report, "run_id")
    if inspection.manifest is None:
        why = inspection.problems[0]
        missing.append(
            f"{manifest.MANIFEST_NAME}: the run has not come to its end" if why.kind == "missing" else str(why)
        )
    rows = log.get("log", log.get("log_history"))
    return Left(
        directory=directory,
        run_id=run_id,
        rows=[row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else [],
        rows_from=rows_from,
        step=_whole(number(log, "step") if "step" in log else number(log, "global_step")),
        max_steps=_whole(number(log, "max_steps")),
        trained=table(log, "trained"),
        report=report,
        settings=table(record, "settings"),
        journal=_journal(directory, run_id),
        inspection=inspection,
        missing=missing,
    )


def _newest_log(
    directory: Path, log: dict[str, Any], checkpoints: list[Path], missing: list[str]
) -> tuple[dict[str, Any], str]:
    """The log that has come furthest, and the name of its file."""
    best, name = (log, LOG_NAME) if log else ({}, "")
    states = [directory / _STATE, *(path / _STATE for path in checkpoints[-1:])]
    for path in states:
        if not path.is_file():
            continue
        state = _read(path, missing)
        reached = number(best, "step") if "step" in best else number(best, "global_step")
        if state and (number(state, "global_step") or 0) > (-1 if reached is None else reached):
            # What was trained does not change over a run, and a trainer's state does not tell it.
            best = {**state, "trained": table(best, "trained") or table(log, "trained")}
            name = path.relative_to(directory).as_posix()
    if not best:
        missing.append(f"{LOG_NAME}: no log of the training, so there are no curves")
    return best, name


def _of_run(run_id: str, content: dict[str, Any], name: str, missing: list[str]) -> dict[str, Any]:
    """The content of a file, unless it is another run's: an older one's that was trained in the same directory."""
    other = text(content, "run_id")
    if run_id and other and other != run_id:
        missing.append(f"{name}: it is of another run, {other}, and is not used")
        return {}
    return content


def _read(path: Path, missing: list[str]) -> dict[str, Any]:
    """A JSON object, or nothing and a line about why."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"more than {_LARGEST_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except FileNotFoundError:
        if path.name not in (LOG_NAME, _STATE):  # `_newest_log` tells of those
            missing.append(f"{path.name}: {_MEANING.get(path.name, 'it is not there')}")
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name}: it cannot be read ({error})")
    return {}


_MEANING = {
    REPORT_NAME: "no transfer report, so nothing is known of what was verified",
    "run.json": "no record of the run, so its settings are unknown",
}


def _checkpoints(directory: Path) -> list[Path]:
    """Directories of checkpoints, the oldest first."""
    found = [(int(name[1]), path) for path in directory.iterdir() if (name := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def _journal(directory: Path, run_id: str) -> Sequence[Row]:
    try:
        lines = (directory / "survival.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # the power went while it was written
            continue
        if isinstance(entry, dict) and (not run_id or text(entry, "run_id") in ("", run_id)):
            entries.append(entry)
    return entries


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
