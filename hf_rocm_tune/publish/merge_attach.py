"""An adapter attached to a model: PEFT's layers, with tensors that the caller has placed.

PEFT decides which tensor of the file belongs where (old names of adapters for mixtures of experts included); here the
tensors are read on the host and handed to the caller, who places them: by the mover on a device, or nowhere, for a
merge. What the caller gives back is used as it is. `PeftModel.from_pretrained` is not used: it reads straight onto the
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge_adapter import WEIGHTS_FILE, short

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from hf_rocm_tune.publish.merge_adapter import Adapter

    Place = Callable[[Tensor, str], Tensor]

NAME = "default"
"""The name under which an adapter is attached."""

# Warnings of PEFT's: that merging a tied layer is the user's affair (here it is ours, see `merge_plan`), about patterns
# that PEFT itself adds for mixtures of experts whose experts are no targets, about a bias that a merge refuses by name,
# and about a name that transformers 5.23 has replaced.
_NOT_FOR_USERS = (
    ".*tie_word_embeddings.*",
    "The following .*_pattern keys",
    "`lora_bias=True` was passed",
    "`is_gradient_checkpointing` is deprecated",
)


def read_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of the file by their names in it, on the host: views of the mapped file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with safe_open(adapter.directory / WEIGHTS_FILE, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{adapter.name}: {WEIGHTS_FILE} cannot be read ({error}); copy it again") from error


def attach(model: PreTrainedModel, adapter: Adapter, place: Place) -> PeftModel:
    """Wrap a model with an adapter, active, in evaluation mode.

    Args:
        model: changed in place; it may be on the meta device.
        adapter: to attach.
        place: called with each tensor of the file and its name there; what it returns is used as it is.

    Raises:
        UsageError: the adapter does not belong to this model.
    """
    from peft import PeftModel, PeftModelForCausalLM, set_peft_model_state_dict

    wrapper = PeftModelForCausalLM if model.can_generate() else PeftModel
    adapter.config.inference_mode = True
    tensors = read_tensors(adapter)
    _resize_vocabulary(model, tensors)
    placed = {name: place(tensor, name) for name, tensor in tensors.items()}
    wrong = f"{adapter.name} does not fit {type(model).__name__} of {_base_name(model)}"
    cure = "give the model that it was trained on with --base"
    try:
        with warnings.catch_warnings():
            for message in _NOT_FOR_USERS:
                warnings.filterwarnings("ignore", message=message)
            peft_model = wrapper(model, adapter.config, NAME, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
        # Assigned, not copied: PEFT would move (and cast) what it loads to where, and what, the base weight is.
        peft_model.load_state_dict = partial(peft_model.load_state_dict, assign=True)
        loaded = set_peft_model_state_dict(peft_model, placed, NAME)
        del peft_model.load_state_dict
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"{wrong}: {short(error)}; {cure}") from error
    there = {name for name, value in peft_model.named_parameters(remove_duplicate=False) if not value.is_meta}
    adapters = (name for name in loaded.missing_keys if f".{NAME}." in name or name.endswith(f".{NAME}"))
    missing = [name for name in adapters if name not in there]  # one that is tied to another is stored once
    # PEFT saves a trained module of a resized vocabulary twice, the second time under a name that it does not read.
    stray = [name for name in loaded.unexpected_keys if ".modules_to_save." not in name]
    if missing or stray:
        what = f"it lacks {missing[0]}" if missing else f"it holds {stray[0]}, which is no part of it"
        raise UsageError(f"{wrong}: {what} ({len(missing) + len(stray)} tensors in all); {cure}")
    peft_model.eval()
    return peft_model


def _resize_vocabulary(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give the model as many token embeddings as the adapter brings: training may have added or cut off tokens.

    The rows that are new are made up here and replaced by the adapter's, which brings both embeddings whole.
    """
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), None)
    rows, width = embedding.weight.shape
    for name, tensor in tensors.items():
        of_embedding = name.startswith(f"base_model.model.{path}.") and name.endswith("weight")
        if of_embedding and ".lora_" not in name and tensor.ndim == 2 and tensor.shape[1] == width:
            if tensor.shape[0] != rows:
                model.resize_token_embeddings(tensor.shape[0], mean_resizing=False)
            return


def _base_name(model: PreTrainedModel) -> str:
    return getattr(model, "name_or_path", "") or "this base model"
