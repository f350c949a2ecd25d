"""Are the tensors and values in a saved file those that are live? Compared by digest, bit for bit.

A file is read once, on the host, from the device where the system allows it (`integrity.manifest.read_once`): the bytes
that are compared are those whose SHA-256 the manifest gets. A live tensor is digested where it is, by the kernel that
computes with it, so that a copy engine which damages what it brings to the host cannot damage both sides alike.

Covered: adapters (with trained modules and saved embeddings), whole models, and the state of optimizer, scheduler,
scaler and random generators. Not covered: what else a checkpoint holds (tokenizer, configuration, model card); the
manifest has the SHA-256 of what lies on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import safe_globals

from hf_rocm_tune.integrity.manifest import FileEntry, read_once
from hf_rocm_tune.models.shards import local, own_rows
from hf_rocm_tune.transfer.digest import digest

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import TrainerState

ADAPTER_FILE = "adapter_model.safetensors"
_READS = 3


@dataclass(frozen=True, kw_only=True)
class Readback:
    """Outcome of reading one file.

    Attributes:
        entry: size and SHA-256 of the bytes that were compared; None where there are none.
        digests: of what it holds, by "<file>:<tensor>", and by "<file>:" of all that is no tensor.
        differing: of these, what is not bit for bit what is live, is missing, or cannot be read.
    """

    entry: FileEntry | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)


def compare_model(
    directory: Path, model: nn.Module, trained: Mapping[str, Tensor] | None = None
) -> dict[str, Readback]:
    """Compare the safetensors files in ``directory`` with a PEFT model's live adapters, or a whole model.

    Args:
        directory: holds the files.
        model: whose they are.
        trained: of a PEFT model that is sharded, the trained weights by name, whole; else they are the model's own.

    Returns:
        One `Readback` a file, by its name relative to ``directory``.
    """
    stored = {file.name: _names(file) for file in sorted(directory.glob("*.safetensors"))}
    found = {
        file: _compare_tensors(directory, file, live, required)
        for file, live, required in _expected(model, stored, trained)
    }
    return found or {"model.safetensors": Readback(differing=["no .safetensors file was written"])}


def compare_recorded(
    recorded: Mapping[str, str], model: nn.Module, trained: Mapping[str, Tensor] | None = None
) -> list[str] | None:
    """Names of what is live in a model and is not what a manifest says was saved; None where it says nothing of it."""
    stored: dict[str, set[str]] = {}
    for label in recorded:
        file, _, name = label.partition(":")
        if file.endswith(".safetensors"):
            stored.setdefault(file, set()).add(name)
    if not stored:
        return None
    differing = []
    for file, live, required in _expected(model, stored, trained):
        names = stored.get(file, set())
        differing += [f"{file}:{name}" for name in sorted(required - names)]
        for name in sorted(names):
            if name not in live or digest(live[name].detach()).hex() != recorded[f"{file}:{name}"]:
                differing.append(f"{file}:{name}")
    return differing


def compare_state(path: Path, live: Any) -> Readback:
    """Compare a file of ``torch.save`` with the live state of an optimizer, scheduler, scaler or random generator."""
    _, found = read_state(path)
    if found.entry is None or found.differing:
        return found
    wanted = state_digests(path.name, live)
    labels = wanted.keys() | found.digests.keys()
    differing = sorted(label for label in labels if wanted.get(label) != found.digests.get(label))
    return Readback(entry=found.entry, digests=found.digests, differing=differing)


def read_state(path: Path) -> tuple[Any, Readback]:
    """The content of a file of ``torch.save`` on the host, and its digests; a file that cannot be read differs."""
    try:
        with read_once(path) as (copy, entry), safe_globals():
            state = torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
            return state, Readback(entry=entry, digests=state_digests(path.name, state))
    except Exception as error:  # what a damaged pickle or archive raises can be anything
        return None, Readback(differing=[f"{path.name}: cannot be read ({_line(error)})"])


def compare_trainer_state(path: Path, live: TrainerState) -> Readback:
    """Compare ``trainer_state.json`` with the live state; the numbers in it decide where a resumed run goes on."""
    try:
        with read_once(path) as (copy, entry):
            found = json.loads(copy.read_bytes())
    except (OSError, ValueError) as error:
        return Readback(differing=[f"{path.name}: cannot be read ({_line(error)})"])
    same = json.dumps(found, sort_keys=True) == json.dumps(json.loads(json.dumps(asdict(live))), sort_keys=True)
    return Readback(entry=entry, differing=[] if same else [path.name])


def state_digests(file: str, state: Any) -> dict[str, str]:
    """Digest of each tensor in nested dicts and sequences by "<file>:<path>", and by "<file>:" that of all else."""
    tensors: dict[str, str] = {}
    rest = hashlib.sha256()
    for path, leaf in sorted(leaves(state), key=lambda item: item[0]):
        if torch.is_tensor(leaf):
            tensors[f"{file}:{path}"] = digest(leaf.detach()).hex()
            leaf = (leaf.dtype, tuple(leaf.shape))
        rest.update(f"{path} {leaf!r}\n".encode())
    return {f"{file}:": rest.hexdigest(), **tensors}


def not_taken_over(saved: Any, live: Any) -> list[str]:
    """Paths of what was loaded and is not live now; a live object may hold more, and hold a tensor in another dtype."""
    now = dict(leaves(live))
    return [path for path, leaf in leaves(saved) if path not in now or not _same(leaf, now[path])]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and sequences with its path; arrays as tensors."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}/{index}")
    else:
        yield prefix, torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def host_copy(tensor: Tensor) -> Tensor:
    """A tensor on the host with the bytes that its own device sees: read again, up to twice, where they differ."""
    right = digest(tensor.detach())
    for _ in range(_READS):
        host = tensor.detach().cpu()
        if digest(host) == right:
            break
    return host.contiguous()  # one that stayed wrong is found when what is written of it is compared


def model_on_host(model: nn.Module) -> dict[str, Tensor]:
    """What a model saves, on the host: of a PEFT model what it trains, the rest as it is. Tied weights stay tied."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, Tensor] = model.state_dict()
    copies: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if name in trained or not hasattr(model, "peft_config"):
            address = tensor.data_ptr() or id(tensor)
            state[name] = copies[address] = copies[address] if address in copies else host_copy(tensor)
    return state


