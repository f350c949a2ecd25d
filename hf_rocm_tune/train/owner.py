# mypy: disable-error-code="empty-body"
"""The interface that the trainer offers to the objects it owns, in addition to upstream's, for the type checker.

`train.trainer` implements it. Out-of-memory recovery imports this module, so imports point down.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.survive.checkpoint import Saving

if TYPE_CHECKING:
    from torch import nn

    from hf_rocm_tune.cards.way import Way
    from hf_rocm_tune.survive.heartbeat import Phase


class Owner(Saving):
    """Implemented by `train.trainer.VerifiedTransferMixin`; see there."""

    way: Way
    recompute_layers: tuple[int, int] | None

    def host_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...
    def unchanged(self, batch: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def step_fault(self, model: nn.Module, *, rows: int, tokens: int) -> AbstractContextManager[None]: ...
    def beat(self, phase: Phase) -> None: ...
