"""The flags that ``trl sft`` does not have, and what the ranks of a job settle before they join a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.models import recompute
from hf_rocm_tune.ranks import preflight
from hf_rocm_tune.ranks.averaging import SyncSettings
from hf_rocm_tune.training import stall


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """The flags of every job. Their meaning is in the help of each."""

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
    recompute_layers: str | None = field(
        default=None,
        metadata={
            "help": "Activation checkpointing of some layers, the first ones: how many are recomputed whole, and how "
            "many but for matrix products and attention (8 or 8,20). --auto_fit chooses it where that is fastest. "
            "Default: all whole, or none, as --activation_checkpointing says."
        },
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
    verbose: bool = field(
        default=False,
        metadata={"aliases": ["-v"], "help": "Say more at the start: each default that differs from TRL's, and why."},
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
        if self.recompute_layers is not None:
            recompute.parse(self.recompute_layers)
        if self.max_skipped_steps < 0:
            raise ValueError(f"--max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience must be 1 or more, got {self.early_stopping_patience}")
        if self.early_stopping_threshold < 0:
            raise ValueError(f"--early_stopping_threshold must be 0 or more, got {self.early_stopping_threshold}")

    @property
    def recompute(self) -> tuple[int, int] | None:
        """``recompute_layers`` as numbers."""
        return None if self.recompute_layers is None else recompute.parse(self.recompute_layers)

    @property
    def eval_rows(self) -> int | float | None:
        """``eval_split_size`` as ``train_test_split(test_size=)`` has it: an int counts rows, a float is a share."""
        size = self.eval_split_size
        return int(size) if size is not None and size >= 1 else size


_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


@dataclass(frozen=True, kw_only=True)
class RanksArguments:
    """The flags of a job on several cards or machines. Their meaning is in the help of each."""

    grad_sync: Literal["auto", "ddp", "host"] = field(
        default="auto",
        metadata={
            "help": "How several processes average gradients: as DistributedDataParallel does over the process group, "
            "or through host memory over gloo, verified both ways. auto: what the preflight finds to work."
        },
    )
    grad_compression: Literal["none", "fp16", "bf16", "powersgd"] = field(
        default="none",
        metadata={
            "help": "What of the gradients travels between the processes: all, a cast to 16 bits, or PowerSGD's "
            "approximation of rank 1 (not through the host). The casts are verified in their rounding; of PowerSGD's "
            "result only that all processes have the same."
        },
    )
    split_layers: str | None = field(
        default=None,
        metadata={
            "help": "One model over several cards in one process, for what is larger than a card: layers on each card "
            "(18, or 18,22; the last may be left out), or auto, which fills them evenly by plan. On the CPU the cards "
            "are logical: the same code and real copies, for trying it out."
        },
    )
    preflight: Literal["auto", "always", "off"] = field(
        default="auto",
        metadata={
            "help": "Whether several processes try their cards before they join: copies of every pair by value, and "
            "an all-reduce, in child processes with deadlines, under 30 seconds in all. auto: where they train on "
            "cards; always: on the CPU too."
        },
    )
    stall_timeout: str = field(
        default="auto",
        metadata={
            "help": "Seconds without progress in a training step after which the job ends with exit code 4 and names "
            "the rank that is stopped or stuck, one process alone too; evaluations, saves and the first steps get 4 "
            "times that. auto: 300, or 10 times the median of the last steps where that is more. 0: never."
        },
    )

    def __post_init__(self) -> None:
        stall.parse(self.stall_timeout)
        self.sync(None)

    def sync(self, found: str | None) -> SyncSettings:
        """How gradients are averaged: as the user says, else as the preflight has found.

        Args:
            found: the way that a preflight has chosen; None where there was none.

        Raises:
            UsageError: the compression that is asked for does not go with it.
        """
        wanted = found if self.grad_sync == "auto" else self.grad_sync
        return SyncSettings(way="host" if wanted == "host" else "ddp", compression=self.grad_compression)


def process_group(sync: SyncSettings, values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the way of averaging asks of TRL's settings: through the host, RCCL is not even made.

    Args:
        sync: as it will be.
        values: TRL's settings by name, as far as they are given.
        environ: of this process, with ``WORLD_SIZE`` where a launcher set it: Accelerate takes a back end for the word
            that there is a process group, and a single process has none.

    Raises:
        UsageError: another process group is asked for.
    """
    if sync.way != "host" or environ.get("WORLD_SIZE", "1") == "1":
        return {}
    given = values.get("ddp_backend")
    if given not in (None, "gloo"):
        raise UsageError(
            f"--ddp_backend {given} does not go with averages of gradients through the host (--grad_sync), which leave "
            "it out: drop --ddp_backend, or choose --grad_sync ddp"
        )
    return {"ddp_backend": "gloo"}


def decide(
    ranks: RanksArguments,
    accelerator: bool,
    accumulation: int,
    *,
    environ: MutableMapping[str, str],
    place: Path | None,
    say: Callable[..., None],
) -> preflight.Preflight | None:
    """Make the preflight where there are several ranks and it is wanted. Every rank calls it.

    It works the same however the ranks were started: what it needs is in the environment that every launcher fills.

    Args:
        ranks: ``--preflight`` and ``--grad_sync``.
        accelerator: whether this rank trains on one.
        accumulation: ``--gradient_accumulation_steps``, for the command that trains on one card.
        environ: of this rank; ``NCCL_P2P_DISABLE`` is set where RCCL works only so.
        place: see `preflight.run`.
        say: takes the lines for the user.

    Returns:
        The decision; None where there was nothing to decide.

    Raises:
        UsageError: the fault that is asked for does not exist.
        StallError: a rank is missing, nothing works, or not what the user has asked for.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if world < 2 or place is None or ranks.preflight == "off" or (ranks.preflight == "auto" and not accelerator):
        return None
    device = _device(int(environ["LOCAL_RANK"]), accelerator)
    done = preflight.run(asked=ranks.grad_sync, device=device, environ=environ, place=place)
    say(*done.lines())
    config = "single_rx7900xt" if accelerator else "cpu"
    one_card = (
        f"`hf-rocm-tune sft --accelerate_config {config} --gradient_accumulation_steps {world * accumulation}` and "
        "your other flags (the same effective batch)"
    )
    preflight.insist(done, one_card=one_card)
    if done.choice.way == "host" and any(environ.get(name, "").lower() == "true" for name in _SHARDED):
        raise StallError(
            f"gradients can only be averaged through host memory here ({done.choice.reason}), which FSDP and DeepSpeed "
            f"cannot do: train without them (--accelerate_config dual_rx7900xt), or on one card with {one_card}"
        )
    several_machines = environ.get("LOCAL_WORLD_SIZE", str(world)) != str(world)
    if done.choice.way == "host" and ranks.grad_sync != "host" and several_machines:
        raise StallError(
            f"gradients can only be averaged through host memory on this machine ({done.choice.reason}), and the "
            "others do not know of it: start all of them again with --grad_sync host"
        )
    if done.choice.way == "ddp_without_p2p":
        environ[preflight.P2P_VARIABLE] = "1"
    return done


def _device(local_rank: int, accelerator: bool) -> dict[str, Any]:
    """Of this rank, by Accelerate's rule: the card of its number on this machine."""
    if not accelerator:
        return {"device": "cpu", "address": None}
    seen = local_rank < torch.cuda.device_count()  # else its trials say that it is not there
    return {"device": f"cuda:{local_rank}", "address": pci_address(local_rank) if seen else None}
