"""``bench step``: what verification costs a training step.

Four trainers in one process, the same model, data and seed: unverified, unverified once more, sampled, and fully
verified. They train in short stretches, in turns, and each step's time is divided by that of the same step of the
unverified trainer in the same turn. The second unverified trainer does the same work as the first, so its ratio is what
the measurement itself cannot tell from 1.

A step is measured from the end of the one before: fetching and sending the next batch, its digests and verdict,
``forward``, ``backward``, the optimizer, and the slice of the sentinel belong to it. The first of each stretch is
thrown away; it pays for starting.

Not covered: saving, evaluation, several ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from datasets.utils import logging as datasets_logging
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig

from hf_rocm_tune.bench import machine
from hf_rocm_tune.bench.figures import Spread, ratios, table
from hf_rocm_tune.bench.result import Result, publish
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import TransferSettings

if TYPE_CHECKING:
    from torch import nn

REFERENCE, CONTROL = "off", "off again"
"""The unverified trainer that all are compared with, and its double."""
SIDES = {REFERENCE: "off", CONTROL: "off", "sample": "sample", "full": "full"}
GOALS = {"cpu": 1.02, "cuda": 1.01}
"""Verified over unverified step time that the project wants to stay below."""
_VOCABULARY = 4096
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """Settings of ``bench step``; None: chosen for the device.

    Args:
        device: cpu, cuda, cuda:1; None for the first accelerator, else the CPU.
        hidden, layers: size of the Llama; hidden is a multiple of 64.
        batch, seq: rows of a batch, tokens of a row.
        turns: stretches of each trainer.
        steps: measured steps of a stretch.
        sentinel_every: as in ``sft``, for the trainers that verify; the unverified ones have no sentinel.
    """

    device: str | None = None
    hidden: int | None = None
    layers: int | None = None
    batch: int | None = None
    seq: int | None = None
    turns: int = 8
    steps: int = 8
    sentinel_every: int = 50

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "batch", "seq", "turns", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}; give a whole number from 1 on")
        if self.hidden is not None and self.hidden % _HEAD:
            raise UsageError(f"--hidden is {self.hidden}; give a multiple of {_HEAD}")
        if self.sentinel_every < 0:
            raise UsageError(f"--sentinel_every is {self.sentinel_every}; give 0 (off) or more")


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained: see `StepBench`."""

    hidden: int
    layers: int
    batch: int
    seq: int


_SIZES = {
    "cpu": Size(hidden=512, layers=8, batch=2, seq=128),
    "cuda": Size(hidden=2048, layers=16, batch=4, seq=1024),
}

Trainer = Callable[..., Any]


def run(bench: StepBench, command: str, *, json_file: Path | None, trainer_class: Trainer) -> None:
    """Trains, prints, writes.

    Args:
        trainer_class: ``VerifiedSFTTrainer``, or another SFT trainer behind the mixin.

    Raises:
        UsageError: the device is not there.
        CorruptionError: a transfer could not be made right.
    """
    device = machine.choose_device(bench.device)
    about = machine.describe(device)
    size = _size(bench, device)
    transformers_logging.set_verbosity_error()
    datasets_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as scratch:
        sides = {
            name: _Side(trainer_class, bench, size, device, verify, Path(scratch) / name.replace(" ", "-"))
            for name, verify in SIDES.items()
        }
        parameters = sum(parameter.numel() for parameter in sides[REFERENCE].trainer.model.parameters())
        try:
            seconds = _interleave(sides, bench.turns)
        finally:
            for side in sides.values():
                side.trainer.mover.close()
    rows = [_row(name, seconds, sides[name]) for name in sides]
    result = Result(
        bench="step",
        command=command,
        machine=about,
        settings={**asdict(bench), **asdict(size), "device": str(device), "parameters": parameters},
        rows=rows,
        notes=_notes(device, size, parameters, rows),
    )
    publish(result, _table(rows), json_file)


class _Side:
    """One trainer and the clock in its callbacks."""

    def __init__(
        self, trainer_class: Trainer, bench: StepBench, size: Size, device: torch.device, verify: str, output: Path
    ) -> None:
        self._clock = _Clock(device)
        self.trainer = trainer_class(
            model=_model(size),
            args=_training_arguments(bench, size, device, output),
            train_dataset=_rows_of_tokens(size, bench.steps + 1),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(target_modules="all-linear", r=16, lora_alpha=32),
            callbacks=[self._clock],
            transfer_settings=TransferSettings(verify=verify),
            sentinel_every=0 if verify == "off" else bench.sentinel_every,
            consent_unverified=True,
        )
        self.trainer.remove_callback("PrinterCallback") if False else None

    def stretch(self) -> list[float]:
        """Train one stretch; seconds of its steps but the first."""
        self._clock.ends.clear()
        self.trainer.train()
        ends = self._clock.ends
        return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
