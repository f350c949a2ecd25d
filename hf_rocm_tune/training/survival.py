"""What a trainer does so that a run outlives crashes: signals, signs of life, and steps that are left out.

`SurvivalMixin` stands in front of a ``transformers.Trainer`` subclass, before the verified checkpoints. A step that is
left out is counted and takes its batches from the loader, but nothing is computed: weights and optimizer state stay,
the schedule moves on, and the position in the data remains that of every other run with these settings.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from typing_extensions import override

from hf_rocm_tune.training.crash import Crashes
from hf_rocm_tune.training.interrupt import InterruptCallback, StopRequests
from hf_rocm_tune.training.supervised import Heart, Listener, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer as _Base
    from transformers import TrainerControl, TrainerState, TrainingArguments
else:
    _Base = object

logger = logging.getLogger(__name__)


class SurvivalMixin(_Base):
    """See the module's description.

    Attributes:
        run_id: of the run; set by the caller.
        skip_steps: numbers of the optimizer steps, from 1 on, that are left out; set by the caller, equal on all ranks.
        stop_requests: the signals that end a training early; its ``installed`` may be entered around more than `train`.

    Raises:
        UsageError: ``HF_ROCM_TUNE_CRASH`` is wrong.
        Interrupted: from `train`, after the checkpoint, when a signal asked for the end.
    """

    run_id: str = ""
    skip_steps: frozenset[int] = frozenset()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.stop_requests = StopRequests()
        self._heart = Heart()
        self._crashes = Crashes()
        self._interrupts = InterruptCallback(self.stop_requests)
        args = keywords.get("args", arguments[1] if len(arguments) > 1 else None)
        if args is not None and args.enable_jit_checkpoint:
            # Upstream's own writes in place, and takes the end for a finished run.
            logger.warning(
                "enable_jit_checkpoint is set to False: SIGTERM writes a verified checkpoint here without it"
            )
            args.enable_jit_checkpoint = False
        super().__init__(*arguments, **keywords)
        self.add_callback(self._interrupts)
        self.add_callback(_PulseCallback(self._heart))

    @override
    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; within it, Ctrl-C and SIGTERM write a checkpoint and end the training."""
        with self.stop_requests.installed():
            self._strike("start", 0)
            return super().train(*arguments, **keywords)

    @override
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream, except for a step that is left out: its batch gets its verdict and is not used."""
        if self.step_is_skipped:
            self._prepare_inputs(inputs)
            self._give_the_scaler_something()
            return torch.zeros((), device=self.args.device)
        self._strike("step", self.state.global_step + 1)
        return super().training_step(model, inputs, num_items_in_batch)

    @property
    def step_is_skipped(self) -> bool:
        """Whether the step that is under way is one of `skip_steps`."""
        return self.state.global_step + 1 in self.skip_steps

    @property
    def crash_injection(self) -> str | None:
        """The crashes that were asked for, as they were written; None for none."""
        return self._crashes.text

    def beat(self, phase: Phase) -> None:
        """One sign of life for the watchdog, and for the supervisor where there is one."""
        self._heart.beat(step=self.state.global_step, phase=phase)

    def listen(self, listener: Listener) -> None:
        """Let somebody hear the signs of life, beside the supervisor."""
        self._heart.listener = listener

    @override
    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """As upstream; its first batch may take its time."""
        self.beat("evaluate")
        return super().evaluation_loop(*arguments, **keywords)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.beat("save")
        self._strike("save", self.state.global_step)
        super()._save_checkpoint(model, trial)
        self.beat("between")

    @override
    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # With save_strategy="best" this alone decides about the save, and would undo one that was asked for.
        return bool(super()._determine_best_metric(metrics, trial)) or self._interrupts.save_wanted

    def _strike(self, at: str, step: int) -> None:
        self._crashes.strike(at, step, directory=Path(self.args.output_dir), run_id=self.run_id)

    def _give_the_scaler_something(self) -> None:
        """The gradient scaler of fp16 refuses a step without any gradient: zeros let only the moments decay."""
        if self.accelerator.scaler is None:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _PulseCallback(TrainerCallback):
    """A sign of life at everything that a trainer tells of."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="between", fresh=True)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="between", fresh=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="step")

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="between")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._heart.beat(step=state.global_step, phase="evaluate")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="between")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._heart.beat(step=state.global_step, phase="end")
