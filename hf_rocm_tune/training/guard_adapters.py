"""Whether training changes what it is to change: digests of the trainable weights, compared every so many steps.

The first look comes soon after the start: an adapter that does not move by then has nothing to learn from. LoRA's ``B``
starts at zero, so one that is still zero has never had a gradient. Not covered: weights that change and learn nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_rocm_tune.models.shards import local
from hf_rocm_tune.training.guard import Finding
from hf_rocm_tune.transfer import Digest, QueuedDigests

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

FIRST_LOOK, LATER_LOOKS = 10, 100
"""Steps after the start of a training at which is looked first, and between the later looks."""

_CAUSES = (
    "a learning rate that is too small for the dtype of the weights (bfloat16 takes no change below about 0.4 %), "
    "gradients that do not reach them, or arithmetic on the device that gives zeros (the doctor tries it)"
)
_NAMED = 3


class MovementCallback(TrainerCallback):
    """Looks at the trainable weights; with several ranks every rank looks at its own, which are equal or its shards.

    Args:
        model: whose weights that require gradients are looked at.
        tell: takes what was found.
    """

    def __init__(self, model: nn.Module, tell: Callable[[Finding], None]) -> None:
        self._model = model
        self._tell = tell
        self._before: dict[str, Digest] = {}
        self._since = 0
        self._next = 0
        self._rate = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Takes the first digests."""
        self._look(state.global_step, wait=FIRST_LOOK)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Compares when it is time. Steps without a learning rate change nothing, and do not count."""
        optimizer = more.get("optimizer")
        self._rate += max((group["lr"] for group in optimizer.param_groups), default=0.0) if optimizer else 0.0
        if state.global_step < self._next:
            return
        before, steps, moved = self._before, state.global_step - self._since, self._rate > 0
        self._look(state.global_step, wait=LATER_LOOKS)
        if not (moved and before):
            return
        if before == self._before:
            what = f"none of the {len(before)} trainable weights has changed in {steps} steps. Likely causes: {_CAUSES}"
            self._say(state.global_step, "nothing moves", what)
        elif steps == FIRST_LOOK and (zero := self._zero()):
            what = f"{len(zero)} LoRA matrices B are still zero after {steps} steps ({_shown(zero)}): {_UNUSED}"
            self._say(state.global_step, "adapters do not move", what)

    def _look(self, step: int, *, wait: int) -> None:
        rows = self._trainable()
        digests = QueuedDigests([weight.detach() for _, weight in rows]).result()
        self._before = {name: found for (name, _), found in zip(rows, digests, strict=True)}
        self._since, self._next, self._rate = step, step + wait, 0.0

    def _zero(self) -> list[str]:
        rows = [(name, weight.detach().any()) for name, weight in self._trainable() if "lora_B" in name]
        moved = torch.stack([each.reshape(()) for _, each in rows]).tolist() if rows else []  # one wait for all
        return [name for (name, _), some in zip(rows, moved, strict=True) if not some]

    def _say(self, step: int, kind: str, what: str) -> None:
        self._tell(Finding(step=step, kind=kind, text=f"step {step}: {what}"))

    def _trainable(self) -> list[tuple[str, Tensor]]:
        return [(name, local(weight)) for name, weight in self._model.named_parameters() if weight.requires_grad]


_UNUSED = "these layers take no part in the loss (experts that no token is routed to, for example), or get no gradient"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
