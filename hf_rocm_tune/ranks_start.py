"""What the ranks of a job settle before they join a process group: how they will average gradients.

It works the same however the ranks were started (``hf-rocm-tune sft``, ``accelerate launch``, torchrun, Slurm,
``notebook_launcher``): all that it needs is in the environment that every launcher fills.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from hf_rocm_tune.distributed import preflight
from hf_rocm_tune.distributed.choice import P2P_VARIABLE
from hf_rocm_tune.distributed.preflight import Preflight
from hf_rocm_tune.distributed.preflight_meeting import Meeting
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.ranks_arguments import RanksArguments

_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def decide(
    ranks: RanksArguments,
    accelerator: bool,
    accumulation: int,
    *,
    environ: MutableMapping[str, str],
    say: Callable[..., None],
) -> tuple[Preflight, Meeting] | None:
    """Make the preflight where there are several ranks and it is wanted. Collective.

    Args:
        ranks: ``--preflight`` and ``--grad_sync``.
        accelerator: whether this rank trains on one.
        accumulation: ``--gradient_accumulation_steps``, for the command that trains on one card.
        environ: of this rank; ``NCCL_P2P_DISABLE`` is set where RCCL works only so.
        say: takes the lines for the user.

    Returns:
        The decision, and what has to be kept until the process group is up; None where there was nothing to decide.

    Raises:
        UsageError: the fault that is asked for does not exist.
        StallError: a rank is missing, nothing works, or not what the user has asked for.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if world < 2 or ranks.preflight == "off" or (ranks.preflight == "auto" and not accelerator):
        return None
    done, meeting = preflight.run(
        asked=ranks.grad_sync, device=_device(int(environ["LOCAL_RANK"]), accelerator), environ=environ
    )
    say(*done.lines())
    preflight.insist(done, one_card=_one_card(accelerator, world * accumulation))
    sharded = [name for name in _SHARDED if environ.get(name, "").lower() == "true"]
    if done.choice.way == "host" and sharded:
        raise StallError(
            f"gradients can only be averaged through host memory here ({done.choice.reason}), which FSDP and DeepSpeed "
            "cannot do: train without them (--accelerate_config dual_rx7900xt), or on one card with "
            f"{_one_card(accelerator, world * accumulation)}"
        )
    if done.choice.way == "ddp_without_p2p":
        environ[P2P_VARIABLE] = "1"
    return done, meeting


def _device(local_rank: int, accelerator: bool) -> dict[str, Any]:
    """Of this rank, by Accelerate's rule: the card of its number on this machine."""
    if not accelerator:
        return {"device": "cpu", "address": None}
    import torch

    from hf_rocm_tune.machine.software import pci_address

    if local_rank >= torch.cuda.device_count():
        return {"device": f"cuda:{local_rank}", "address": None}  # its trials say that it is not there
    return {"device": f"cuda:{local_rank}", "address": pci_address(local_rank)}


def _one_card(accelerator: bool, accumulation: int) -> str:
    config = "single_rx7900xt" if accelerator else "cpu"
    return (
        f"`hf-rocm-tune sft --accelerate_config {config} --gradient_accumulation_steps {accumulation}` and your other "
        "flags (the same effective batch)"
    )
