"""Trainers that save verified checkpoints, for the tests of saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from hf_rocm_tune.training.checkpoint import VerifiedCheckpointMixin

STEPS = 4
Make = Callable[..., Any]


class VerifiedSFT(VerifiedCheckpointMixin, SFTTrainer):  # type: ignore[misc]
    """As a user would define it."""

    run_id = "run-1"


class VerifiedPlain(VerifiedCheckpointMixin, Trainer):  # type: ignore[misc]
    """The mixin in front of the plain trainer."""

    run_id = "run-2"


def names(directory: Path) -> list[str]:
    """Checkpoints and unfinished or set aside directories of an output directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("checkpoint", "_", "damaged")))
