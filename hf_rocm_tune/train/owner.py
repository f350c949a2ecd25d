# mypy: disable-error-code="empty-body"
"""The interface that the trainer offers to the objects it owns, in addition to upstream's, for the type checker.

`training.trainer` implements it. Checkpoints and out-of-memory recovery import this module, so imports point down.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hf_rocm_tune.cards.way import Way
    from hf_rocm_tune.survive.heartbeat import Phase
    from hf_rocm_tune.transfer import Mover, TransferReport


class Owner(Trainer):
    """Implemented by `training.trainer.VerifiedTransferMixin`; see there."""

    mover: Mover
    transfer_report: TransferReport
    way: Way
    run_id: str
    recompute_layers: tuple[int, int] | None

    @property
    def devices(self) -> tuple[torch.device, ...]: ...
    @property
    def is_sharded(self) -> bool: ...
    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...
    def unchanged(self, batch: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def step_fault(self, model: nn.Module, *, rows: int, tokens: int) -> AbstractContextManager[None]: ...
    def place_tensor(self, tensor: Tensor, *, name: str, stage: str) -> Tensor: ...
    def before_save(self) -> None: ...
    def before_manifest(self, directory: Path) -> None: ...
    def write_model(self, directory: str) -> None: ...
    def beat(self, phase: Phase) -> None: ...
