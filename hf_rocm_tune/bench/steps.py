"""``bench step``: what verification costs a training step.

Four trainers in one process, with the same model, data and seed: unverified, unverified again, sampled, and fully
verified. They train a few steps at a time, in turns, and the time of each step is divided by that of the same step of
the unverified trainer in the same turn; the second unverified one shows the noise of the measurement.

A step is measured from the end of the one before, so it includes its batch, digests, verdict, optimizer and sentinel.
The first step of each turn, and the first turn, are discarded. An accelerator is synchronised only at both ends of a
turn, because a wait after each step would hide what verification costs a run that queues steps ahead; there a sample is
the mean step of a turn. Not covered: saving, evaluation, several ranks.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from datasets.utils import logging as datasets_logging
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import VOCABULARY, Figures, Spread, in_turns, ratios, table
from hf_rocm_tune.models.factory import ModelSource, load_model
from hf_rocm_tune.transfer import Mover, TransferSettings

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

REFERENCE, CONTROL = "off", "off again"
"""The unverified trainer that all are compared with, and a second one like it."""
SIDES = {REFERENCE: "off", CONTROL: "off", "sample": "sample", "full": "full"}
GOALS = {"cpu": 1.02, "cuda": 1.01}
"""The project's goals: verified over unverified step time."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained: width and layers of the Llama, rows of a batch, tokens of a row."""

    hidden: int
    layers: int
    batch: int
    seq: int


# Four models and the activations of one fit into 20 GB.
_SIZES = {
    "cpu": Size(hidden=512, layers=8, batch=2, seq=64),
    "cuda": Size(hidden=2048, layers=12, batch=2, seq=1024),
}

Trainer = Callable[..., Any]


def run(wanted: Namespace, trainer_class: Trainer) -> None:
    """Trains, prints, writes."""
    device = report.choose_device(wanted.device)
    machine = report.describe(device)
    default = asdict(_SIZES[device.type])
    size = Size(**{name: getattr(wanted, name) or value for name, value in default.items()})
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as scratch, warnings.catch_warnings():
        # PEFT 0.21 reads an attribute that transformers 5.23 renamed: https://github.com/huggingface/peft/pull/2817
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        base = Path(scratch) / "base"
        set_seed(0)
        report.small_llama(size.hidden, size.layers, size.seq).save_pretrained(base)
        sides = {
            name: _TimedTrainer(trainer_class, wanted, size, device, base, verify) for name, verify in SIDES.items()
        }
        parameters = sum(parameter.numel() for parameter in sides[REFERENCE].trainer.model.parameters())
        try:
            seconds = _interleave(sides, wanted.turns)
        finally:
            for side in sides.values():
                side.trainer.mover.close()
    rows = [_row(name, seconds, sides[name]) for name in sides]
    settings = {**asdict(size), "device": str(device), "parameters": parameters}
    report.publish(wanted, machine, settings, rows, _table(rows), _notes(device, size, parameters, rows))


class _Clock(TrainerCallback):
    """Records when steps end; waits for an accelerator at the first and the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._device.type == "cuda" and state.global_step in (1, state.max_steps):
            torch.cuda.synchronize(self._device)
        self.ends.append(time.perf_counter())

    def samples(self) -> list[float]:
        """Seconds of the steps in `ends` without the first; on an accelerator their mean."""
        if self._device.type == "cuda":
            return [(self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)]
        return [later - earlier for earlier, later in pairwise(self.ends)]


class _TimedTrainer:
    def __init__(
        self, trainer_class: Trainer, wanted: Namespace, size: Size, device: torch.device, base: Path, verify: str
    ) -> None:
        self._clock = _Clock(device)
        self.loss = 0.0
        mover = Mover(device, settings=TransferSettings(verify=verify))
        model, _ = load_model(
            ModelSource(name=str(base), init={"dtype": "bfloat16" if device.type == "cuda" else "float32"}), mover
        )
        set_seed(0)  # of the adapter
        self.trainer = trainer_class(
            model=model,
            args=_training_arguments(wanted, size, device, base.parent / "out"),
            train_dataset=_random_tokens(size, wanted.steps + 1),
            processing_class=report.small_tokenizer(),
            peft_config=LoraConfig(target_modules="all-linear", r=16, lora_alpha=32),
            callbacks=[self._clock],
            mover=mover,
            sentinel_every=0 if verify == "off" else wanted.sentinel_every,
        )
        self.trainer.remove_callback(PrinterCallback)

    def turn(self) -> list[float]:
        """Train the steps of one turn; their samples in seconds."""
        self._clock.ends.clear()
        self.loss = self.trainer.train().training_loss
        return self._clock.samples()


def _training_arguments(wanted: Namespace, size: Size, device: torch.device, output: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=size.batch,
        max_length=size.seq,
        max_steps=wanted.steps + 1,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        use_cpu=device.type == "cpu",
        bf16=device.type == "cuda",
        activation_checkpointing=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _random_tokens(size: Size, steps: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, VOCABULARY, (steps * size.batch, size.seq), generator=generator)
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})


def _interleave(sides: dict[str, _TimedTrainer], turns: int) -> dict[str, list[float]]:
    """Samples by side; the first turn only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    begun = -1
    for turn, name in in_turns(sides, turns):
        if turn != begun:
            report.progress(f"turn {turn} of {turns}" if turn else "warming up")
            begun = turn
        taken = sides[name].turn()
        seconds[name] += taken if turn else []
    return seconds


def _row(name: str, seconds: dict[str, list[float]], side: _TimedTrainer) -> Figures:
    batches = side.trainer.transfer_report.to_dict()["batches"]
    return {
        "side": name,
        "verify": SIDES[name],
        "seconds": Spread.of(seconds[name]),
        "ratio": ratios(seconds[name], seconds[REFERENCE]),
        "ratio_of_totals": round(sum(seconds[name]) / sum(seconds[REFERENCE]), 6),
        "batch_bytes": batches["bytes"],
        "batch_verified_bytes": batches["verified_bytes"],
        "training_loss": side.loss,
    }


def _notes(device: torch.device, size: Size, parameters: int, rows: list[Figures]) -> list[str]:
    by_side = {row["side"]: row["ratio"].median for row in rows}
    goal, seen, noise = GOALS[device.type], by_side["full"], by_side[CONTROL]
    return [
        f"a Llama of {parameters / 1e6:.1f} M parameters with LoRA adapters, {size.batch} x {size.seq} tokens a step",
        f"goal: verified within {100 * (goal - 1):.0f} % of unverified; measured {100 * (seen - 1):+.2f} %, "
        f"{report.verdict(seen, noise, goal)}; two unverified trainers differ by {100 * (noise - 1):+.2f} %, "
        "the noise of this measurement",
        "ratios are taken step by step in the same turn; steps in which the sentinel reads large tensors show in the "
        "ratio of totals, not in the median",
    ]


def _table(rows: list[Figures]) -> str:
    columns = {
        "side": lambda row: row["side"],
        "ms a step (q1 .. q3)": lambda row: row["seconds"].show(2, 1e3, quartiles=True),
        "ratio to off (q1 .. q3)": lambda row: (
            "reference" if row["side"] == REFERENCE else row["ratio"].show(4, quartiles=True)
        ),
        "ratio of totals": lambda row: f"{row['ratio_of_totals']:.4f}",
        "samples": lambda row: row["seconds"].n,
        "batches verified": lambda row: f"{100 * row['batch_verified_bytes'] / row['batch_bytes']:.0f} %",
    }
    return table(columns, rows)
