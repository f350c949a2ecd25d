"""A trainer that does not use a step whose numbers are not finite, and says when training has died in silence.

Loss and gradient norm come to the host together, in one read of two numbers a step, after clipping and before the
optimizer: the only place where a step can still be left out. Upstream has waited for the device just before, when it
asked whether the loss is NaN (``logging_nan_inf_filter``, on by default). Several ranks exchange theirs over gloo, so
that all of them leave out the same steps.

A step that is left out counts: its samples are not seen again in this epoch, the schedule moves on, weights and
optimizer state stay as they are. Covered: any trainer and optimizer (an optimizer leaves parameters without gradients
alone). Not covered: LOMO, which updates weights during backward. With fp16 the gradient scaler looks after gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hf_rocm_tune.errors import DivergedError
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.ranks.agree import everyone, highest
from hf_rocm_tune.training.guard import Finding, StepGuard
from hf_rocm_tune.training.guard_adapters import MovementCallback
from hf_rocm_tune.training.rotation import list_checkpoints

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)


class GuardMixin(_Base):
    """Stands in front of a ``transformers.Trainer`` subclass, behind the mixin that leaves steps out on request.

    Args:
        max_skipped_steps: how many of the last 100 steps may be left out because they are not finite.

    Raises:
        DivergedError: from `train`, when there are more of them, when nothing has been learned for long, or when
            weights that are to be saved are not finite. Checkpoints that were written are intact.
    """

    def __init__(self, *arguments: Any, max_skipped_steps: int = 5, **keywords: Any) -> None:
        self._guard = StepGuard(max_skipped=max_skipped_steps)
        self._micro_losses: list[Tensor] = []
        super().__init__(*arguments, **keywords)
        self.add_callback(MovementCallback(self.model, self._tell))

    @override
    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> tuple[list[Any], Any]:
        """As upstream: an optimizer step begins, however the last one ended."""
        self._micro_losses.clear()
        return super().get_batch_samples(*arguments, **keywords)

    @override
    def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
        """As upstream; the loss is remembered until the end of the step, on the device."""
        loss: Tensor = super().training_step(*arguments, **keywords)
        self._micro_losses.append(loss)
        return loss

    @override
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As upstream; here the step is judged."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        losses, self._micro_losses = self._micro_losses, []
        if losses:  # else the step was left out
            self._judge_step(model, *self._step_numbers(losses, norm))
        return norm

    def _step_numbers(self, losses: list[Tensor], norm: Any) -> tuple[float, float]:
        """Loss of the effective batch, and gradient norm: NaN on one rank is NaN here on all."""
        loss = torch.stack(losses).sum().double()
        if type(norm) is torch.Tensor and norm.device == loss.device:
            mine = torch.stack([loss, norm.double()]).tolist()
        else:
            mine = [loss.item(), float(norm)]
        rows = everyone(mine)
        return sum(row[0] for row in rows) / len(rows), max((row[1] for row in rows), key=_worse)

    def _judge_step(self, model: nn.Module, loss: float, norm: float) -> None:
        step = self.state.global_step + 1
        judgement = self._guard.judge(step, loss, norm, scaled=self.accelerator.scaler is not None)
        if judgement.skip:
            model.zero_grad()  # every optimizer leaves a parameter without a gradient alone
            if self.is_world_process_zero():
                self.transfer_report.count("guard", skipped_steps=1)
        for finding in judgement.findings:
            self._tell(finding)

    def before_save(self) -> None:
        """Refuses to save weights that hold NaN or infinities. Collective."""
        super().before_save()
        bad = list(_not_finite(self.model))
        if highest([int(bool(bad))])[0]:
            named = f": {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}" if bad else " on another rank"
            self._tell(
                Finding(
                    step=self.state.global_step,
                    kind="weights not finite",
                    text=f"step {self.state.global_step}: {len(bad) or 'some'} trainable weights hold NaN or "
                    f"infinity{named}, so they are not saved. Likely causes: a learning rate that is too high, or "
                    "wrong arithmetic on the device (the doctor tries it)",
                    stops=True,
                )
            )

    def _tell(self, finding: Finding) -> None:
        """Warn and report once for all ranks; end the run where the finding says so."""
        if self.is_world_process_zero():
            outcome = "stopped" if finding.stops else "skipped" if finding.kind == "not finite" else "named"
            row = {"step": finding.step, "stage": "guard", "kind": finding.kind, "text": finding.text}
            self.transfer_report.incident({**row, "outcome": outcome})
            self.transfer_report.count("guard", warnings=1)
        if finding.stops:
            saved = list_checkpoints(Path(self.args.output_dir))
            kept = f"{saved[-1][1].name} is the newest checkpoint, and intact" if saved else "no checkpoint was written"
            raise DivergedError(f"{finding.text}. {kept}: change what is wrong and start again")
        if self.is_world_process_zero():
            logger.warning("%s", finding.text)


def _worse(norm: float) -> float:
    """Orders norms, with what is not finite above all."""
    return norm if norm < float("inf") else float("inf")


def _not_finite(model: nn.Module) -> Iterator[str]:
    for name, weight in model.named_parameters():
        if weight.requires_grad and not local(weight).detach().isfinite().all():
            yield name
