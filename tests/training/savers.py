"""Trainers that save verified checkpoints, for the tests of saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from hf_rocm_tune import VerifiedTransferMixin

STEPS = 4
Make = Callable[..., Any]


class VerifiedSFT(VerifiedTransferMixin, SFTTrainer):
    """As a user would define it."""


class VerifiedPlain(VerifiedTransferMixin, Trainer):
    """The mixin in front of the plain trainer."""


def files(trainer: Any) -> tuple[int, int]:
    """Files that were read back and equal what is live, and tensors and values in files that did not."""
    counted = trainer.transfer_report.to_dict()["files"]
    return counted["verified"], counted["mismatches"]


def names(directory: Path) -> list[str]:
    """Checkpoints and unfinished or set aside directories of an output directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("checkpoint", "_", "damaged")))
