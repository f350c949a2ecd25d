"""Where each tensor of a model came from, and the move of what is still on the host.

:func:`tensors_of` is the one list of everything that a model keeps on its device: parameters, buffers, and the
quantisation state of 4-bit and 8-bit weights. Coverage, placement and the sentinels all walk this list.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.models.shards import local, reshard
from hf_rocm_tune.transfer import digest
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Digest, Mover

MOVED = "equal to its source on arrival"
QUANTISED = "quantised on the device from a verified tensor"
CONVERTED = "fused or split on the device from verified tensors"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of what a model keeps on its device was verified on the way there.

    Args:
        verified_bytes: bytes that were transferred and verified, or computed on the device from such.
        device_bytes: all bytes of parameters, buffers and quantisation state.
        unverified: name and reason of each tensor that makes the difference.
        verified_by: of the verified bytes, how many by what.
    """

    verified_bytes: int
    device_bytes: int
    unverified: list[dict[str, str]] = field(default_factory=list)
    verified_by: dict[str, int] = field(default_factory=dict)

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
    was on the device before the block must have a provenance already (`models.attest`); where that is unverified, so
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
