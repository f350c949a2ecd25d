"""A model's tensors are compared with those of its files: after our own load, or of a model that is given.

Tables that no file holds (rotary frequencies) are recomputed on the host; weights that bitsandbytes quantised are
compared with the file's tensor, transferred and quantised again. Of a given model on an accelerator quantised
checkpoint files, tensors that loading fuses or renames, and weights changed since are not covered.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.models.files import MappedFile, check_model_directory, hub_snapshot
from hf_rocm_tune.models.placement import QUANTISED
from hf_rocm_tune.models.streaming import streamer_of
from hf_rocm_tune.models.tensors import (
    Read,
    file_name,
    places_of,
    quant_state_of,
    remember_read,
    require_as_read,
    tensors_of,
)
from hf_rocm_tune.transfer import QueuedDigests, digest, was_verified
from hf_rocm_tune.transfer.mapped import in_file
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Digest, Mover

EQUAL = "equal to its file"
EQUAL_QUANTISED = "equal to its file, quantised again on the device"
RECOMPUTED = "equal to what its configuration gives on the host"
TRAINED = "verified on arrival, and trained since"
IN_PLACE = "digested where it lies: on this device nothing crosses"


# ---- after our own load ----------------------------------------------------------------------------------------------


def record_host_tensors(model: nn.Module, mover: Mover) -> None:
    """Digest what a load has left on the host, until `tensors.checked_read`: it has to stay what it is now.

    A tensor whose memory is that of a mapped file is tied to the file's tensor.
    """
    if mover.settings.verify == "off":
        return
    for _, tensor in tensors_of(model):
        if tensor.device.type != "cpu" or mover.provenance(tensor) is not None or not tensor.nbytes:
            continue
        storage = storage_bytes(tensor)
        known = digest(storage)
        where = in_file(tensor)
        if where is None or storage.nbytes != tensor.nbytes:
            remember_read(tensor, Read(known))
        else:
            mover.read_from(where.file, where.tensor, known)
            remember_read(tensor, Read(known, where.file, where.tensor))


def record_file_digests(model: nn.Module, unexpected: Iterable[str], mover: Mover, *, as_loaded: bool = True) -> None:
    """Record digests of the tensors of a model's files that were loaded, for the comparison with the files' SHA-256.

    What crossed unchanged has been recorded. All else is read once more, and what was loaded must be equal to it: as it
    is, cast, quantised again, or converted back from what transformers fused or renamed.

    Args:
        model: loaded from files.
        unexpected: names for which the model has no place, as its loading reports them.
        mover: of the card, or of the host.
        as_loaded: nothing has changed a weight since the load.

    Raises:
        CorruptionError: what was loaded is not what the file holds.
    """
    if mover.settings.verify == "off":
        return
    is_left_out = _left_out(model, unexpected)
    is_converted = _converted(model)
    live = {file_name(name): tensor for name, tensor in tensors_of(model)}
    on_host: dict[str, Tensor] = {}  # the memory of streamed tensors
    streamer = streamer_of(model)
    if streamer is not None:
        for name, tensor, memory in streamer.read_apart():
            live[file_name(name)] = tensor if _is_quantised(tensor) else memory
            on_host[file_name(name)] = memory
    transposed = {  # GPT-2's, by bitsandbytes' layers in their place
        file_name(f"{path}.weight")
        for path, module in model.named_modules()
        if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D)
    }
    read = {(os.path.realpath(file), name): known for (file, name), known in mover.loaded.items()}
    converted: dict[str, tuple[Path, Tensor]] = {}  # by names in the files, what the load fused or renamed on the host
    for file in files_of(model)[0]:
        where = os.path.realpath(file)
        for name, held in MappedFile(file).tensors.items():
            if is_left_out(name):
                continue
            seen = read.get((where, name), set())
            if not seen:
                mover.read_from(os.fspath(file), name, digest(held))
            if name in live and not is_converted(name):
                if as_loaded:
                    held = held.T if name in transposed else held
                    _require_as_in_file(file, name, held, live[name], on_host.get(name, live[name]), seen, mover)
            elif not seen:
                converted[name] = file, held
    if as_loaded and converted:
        _require_as_converted(model, converted, live)


def _require_as_in_file(
    file: Path, name: str, held: Tensor, loaded: Tensor, memory: Tensor, seen: Collection[Digest], mover: Mover
) -> None:
    """Compare a loaded tensor with its file's, cast as a load casts it; a quantised one has other bytes.

    ``memory``: where its bytes are, on the host if it is streamed. ``seen``: digests of the file's tensor where it was
    digested as it was loaded.

    Raises:
        CorruptionError: what was loaded is something else.
    """
    if _is_quantised(loaded):
        _require_as_quantised(file, name, held, loaded, memory, seen, mover)
        return
    if loaded.shape != held.shape or not loaded.is_floating_point():
        return
    known = mover.digest_of(loaded)  # of when it was verified: later changes are no fault of the reading
    if known is None and loaded.device.type == "cpu":
        known = digest(loaded.detach())
    if known is not None and known not in seen and known != digest(held.to(loaded.dtype)):
        raise _misread(file, name)


def _require_as_converted(
    model: nn.Module, converted: Mapping[str, tuple[Path, Tensor]], live: Mapping[str, Tensor]
) -> None:
    """Compare tensors that transformers renamed or fused with the file's, converted back as a save does it.

    One layer at a time: a fused tensor is copied for it. Not compared: what a quantisation has packed, and a checkpoint
    that was saved quantised.

    Raises:
        CorruptionError: another tensor was loaded.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    dense: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by layer
    for name, tensor in live.items():
        if tensor.is_floating_point() and not _is_quantised(tensor) and ".quant_state." not in name:
            dense[_LAYER.match(name)[0]][name] = tensor.detach()  # type: ignore[index]
    for of_layer in dense.values():
        try:
            as_saved = revert_weight_conversion(base, of_layer)
        except NotImplementedError:  # the conversions of a checkpoint that was saved quantised have no way back
            return
        for name, tensor in as_saved.items():
            if name not in converted:
                continue
            file, held = converted[name]
            loaded = tensor.clone(memory_format=torch.contiguous_format)
            (found,) = QueuedDigests([storage_bytes(loaded)]).confirmed()
            if loaded.shape == held.shape and found != digest(held.to(loaded.dtype)):
                raise _misread(file, name)


