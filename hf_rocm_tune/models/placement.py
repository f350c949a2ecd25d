"""Places a model on its device and records where each of its tensors came from.

:func:`tensors_of` is the one list of everything that a model keeps on its device; coverage, placement and the
sentinels all walk it.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, UsageError, listed
from hf_rocm_tune.models.files import MappedFile, check_model_directory, hub_snapshot
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.tensors import LAYER_BUFFERS, Place, places_of, quant_state_of, tensors_of
from hf_rocm_tune.transfer import Digest, digest, was_verified
from hf_rocm_tune.transfer.raw_bytes import Registry, storage_bytes
from hf_rocm_tune.transfer.report import share_words

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

MOVED = "equal to its source on arrival"
QUANTISED = "quantised on the device from a verified tensor"
CONVERTED = "fused or split on the device from verified tensors"
EQUAL = "equal to its file"
EQUAL_QUANTISED = "equal to its file, quantised again on the device"
UNSURE = "computed on the device, where not all weights were verified"
RECOMPUTED = "equal to what its configuration gives on the host"
TRAINED = "verified on arrival, and trained since"
IN_PLACE = "digested where it lies: on this device nothing crosses"


@dataclass(frozen=True)
class Read:
    digest: Digest  # of its storage
    file: str | None = None  # whose mapped bytes it shares; None: it has memory of its own
    name: str = ""  # in the file


_READ: Registry[Read] = Registry()


def remember_read(tensor: Tensor, known: Read | None) -> None:
    """Keeps the digest of a host tensor that was just read from a file, for `read_as`."""
    _READ.put(tensor, known or Read(digest(storage_bytes(tensor))))


def read_as(name: str, tensor: Tensor) -> Read | None:
    """What `remember_read` knows of a host tensor, once; raises where that is no longer what it holds."""
    known = _READ.get(tensor)
    if known is None:
        return None
    del _READ.entries[tensor.untyped_storage()]
    if digest(storage_bytes(tensor)) != known.digest:
        raise MemoryFaultError(
            f"weights changed in host memory after they were read: {name}",
            "They were not used: start the same command again; if it happens again, test this machine's memory",
        )
    return known


@dataclass(frozen=True, kw_only=True, repr=False)
class Coverage:
    """How much of a model's device memory holds verified bytes."""

    verified_bytes: int  # transferred and verified, or computed on the device from verified tensors
    device_bytes: int  # parameters, buffers and quantisation state
    unverified: list[dict[str, str]] = field(default_factory=list)  # name and reason of each unverified tensor
    verified_by: dict[str, int] = field(default_factory=dict)  # verified bytes by kind of evidence

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            verified_bytes=self.verified_bytes + other.verified_bytes,
            device_bytes=self.device_bytes + other.device_bytes,
            unverified=[*self.unverified, *other.unverified],
            verified_by=dict(Counter(self.verified_by) + Counter(other.verified_by)),
        )

    @property
    def share(self) -> str:
        return share_words(self.verified_bytes, self.device_bytes)

    def __repr__(self) -> str:
        rest = ""
        if self.unverified:
            names = [row["tensor"] for row in self.unverified]
            rest = f", not: {listed(names)}"
        return f"Coverage({self.share} of {self.device_bytes:,} bytes verified{rest})"

    def describe(self) -> str:
        """The share, and what is not verified, for a message."""
        by_reason: dict[str, list[str]] = {}
        for row in self.unverified:
            by_reason.setdefault(row["reason"], []).append(row["tensor"])
        named = [f"{listed(names, 1)} ({reason})" for reason, names in by_reason.items()]
        return f"{self.share} of the model's bytes; not verified: {', '.join(named[:3])}"

    @property
    def complete(self) -> bool:
        return not self.unverified


def place(model: nn.Module, mover: Mover, *, parameters: bool = True, loaded: bool = False) -> None:
    """Moves every tensor that is still on the host to the mover's device, verified, in place.

    Args:
        model: whose parameters keep their identity, so optimizers and tied weights stay valid; buffers are rebound.
        mover: of the device.
        parameters: whether parameters are moved, or buffers alone.
        loaded: all are weights of a base; otherwise those that can be trained are an adapter's.

    Raises:
        MemoryFaultError: a tensor is no longer what was read from its file.
        CorruptionError: a tensor could not be transferred correctly.
    """
    _require_as_read(model)
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if parameters:
            for name, parameter in module.named_parameters(recurse=False):
                if _on_host_unknown(local(parameter), mover):
                    is_adapter = parameter.requires_grad and not loaded
                    _place_parameter(parameter, prefix + name, "adapter" if is_adapter else "weights", mover)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if _on_host_unknown(buffer, mover):
                setattr(module, name, mover.move(buffer, name=prefix + name, stage="weights"))


def _place_parameter(parameter: nn.Parameter, name: str, stage: str, mover: Mover) -> None:
    codes = getattr(parameter, "CB", None)  # the same memory under another name, in 8 bit
    is_shared = codes is not None and codes.data_ptr() == parameter.data_ptr()
    parameter.data = mover.move(parameter.data, name=name, stage=stage)
    if is_shared:
        setattr(parameter, "CB", parameter.data)  # noqa: B010  # of bitsandbytes' class


def _require_as_read(model: nn.Module) -> None:
    for name, tensor in tensors_of(model):
        if tensor.device.type == "cpu":
            read_as(name, tensor)


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def mark_loaded(model: nn.Module, name: str, mover: Mover) -> None:
    """Marks a weight that was computed from verified checkpoint tensors, and its quantisation state, as derived."""
    path, _, key = name.rpartition(".")
    for where in places_of(model.get_submodule(path)):
        if where.name == key or where.name.startswith(f"{key}."):
            _mark_derived(where, mover)


