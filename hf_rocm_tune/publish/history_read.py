"""Reading what a run left in its directory, whatever state it is in.

`collect` never raises on what it finds in a directory: a file that is missing, torn, nested without end or of another
form is told in words, and the rest is still read. Where ``training_log.json`` is missing (the run was killed, or
another program trained), the newest ``trainer_state.json`` takes its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.publish.history import LOG_NAME, Row
from hf_rocm_tune.publish.history_values import number, table, text
from hf_rocm_tune.publish.upload_refusals import REPORT_NAME

_LARGEST_BYTES = 256 << 20
_DEEPEST = 32
_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRACES = (LOG_NAME, REPORT_NAME, _STATE, "run.json", manifest.MANIFEST_NAME, "adapter_config.json", "survival.jsonl")


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


def collect(directory: Path) -> Left:
    """Read what a run left.

    Raises:
        UsageError: there is no such directory, or nothing in it that a run leaves.
    """
    if not os.path.isdir(directory):  # unlike Path.is_dir, never raises
        what = "is a file" if os.path.exists(directory) else "does not exist"
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
        if _depth_of(content) > _DEEPEST:
            raise ValueError("nested too deeply")
        return content
    except FileNotFoundError:
        if path.name not in (LOG_NAME, _STATE):  # `_newest_log` tells of those
            missing.append(f"{path.name}: {_MEANING.get(path.name, 'it is not there')}")
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name}: it cannot be read ({error})")
    return {}


def _depth_of(content: Any) -> int:
    """How many objects and lists lie within each other, up to just above `_DEEPEST`."""
    layer, depth = [content], 0
    while layer and depth <= _DEEPEST:
        layer = [
            inner
            for value in layer
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
    return depth


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
        if not isinstance(entry, dict) or _depth_of(entry) > _DEEPEST:
            continue
        if not run_id or text(entry, "run_id") in ("", run_id):
            entries.append(entry)
    return entries


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
