"""The flags of a job on several cards or machines, and what its ranks settle before they join a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.ranks import preflight
from hf_rocm_tune.ranks.averaging import SyncSettings
from hf_rocm_tune.training import stall

_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


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
