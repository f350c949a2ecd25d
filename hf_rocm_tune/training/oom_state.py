"""By how much a run has had to cut its micro-batches, kept beside its checkpoints, so that a restart need not learn it.

Written when a micro-batch has been cut, not with the next checkpoint: a run that dies in between would meet the same
batch again.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hf_rocm_tune.integrity.atomic import write_text_atomic

logger = logging.getLogger(__name__)

# The underscore keeps it out of transformers' uploads, which ignore "_*".
STATE_FILE = "_step_down.json"


def write_divisor(directory: Path, *, run_id: str, batch_size: int, divisor: int) -> None:
    """Record that micro-batches of ``batch_size`` rows are cut by ``divisor`` from now on in this run.

    A full disk is no reason to end a run that has just been saved from another end: it is logged.
    """
    body = {"run_id": run_id, "batch_size": batch_size, "divisor": divisor}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text_atomic(directory / STATE_FILE, json.dumps(body) + "\n")
    except OSError as error:
        logger.warning(
            "%s could not be written (%s): a restart begins with whole micro-batches again", STATE_FILE, error
        )


def read_divisor(directory: Path, *, run_id: str, batch_size: int, resumed: bool) -> int:
    """By what this run cuts its micro-batches; 1 for a run that never had to.

    Args:
        directory: the run's output directory.
        run_id: of this run. A trainer of the user's own has none: then what stands there counts for a run that is
            resumed from a checkpoint.
        batch_size: rows of a micro-batch; a record for another size does not count.
        resumed: whether a checkpoint is resumed from.
    """
    try:
        body = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        same = body["run_id"] == run_id and body["batch_size"] == batch_size and bool(run_id or resumed)
        return max(1, int(body["divisor"])) if same else 1
    except FileNotFoundError:
        return 1
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read (%s): micro-batches are whole again", STATE_FILE, error)
        return 1