def on_host(state: Any) -> Any:
    """The same nested dicts and sequences with a `host_copy` of each tensor."""
    if torch.is_tensor(state):
        return host_copy(state)
    if isinstance(state, Mapping):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_host(value) for value in state)
    return state


def adapter_file(adapter: str) -> str:
    """Where PEFT keeps this adapter: beside all else for "default", in a folder of its name for another."""
    return ADAPTER_FILE if adapter == "default" else f"{adapter}/{ADAPTER_FILE}"


def _expected(
    model: nn.Module, stored: Mapping[str, set[str]], trained: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Mapping[str, Tensor], set[str]]]:
    """(file, live tensors by their names in that file, names that must be in it)."""
    if hasattr(model, "peft_config"):
        for adapter in cast("PeftModel", model).peft_config:
            yield adapter_file(adapter), *_live_adapter(model, adapter, trained)
        return
    live, required = _live_model(model, set().union(*stored.values()))
    for file in stored:
        elsewhere = set().union(*(names for other, names in stored.items() if other != file))
        yield file, live, required - elsewhere


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
    kept = {live[name].data_ptr() for name in stored & live.keys()}
    return live, {name for name, tensor in live.items() if tensor.data_ptr() not in kept}


def _compare_tensors(directory: Path, file: str, live: Mapping[str, Tensor], required: set[str]) -> Readback:
    digests: dict[str, str] = {}
    differing: list[str] = []
    try:
        with read_once(directory / file) as (copy, entry), safe_open(copy, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                saved, now = opened.get_tensor(name), live.get(name)
                label = f"{file}:{name}"
                digests[label] = digest(saved).hex()
                if (
                    now is None
                    or (saved.dtype, saved.shape) != (now.dtype, now.shape)
                    or digest(now.detach()).hex() != digests[label]
                ):
                    differing.append(label)
    except (OSError, SafetensorError) as error:
        return Readback(differing=[f"{file}: {_line(error)}"])
    differing += [f"{file}:{name}" for name in sorted(required) if f"{file}:{name}" not in digests]
    return Readback(entry=entry, digests=digests, differing=differing)


def _same(saved: Any, live: Any) -> bool:
    if torch.is_tensor(saved) and torch.is_tensor(live):
        if isinstance(live, DTensor) and saved.dim() > 0:
            saved, live = own_rows(saved, live), local(live)
        return saved.shape == live.shape and digest(saved.to(live.dtype)) == digest(live.detach())
    return bool(saved == live or (saved != saved and live != live))  # a NaN, such as a learning rate, is itself


def _names(file: Path) -> set[str]:
    with suppress(SafetensorError, OSError), safe_open(file, framework="pt", device="cpu") as opened:
        return set(opened.keys())
    return set()  # the comparison reports it


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
