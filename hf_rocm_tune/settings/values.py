"""Values that are refused before torch is imported; one that cannot be read here is left to the parser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hf_rocm_tune.data.sources import refuse_missing
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.caches import unwritable
from hf_rocm_tune.paths import HUB_FIX, answers, is_local_model, require_model

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "1 or more",
        lambda value: value >= 1,
        "sample_every effective_batch early_stopping_patience per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps max_length lora_r lora_alpha eval_accumulation_steps max_pixels",
    ),
    (
        "0 or more, and finite",
        lambda value: 0 <= value < math.inf,
        "telemetry_every embedding_learning_rate max_skipped_steps early_stopping_threshold learning_rate weight_decay "
        "warmup_steps logging_steps eval_steps save_steps save_total_limit dataloader_num_workers adam_epsilon "
        "neftune_noise_alpha dataset_num_proc",
    ),
    ("0 (off) or more", lambda value: value >= 0, "sentinel_every prefetch_batches"),
    ("0 or more", lambda value: value >= 0, "max_grad_norm"),  # inf: no clipping
    ("more than 0, and finite", lambda value: 0 < value < math.inf, "loraplus_lr_ratio auto_fit_gib num_train_epochs"),
    ("0 or more and below 2**32", lambda value: 0 <= value < 2**32, "seed data_seed"),
    ("0 or more and below 1", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2 lora_dropout"),
    # transformers treats 0 like -1
    ("1 or more, or -1 for no limit", lambda value: value == -1 or value >= 1, "max_steps"),
    (
        "a share between 0 and 1 or a number of rows",
        lambda size: 0 < size < 1 or (1 <= size < math.inf and size == int(size)),
        "eval_split_size",
    ),
    ("1 or more, or auto", lambda value: value >= 1, "pad_to_multiple_of"),
)


def out_of_range(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with these values, which may still be text."""
    faults = []
    for expected, holds, names in _RANGES:
        for name in names.split():
            number = _number(given.get(name))
            if number is not None and not holds(number):
                faults.append(f"--{name} must be {expected}, got {given[name]}")
    return faults


def missing(given: Mapping[str, Any]) -> list[str]:
    """What a job cannot do without and does not have."""
    faults = []
    if not given.get("model_name_or_path"):
        faults.append("no model: give --model (--model_name_or_path), a Hub id or a directory")
    if not given.get("dataset_name") and not given.get("datasets"):
        faults.append("no data: give --dataset (--dataset_name), a Hub id, a directory or a file")
    return faults


def without_value(typed: Mapping[str, Any]) -> list[str]:
    """What is wrong with flags of a command line, by name, after which nothing stands."""
    valued = {"model_name_or_path", "dataset_name", "output_dir"}
    for _, _, names in _RANGES:
        valued |= {*names.split()}
    return [f"--{name} needs a value after it" for name, value in typed.items() if value is None and name in valued]


def _number(value: Any) -> Any:
    """The number that a text stands for; None for words that a flag may have instead, nan for others."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return None if value.lower() in ("none", "null", "auto") else math.nan


def check_values(given: Mapping[str, Any]) -> None:
    """Refuses what is wrong in any case; ``given``: flags as typed, or a recipe's values, by name."""
    faults = out_of_range(given)
    if faults:
        raise UsageError("; ".join(faults))
    model = given.get("model_name_or_path")
    data = given.get("dataset_name")
    if isinstance(model, str):
        require_model(model)
    if isinstance(data, str):
        refuse_missing(data)
    # A recipe is written without the model, and without a network.
    if isinstance(model, str) and not is_local_model(model) and "print_config" not in given:
        _require_on_hub(model, given.get("model_revision"))


def _require_on_hub(model: str, revision: str | None) -> None:
    """Refuses a model of which not even the configuration can be had. Other answers of the Hub are for the loader."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import logging

    reasons = {  # by type: a gated model is one of the first as well
        RepositoryNotFoundError: "the Hub has no model of this name, or none that your token may read",
        LocalEntryNotFoundError: "the Hub cannot be reached, and the model is not in its cache",
    }
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        offline = constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT)
        hf_hub_download(model, "config.json", revision=revision, local_files_only=offline)
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = unwritable("hub") if isinstance(error, OSError) else None
        if why:
            raise UsageError(f"model {model}: it cannot be fetched, for the cache {why}") from error
        reason = reasons.get(type(error))
        if reason:
            raise UsageError(f"model {model}: {reason}; {HUB_FIX}") from error
    finally:
        logging.set_verbosity(verbosity)
