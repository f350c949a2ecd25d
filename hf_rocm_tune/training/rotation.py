"""Deletion of old checkpoints: never of the one just verified nor of the best, and only of what the run has written.

Upstream orders by modification time and protects the newest; a damaged checkpoint of a later step, from which a run
fell back, would then be kept in place of the good one.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.atomic import delete_directory
from hf_rocm_tune.training.artefacts import CHECKPOINT_NAME, listed_by, remove, unlisted

logger = logging.getLogger(__name__)


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of each ``checkpoint-N`` there, in the order of the numbers; without a directory, none."""
    if not directory.is_dir():
        return []
    found = [(CHECKPOINT_NAME.match(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def rotate(newest: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints of a run beside ``newest`` until ``limit`` are left.

    Args:
        newest: the checkpoint that was just verified; it stays, whatever its number, and says which run it is.
        limit: how many to keep (``save_total_limit``); None or below 1 keeps all.
        best: ``best_model_checkpoint``; it stays.
    """
    written = manifest.read(newest)
    if limit is None or limit < 1 or not isinstance(written, manifest.Manifest):
        return
    protected = {newest.name} | ({Path(best).name} if best else set())
    here = [path for _, path in list_checkpoints(newest.parent) if not path.is_symlink()]
    checkpoints = [path for path in here if listed_by(path, written.run_id) is not None]
    surplus = len(checkpoints) - max(limit, len(protected))
    for path in [path for path in checkpoints if path.name not in protected][: max(surplus, 0)]:
        _delete(path, written.run_id)


def _delete(checkpoint: Path, run_id: str) -> None:
    foreign = unlisted(checkpoint, run_id)
    if not foreign:
        delete_directory(checkpoint)
        return
    ours = [manifest.MANIFEST_NAME, *(listed_by(checkpoint, run_id) or ())]
    remove([checkpoint / name for name in ours], checkpoint)
    logger.warning("%s was deleted but for what the run has not written: %s", checkpoint.name, ", ".join(foreign[:6]))
