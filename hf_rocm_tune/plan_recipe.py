"""A planned choice as a command line and as a recipe that ``hf-rocm-tune sft --config`` reads. Imports no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.memory.plan import GIB
from hf_rocm_tune.memory.plan_choice import Option
from hf_rocm_tune.memory.plan_optimizers import DEFAULT as DEFAULT_OPTIMIZER
from hf_rocm_tune.plan_request import ALL_LINEAR, PlanRequest

PROGRAM = "hf-rocm-tune"
NO_DATA = "YOUR_DATA"
TWO_CARDS = "dual_rx7900xt"
#: What `hf-rocm-tune sft` does unasked; the command line leaves it out, the recipe states it.
_USUAL: dict[str, Any] = {
    "use_peft": True,
    "load_in_4bit": False,
    "use_bnb_nested_quant": True,
    "dtype": "bfloat16",
    "bf16": True,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": [ALL_LINEAR],
    "lora_modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "packing": False,
    "optim": DEFAULT_OPTIMIZER,
    "attn_implementation": None,
    "model_revision": "main",
    "trust_remote_code": False,
    "dataloader_num_workers": 0,
}


def settings(request: PlanRequest, option: Option, dataset: str | None = None) -> dict[str, Any]:
    """The settings of a choice, by the names of the flags of ``hf-rocm-tune sft``."""
    estimate = option.estimate
    case, method = estimate.case, estimate.variant
    found: dict[str, Any] = {"model_name_or_path": request.model}
    if dataset is not None:
        found["dataset_name"] = dataset
    found |= {
        "model_revision": request.revision,
        "trust_remote_code": request.trust_remote_code,
        "max_length": case.length,
        "packing": case.packing,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": case.checkpointing,
        "use_peft": method != "full",
        "dtype": request.dtype_of(method),
        "bf16": request.autocast,
        "optim": request.optim,
        "attn_implementation": None if request.attention == "sdpa" else request.attention,
        "dataloader_num_workers": request.workers,
    }
    if method == "qlora":
        found |= {"load_in_4bit": True, "use_bnb_nested_quant": request.nested}
    if method != "full":
        targets = [request.targets] if isinstance(request.targets, str) else list(request.targets)
        found |= {
            "lora_r": request.rank,
            "lora_alpha": request.alpha,
            "lora_dropout": request.adapter_dropout,
            "lora_target_modules": targets,
            "lora_modules_to_save": list(request.modules_to_save) or None,
            "use_dora": request.dora,
            "use_rslora": request.rslora,
        }
    return found


def command(request: PlanRequest, option: Option, dataset: str | None = None) -> str:
    """The command line of a choice; flags with their usual values are left out."""
    words = [PROGRAM, "sft"]
    if request.cards > 1:
        words += ["--accelerate_config", TWO_CARDS]
    given = settings(request, option, dataset or NO_DATA)
    for name, value in given.items():
        if value is None or (name in _USUAL and value == _USUAL[name]):
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(item) for item in value] if isinstance(value, list) else [_word(value)]
    return shlex.join(words)


def write_recipe(
    path: Path, request: PlanRequest, option: Option, *, dataset: str | None = None, replace: bool = False
) -> None:
    """Writes the recipe of a choice.

    Raises:
        UsageError: there is a file already and ``replace`` is not set, or it cannot be written.
    """
    check_recipe(path, replace=replace)
    content = {name: value for name, value in settings(request, option, dataset).items() if value is not None}
    estimate = option.estimate
    head = (
        f"# Planned for {estimate.total / GIB:.1f} GiB of the card; `{PROGRAM} plan` says what takes it.\n"
        f"# Start: {PROGRAM} sft {f'--accelerate_config {TWO_CARDS} ' if request.cards > 1 else ''}--config {path.name}"
        f"{'' if dataset else f' --dataset_name {NO_DATA}'}\n"
    )
    try:
        path.write_text(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--emit {path} cannot be written: {error.strerror}; choose another file") from error


def check_recipe(path: Path, *, replace: bool) -> None:
    """Refuses a file that is there, before anything is planned.

    Raises:
        UsageError: see :func:`write_recipe`.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--emit {path} is not a file in a directory that exists; choose another")
    if path.exists() and not replace:
        raise UsageError(f"--emit {path}: that file exists; choose another, or give --force to replace it")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
