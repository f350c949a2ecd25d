"""A model object that was made or loaded elsewhere: what it already has on the device, compared with its files.

A notebook user may hand over a model that is already on the device. Its transfer cannot be verified any more, but its
content can: where the files that it came from are known, each tensor's digest is compared with the file's. Tables that
no file holds (rotary frequencies) are made again on the host from the module's own configuration and compared. What
bitsandbytes has quantised is compared with what it makes of the file's tensor, moved and quantised again.

Where the device is the host nothing crosses: what has no file, or was changed since, is digested where it lies.

Not covered on an accelerator: files that are quantised themselves, tensors that a conversion fuses or renames on
loading, and weights that were changed since: all of these stay unverified, with the reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.models.files import check_model_directory, hub_snapshot
from hf_rocm_tune.models.placement import file_name, quant_state_of, tensors_of
from hf_rocm_tune.transfer import digest, redirected, was_verified

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

EQUAL = "equal to its file"
EQUAL_QUANTISED = "equal to its file, quantised again on the device"
RECOMPUTED = "equal to what its configuration gives on the host"
TRAINED = "verified on arrival, and trained since"
IN_PLACE = "digested where it lies: on this device nothing crosses"


def attest(model: nn.Module, mover: Mover) -> tuple[int, int]:
    """Compares everything that a handed-over model already has on the mover's device with its files.

    What equals its file (or its configuration) counts as verified from here on; where the mover's device is the host
    everything else does too. On an accelerator the others are marked as unverified with a reason. The digest that is
    taken here is the one that the sentinels expect. Tensors with a provenance are left alone, and those still on the
    host of an accelerator: these will be moved.

    Returns:
        Number of tensors that were found equal, and number of tensors looked at.
    """
    unknown: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model):
        if tensor.device.type == mover.device.type and mover.provenance(tensor) is None:
            if tensor.requires_grad and was_verified(tensor):
                mover.mark_derived(tensor, TRAINED)
            else:
                unknown[name] = tensor
    looked_at = len(unknown)
    files, why_not = _files_of(model)
    why: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as checkpoint:
                held = set(checkpoint.keys())
                for name in [name for name in unknown if file_name(name) in held]:
                    in_file = checkpoint.get_tensor(file_name(name))
                    again = _quantised_again(name, unknown[name], in_file, mover)
                    for part, expected in (again or {name: in_file}).items():
                        if part not in unknown:
                            continue
                        if _is_equal(expected, unknown[part], mover, EQUAL_QUANTISED if again else EQUAL):
                            del unknown[part]
                        else:
                            why[part] = f"differs from {file.name}"
        except (OSError, SafetensorError) as error:
            why_not = f"{file.name} cannot be read ({error})"
    for name, expected in _recomputed(model):
        if name in unknown and _is_equal(expected, unknown[name], mover, RECOMPUTED):
            del unknown[name]
    for name, tensor in unknown.items():
        if mover.device.type == "cpu":
            mover.mark_derived(tensor, IN_PLACE, digest=digest(tensor))
        else:
            reason = why.get(name) or why_not or "no file holds a tensor of this name"
            mover.mark_unverified(tensor, f"handed over on the device; {reason}")
    return looked_at - len(unknown), looked_at


def _quantised_again(name: str, weight: Tensor, in_file: Tensor, mover: Mover) -> dict[str, Tensor]:
    """What bitsandbytes makes of a file's tensor on the device, by the names of `tensors_of`; empty: not quantised."""
    state, rows = getattr(weight, "quant_state", None), getattr(weight, "CB", None)
    if mover.device.type == "cpu" or not in_file.is_floating_point() or (state is None and rows is None):
        return {}
    functional = importlib.import_module("bitsandbytes.functional")
    with redirected(mover, stage="weights"):
        if state is None:
            moved = mover.move_to(weight.device, in_file.to(torch.float16), name=name)
            packed, scales, _ = functional.int8_vectorwise_quant(moved)
            return {name: packed, f"{name}.SCB": scales}
        moved = mover.move_to(weight.device, in_file.to(state.dtype), name=name)
        packed, made = functional.quantize_4bit(
            moved,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=weight.dtype,
        )
    return {name: packed, **{f"{name}.quant_state.{path}": attrgetter(path)(made) for path in quant_state_of(made)}}


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
            yield f"{prefix}.{name}".lstrip("."), buffer


def is_recomputed(model: nn.Module, name: str, tensor: Tensor, mover: Mover) -> bool:
    """Whether a buffer holds what its module's configuration gives on the host, as rotary tables do that grow.

    Args:
        model: whose it is.
        name: of the buffer in the model.
        tensor: what it holds now.
        mover: brings it to the host. There a device's own rounding (4 units in the last place) is let pass.
    """
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None:
        return False  # a tensor of a quantisation state, which is named below the weight
    expected = [fresh for found, fresh in _recomputed(model) if found == name]
    expected += _rotary_tables(module, attribute)
    with mover.fetched(tensor.detach(), name=name, stage="weights") as found:
        held = found.host
        close = 0.0 if tensor.device.type == "cpu" else 4 * torch.finfo(torch.float32).eps
        return any(
            each.shape == held.shape and each.dtype == held.dtype and torch.allclose(each, held, rtol=close, atol=0.0)
            for each in expected
        )


def _rotary_tables(module: nn.Module, attribute: str) -> Iterator[Tensor]:
    """What transformers' `dynamic_rope_update` may have put there: for the length seen so far, and for long ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = getattr(module, "config", None)
    prefix = attribute.removesuffix("inv_freq")
    layer_type = prefix.removesuffix("_") or None
    kind = getattr(module, "rope_type", None)
    kind = kind.get(layer_type) if isinstance(kind, dict) else kind
    if config is None or not attribute.endswith("inv_freq") or kind not in ROPE_INIT_FUNCTIONS:
        return
    lengths = [getattr(module, f"{prefix}max_seq_len_cached", None), getattr(module, "original_max_seq_len", None)]
    for length in (each for each in lengths if each is not None):
        for seen in (length, length + 1):
            with torch.device("cpu"), suppress(TypeError, ValueError, KeyError, AttributeError):
                yield ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seen, layer_type=layer_type)[0]


def _is_equal(expected: Tensor, on_device: Tensor, mover: Mover, reason: str) -> bool:
    """Whether a tensor holds the expected values, cast to its dtype; if so, the mover is told."""
    both_floating = expected.is_floating_point() and on_device.is_floating_point()
    if expected.shape != on_device.shape or not (both_floating or expected.dtype == on_device.dtype):
        return False
    found = digest(on_device)
    if digest(expected.to(dtype=on_device.dtype)) != found:
        return False
    mover.mark_derived(on_device, reason, digest=found)
    return True


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
