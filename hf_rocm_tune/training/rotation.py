"""Deletion of old checkpoints, never of the one just verified nor of the best.

Upstream orders by modification time and protects the newest; a damaged checkpoint of a later step, from which a run
fell back, would then be kept in place of the good one.
"""

from __future__ import annotations

import re
from pathlib import Path

from hf_rocm_tune.integrity.atomic import delete_directory

CHECKPOINT_NAME = re.compile(r"^checkpoint-(\d+)$")


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of each ``checkpoint-N`` there, in the order of the numbers; without a directory, none."""
    if not directory.is_dir():
        return []
    found = [(CHECKPOINT_NAME.match(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def rotate(newest: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beside ``newest`` until ``limit`` are left.

    Args:
        newest: the checkpoint that was just verified; it stays, whatever its number.
        limit: how many to keep (``save_total_limit``); None or below 1 keeps all.
        best: ``best_model_checkpoint``; it stays.
    """
    if limit is None or limit < 1:
        return
    protected = {newest.name} | ({Path(best).name} if best else set())
    checkpoints = [path for _, path in list_checkpoints(newest.parent)]
    surplus = len(checkpoints) - max(limit, len(protected))
    for path in [path for path in checkpoints if path.name not in protected][: max(surplus, 0)]:
        delete_directory(path)
