"""Where each tensor of a model came from: the move of what is on the host, and what a model had before we saw it.

:func:`tensors_of` is the one list of everything that a model keeps on its device: parameters, buffers, and the
quantisation state of 4-bit and 8-bit weights. Coverage, placement and the sentinels all walk this list.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, UsageError
from hf_rocm_tune.models.files import check_model_directory, hub_snapshot
from hf_rocm_tune.models.shards import local, reshard
from hf_rocm_tune.transfer import digest, redirected, was_verified
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Digest, Mover

MOVED = "equal to its source on arrival"
QUANTISED = "quantised on the device from a verified tensor"
CONVERTED = "fused or split on the device from verified tensors"
EQUAL = "equal to its file"
EQUAL_QUANTISED = "equal to its file, quantised again on the device"
RECOMPUTED = "equal to what its configuration gives on the host"
TRAINED = "verified on arrival, and trained since"
IN_PLACE = "digested where it lies: on this device nothing crosses"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of what a model keeps on its device was verified on the way there."""

    verified_bytes: int  # transferred and verified, or computed on the device from such
    device_bytes: int  # all of parameters, buffers and quantisation state
    unverified: list[dict[str, str]] = field(default_factory=list)  # name and reason of what makes the difference
    verified_by: dict[str, int] = field(default_factory=dict)  # of the verified bytes, how many by what

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            verified_bytes=self.verified_bytes + other.verified_bytes,
            device_bytes=self.device_bytes + other.device_bytes,
            unverified=[*self.unverified, *other.unverified],
            verified_by=dict(Counter(self.verified_by) + Counter(other.verified_by)),
        )

    @property
    def complete(self) -> bool:
        """Whether nothing is unverified."""
        return not self.unverified


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything that the model keeps on its device, each storage once. Of what is sharded, this rank's part.

    Yields:
        Dotted name and tensor: parameters, then buffers, then ``<weight>.quant_state.*`` (bitsandbytes 4-bit) and
        ``<weight>.CB``/``SCB`` (8-bit).
    """
    return ((name, tensor) for name, tensor, _ in findable_tensors_of(model))


def findable_tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """As `tensors_of`, and for each a function that finds it again without a walk over the model.

    The function raises AttributeError where there is no such tensor any more.
    """
    reshard(model)
    seen: set[int] = set()
    for name, module, path in _places(model):
        find = partial(_find, module, path)
        tensor = find()
        key = tensor.untyped_storage()._cdata
        if key not in seen:
            seen.add(key)
            yield name, tensor, find


def _find(module: nn.Module, path: str) -> Tensor:
    tensor: Tensor | None = attrgetter(path)(module)
    if tensor is None:  # bitsandbytes hands an 8-bit weight's state over to its layer at the first forward
        tensor = attrgetter(f"state.{path.rpartition('.')[2]}")(module)
    return local(tensor)


def place(model: nn.Module, mover: Mover, *, parameters: bool = True) -> None:
    """Moves everything that is still on the host to the mover's device, verified, in place.

    Parameters keep their identity (an optimizer or a tie that holds them stays right); buffers are rebound.

    Args:
        model: not sharded.
        mover: the door.
        parameters: False for buffers only.

    Raises:
        CorruptionError: a tensor could not be brought over right.
    """
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in module._parameters.items() if parameters else ():
            if parameter is not None and _on_host_unknown(parameter, mover):
                stage = "adapter" if parameter.requires_grad else "weights"
                parameter.data = mover.move(parameter.data, name=prefix + name, stage=stage)
        for name, buffer in module._buffers.items():
            if buffer is not None and _on_host_unknown(buffer, mover):
                module._buffers[name] = mover.move(buffer, name=prefix + name, stage="weights")


def release_memory() -> None:
    """Gives back what a model that is no longer referenced held, before another one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def mark_loaded(model: nn.Module, name: str, mover: Mover) -> None:
    """Tells the mover of a weight that was computed from verified checkpoint tensors, and of its quantisation state.

    Args:
        model: that is being loaded; the weight has just been set.
        name: its state-dict name.
        mover: through which the checkpoint's tensors came.
    """
    path, _, key = name.rpartition(".")
    for found, tensor in _named(model.get_submodule(path)):
        if found != key and not found.startswith(f"{key}."):
            continue
        if found.endswith(".code") and mover.device.type != "cpu":
            continue  # tables are made on the host: they crossed, so the mover knows them or they went round it
        if tensor.device.type == mover.device.type and mover.provenance(tensor) is None:
            is_packed = found != key or hasattr(tensor, "quant_state") or hasattr(tensor, "CB")
            mover.mark_derived(tensor, QUANTISED if is_packed else CONVERTED)


def mark_computed(model: nn.Module, mover: Mover) -> None:
    """Marks what the device computed while `redirected` was in force: nothing unverified could have come to it.

    DoRA's magnitudes, PiSSA's factors, copies for ``modules_to_save``, embeddings that a chat template resized. What
    was on the device before the block must have a provenance already (`attest`); where that is unverified, so
    is what was computed. Where the device is the host nothing is marked: there what is new is host memory, which
    `place` digests.

    Raises:
        CorruptionError: a copy for ``modules_to_save`` is not what it was copied from.
    """
    if mover.device.type == "cpu":
        return
    for name, original, copied in _saved_copies(model):
        if mover.provenance(copied) is None and digest(original.to(copied.dtype)) != digest(copied):
            raise CorruptionError(
                f"the device copied {name} wrongly for modules_to_save: arithmetic or memory of the card, not a "
                "transfer. Nothing of it was used; run hf-rocm-tune doctor --full"
            )
    tensors = [tensor for _, tensor in tensors_of(model) if tensor.device.type == mover.device.type]
    tainted = any(mover.provenance(tensor) == "unverified" for tensor in tensors)
    for tensor in tensors:
        if mover.provenance(tensor) is not None:
            continue
        if tainted:
            mover.mark_unverified(tensor, "computed on the device, where not all weights were verified")
        else:
            mover.mark_derived(tensor, "computed on the device from verified tensors")


