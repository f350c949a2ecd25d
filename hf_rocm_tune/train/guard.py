"""Checks of each optimizer step's loss and gradient norm: steps that are not finite are skipped, dead runs stopped.

A spike is 10 robust standard deviations (1.4826 times the median absolute deviation) above the median, and 1.5 times
that. Ranks exchange both numbers over gloo, so that all skip the same steps; a skipped step counts, its samples are not
repeated. Not covered: values that are wrong but plausible; LOMO, which updates weights during backward. With fp16 the
gradient scaler handles gradients that overflow.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback

from hf_rocm_tune.cards.agree import all_gather_floats, max_over_ranks
from hf_rocm_tune.errors import CorruptionError, DivergedError, listed
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.trainer_parts import OwningTrainer
from hf_rocm_tune.survive.run_directory import list_checkpoints
from hf_rocm_tune.train.arithmetic.verdict import StepCheck, StepVerdict
from hf_rocm_tune.transfer import Digest, QueuedDigests

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import TrainerControl, TrainerState, TrainingArguments


logger = logging.getLogger(__name__)

SKIPPED_AMONG = 100
"""Steps among which skipped ones are counted."""
FIRST_CHANGE_CHECK = 10
"""Steps after which weights are compared with those at the start of training."""

_HOST = torch.device("cpu")
_DEAD_WARNS, _DEAD_STOPS = 3, 20
_REMEMBERED, _ENOUGH = 100, 30
_SPIKE_PAUSE = 20


class StepFinding(NamedTuple):
    """A problem with a step."""

    step: int  # from 1
    kind: str  # short, for the report, such as "loss spike"
    said: str  # the problem and its likely causes
    stops: bool = False  # whether the run must end here
    skips: bool = False  # whether the gradients of this step must not be used

    @property
    def text(self) -> str:
        return f"step {self.step}: {self.said}"

    @property
    def outcome(self) -> str:
        """For the report."""
        if self.stops:
            return "stopped"
        if self.skips:
            return "skipped"
        return "named"


class StepGuard:
    """Judges the steps of one run, in order; more than ``max_skipped`` skipped steps of the last 100 end it."""

    def __init__(self, *, max_skipped: int) -> None:
        self._max_skipped = max_skipped
        self._skips: deque[int] = deque(maxlen=max_skipped + 1)
        self._dead = 0
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet_until = 0

    def judge(self, step: int, loss: float, grad_norm: float, *, scaled: bool = False) -> StepFinding | None:
        """Judge a step (from 1) whose gradients have not been used yet."""
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaled):
            return self._not_finite(step, loss, grad_norm)
        if loss == 0 and grad_norm == 0:
            self._dead += 1
            return self._nothing_learned(step)
        self._dead = 0
        return self._spike(step, loss)

    def _not_finite(self, step: int, loss: float, grad_norm: float) -> StepFinding:
        self._skips.append(step)
        count = sum(skipped > step - SKIPPED_AMONG for skipped in self._skips)
        said = (
            f"loss {loss:.4g}, gradient norm {grad_norm:.4g}: the step was skipped ({count} of the last "
            f"{SKIPPED_AMONG}; at most {self._max_skipped} are allowed). Likely causes: a learning rate that is "
            "too high, fp16 overflow, NaN in the data or the base weights, or wrong arithmetic on the device, "
            "which has been reported on these cards (the doctor tests it)"
        )
        return StepFinding(step, "not finite", said, stops=count > self._max_skipped, skips=True)

    def _nothing_learned(self, step: int) -> StepFinding | None:
        if self._dead not in (_DEAD_WARNS, _DEAD_STOPS):
            return None
        said = (
            f"loss and gradient norm are exactly 0, for {self._dead} steps now: nothing is learned. Likely causes: "
            "no label counts in the loss (answers cut off by --max_length, a mask that covers everything), or "
            "weights or activations that are zero on the device: "
            "https://github.com/huggingface/accelerate/issues/3043 (the doctor tests its arithmetic)"
        )
        return StepFinding(step, "dead", said, stops=self._dead == _DEAD_STOPS)

    def _spike(self, step: int, loss: float) -> StepFinding | None:
        earlier = list(self._losses)
        self._losses.append(loss)
        if len(earlier) < _ENOUGH or step < self._quiet_until:
            return None
        median = statistics.median(earlier)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in earlier)
        if loss <= max(1.5 * abs(median), median + 10 * deviation):
            return None
        self._quiet_until = step + _SPIKE_PAUSE
        said = (
            f"the loss is {loss:.4g}, far above those of the last {len(earlier)} steps (median {median:.4g}). Likely "
            "causes: unusual rows in this batch, a learning rate that is too high, or wrong arithmetic on the device"
        )
        return StepFinding(step, "loss spike", said)


class TrainingGuard:
    """Judges the steps of a trainer and the weights it is about to save; ``max_skipped``: see `StepGuard`."""

    def __init__(self, trainer: OwningTrainer, *, max_skipped: int) -> None:
        self._trainer = trainer
        self._steps = StepGuard(max_skipped=max_skipped)
        self._losses: list[Tensor] = []  # of the micro-steps so far, on the device

    def begin_step(self) -> None:
        self._losses.clear()

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-step, shape []; it stays on the device until the end of the step."""
        self._losses.append(loss)

    def judge(
        self,
        model: nn.Module,
        norm: Any,
        wait_verified: Callable[[int], None],
        checks: Sequence[StepCheck],
        *,
        can_repeat: bool,
    ) -> StepVerdict:
        """Decide whether the optimizer uses this step. Collective: every rank must call it, and gets the same verdict.

        Args:
            model: its gradients are cleared if the step is skipped.
            norm: of the clipped gradients, a tensor of shape [] or a number.
            wait_verified: waits until all that the step used is verified, and raises if it is not.
            checks: each says what it found on this rank; the worst verdict of all ranks counts.
            can_repeat: whether the batches of the step are there to compute it again.

        Returns:
            REPEAT: compute the step again; SKIP: no parameter has a gradient now; GO_ON.

        Raises:
            CorruptionError: a check ends the run.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return StepVerdict.GO_ON  # one of ``skip_steps``
        loss = losses[0]
        if len(losses) > 1:
            loss = torch.stack(losses).sum()
        step = self._trainer.state.global_step + 1

        own_loss, own_norm, figures = _read_figures(loss, norm, [check.pending() for check in checks])
        own_verdict = max(check.judge(rows, can_repeat=can_repeat) for check, rows in zip(checks, figures, strict=True))
        of_ranks = all_gather_floats([own_loss, own_norm, own_verdict])
        verdict = StepVerdict(int(max(rank_verdict for _, _, rank_verdict in of_ranks)))

        if verdict == StepVerdict.END:
            for check in checks:
                if check.failure:
                    raise CorruptionError(check.failure)
            raise CorruptionError(f"step {step}: wrong arithmetic on another rank")
        if verdict == StepVerdict.REPEAT:
            return verdict
        wait_verified(step)
        if verdict == StepVerdict.SKIP:
            model.zero_grad()
            return verdict

        mean = sum(rank_loss for rank_loss, _, _ in of_ranks) / len(of_ranks)  # NaN if it is NaN on any rank
        worst = max((rank_norm for _, rank_norm, _ in of_ranks), key=_nan_as_infinity)
        finding = self._steps.judge(step, mean, worst, scaled=self._trainer.accelerator.scaler is not None)
        if finding is None:
            return StepVerdict.GO_ON
        if finding.skips:
            model.zero_grad()  # optimizers do not update a parameter without a gradient
        self.report(finding)
        return StepVerdict.SKIP if finding.skips else StepVerdict.GO_ON

    def require_finite(self, model: nn.Module) -> None:
        """Refuse to save weights that hold NaN or infinity. Collective."""
        bad = []
        for name, weight in _trainable(model):
            if not weight.detach().isfinite().all():
                bad.append(name)
        if not max_over_ranks([int(bool(bad))])[0]:
            return
        weights = "some trainable weights hold NaN or infinity on another rank"
        if bad:
            weights = f"{len(bad)} trainable weights hold NaN or infinity: {listed(bad)}"
        said = (
            f"{weights}, so they are not saved. "
            "Likely causes: a learning rate that is too high, or wrong arithmetic on the device (the doctor tests it)"
        )
        self.report(StepFinding(self._trainer.state.global_step, "weights not finite", said, stops=True))

    def report(self, finding: StepFinding) -> None:
        """Warn and add an incident once for all ranks; raises `DivergedError` if the run must end."""
        trainer = self._trainer
        is_first_rank = trainer.is_world_process_zero()
        if is_first_rank:
            row = {"step": finding.step, "stage": "guard", "kind": finding.kind, "text": finding.text}
            trainer.transfer_report.incident({**row, "outcome": finding.outcome})
            trainer.transfer_report.count("guard", warnings=1, skipped_steps=int(finding.skips))
        if finding.stops:
            saved = list_checkpoints(Path(trainer.args.output_dir))
            kept = "no checkpoint was written"
            if saved:
                kept = f"{saved[-1][1].name} is the newest checkpoint and intact"
            raise DivergedError(f"{finding.text}. {kept}: fix the cause and start again")
        if is_first_rank:
            logger.warning("%s", finding.text)


def _read_figures(
    loss: Tensor, norm: Any, pending: Sequence[Sequence[Tensor]]
) -> tuple[float, float, list[list[list[float]]]]:
    """Wait for the figures of a step: its loss, its norm, and a row for each tensor of each check.

    Those on the card of the loss are read together, in one wait. ``loss``: shape []; ``norm``: a tensor of shape [], or
    a number; the others: shape [n], float32 or float64.
    """
    if type(norm) is not torch.Tensor or norm.device != loss.device or loss.device == _HOST:
        return loss.item(), float(norm), [[tensor.tolist() for tensor in tensors] for tensors in pending]
    if norm.dtype != loss.dtype:
        loss, norm = loss.double(), norm.double()
    together = [torch.stack([loss, norm])]
    together += [tensor for tensors in pending for tensor in tensors if tensor.device == loss.device]
    read_loss, read_norm, *rest = torch.cat(together).tolist()
    of_checks: list[list[list[float]]] = []
    for tensors in pending:
        rows = []
        for tensor in tensors:
            if tensor.device == loss.device:
                rows.append(rest[: tensor.numel()])
                rest = rest[tensor.numel() :]
            else:
                rows.append(tensor.tolist())
        of_checks.append(rows)
    return read_loss, read_norm, of_checks


def _nan_as_infinity(norm: float) -> float:
    return norm if norm < math.inf else math.inf


class MovementCallback(TrainerCallback):
    """Checks, once, that the trainable weights change; each rank checks its own (replicas, or its shards).

    LoRA's ``B`` starts at zero, so one that is still zero has never had a gradient.
    """

    def __init__(self, model: nn.Module, report: Callable[[StepFinding], None]) -> None:
        self._model, self._report = model, report
        self._before: list[Digest] = []
        self._began = self._check_at = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._before = self._digests()
        self._began, self._check_at = state.global_step, state.global_step + FIRST_CHANGE_CHECK

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if state.global_step != self._check_at:
            return
        if not any(group["lr"] for group in more["optimizer"].param_groups):
            self._check_at += FIRST_CHANGE_CHECK  # such steps change nothing
            return
        steps = state.global_step - self._began
        still = _zero_matrices(self._model)
        if self._before and self._before == self._digests():
            said = (
                f"no trainable weight changed in {steps} steps ({len(self._before)} weights). Likely causes: a "
                "learning rate that is too small for the dtype of the weights (bfloat16 loses changes below about 0.4 "
                "%), gradients that do not reach them, or arithmetic on the device that gives zeros (the doctor tests "
                "it)"
            )
            self._report(StepFinding(state.global_step, "nothing moves", said))
        elif still:
            said = (
                f"{len(still)} LoRA matrices B are still zero after {steps} steps ({listed(still)}): these layers do "
                "not contribute to the loss (experts that no token is routed to, for example), or receive no gradient"
            )
            self._report(StepFinding(state.global_step, "adapters do not move", said))

    def _digests(self) -> list[Digest]:
        return list(QueuedDigests([weight.detach() for _, weight in _trainable(self._model)]).result())


def _zero_matrices(model: nn.Module) -> list[str]:
    """The names of LoRA's matrices B that are zero."""
    matrices = {name: weight for name, weight in _trainable(model) if "lora_B" in name}
    if not matrices:
        return []
    nonzero = [weight.detach().any().reshape(()) for weight in matrices.values()]
    is_nonzero = torch.stack(nonzero).tolist()  # one wait for all of them
    return [name for name, moved in zip(matrices, is_nonzero, strict=True) if not moved]


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """This rank's part of each weight that requires gradients, by name."""
    return [(name, local(weight)) for name, weight in model.named_parameters() if weight.requires_grad]
