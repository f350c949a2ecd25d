"""Trainers of the verbs other than ``sft``: TRL's own, with the mixin in front. Imported only where one is used.

GRPO makes its batches itself, from prompts: what it moves meanwhile, in both directions, passes the mover (see
``VerifiedTransferMixin._prepare_inputs``).
"""

from __future__ import annotations

from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer

from hf_rocm_tune.training.trainer import VerifiedTransferMixin


class VerifiedDPOTrainer(VerifiedTransferMixin, DPOTrainer):
    """Direct preference optimization; a reference model is verified and watched as the trained one is."""


class VerifiedKTOTrainer(VerifiedTransferMixin, KTOTrainer):
    """Kahneman-Tversky optimization; a reference model is verified and watched as the trained one is."""


class VerifiedRewardTrainer(VerifiedTransferMixin, RewardTrainer):
    """Training of a reward model, whose head is new."""


class VerifiedGRPOTrainer(VerifiedTransferMixin, GRPOTrainer):
    """Group relative policy optimization with plain generation; reward models are verified too."""
