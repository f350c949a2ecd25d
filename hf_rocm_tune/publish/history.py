"""A run, finished or not, read from its directory.

A file that is missing, truncated or invalid is reported, and the others are still read. Its verdict is in `verdict`,
the curves of its log in `training_log`, the templates that show it in `templates`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import read_object
from hf_rocm_tune.publish.training_log import Row
from hf_rocm_tune.publish.values import count, items, mapping, number, text
from hf_rocm_tune.publish.verdict import Verdict, judge
from hf_rocm_tune.redaction import Private, scrub_json
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.run_directory import SMALL_PICTURES, list_checkpoints

LOG_NAME = "training_log.json"
REPORT_NAME = "transfer_report.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run; empty or None if unknown."""

    directory: Path
    run_id: str = ""
    rows: Sequence[Row] = ()  # the log history, oldest first
    step: int | None = None  # optimizer steps done
    max_steps: int | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)  # what was trained, without names and paths
    report: Mapping[str, Any] = field(default_factory=dict)  # the transfer report
    settings: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    written: str = ""  # UTC time of the manifest, ISO 8601
    damaged: Sequence[str] = ()  # files that differ from what was written, in words
    missing: Sequence[str] = ()  # files that are missing or could not be read, in words
    pictures: Sequence[Mapping[str, Any]] = ()  # a few of the data: ``row``, ``size``, ``jpeg`` in base64

    @property
    def verdict(self) -> Verdict:
        return judge(self.report, finished=self.finished, damaged=self.damaged)

    def without(self, private: Private) -> Run:
        """What may be published."""
        shown = ("rows", "trained", "report", "settings", "missing")
        return replace(self, **{name: scrub_json(getattr(self, name), private) for name in shown})


def write_log(run: Run) -> Path:
    """Write ``training_log.json``, in which numbers that are not finite are null. It names no file and no directory."""
    log = []
    for row in run.rows:
        log.append({key: _finite_or_none(value) for key, value in row.items()})
    content = {
        "schema": 1,
        "run_id": run.run_id,
        "step": run.step,
        "max_steps": run.max_steps,
        "trained": run.trained,
        "log": log,
    }
    write_text_atomic(run.directory / LOG_NAME, json.dumps(content, indent=1) + "\n")
    return run.directory / LOG_NAME


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- a directory -----------------------------------------------------------------------------------------------------


_STATE = "trainer_state.json"


def collect(directory: Path) -> Run:
    """Read the files of a run; a ``UsageError`` if there are none."""
    if not os.path.isdir(directory):  # unlike Path.is_dir, never raises
        raise UsageError(f"{directory} is not a directory: name the --output_dir of a run")
    checkpoints = [path for _, path in list_checkpoints(directory)]
    missing: list[str] = []
    problems, sealed = manifest.inspect(directory)
    record = read_json(directory / "run.json", missing)
    run_id = text(record, "run_id") or (sealed.run_id if sealed else "")
    report = read_json(directory / REPORT_NAME, missing, run_id)
    log = read_json(directory / LOG_NAME, missing, run_id)
    states = [directory / _STATE]  # of a user's script
    if checkpoints:
        states.append(checkpoints[-1] / _STATE)  # of a killed run
    for path in states:
        state = read_json(path, missing) if path.is_file() else {}
        if count(state, "global_step") > max(count(log, "step"), 0):
            if path.parent == directory:
                missing = [line for line in missing if not line.startswith(LOG_NAME)]
            log |= {
                "max_steps": state.get("max_steps"),
                "step": state.get("global_step"),
                "log": state.get("log_history"),
            }
    if not (checkpoints or sealed or record or report or log):
        raise UsageError(f"{directory} has no file of a training run: name the --output_dir of a run")
    damaged = []
    for problem in problems:
        is_edited = problem.file.endswith(".md")  # a README.md may be
        if not is_edited and (sealed or problem.kind != "missing"):
            damaged.append(str(problem))
    if sealed is None:
        missing += damaged or [f"{manifest.MANIFEST_NAME}: the run has not finished"]
    step = None
    if number(log, "step") is not None:
        step = count(log, "step")
    return Run(
        directory=directory,
        run_id=run_id or text(log, "run_id"),
        rows=[row for row in items(log, "log") if isinstance(row, dict)],
        step=step,
        max_steps=count(log, "max_steps") or None,
        trained=mapping(log, "trained"),
        report=report,
        settings=mapping(record, "settings") | mapping(record, "names"),
        finished=sealed is not None and sealed.status == "final",
        written=sealed.created if sealed else "",
        damaged=damaged,
        missing=missing,
        pictures=_small_pictures(directory, run_id),
    )


def _small_pictures(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """The small pictures that a run with pictures has written; what is no picture of ours is left out."""
    content = read_json(directory / SMALL_PICTURES, run_id=run_id)
    rows = [row for row in items(content, "pictures") if isinstance(row, dict)]
    known = re.compile(r"/9j/[A-Za-z0-9+/]{16,40000}={0,2}")
    return [row for row in rows[:8] if known.fullmatch(text(row, "jpeg"))]


def read_json(path: Path, missing: list[str] | None = None, run_id: str = "") -> dict[str, Any]:
    """A JSON object of this run, or nothing and a line about why."""
    try:
        content = read_object(path)
        other = text(content, "run_id")
        if run_id and other and other != run_id:
            raise ValueError(f"it belongs to another run, {other}")
        return content
    except (OSError, ValueError) as error:
        why = "it is missing" if isinstance(error, FileNotFoundError) else f"it is not used ({error})"
        if missing is not None:
            missing.append(f"{path.name}: {why}")
        return {}
