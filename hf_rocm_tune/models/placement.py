"""Places a model on its device and records where each of its tensors came from.

:func:`tensors_of` is the one list of everything that a model keeps on its device; coverage, placement and the
sentinels all walk it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, listed
from hf_rocm_tune.models.shards import local
from hf_rocm_tune.models.tensors import LAYER_BUFFERS, Place, file_name, places_of, require_as_read, tensors_of
from hf_rocm_tune.transfer import Digest, digest
from hf_rocm_tune.transfer.raw_bytes import storage_bytes
from hf_rocm_tune.transfer.report import share_words

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

MOVED = "equal to its source on arrival"
QUANTISED = "quantised on the device from a verified tensor"
CONVERTED = "fused or split on the device from verified tensors"
UNSURE = "computed on the device, where not all weights were verified"


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
    require_as_read(model)
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
