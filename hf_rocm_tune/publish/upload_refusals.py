"""What is not uploaded at all: a directory that is not what the run wrote, and a run that ended with wrong bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.manifest import Manifest, Problem

REPORT_NAME = "transfer_report.json"
LEFT_OUT = {"training_args.bin": "a pickle of this machine's settings", "run.json": "this machine's settings"}
"""Files of a run that are never uploaded, with the reason."""

_STAGES = ("weights", "batches", "adapter", "optimizer", "casts", "gradients")


def check_directory(directory: Path) -> Manifest:
    """The manifest of a directory whose files are those that the run wrote. A model card may have been edited since.

    Raises:
        UsageError: there is no such directory, it was never completed, or a file is not what was written.
        CorruptionError: the run's report tells of wrong bytes that were not made right.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: name the --output_dir of a run, or one of its checkpoints")
    found = manifest.inspect(directory)
    if found.manifest is None:
        problem = found.problems[0]
        why = "no run has completed it" if problem.kind == "missing" else str(problem)
        raise UsageError(
            f"{directory} holds no {manifest.MANIFEST_NAME} that can be trusted ({why}), so it is unknown whether its "
            "files are what was trained: let the run end, or name a checkpoint-N of it"
        )
    lost = [problem for problem in found.problems if not _forgiven(problem)]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(f"{directory}: {lost[0]}{more}: it is not what was trained, so it is not uploaded")
    check_report(directory / REPORT_NAME)
    return found.manifest


def _forgiven(problem: Problem) -> bool:
    """A model card is there to be edited, and what is never uploaded may be gone."""
    return problem.file.endswith(".md") or (problem.kind == "missing" and problem.file in LEFT_OUT)


def check_report(file: Path) -> None:
    """Refuse the report of a run that ended with wrong bytes; a directory without a report (a checkpoint) passes.

    Raises:
        UsageError: it cannot be understood.
        CorruptionError: it tells of corruption that was not recovered.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        wrong = unrecovered(report)
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{file} cannot be understood ({error!r}), so the run is not uploaded") from error
    if wrong:
        raise CorruptionError(
            f"{file} tells of corruption that was not recovered ({'; '.join(wrong[:3])}): this run is not uploaded. "
            "Train again, or push a checkpoint from before it"
        )


def unrecovered(report: Mapping[str, Any]) -> list[str]:
    """What a transfer report tells of wrong bytes that were not made right, one line each.

    Raises:
        KeyError, TypeError, AttributeError: it is not of the expected form.
    """
    found = [
        f"{row['stage']}{' ' + str(row['tensor']) if 'tensor' in row else ''} at step {row.get('step', '?')}"
        for row in report["incidents"]
        if row.get("outcome") == "stopped"
    ]
    for stage in _STAGES:
        lost = report[stage]["mismatches"] - report[stage]["recovered"]
        if lost > 0 and not found:
            found.append(f"{stage}: {lost} of {report[stage]['mismatches']} mismatches")
    return found
