"""What only some methods of training have: settings that do not go with them, and GRPO's reward functions."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import str_to_bool

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.settings.arguments import Arguments

_SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def check_method(arguments: Arguments, environ: Mapping[str, str]) -> None:
    """Refuses what was never tried together with this method, or goes round the verification.

    Raises:
        UsageError: all of it in one line.
    """
    method, training, model = arguments.method, arguments.training, arguments.model
    if method == "sft":
        return
    sharded = training.fsdp or training.deepspeed or any(str_to_bool(environ.get(name) or "no") for name in _SHARDED)
    reasons = {
        "FSDP and DeepSpeed": bool(sharded),
        "--split_layers": arguments.ranks.split_layers is not None,
        "--precompute_ref_log_probs, whose batches are moved unverified": getattr(
            training, "precompute_ref_log_probs", False
        ),
        "--use_vllm, whose weights and answers are not verified": getattr(training, "use_vllm", False),
        "--use_transformers_continuous_batching, which casts the model in place": getattr(
            training, "use_transformers_continuous_batching", False
        ),
        "--use_peft false together with --beta, whose reference model is loaded by its name alone (--model_revision)": (
            method == "grpo" and training.beta != 0.0 and not model.use_peft and model.model_revision != "main"
        ),
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UsageError(f"{method} does not go together with {'; nor with '.join(found)}")


def reward_functions(script: Any) -> list[Any]:
    """The functions and the model that `trl grpo`'s flags name.

    ``--reward_funcs`` takes TRL's names and dotted paths. A module is found as by any import; from the working
    directory nothing is imported unless the path begins with ``./``: ``./rewards.length`` is `length` of ``rewards.py``
    there.

    Raises:
        UsageError: there is none, or one cannot be imported.
    """
    from trl import rewards

    known = {
        "accuracy_reward": rewards.accuracy_reward,
        "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
        "think_format_reward": rewards.think_format_reward,
        "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),  # TRL's numbers
    }
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        found.append(known[name] if name in known else _imported(name, known))
    if not found:
        raise UsageError(
            f"no reward: give --reward_funcs ({', '.join(known)}, or module.function), or --reward_model_name_or_path"
        )
    return found


def _imported(name: str, known: Mapping[str, Any]) -> Any:
    here = name.startswith("./")
    module, _, function = name.removeprefix("./").rpartition(".")
    if not module:
        raise UsageError(f"--reward_funcs {name}: there are {', '.join(known)}, and paths as module.function")
    try:
        if here:
            file = Path.cwd() / f"{module.replace('.', os.sep)}.py"
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None, "the name ends in .py"
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        found = getattr(loaded, function)
    except Exception as error:  # the user's code runs here
        local = " (for a file of the working directory begin with ./)" if not here else ""
        raise UsageError(f"--reward_funcs {name} cannot be imported: {type(error).__name__}: {error}{local}") from error
    if not callable(found):
        raise UsageError(f"--reward_funcs {name} is a {type(found).__name__}, not a function")
    return found
