"""Are the tensors in a saved file those that are live in the model? Compared by digest, bit for bit.

The file is read back from the device where the system allows it (see `integrity.manifest`), on the host. The live
tensor is digested where it is, by the kernel that computes with it, so that a copy engine which damages what it brings
to the host cannot damage both sides of the comparison alike.

Covered: adapters (with trained modules and saved embeddings), whole models, optimizer state. Not covered: files that
hold no tensors of the device (scheduler, random states, tokenizer); the manifest's digests cover those on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.integrity.atomic import flush
from hf_rocm_tune.integrity.manifest import drop_from_cache
from hf_rocm_tune.transfer.digest import digest

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Readback:
    """Outcome of a comparison.

    Attributes:
        files: how many files were read back.
        tensors: digest (hexadecimal) of each tensor in them, by "<file>:<tensor>".
        differing: "<file>:<tensor>" of what is not bit for bit the live tensor, is missing, or cannot be read.
    """

    files: int
    tensors: Mapping[str, str]
    differing: list[str]


def compare_model(directory: Path, model: nn.Module, trained: Mapping[str, Tensor] | None = None) -> Readback:
    """Compare the safetensors files in ``directory`` with a PEFT model's live adapters, or a whole model.

    Args:
        directory: holds the files.
        model: whose they are.
        trained: of a PEFT model that is sharded, the trained weights by name, whole; else they are the model's own.
    """
    tensors: dict[str, str] = {}
    differing: list[str] = []
    files = 0
    for file, live, required in _expected(directory, model, trained):
        names = set()
        for name, saved in _read(file, differing):
            names.add(name)
            label = f"{file.name}:{name}"
            tensors[label] = digest(saved).hex()
            if name not in live or not _same(saved, live[name], tensors[label]):
                differing.append(label)
        differing += [f"{file.name}:{name}" for name in sorted(required - names)]
        files += 1
    if files == 0:
        differing.append("no .safetensors file was written")
    return Readback(files=files, tensors=tensors, differing=differing)


def compare_optimizer(path: Path, optimizer: Any) -> Readback:
    """Compare ``optimizer.pt`` with the optimizer's live state."""
    _from_device(path)
    saved = dict(_leaves(torch.load(path, map_location="cpu", weights_only=True, mmap=True)))
    live = dict(_leaves(optimizer.state_dict()))
    tensors = {f"{path.name}:{name}": digest(leaf).hex() for name, leaf in saved.items() if torch.is_tensor(leaf)}
    differing = [f"{path.name}:{name}" for name in sorted(saved.keys() ^ live.keys())]
    for name in saved.keys() & live.keys():
        label = f"{path.name}:{name}"
        one, other = saved[name], live[name]
        same = _same(one, other, tensors[label]) if label in tensors else _same_value(one, other)
        if not same:
            differing.append(label)
    return Readback(files=1, tensors=tensors, differing=sorted(differing))


def adapter_directory(directory: Path, adapter: str) -> Path:
    """Where PEFT keeps this adapter: the directory itself for "default", a folder of its name for another."""
    return directory if adapter == "default" else directory / adapter


def _expected(
    directory: Path, model: nn.Module, state: Mapping[str, Tensor] | None
) -> Iterator[tuple[Path, Mapping[str, Tensor], set[str]]]:
    """(file, live tensors by their names in that file, names that must be in it)."""
    if hasattr(model, "peft_config"):
        for adapter in cast("PeftModel", model).peft_config:
            live, required = _live_adapter(model, adapter, state)
            yield adapter_directory(directory, adapter) / ADAPTER_FILE, live, required
        return
    files = sorted(directory.glob("*.safetensors"))
    stored = {name: file for file in files for name in _names(file)}
    live, required = _live_model(model, set(stored))
    for file in files:
        yield file, live, {name for name in required if stored.get(name, files[0]) == file}


def _live_adapter(
    model: nn.Module, adapter: str, state: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], set[str]]:
    from peft import get_peft_model_state_dict

    # Whether embeddings belong in the file was decided when it was written (it may ask the Hub): when they are there,
    # they go by their names in the model.
    adapter_state = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    return {**(model.state_dict() if state is None else state), **adapter_state}, set(adapter_state)


def _live_model(model: nn.Module, stored: set[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Live tensors by their names in the files, and those that must be there; a tied weight is stored once."""
    live = model.state_dict()
    if not stored <= live.keys():
        from transformers.core_model_loading import revert_weight_conversion

        # Fused experts are split when they are written: the same function gives the live tensors in that form.
        live = revert_weight_conversion(model, live)
        return live, set()
    kept = {live[name].data_ptr() for name in stored}
    return live, {name for name, parameter in model.named_parameters() if parameter.data_ptr() not in kept}


def _same(saved: Tensor, live: Any, saved_digest: str) -> bool:
    if not torch.is_tensor(live) or saved.dtype != live.dtype or saved.shape != live.shape:
        return False
    return digest(live.detach()).hex() == saved_digest


def _same_value(saved: Any, live: Any) -> bool:
    return bool(saved == live or (saved != saved and live != live))  # a NaN, such as a learning rate, is itself


def _read(file: Path, differing: list[str]) -> Iterator[tuple[str, Tensor]]:
    try:
        _from_device(file)
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (FileNotFoundError, SafetensorError) as error:
        differing.append(f"{file.name}: {error}")


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except SafetensorError:
        return []  # `_read` reports it


def _from_device(file: Path) -> None:
    flush(file)
    drop_from_cache(file)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and sequences with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}/{index}")
    else:
        yield prefix, value