def mark_computed_in_load(model: nn.Module, mover: Mover) -> None:
    """Marks all that the device computed in a load from tensors that crossed, cast, fused or quantised, as derived.

    Its digest is taken now: what changes it from here on is found.
    """
    for where in places_of(model):
        _mark_derived(where, mover)


def _mark_derived(where: Place, mover: Mover) -> None:
    tensor = where.find()
    if tensor.device.type != mover.device.type or mover.provenance(tensor) is not None:
        return
    if mover.settings.verify != "full":
        mover.mark_unverified(tensor, UNSURE)
        return
    is_state = ".quant_state." in where.name or where.name.endswith((".CB", ".SCB"))
    if is_state or hasattr(tensor, "quant_state") or hasattr(tensor, "CB"):
        mover.mark_derived(tensor, QUANTISED)
    else:
        mover.mark_derived(tensor, CONVERTED)


def mark_computed(model: nn.Module, mover: Mover) -> None:
    """Marks as derived what the device computed: DoRA's magnitudes, ``modules_to_save`` ...

    If one of the tensors that were there before is unverified, so is everything computed. On the host backend nothing
    is marked: new tensors are host memory, which `place` digests.
    """
    if mover.device.type == "cpu":
        return
    for name, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict):  # on the PeftModel itself it is a set of names
            _require_equal_copies(name, module.original_module, copies, mover)
    tensors = [tensor for _, tensor in tensors_of(model) if tensor.device.type == mover.device.type]
    tainted = any(mover.provenance(tensor) == "unverified" for tensor in tensors)
    for tensor in tensors:
        if mover.provenance(tensor) is not None:
            continue
        if tainted:
            mover.mark_unverified(tensor, UNSURE)
        else:
            mover.mark_derived(tensor, "computed on the device from verified tensors")


def _require_equal_copies(name: str, original: Any, copies: nn.ModuleDict, mover: Mover) -> None:
    """Compare the copies of a module that are trained in its place with it."""
    originals = dict(original.named_parameters())
    for copy in copies.values():
        for part, copied in copy.named_parameters():
            if mover.provenance(copied) is not None:
                continue
            if digest(originals[part].to(copied.dtype)) != digest(copied):
                raise CorruptionError(
                    f"the device's copy of {name}.{part} for modules_to_save differs from the original: a fault of the "
                    "card's arithmetic or memory, not of a transfer. It was not used; run hf-rocm-tune doctor --full"
                )


def digests_before(model: nn.Module, mover: Mover) -> dict[str, Digest]:
    """Digests of the weights, by their names in the files, before an adapter is computed from them and changes them."""
    digests: dict[str, Digest] = {}
    for name, tensor in tensors_of(model):
        data = storage_bytes(tensor)
        now = digest(data)
        digests[file_name(name)] = now
        if mover.was_verified(tensor) and mover.digest_of(data) not in (None, now):
            raise MemoryFaultError(
                f"frozen weights changed in memory (before the adapter is computed from them): {name}",
                "Nothing was trained: start the same command again",
            )
    return digests


def mark_rewritten(model: nn.Module, before: Mapping[str, Digest], mover: Mover) -> None:
    """Marks the base weights that the adapter's initialisation (PiSSA, OLoRA) has rewritten; the report names them."""
    reason = "rewritten by the adapter's initialisation"
    if not before:
        return
    for name, tensor in tensors_of(model):
        data = storage_bytes(tensor)
        now = digest(data)
        if tensor.requires_grad or before.get(file_name(name), now) == now:
            continue
        mover.report.rebaselined(name, reason)
        if mover.digest_of(data) != now and (mover.was_verified(tensor) or tensor.device.type != "cpu"):
            mover.mark_derived(tensor, reason)  # new host tensors are digested by `place`


def file_name(name: str) -> str:
    """The name in the base's file of a tensor of a model with adapters."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


def coverage(model: nn.Module, mover: Mover) -> Coverage:
    """The share of the model's bytes on its device that is verified, buffers of streamed layers included."""
    verified = total = 0
    unverified: list[dict[str, str]] = []
    verified_by: Counter[str] = Counter()
    buffers: dict[str, Tensor] = {}
    for where in places_of(model):
        tensor = where.find()
        buffer = LAYER_BUFFERS.get(tensor)
        if buffer is not None:
            buffers[buffer] = storage_bytes(tensor)
    for name, tensor in chain(tensors_of(model), buffers.items()):
        size = tensor.numel() * tensor.element_size()
        total += size
        origin = mover.provenance(tensor)
        if origin in {"transferred", "derived"} or size == 0:
            verified += size
            verified_by[mover.reason(tensor) or MOVED] += size
        else:
            reason = mover.reason(tensor) or "reached the device without passing the mover"
            unverified.append({"tensor": name, "reason": reason})
    return Coverage(verified_bytes=verified, device_bytes=total, unverified=unverified, verified_by=dict(verified_by))


def _on_host_unknown(tensor: Tensor, mover: Mover) -> bool:
    return tensor.device.type == "cpu" and mover.provenance(tensor) is None


# ---- models that were created or loaded elsewhere: their content is compared with their files -----
#
# Tables that no file holds (rotary frequencies) are recomputed on the host; weights that bitsandbytes quantised are
# compared with the file's tensor, transferred and quantised again. Not covered on an accelerator: quantised checkpoint
# files, tensors that loading fuses or renames, and weights changed since.


def attest(model: nn.Module, mover: Mover) -> None:
    """Compares the tensors that a given model already has on the mover's device with its files.

    A tensor equal to its file (or to its recomputed table) counts as verified from here on; on the host backend every
    other one does too, on an accelerator it is marked unverified, with a reason.
    """
    _require_as_read(model)
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
