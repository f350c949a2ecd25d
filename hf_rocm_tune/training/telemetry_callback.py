"""Puts the card's telemetry beside the loss: in every logger that the trainer reports to, and in its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_rocm_tune.machine.sysfs import LiveTree, Tree
from hf_rocm_tune.training.telemetry import Telemetry
from hf_rocm_tune.training.telemetry_source import Sample, card_of, sample, torch_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class TelemetryCallback(TrainerCallback):
    """Has the sensors looked at while a training lasts, and adds ``gpu/...`` to each training log.

    To be added with :func:`attach`: the services that a trainer reports to are callbacks themselves, and see only what
    a callback before them has added.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begins to look."""
        self.telemetry.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Looks no more. A training that ends in an error leaves the thread to the end of the process."""
        self.telemetry.stop()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Adds to training logs only: an evaluation at the same step would say the same again."""
        if logs is None or "loss" not in logs:
            return
        found = self.telemetry.since_last_log()
        logs.update(found)
        state.log_history[-1].update(found)  # the trainer has entered a copy there


def attach(trainer: Trainer, telemetry: Telemetry) -> None:
    """Give a trainer the callback, before all others."""
    trainer.callback_handler.callbacks.insert(0, TelemetryCallback(telemetry))


def of_device(
    device: torch.device,
    *,
    every_s: float,
    tell: Callable[[str], None],
    tree: Tree | None = None,
) -> Telemetry:
    """Telemetry of the very card that is trained on, found by its PCI address.

    Args:
        device: the device of this process.
        every_s, tell: see :class:`Telemetry`.
        tree: whose ``sys`` is read; this machine's unless given.
    """
    address, reason = card_of(device)
    files = tree or LiveTree()

    def read() -> Sample:
        assert address is not None
        return sample(files, address)

    return Telemetry(
        None if address is None else read,
        source=reason if address is None else f"amdgpu, {address}",
        every_s=every_s,
        memory=lambda: torch_memory(device),
        tell=tell,
    )
