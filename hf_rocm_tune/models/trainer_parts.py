"""What the objects that a trainer owns ask of it: checkpoints, guard, recovery, checks of products and of replays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Mover, TransferReport

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class OwningTrainer(Protocol):
    """A trainer of transformers or TRL with `VerifiedTransferMixin` in front, as its parts see it."""

    # ---- of transformers' ``Trainer`` -----------------------------------------------------------------------
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: TrainerCallback
    accelerator: Any  # of Accelerate
    model: Any
    model_wrapped: nn.Module
    optimizer: Any  # None before training
    lr_scheduler: Any
    data_collator: Any
    compute_loss_func: Any
    loss_is_scaled_for_ga: bool | None
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int

    def is_world_process_zero(self) -> bool: ...
    def get_tp_size(self) -> int: ...
    def get_cp_size(self) -> int: ...
    def get_sp_size(self) -> int: ...
    def save_model(self) -> None: ...
    def _save(self, output_dir: str, state_dict: Mapping[str, Any]) -> None: ...

    # ---- of the mixin ---------------------------------------------------------------------------------------
    mover: Mover
    transfer_report: TransferReport
    run_id: str
    strategy: Any  # `cards.strategy.ParallelStrategy`, which stands above this package
    step_faults: Any  # `train.faults.StepFaults`, likewise
    streamer: Any
    loss_context: Any

    @property
    def devices(self) -> tuple[torch.device, ...]: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def full_state(self) -> Any: ...
    def beat(self, phase: Any) -> None: ...
    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...
    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor: ...
    def before_save(self) -> None: ...
    def before_manifest(self, directory: Path) -> None: ...
    def write_model(self, directory: str) -> None: ...
