"""Weights and training state from a checkpoint, read on the host and brought to the device by the caller's mover.

PEFT's ``load_adapter`` is not used: it reads straight onto the device, and by default (``autocast_adapter_dtype=True``)
turns the bf16 adapters of a QLoRA run into fp32, so that a resumed run is no longer bit-equal to an uninterrupted one.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.written import is_written_buffer, set_buffer
from hf_rocm_tune.training.readback import adapter_file
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

RNG_OF_CARDS = "rng_state_cards.pth"
"""States of all cards of a model whose layers are split over several; upstream saves the current one's."""

# bitsandbytes 0.50.2, ``Optimizer8bit.get_state_buffer``: what it pages, and from how many elements on.
_PAGED = frozenset({"state1", "state2"})
_PAGED_FROM = 100_000


class Place(Protocol):
    """Brings one host tensor to where it is used."""

    def __call__(self, tensor: Tensor, *, name: str, stage: str) -> Tensor: ...


def require_complete(directory: Path) -> None:
    """Refuse a checkpoint that upstream would use by halves, or stumble over.

    Raises:
        UsageError: it is not there, its trainer state cannot be read, or it has some of optimizer, scheduler and
            random state, not all.
    """
    if not directory.is_dir():
        raise UsageError(f"Can't find a valid checkpoint at {directory}: name another one or start afresh")
    try:
        step = TrainerState.load_from_json(str(directory / TRAINER_STATE_NAME)).global_step
        if not isinstance(step, int):
            raise ValueError(f"global_step is {step!r}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise UsageError(
            f"{directory}: {TRAINER_STATE_NAME} cannot be read ({text}); name another checkpoint or start afresh"
        ) from error
    parts = {name: (directory / name).is_file() for name in (OPTIMIZER_NAME, SCHEDULER_NAME)}
    parts["rng_state.pth"] = any(directory.glob("rng_state*.pth"))
    missing = [name for name, there in parts.items() if not there]
    if len(missing) == len(parts):
        logger.warning("%s holds weights only: optimizer, schedule and random numbers begin anew", directory)
    elif missing:
        raise UsageError(
            f"{directory} has no {' and no '.join(missing)}: a run resumed from it would be another one; name another "
            "checkpoint or start afresh"
        )


def rng_file(args: TrainingArguments) -> str:
    """Where ``Trainer._save_rng_state`` puts the random states of this rank."""
    return "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"


def random_states(*, all_cards: bool) -> dict[str, Any]:
    """The random states as they are now, in the form of ``Trainer._save_rng_state``, which has all cards' in ranks."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        read = torch.cuda.random.get_rng_state_all if all_cards else torch.cuda.random.get_rng_state
        states["cuda"] = read()
    return states


def load_adapters(directory: Path, model: nn.Module, place: Place) -> None:
    """Set every adapter of a PEFT model from ``directory``; dtypes and trainability stay as they are.

    Raises:
        UsageError: a file is missing or damaged, or its tensors do not fit the model's adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for adapter in cast("PeftModel", model).peft_config:
        file = directory / adapter_file(adapter)
        with _opened(file) as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        live = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        _check_fit(file, tensors, live)
        placed = {name: place(tensor, name=name, stage="adapter") for name, tensor in tensors.items()}
        set_peft_model_state_dict(model, placed, adapter_name=adapter)


def load_model(directory: Path, model: nn.Module, place: Place) -> None:
    """Set the weights of a whole model from the safetensors files in ``directory``, one tensor on its way at a time.

    A weight that is tied to another is in the files once, and set once.

    Raises:
        UsageError: a file is damaged, or its tensors are not those of the model.
    """
    live = model.state_dict()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory} holds no .safetensors file: name a checkpoint of this run's model")
    for file in files:
        with _opened(file) as opened:
            names = set(opened.keys())
            if not names <= live.keys():
                _load_converted(directory, model, place)
                return
            for name in sorted(names):
                tensor = opened.get_tensor(name)
                if tensor.shape != live[name].shape and is_written_buffer(model, name):
                    set_buffer(model, name, place(tensor, name=name, stage="adapter"))
                    continue
                _check_fit(file, {name: tensor}, {name: live[name]})
                live[name].copy_(place(tensor, name=name, stage="adapter"))  # device: both are there


