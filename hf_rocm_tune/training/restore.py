"""Adapters and optimizer state from a checkpoint, read on the host and brought to the device by the caller's mover.

PEFT's ``load_adapter`` is not used: it reads straight onto the device, and by default (``autocast_adapter_dtype=True``)
turns the bf16 adapters of a QLoRA run into fp32, so that a resumed run is no longer bit-equal to an uninterrupted one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.training.readback import ADAPTER_FILE, adapter_directory
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

# bitsandbytes 0.50.2, ``Optimizer8bit.get_state_buffer``: what it pages, and from how many elements on.
_PAGED = frozenset({"state1", "state2"})
_PAGED_FROM = 100_000


class Place(Protocol):
    """Brings one host tensor to where it is used."""

    def __call__(self, tensor: Tensor, *, name: str, stage: str) -> Tensor: ...


def load_adapters(directory: Path, model: nn.Module, place: Place) -> None:
    """Set every adapter of a PEFT model from ``directory``; dtypes and trainability stay as they are.

    Raises:
        UsageError: a file is missing or damaged, or its tensors do not fit the model's adapter.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for adapter in cast("PeftModel", model).peft_config:
        file = adapter_directory(directory, adapter) / ADAPTER_FILE
        tensors = _read_file(file)
        live = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        _check_fit(file, tensors, live)
        placed = {name: place(tensor, name=name, stage="adapter") for name, tensor in tensors.items()}
        set_peft_model_state_dict(model, placed, adapter_name=adapter)


def load_optimizer(path: Path, optimizer: Any, place: Place) -> None:
    """Set the optimizer's state from ``optimizer.pt``; tensors without a dimension (step counts) stay on the host.

    bitsandbytes' paged state stays paged: its own ``load_state_dict`` would put all of it on the device.

    Raises:
        UsageError: the file cannot be read, or was written for other parameters.
        CorruptionError: a page does not hold what the file does.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper passes no options on
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if getattr(own, "is_paged", False):
            own.load_state_dict(state, move_to_device=False)
            _place_paged(own, place)
        else:
            optimizer.load_state_dict(_placed(state, place))
    except (RuntimeError, ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be resumed from: {error}; name another checkpoint or start afresh") from error


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


def _placed(value: Any, place: Place, name: str = "optimizer") -> Any:
    if torch.is_tensor(value):
        return place(value, name=name, stage="optimizer") if value.dim() > 0 else value
    if isinstance(value, dict):
        return {key: _placed(item, place, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, place, f"{name}.{index}") for index, item in enumerate(value))
    return value


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except FileNotFoundError as error:
        raise UsageError(f"{file.parent} holds no {file.name}: name a checkpoint of this run's adapter") from error
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read ({error}): name another checkpoint or start afresh") from error


def _check_fit(file: Path, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    missing = sorted(live.keys() - saved.keys())
    if missing:
        raise UsageError(
            f"{file} is of another adapter: it lacks {len(missing)} of {len(live)} tensors, {missing[0]} first; "
            "use the LoRA settings it was trained with"
        )
    for name, tensor in live.items():
        if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"{file} does not fit: {name} is {_form(saved[name])} there and {_form(tensor)} in this run; "
                "use the settings it was trained with"
            )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
