"""Trainers of TRL with verified transfers."""

from __future__ import annotations

from trl import SFTTrainer

from hf_rocm_tune.training.mixin import VerifiedTransferMixin


class VerifiedSFTTrainer(VerifiedTransferMixin, SFTTrainer):
    """Supervised fine-tuning in which every weight and batch is verified on its way to the device."""
