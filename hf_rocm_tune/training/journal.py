"""``survival.jsonl``: how often a run was started, how each start ended and what was decided, one JSON object a line.

The supervisor appends; the report takes it in. A line that cannot be read (the power went while it was written) is
passed over. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_rocm_tune.integrity.atomic import open_in_place, read_plain
from hf_rocm_tune.redaction import redact_json

FILE_NAME = "survival.jsonl"


def append(directory: Path, entry: Mapping[str, Any]) -> None:
    """Add one line.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = open_in_place(directory / FILE_NAME, os.O_RDWR | os.O_APPEND)
    with open(descriptor, "rb+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        # A line that the end of the power cut short must not swallow this one.
        torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        file.write(("\n" if torn else "").encode() + json.dumps(redact_json(dict(entry))).encode() + b"\n")


def entries(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """The entries of one run, oldest first; none without a journal."""
    try:
        lines = read_plain(directory / FILE_NAME).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("run_id") == run_id:
            found.append(entry)
    return found


def summary(
    directory: Path, run_id: str, *, skipped_steps: list[int], supervised: bool, crash_injection: str | None
) -> dict[str, Any]:
    """The report's section ``survival``: what this run went through, as far as a supervisor saw it.

    Args:
        directory: the run's output directory.
        run_id: of the run.
        skipped_steps: optimizer steps that were left out.
        supervised: whether a supervisor watches the run now.
        crash_injection: crashes that were asked for, as text.
    """
    told = entries(directory, run_id)
    ends = [entry for entry in told if entry.get("event") == "end"]
    keys = ("time", "how", "code", "phase", "step", "message", "evidence", "decision")
    return {
        "supervised": supervised,
        "starts": sum(entry.get("event") == "start" for entry in told),
        "ends": [{key: entry[key] for key in keys if key in entry} for entry in ends],
        "skipped_steps": skipped_steps,
        "crash_injection": crash_injection,
    }