def _is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of bitsandbytes' in 4 or 8 bits."""
    return hasattr(tensor, "quant_state") or hasattr(tensor, "CB")


def _require_as_quantised(
    file: Path, name: str, held: Tensor, loaded: Tensor, memory: Tensor, seen: Collection[Digest], mover: Mover
) -> None:
    """Compare a weight of 4 or 8 bits with the file's, quantised again on its device.

    On a card only what was no part of the mapped file as it crossed: the rest is compared with the file by ``seen``.

    Raises:
        CorruptionError: another tensor was quantised.
    """
    on_card = loaded.device.type != "cpu"
    if on_card and seen:
        return
    again = quantised_again(name, loaded, held, mover).get(name)
    if again is None:
        return
    if on_card:
        (expected,) = QueuedDigests([storage_bytes(again)]).confirmed()
        (found,) = QueuedDigests([storage_bytes(memory)]).confirmed()
        if expected != found:
            raise _misread(file, name)
    else:  # a change since it was quantised is found where frozen weights are watched
        mover.mark_derived(loaded, QUANTISED, digest=digest(again))


_LAYER = re.compile(r"(.*?\.\d+\.)?")
"""Of a tensor's name what names its layer; empty outside of layers."""


def _misread(file: Path, name: str) -> CorruptionError:
    return CorruptionError(
        f"model file {file}: {name} was loaded from it with other bytes than another reading gave: a read from the "
        "disk or from the page cache was wrong. It was not used: start the same command again; if it happens again, "
        "test this machine's memory"
    )


def _converted(model: nn.Module) -> Callable[[str], bool]:
    """Whether a load computes weights of these names in the files from others, instead of taking them as they are."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    patterns = [
        re.compile(pattern.replace("*", ".*"))
        for conversion in get_checkpoint_conversion_mapping(model_type) or ()
        if getattr(conversion, "operations", None)
        for pattern in conversion.source_patterns
    ]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _left_out(model: nn.Module, unexpected: Iterable[str]) -> Callable[[str], bool]:
    """Whether a file's tensor has no place in the model: so its loading reports, or its class without a report.

    A class's patterns may fit weights that do have a place. Names in a file may lack the model's prefix, or have it.
    """
    patterns = [re.compile(pattern) for pattern in upstream.read("ignored_weights", model) or ()]
    reported, prefix = set(unexpected), f"{getattr(model, 'base_model_prefix', '')}."
    places = {name for where in places_of(model) for name in (where.name, where.name.removeprefix(prefix))}

    def is_left_out(name: str) -> bool:
        if name in reported:
            return True
        return name.removeprefix(prefix) not in places and any(pattern.search(name) for pattern in patterns)

    return is_left_out


# ---- a model that was created or loaded elsewhere -------------------------------------------------------------------


def attest(model: nn.Module, mover: Mover) -> None:
    """Compares the tensors that a given model already has on the mover's device with its files.

    A tensor equal to its file (or to its recomputed table) counts as verified from here on; on the host backend every
    other one does too, on an accelerator it is marked unverified, with a reason.
    """
    require_as_read(model)
    unknown: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model):
        if tensor.device.type == mover.device.type and mover.provenance(tensor) is None:
            if tensor.requires_grad and was_verified(tensor):
                mover.mark_derived(tensor, TRAINED)
            else:
                unknown[name] = tensor
    files, why_not = files_of(model)
    why: dict[str, str] = {}
    for file in files:
        try:
            _compare_with_file(file, unknown, why, mover)
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
            mover.mark_unverified(tensor, f"was on the device before training; {reason}")


def _compare_with_file(file: Path, unknown: dict[str, Tensor], why: dict[str, str], mover: Mover) -> None:
    """Mark tensors that equal the file's, and take them out of ``unknown``; ``why``: what is said of the others."""
    held = MappedFile(file).tensors
    for name in list(unknown):
        if file_name(name) not in held:
            continue
        in_file = held[file_name(name)]
        wanted = {name: in_file}
        reason = EQUAL
        if mover.device.type != "cpu":
            again = quantised_again(name, unknown[name], in_file, mover)
            if again:
                wanted = again
                reason = EQUAL_QUANTISED
        for part, expected in wanted.items():
            if part not in unknown:
                continue
            if _is_equal(expected, unknown[part], mover, reason):
                del unknown[part]
            else:
                why[part] = f"differs from {file.name}"