def _load_converted(directory: Path, model: nn.Module, place: Place) -> None:
    """As `load_model` where the files hold other tensors than the model: fused experts are split when written."""
    host, info = type(model).from_pretrained(directory, dtype="auto", output_loading_info=True)  # type: ignore[attr-defined]
    lost = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if lost:
        raise UsageError(f"{directory} is of another model, it lacks or adds {lost[0]}: name another checkpoint")
    saved, live = host.state_dict(), model.state_dict()
    _check_fit(directory, saved, live)
    for name, tensor in live.items():
        tensor.copy_(place(saved[name], name=name, stage="adapter"))  # device: both are there


def load_optimizer(state: Any, optimizer: Any, place: Place) -> None:
    """Set the optimizer's state; step counts stay on the host unless the optimizer computes with them on the device.

    bitsandbytes' paged state stays paged: its own ``load_state_dict`` would put all of it on the device.

    Raises:
        ValueError: it was written for other parameters.
        CorruptionError: a page does not hold what the file does.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper passes no options on
    if getattr(own, "is_paged", False):
        own.load_state_dict(state, move_to_device=False)
        _place_paged(own, place)
        return
    # As torch decides in `Optimizer._process_value_according_to_param_policy`, which would move them itself.
    steps_on_device = {
        number
        for group in state["param_groups"]
        if group.get("fused") or group.get("capturable")
        for number in group["params"]
    }
    placed = {
        number: _placed(values, place, f"optimizer.state.{number}", steps=number in steps_on_device)
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})


def _place_paged(optimizer: Any, place: Place) -> None:
    """Bring loaded state to where bitsandbytes would have made it: large moments into pages, the rest to the device."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not torch.is_tensor(value) or value.dim() == 0:
                continue
            if name in _PAGED and parameter.numel() >= _PAGED_FROM and parameter.device.type != "cpu":
                values[name] = _in_pages(value, parameter.device, optimizer)
            else:
                values[name] = place(value, name=f"optimizer.state.{numbers[id(parameter)]}.{name}", stage="optimizer")


def _in_pages(value: Tensor, device: torch.device, optimizer: Any) -> Tensor:
    pages = importlib.import_module("bitsandbytes.functional").get_paged(*value.shape, dtype=value.dtype, device=device)
    pages.copy_(value)  # device: to torch both are host memory; the driver brings the pages over
    if digest(pages) != digest(value):
        raise CorruptionError(
            "paged optimizer state differs from the checkpoint after it was copied: start the same command again; if "
            "it stays, train with another --optim"
        )
    optimizer.page_mng.paged_tensors.append(pages)
    return cast("Tensor", pages)


def _placed(value: Any, place: Place, name: str, *, steps: bool) -> Any:
    if torch.is_tensor(value):
        if name.endswith(".step") and not steps:
            return value.clone()  # what was read is in the file's memory, all of which it would keep
        return place(value, name=name, stage="optimizer")
    if isinstance(value, dict):
        return {key: _placed(item, place, f"{name}.{key}", steps=steps) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, place, f"{name}.{index}", steps=steps) for index, item in enumerate(value))
    return value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except FileNotFoundError as error:
        raise UsageError(f"{file.parent} holds no {file.name}: name a checkpoint of this run's adapter") from error
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read ({error}): name another checkpoint or start afresh") from error


def _check_fit(file: Path, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    missing = sorted(live.keys() - saved.keys())
    if missing:
        raise UsageError(
            f"{file} is of another model or adapter: it lacks {len(missing)} of {len(live)} tensors, {missing[0]} "
            "first; use the settings it was trained with"
        )
    for name, tensor in live.items():
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"{file} does not fit: {name} is {_form(saved[name])} there and {_form(tensor)} in this run; "
                "use the settings it was trained with"
            )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