def _saved_copies(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What PEFT deep-copied on the device: name, original and copy."""
    for name, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict):  # the PeftModel has a set of names there
            continue
        originals = dict(module.original_module.named_parameters())
        for copied in copies.values():
            for part, tensor in copied.named_parameters():
                yield f"{name}.{part}", originals[part], tensor


def digests_before(model: nn.Module, mover: Mover) -> dict[str, Digest]:
    """What weights hold before an adapter is computed from them and rewrites them, by their names in the files.

    Raises:
        MemoryFaultError: one no longer holds what was loaded.
    """
    found: dict[str, Digest] = {}
    for name, tensor in tensors_of(model):
        data = storage_bytes(tensor)
        found[file_name(name)] = now = digest(data)
        if mover.was_verified(tensor) and mover.digest_of(data) not in (None, now):
            raise MemoryFaultError(
                f"frozen weights changed in memory (before the adapter is computed from them): {name}",
                "Nothing was trained: start the same command again",
            )
    return found


def mark_rewritten(model: nn.Module, before: Mapping[str, Digest], mover: Mover) -> None:
    """Marks base weights that the adapter's initialisation has rewritten, some of them in place.

    PiSSA, OLoRA, LoftQ and their like take the adapter's product out of the weight below it: the digest with which that
    weight arrived is no longer right. Exactly the weights that have changed are marked, and the report names them.

    Args:
        model: with the adapter.
        before: see :func:`digests_before`.
        mover: that knows their digests.
    """
    reason = "rewritten by the adapter's initialisation"
    for name, tensor in tensors_of(model) if before else ():
        now = digest(data := storage_bytes(tensor))
        if tensor.requires_grad or before.get(file_name(name), now) == now:
            continue
        mover.report.rebaselined(name, reason)
        if mover.digest_of(data) != now and (mover.was_verified(tensor) or tensor.device.type != "cpu"):
            mover.mark_derived(tensor, reason)  # what is new on the host is digested by `place`


def file_name(name: str) -> str:
    """A tensor's name without what PEFT adds to it."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


def coverage(model: nn.Module, mover: Mover) -> Coverage:
    """Walks the model and says how much of it was verified.

    Returns:
        The bytes, and each tensor that was not verified with the reason.
    """
    verified = total = 0
    unverified: list[dict[str, str]] = []
    verified_by: Counter[str] = Counter()
    for name, tensor in tensors_of(model):
        size = tensor.numel() * tensor.element_size()
        total += size
        origin = mover.provenance(tensor)
        if origin in {"transferred", "derived"} or size == 0:
            verified += size
            verified_by[mover.reason(tensor) or MOVED] += size
        else:
            reason = mover.reason(tensor) or "came to the device by another way than the mover"
            unverified.append({"tensor": name, "reason": reason})
    return Coverage(verified_bytes=verified, device_bytes=total, unverified=unverified, verified_by=dict(verified_by))


def _on_host_unknown(tensor: Tensor, mover: Mover) -> bool:
    return tensor.device.type == "cpu" and mover.provenance(tensor) is None


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, _find(module, path)) for name, module, path in _places(model))


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of each tensor, the module that it belongs to, and its dotted attribute there."""
    modules = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
    for prefix, module in modules:
        yield from ((prefix + key, module, key) for key, each in module._parameters.items() if each is not None)
    for prefix, module in modules:
        yield from ((prefix + key, module, key) for key, each in module._buffers.items() if each is not None)
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            state, at = getattr(parameter, "quant_state", None), f"{key}.quant_state"
            if state is None and key == "weight":  # a sharded 4-bit weight has left it to its layer
                state, at = getattr(module, "quant_state", None), "quant_state"
            for suffix in quant_state_of(state):
                yield f"{prefix}{key}.quant_state.{suffix}", module, f"{at}.{suffix}"
            for attribute in ("CB", "SCB"):
                owners = (parameter, getattr(module, "state", None)) if hasattr(parameter, attribute) else ()
                if any(isinstance(getattr(owner, attribute, None), torch.Tensor) for owner in owners):
                    yield f"{prefix}{key}.{attribute}", module, f"{key}.{attribute}"


def quant_state_of(state: object) -> Iterator[str]:
    """Names of the tensors of a 4-bit weight's quantisation state, those of its nested state included."""
    for attribute in ("absmax", "code", "offset"):
        if isinstance(getattr(state, attribute, None), torch.Tensor):
            yield attribute
    nested = getattr(state, "state2", None)
    if nested is not None:
        yield from (f"state2.{attribute}" for attribute in quant_state_of(nested))


# ---- a model that was made or loaded elsewhere ---------------------------------------------------------------------
#
# Its transfer cannot be verified any more, but its content can: each digest is compared with that of the file. Tables
# that no file holds (rotary frequencies) are made again on the host from the module's configuration. What bitsandbytes
# has quantised is compared with what it makes of the file, moved and quantised again. Where the device is the
# host nothing crosses: the rest is digested where it lies. Not covered on an accelerator: files that are quantised
# themselves, tensors that a conversion fuses or renames on loading, and weights that were changed since.


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
