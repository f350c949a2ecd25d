"""Where each tensor of a model came from, and the move of what is still on the host.

:func:`tensors_of` is the one list of everything that a model keeps on its device: parameters, buffers, and the
quantisation state of 4-bit and 8-bit weights. Coverage, placement and the sentinels all walk this list.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_rocm_tune.models.shards import local, reshard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_rocm_tune.transfer import Mover

QUANTISED = "quantised on the device from a verified tensor"
CONVERTED = "fused or split on the device from verified tensors"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of what a model keeps on its device was verified on the way there.

    Args:
        verified_bytes: bytes that were transferred and verified, or computed on the device from such.
        device_bytes: all bytes of parameters, buffers and quantisation state.
        unverified: name and reason of each tensor that makes the difference.
    """

    verified_bytes: int
    device_bytes: int
    unverified: list[dict[str, str]] = field(default_factory=list)

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
    reshard(model)
    seen: set[int] = set()
    for name, each in _named(model):
        tensor = local(each)
        key = id(tensor.untyped_storage())
        if key not in seen:
            seen.add(key)
            yield name, tensor


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


def mark_loaded(model: nn.Module, names: Iterable[str], mover: Mover) -> None:
    """Tells the mover which tensors of the model were computed from verified checkpoint tensors.

    Args:
        model: after loading.
        names: state-dict names that the checkpoint filled.
        mover: through which the checkpoint's tensors came.
    """
    filled = set(names)
    for name, tensor in _named(model):
        quantised = ".quant_state." in name or name.endswith((".CB", ".SCB"))
        owner = name.split(".quant_state.")[0] if quantised else name
        owner = owner.removesuffix(".CB").removesuffix(".SCB") if quantised else owner
        known = owner in filled or f"{owner}.weight" in filled
        if known and tensor.device.type == mover.device.type and mover.provenance(tensor) is None:
            is_packed = quantised or hasattr(tensor, "quant_state") or hasattr(tensor, "CB")
            mover.mark_derived(tensor, QUANTISED if is_packed else CONVERTED)


def mark_initialised(model: nn.Module, mover: Mover) -> None:
    """Marks trainable tensors whose first values the device computed from verified base weights (DoRA, PiSSA ...)."""
    for _, parameter in model.named_parameters():
        on_device = parameter.device.type == mover.device.type
        if parameter.requires_grad and on_device and mover.provenance(parameter) is None:
            mover.mark_derived(parameter, "initialised on the device from verified weights")


def mark_rewritten(model: nn.Module, mover: Mover) -> None:
    """Marks base weights that the adapter's initialisation may have rewritten on the device, some of them in place.

    PiSSA, OLoRA, LoftQ and their like take the adapter's product out of the weight below it: the digest with which that
    weight arrived is no longer right. Exactly the weights below adapters are marked.
    """
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        weight = getattr(base, "weight", None)
        if isinstance(weight, torch.Tensor) and mover.was_verified(weight):
            mover.mark_derived(weight, "rewritten on the device by the adapter's initialisation")


def coverage(model: nn.Module, mover: Mover) -> Coverage:
    """Walks the model and says how much of it was verified.

    Returns:
        The bytes, and each tensor that was not verified with the reason.
    """
    verified = total = 0
    unverified: list[dict[str, str]] = []
    for name, tensor in tensors_of(model):
        size = tensor.numel() * tensor.element_size()
        total += size
        origin = mover.provenance(tensor)
        if origin in {"transferred", "derived"} or size == 0:
            verified += size
        else:
            reason = mover.reason(tensor) or "came to the device by another way than the mover"
            unverified.append({"tensor": name, "reason": reason})
    return Coverage(verified_bytes=verified, device_bytes=total, unverified=unverified)


def _on_host_unknown(tensor: Tensor, mover: Mover) -> bool:
    return tensor.device.type == "cpu" and mover.provenance(tensor) is None


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if state is None and name.endswith(".weight"):  # a sharded 4-bit weight has left it to its layer
            state = getattr(modules[name.removesuffix(".weight")], "quant_state", None)
        if state is not None:
            yield from _quant_state(f"{name}.quant_state", state)
        for attribute in ("CB", "SCB"):
            value = getattr(parameter, attribute, None)
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value


def _quant_state(prefix: str, state: object) -> Iterator[tuple[str, Tensor]]:
    for attribute in ("absmax", "code", "offset"):
        value = getattr(state, attribute, None)
        if isinstance(value, torch.Tensor):
            yield f"{prefix}.{attribute}", value
    nested = getattr(state, "state2", None)
    if nested is not None:
        yield from _quant_state(f"{prefix}.state2", nested)
