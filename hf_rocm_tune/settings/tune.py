"""The flags of a job that ``trl sft`` does not have, but for those about several cards (``ranks_arguments``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """The flags that ``trl sft`` does not have. Their meaning is in the help of each."""

    verify: Literal["full", "sample", "off"] = field(
        default="full", metadata={"help": "Which transfers to the device are verified: all, a sample, or none."}
    )
    on_corruption: Literal["recover", "stop"] = field(
        default="recover",
        metadata={"help": "Whether bytes that arrived wrong are sent again, or end the run with exit code 3 at once."},
    )
    consent_unverified: bool = field(
        default=False, metadata={"help": "Train although `--verify full` does not cover every byte on the device."}
    )
    sentinel_every: int = field(
        default=50,
        metadata={"help": "Steps between two looks at weights that must not change. 0 turns the looks off."},
    )
    compare_optimizer_every: int = field(
        default=0,
        metadata={"help": "Steps between two comparisons of the optimizer's state over all ranks. 0 for never."},
    )
    prefetch_batches: int = field(
        default=1,
        metadata={
            "help": "Batches beyond the one in use that may be on their way to the device; above 1 it counts within "
            "an accumulation window only. 0 moves each batch when it is used."
        },
    )
    auto_fit: Literal["off", "plan", "probe"] = field(
        default="off",
        metadata={
            "help": "Choose micro-batch, accumulation and activation checkpointing, as far as they are not given, for "
            "the free memory of the card: by the plan, or corrected by a worst-case step before the run. The effective "
            "batch stays."
        },
    )
    effective_batch: int | None = field(
        default=None,
        metadata={
            "help": "With --auto_fit: sequences to one optimizer step over all processes. Default: what "
            "--per_device_train_batch_size and --gradient_accumulation_steps make."
        },
    )
    auto_fit_gib: float | None = field(
        default=None,
        metadata={"help": "With --auto_fit: GiB of the card to fit into. Default: what is free on it."},
    )
    on_oom: Literal["step_down", "stop"] = field(
        default="step_down",
        metadata={
            "help": "When a step runs out of device memory: do it again with smaller micro-batches at the same "
            "effective batch, or end the run with exit code 5. (With several ranks, step_down averages gradients after "
            "the last backward of a step instead of during it.)"
        },
    )
    max_skipped_steps: int = field(
        default=5,
        metadata={
            "help": "Steps among the last 100 that may be left out because loss or gradients are not finite; one more "
            "ends the run with exit code 3."
        },
    )
    doctor: Literal["quick", "off"] = field(
        default="quick",
        metadata={"help": "Whether the machine is looked at before the run: what can be read in a few seconds."},
    )
    telemetry_every: float = field(
        default=1.0,
        metadata={
            "help": "Seconds between two looks at the card's temperature, power and load during a run. 0 for never."
        },
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Use an output directory that holds another run; its files are replaced."}
    )
    eval_split_size: float | None = field(
        default=None,
        metadata={
            "help": "Evaluation rows to split off when the dataset has no test split: a share below 1, or a number."
        },
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better metric."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "How much better the metric must be to count for early stopping."}
    )
    hub_base_model_id: str | None = field(
        default=None,
        metadata={
            "help": "Name of the base model on the Hub (ORG/NAME) for what is pushed, where --model_name_or_path is a "
            "directory; without it the published copy names the directory's last part."
        },
    )
    hub_verify: Literal["download", "hashes"] = field(
        default="download",
        metadata={
            "help": "How a pushed result is checked: every byte, downloaded, or only the hashes that the Hub states."
        },
    )
    print_config: bool = field(
        default=False, metadata={"help": "Print the resolved configuration as a YAML recipe and exit."}
    )

    def __post_init__(self) -> None:
        size = self.eval_split_size
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise ValueError(f"--eval_split_size must be a share between 0 and 1 or a number of rows, got {size}")
        for name in ("sentinel_every", "compare_optimizer_every", "prefetch_batches", "telemetry_every"):
            if not getattr(self, name) >= 0:  # a NaN is not either
                raise ValueError(f"--{name} must be 0 (off) or more, got {getattr(self, name)}")
        if self.auto_fit == "off" and (self.effective_batch is not None or self.auto_fit_gib is not None):
            name = "effective_batch" if self.effective_batch is not None else "auto_fit_gib"
            raise ValueError(f"--{name} works only with --auto_fit plan or --auto_fit probe; add one of them")
        if self.effective_batch is not None and self.effective_batch < 1:
            raise ValueError(f"--effective_batch must be 1 or more, got {self.effective_batch}")
        if self.auto_fit_gib is not None and not 0 < self.auto_fit_gib < math.inf:
            raise ValueError(f"--auto_fit_gib must be more than 0, and finite, got {self.auto_fit_gib}")
        if self.max_skipped_steps < 0:
            raise ValueError(f"--max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience must be 1 or more, got {self.early_stopping_patience}")
        if self.early_stopping_threshold < 0:
            raise ValueError(f"--early_stopping_threshold must be 0 or more, got {self.early_stopping_threshold}")

    @property
    def eval_rows(self) -> int | float | None:
        """``eval_split_size`` as ``train_test_split(test_size=)`` has it: an int counts rows, a float is a share."""
        size = self.eval_split_size
        return int(size) if size is not None and size >= 1 else size
