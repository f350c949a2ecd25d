"""Before a model is loaded: adapters, GRPO's reward functions, and how several ranks average gradients."""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hf_rocm_tune.cards import preflight
from hf_rocm_tune.cards.way import is_on
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.settings.arguments import RanksArguments

if TYPE_CHECKING:
    from hf_rocm_tune.publish.adapter import Adapter


def check_adapter(method: str, adapter: Adapter | None) -> None:
    """Refuses to train a reward model on with an adapter that has no reward head: a new one would not be saved."""
    if adapter is not None and method == "reward" and (kind := adapter.config.task_type) != "SEQ_CLS":
        raise UsageError(
            f"--adapter_name_or_path {adapter.name} is no adapter of a reward model (its task_type is {kind}, not "
            "SEQ_CLS): give one that `reward` has trained, or drop the flag"
        )


def reward_functions(script: Any) -> list[Any]:
    """The reward functions and reward model that the flags name: TRL's, dotted paths of installed modules, or, as
    ``./rewards.length``, `length` of ``rewards.py`` in the working directory.
    """
    from trl import rewards

    known = {each: getattr(rewards, each) for each in _REWARDS_OF_TRL}
    known["get_soft_overlong_punishment"] = rewards.get_soft_overlong_punishment(1280, 256)  # TRL's numbers
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    found += [known[name] if name in known else _imported(name, known) for name in script.reward_funcs or ()]
    if not found:
        raise UsageError(
            f"no reward: give --reward_funcs ({', '.join(known)}, or module.function), or --reward_model_name_or_path"
        )
    return found


_REWARDS_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def check_rewards(rewards: Iterable[Any], columns: Iterable[str] | None) -> None:
    """Refuses a reward function that TRL cannot call with these columns; None: they are not known."""
    if columns is None:
        return
    given = dict.fromkeys((*_OF_TRL, *(set(columns) - {"prompt", "completion", "completion_ids"})))
    for function in filter(callable, rewards):
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            raise UsageError(
                f"--reward_funcs {function.__name__}: {error}; its arguments are the columns of the rows "
                f"({', '.join(columns)}) and {', '.join(_OF_TRL)}"
            ) from error


def _imported(name: str, known: Iterable[str]) -> Any:
    here = name.startswith("./")
    module, _, function = name.removeprefix("./").rpartition(".")
    if not module:
        raise UsageError(f"--reward_funcs {name}: give {', '.join(known)}, or a path module.function")
    try:
        if here:
            found = runpy.run_path(f"{module.replace('.', os.sep)}.py", run_name=module)[function]
        else:
            found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code runs here
        local = " (begin with ./ for a file in the working directory)" if not here else ""
        raise UsageError(f"--reward_funcs {name} cannot be imported: {type(error).__name__}: {error}{local}") from error
    if not callable(found):
        raise UsageError(f"--reward_funcs {name} is a {type(found).__name__}, not a function")
    return found


# ---- several ranks ---------------------------------------------------------------------------------------------------


def decide(
    ranks: RanksArguments,
    accelerator: bool,
    accumulation: int,
    *,
    environ: MutableMapping[str, str],
    say: Callable[..., None],
) -> preflight.Preflight | None:
    """Run the preflight if there are several ranks and it is enabled. Every rank calls it."""
    world = int(environ.get("WORLD_SIZE", "1"))
    if world < 2 or ranks.preflight == "off" or (ranks.preflight == "auto" and not accelerator):
        return None
    rank, device = int(environ["LOCAL_RANK"]), {"device": "cpu", "address": None}
    if accelerator:  # by Accelerate's rule the card of this number; if it is missing, its trials say so
        address = pci_address(rank) if rank < torch.cuda.device_count() else None
        device = {"device": f"cuda:{rank}", "address": address}
    done = preflight.run(asked=ranks.grad_sync, device=device, environ=environ)
    say(*done.lines())
    config = "single_rx7900xt" if accelerator else "cpu"
    one_card = (
        f"`hf-rocm-tune sft --accelerate_config {config} --gradient_accumulation_steps {world * accumulation}` and "
        "your other flags (the same effective batch)"
    )
    preflight.insist(done, one_card=one_card)
    if done.way == "host" and any(is_on(f"ACCELERATE_USE_{each}", environ) for each in ("FSDP", "DEEPSPEED")):
        raise StallError(
            f"gradients can only be averaged through host memory here ({done.reason}), which FSDP and DeepSpeed "
            f"do not support: train without them (--accelerate_config dual_rx7900xt), or on one card with {one_card}"
        )
    if done.way == "host" and ranks.grad_sync != "host" and environ.get("LOCAL_WORLD_SIZE", str(world)) != str(world):
        raise StallError(
            f"gradients can only be averaged through host memory on this machine ({done.reason}), and the "
            "other machines may average differently: start all of them again with --grad_sync host"
        )
    if done.way == "ddp_without_p2p":
        environ[preflight.P2P_VARIABLE] = "1"
    return done
