"""Our defaults where they differ from TRL's, and the checks that need more than one flag or a bound.

Both work on the plain values by name, before TRL's objects are built from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError

LORA_LEARNING_RATE = 2e-4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A default of ours that differs from TRL's, in use because the user gave no value.

    Args:
        name: the flag without its dashes.
        trl: the value that ``trl sft`` would use.
        ours: the value that is used.
        reason: why.
    """

    name: str
    trl: object
    ours: object
    reason: str


def differences(
    given: Mapping[str, Any], trl: Mapping[str, Any], *, accelerator: bool, bf16_supported: bool
) -> tuple[Difference, ...]:
    """Our defaults for the flags that were not given, as far as they differ from TRL's.

    Args:
        given: what the user set, by name.
        trl: TRL's defaults, by name.
        accelerator: whether the job runs on a GPU.
        bf16_supported: whether that GPU computes in bfloat16.
    """
    found: list[Difference] = []

    def default(name: str, ours: object, reason: str, *, upstream: object = None) -> None:
        theirs = trl[name] if upstream is None else upstream
        if name not in given and ours != theirs:
            found.append(Difference(name=name, trl=theirs, ours=ours, reason=reason))

    lora = given.get("use_peft", True)
    default("use_peft", True, "LoRA; --use_peft false trains all weights")
    if lora:
        default("learning_rate", LORA_LEARNING_RATE, "adapters start at zero and learn at about ten times the rate")
        if given.get("lora_target_parameters") is None:
            default("lora_target_modules", ["all-linear"], "every linear layer but the output head")
    if given.get("load_in_4bit"):
        default("use_bnb_nested_quant", True, "QLoRA: the quantisation constants are quantised too")
    # TRL resolves an unset bf16 to "not fp16", whatever the device can do.
    fp16 = given.get("fp16", False)
    default(
        "bf16",
        bf16_supported and not fp16,
        "the device computes in bfloat16" if bf16_supported else "no device here computes in bfloat16",
        upstream=not fp16,
    )
    if given.get("load_in_4bit") and not fp16:
        default("dtype", "bfloat16", "QLoRA computes in bfloat16, and so do the layers that are not quantised")
    elif lora and bf16_supported and not fp16:
        default("dtype", "bfloat16", "frozen weights take half the memory; adapters are trained in float32")
    if given.get("early_stopping_patience") is not None:
        default("metric_for_best_model", "loss", "early stopping watches the evaluation loss")
    if not accelerator:
        default("use_cpu", True, "there is no GPU here")
    default("dataloader_pin_memory", False, "the verified transfer has page-locked slots of its own")
    return tuple(found)


def check(given: Mapping[str, Any], *, accelerator: bool) -> None:
    """Check what the user gave, all of it at once.

    Raises:
        UsageError: one line with everything that is wrong.
    """
    faults = [
        f"--{name} must be {expected}, got {given[name]}"
        for name, (holds, expected) in _BOUNDS.items()
        if given.get(name) is not None and not holds(given[name])
    ]
    if not given.get("model_name_or_path"):
        faults.append("no model: give --model_name_or_path, a Hub id or a directory")
    if not given.get("dataset_name") and not given.get("datasets"):
        faults.append("no data: give --dataset_name (a Hub id, a directory or a file), or `datasets` in a recipe")
    quantised = [name for name in ("load_in_4bit", "load_in_8bit") if given.get(name)]
    if len(quantised) == 2:
        faults.append("--load_in_4bit and --load_in_8bit exclude each other; keep one")
    elif quantised and given.get("use_peft") is False:
        faults.append(f"--{quantised[0]} works only with LoRA; leave --use_peft false or --{quantised[0]} away")
    if given.get("early_stopping_patience") is not None and given.get("eval_strategy", "no") == "no":
        faults.append("--early_stopping_patience needs evaluations; add --eval_strategy steps (or epoch)")
    if given.get("fp16") and not accelerator:
        faults.append("--fp16 needs a GPU, and this job runs on the CPU; leave it away")
    if given.get("fp16") and given.get("bf16"):
        faults.append("--fp16 and --bf16 exclude each other; keep one")
    if faults:
        raise UsageError("; ".join(faults))


_Bound = tuple[Callable[[Any], bool], str]
_AT_LEAST_ONE: _Bound = (lambda value: value >= 1, "1 or more")
_NOT_NEGATIVE: _Bound = (lambda value: value >= 0, "0 or more")
_POSITIVE: _Bound = (lambda value: value > 0, "more than 0")
_SEED: _Bound = (lambda value: 0 <= value < 2**32, "0 or more and below 2**32")
_BETA: _Bound = (lambda value: 0 <= value < 1, "0 or more and below 1")
_BOUNDS: dict[str, _Bound] = {
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "per_device_eval_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    # transformers takes 0, like -1, for "no limit": a surprise for whoever asked for no step.
    "max_steps": (lambda value: value == -1 or value >= 1, "1 or more, or -1 for no limit"),
    "num_train_epochs": _POSITIVE,
    "learning_rate": (lambda value: 0 <= value < math.inf, "0 or more, and finite"),
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "logging_steps": _NOT_NEGATIVE,
    "eval_steps": _NOT_NEGATIVE,
    "save_steps": _NOT_NEGATIVE,
    "save_total_limit": _NOT_NEGATIVE,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "max_length": _AT_LEAST_ONE,
    "lora_r": _AT_LEAST_ONE,
    "lora_alpha": _AT_LEAST_ONE,
    "seed": _SEED,
    "data_seed": _SEED,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _NOT_NEGATIVE,
    "eval_accumulation_steps": _AT_LEAST_ONE,
    "lora_dropout": (lambda value: 0 <= value < 1, "0 or more and below 1"),
}