def quantised_again(name: str, weight: Tensor, in_file: Tensor, mover: Mover) -> dict[str, Tensor]:
    """The file's tensor as bitsandbytes quantises it on the device, named as in `tensors_of`; empty: not quantised."""
    state = getattr(weight, "quant_state", None)
    rows = getattr(weight, "CB", None)
    if not in_file.is_floating_point() or (state is None and rows is None):
        return {}
    functional = importlib.import_module("bitsandbytes.functional")
    with mover.copies_as("weights"):
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
    tensors = {name: packed}
    for path in quant_state_of(made):
        tensors[f"{name}.quant_state.{path}"] = attrgetter(path)(made)
    return tensors


def _recomputed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Non-persistent buffers of modules without weights, recomputed on the host from the module's configuration."""
    for prefix, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or any(True for _ in module.parameters()):
            continue
        if {name for name, _ in module.named_buffers(recurse=False)} <= module.state_dict().keys():
            continue  # its files have them
        try:
            with torch.device("cpu"):
                fresh = type(module)(config)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue  # needs more than its configuration: its buffers stay unverified
        for name, buffer in fresh.named_buffers():
            yield f"{prefix}.{name}".lstrip("."), buffer


def is_recomputed(model: nn.Module, name: str, tensor: Tensor, mover: Mover) -> bool:
    """Whether a buffer equals the one recomputed on the host from its configuration, such as a grown rotary table."""
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None:
        return False  # a quantisation state's tensor
    expected = [fresh for buffer, fresh in _recomputed(model) if buffer == name]
    if attribute.endswith("inv_freq"):
        expected += _rotary_tables(module, attribute.removesuffix("inv_freq"))
    with mover.fetched(tensor.detach(), name=name, stage="weights") as fetched:
        held = fetched.host
        tolerance = 0.0
        if tensor.device.type != "cpu":
            tolerance = 4 * torch.finfo(torch.float32).eps
        for table in expected:
            if table.shape != held.shape or table.dtype != held.dtype:
                continue
            if torch.allclose(table, held, rtol=tolerance, atol=0.0):
                return True
        return False


def _rotary_tables(module: Any, prefix: str) -> Iterator[Tensor]:
    """Tables that transformers' `dynamic_rope_update` may have set: for the length so far, and for long inputs."""
    layer_type = prefix.removesuffix("_") or None
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        kind = kind.get(layer_type)
    for attribute in (f"{prefix}max_seq_len_cached", "original_max_seq_len"):
        length = getattr(module, attribute, None)
        if length is None:
            continue
        for seen in (length, length + 1):
            with torch.device("cpu"), suppress(TypeError, ValueError, KeyError, AttributeError):
                make = ROPE_INIT_FUNCTIONS[kind]
                yield make(module.config, torch.device("cpu"), seq_len=seen, layer_type=layer_type)[0]


def _is_equal(expected: Tensor, on_device: Tensor, mover: Mover, reason: str) -> bool:
    """Whether a tensor equals the expected one, cast to its dtype; if so, it is marked as derived."""
    both_floating = expected.is_floating_point() and on_device.is_floating_point()
    if expected.shape != on_device.shape or not (both_floating or expected.dtype == on_device.dtype):
        return False
    there = digest(on_device)
    if digest(expected.to(dtype=on_device.dtype)) != there:
        return False
    mover.mark_derived(on_device, reason, digest=there)
    return True


def files_of(model: nn.Module) -> tuple[list[Path], str]:
    """The safetensors files that a model was loaded from, or none and why they are unknown."""
    name = getattr(getattr(model, "config", None), "name_or_path", "") or ""
    if not name:
        return [], "its weight files are unknown"
    directory = Path(name)
    if not os.path.isdir(directory):  # Path's own raises on a name that is too long
        cached = hub_snapshot(name, upstream.read("commit", model.config))
        if cached is None:
            return [], f"{name} is neither a directory nor in the Hub's cache"
        directory = cached
    try:
        return check_model_directory(directory), ""
    except (UsageError, OSError, SafetensorError) as error:
        return [], str(error)
