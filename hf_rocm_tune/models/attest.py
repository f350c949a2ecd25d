"""A model object that was loaded elsewhere, compared with its files.

A notebook user may hand over a model that is already on the device. Its transfer cannot be verified any more, but its
content can: where the files that it came from are known, each tensor's digest is compared with the file's. Tables that
no file holds (rotary frequencies) are made again on the host from the module's own configuration and compared.

Not covered: quantised weights (their files hold other bits), tensors that a conversion fuses or renames on loading,
and weights that were changed since: all of these stay unverified, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.files import check_model_directory, hub_snapshot
from hf_rocm_tune.models.placement import tensors_of
from hf_rocm_tune.transfer import digest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

EQUAL = "equal to its file"
RECOMPUTED = "equal to what its configuration gives on the host"


def attest(model: nn.Module, mover: Mover) -> tuple[int, int]:
    """Compares everything that a handed-over model already has on the mover's device with its files.

    Tensors that equal their file (or their configuration) count as verified from here on; the others are marked as
    unverified with a reason. Tensors with a provenance are left alone, and those still on the host of an accelerator.

    Returns:
        Number of tensors that were found equal, and number of tensors looked at.
    """
    unknown = {
        _file_name(name): tensor
        for name, tensor in tensors_of(model)
        if tensor.device.type == mover.device.type and mover.provenance(tensor) is None
    }
    files, why_not = _files_of(model)
    looked_at = len(unknown)
    equal = 0
    for file in files:
        try:
            equal += _compare(file, unknown, mover)
        except (OSError, SafetensorError) as error:
            why_not = f"{file.name} cannot be read ({error})"
    for name, expected in _recomputed(model):
        if name in unknown and _equal(expected, unknown[name]):
            mover.mark_derived(unknown.pop(name), RECOMPUTED)
            equal += 1
    for tensor in unknown.values():
        mover.mark_unverified(tensor, f"handed over on the device; {why_not or 'no file holds a tensor of this name'}")
    return equal, looked_at


def _compare(file: Path, unknown: dict[str, Tensor], mover: Mover) -> int:
    """Judges the tensors that this file holds, takes them out of `unknown`, and says how many are equal."""
    equal = 0
    with safe_open(file, framework="pt") as checkpoint:
        for name in checkpoint.keys() & unknown.keys():
            tensor = unknown.pop(name)
            if _equal(checkpoint.get_tensor(name), tensor):
                mover.mark_derived(tensor, EQUAL)
                equal += 1
            else:
                mover.mark_unverified(tensor, f"handed over on the device; differs from {file.name}")
    return equal


def _recomputed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that no file holds, made again on the host: of modules without weights that a configuration describes."""
    for prefix, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or not module._non_persistent_buffers_set or any(True for _ in module.parameters()):
            continue
        try:
            with torch.device("cpu"):
                fresh = type(module)(config)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue  # it needs more than its configuration: its buffers stay unverified, by name
        for name, buffer in fresh.named_buffers():
            yield _file_name(f"{prefix}.{name}"), buffer


def _equal(in_file: Tensor, on_device: Tensor) -> bool:
    if in_file.shape != on_device.shape or not on_device.is_floating_point():
        return False
    return digest(in_file.to(dtype=on_device.dtype)) == digest(on_device)


def _files_of(model: nn.Module) -> tuple[list[Path], str]:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    if not name:
        return [], "the files that it came from are not known"
    directory = Path(name)
    if not os.path.isdir(directory):  # Path's own raises on a name that is too long
        cached = hub_snapshot(name, getattr(model.config, "_commit_hash", None))
        if cached is None:
            return [], f"{name} is neither a directory nor in the Hub's cache"
        directory = cached
    try:
        return check_model_directory(directory), ""
    except (UsageError, OSError, SafetensorError) as error:
        return [], str(error)


def _file_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
