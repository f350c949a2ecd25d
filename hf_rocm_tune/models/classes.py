"""The class of a model, decided in one place for training, previews, splits and plans: by its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification

from hf_rocm_tune.errors import FOREIGN_ERRORS, UsageError
from hf_rocm_tune.models.incomplete import describe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def architecture_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that the configuration names; None: it is of the model's own code."""
    return getattr(transformers, (config.architectures or ["?"])[0], None)


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that the model's own code is for; None: it names none of those that are trained."""
    remote = getattr(config, "auto_map", None) or {}
    for name in ("AutoModelForImageTextToText", "AutoModelForCausalLM"):
        if name in remote:
            return getattr(transformers, name)
    return None


def model_class(config: PreTrainedConfig) -> Any:
    """The class that training loads, as TRL's ``create_model_from_path`` decides."""
    return architecture_of(config) or auto_class(config) or transformers.AutoModelForCausalLM


def without_weights(config: PreTrainedConfig, *, reward: bool = False, trust_remote_code: bool = False) -> Any:
    """The model that training would load, on the meta device. ``reward``: as a reward model, of one output.

    Raises:
        UsageError: the configuration describes no model that transformers can make.
    """
    factory = model_class(config)
    if reward:
        config.num_labels = 1
        factory = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            if hasattr(factory, "from_config"):  # an auto class
                return factory.from_config(config, trust_remote_code=trust_remote_code)
            return factory(config)
    except FOREIGN_ERRORS as error:
        raise UsageError(f"the configuration describes no model that can be made: {describe(config, error)}") from error
