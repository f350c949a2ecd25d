"""The flags of a job on several cards or machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_rocm_tune.distributed.sync_settings import SyncSettings
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training import stall
from hf_rocm_tune.training.batch_shares import parse_shares


@dataclass(frozen=True, kw_only=True)
class RanksArguments:
    """Their meaning is in the help of each."""

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
    batch_shares: str | None = field(
        default=None,
        metadata={
            "help": "Rows of each micro-batch in uneven shares, for cards of unequal speed: 3:1 gives rank 0 three "
            "quarters of the rows of all ranks; auto measures the ranks' devices by a short matrix product. The "
            "effective batch and the loss stay those of even batches. Default: even."
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
        if self.batch_shares is not None:
            parse_shares(self.batch_shares)
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
