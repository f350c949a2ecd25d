"""The tensors that a model keeps on its device: :func:`tensors_of` is the one list of them.

Coverage, placement and the sentinels all walk it. No library but torch is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.models.shards import local, reshard
from hf_rocm_tune.transfer import Digest, digest
from hf_rocm_tune.transfer.raw_bytes import Registry, storage_bytes

#: Device memory that streamed layers share, with its name, see `models.streaming`.
LAYER_BUFFERS: Registry[str] = Registry()


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors that the model keeps on its device, each storage once; of a sharded tensor, this rank's part.

    Dotted name and tensor: parameters, buffers, ``<weight>.quant_state.*`` (bitsandbytes 4-bit),
    ``<weight>.CB``/``SCB`` (8-bit). Not those of streamed layers, which share buffers.
    """
    return ((name, tensor) for name, tensor, _ in findable_tensors_of(model))


def findable_tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """As `tensors_of`, each with a function that looks it up again (AttributeError: it no longer exists)."""
    reshard(model)
    seen: set[int] = set()
    for where in places_of(model):
        tensor = where.find()
        key = tensor.untyped_storage()._cdata
        if key not in seen and LAYER_BUFFERS.get(tensor) is None:
            seen.add(key)
            yield where.name, tensor, where.find


class Place(NamedTuple):
    name: str
    module: nn.Module
    path: str  # dotted attribute of the module

    def find(self) -> Tensor:
        tensor: Tensor | None = attrgetter(self.path)(self.module)
        if tensor is None:  # bitsandbytes moves an 8-bit weight's state to its layer at the first forward
            tensor = attrgetter(f"state.{self.path.rpartition('.')[2]}")(self.module)
        return local(tensor)

    def rebind(self, tensor: Tensor) -> Tensor:
        """Puts a tensor in the place of one of the same shape and dtype; a parameter keeps its identity."""
        owner_path, _, attribute = self.path.rpartition(".")
        owner = attrgetter(owner_path)(self.module) if owner_path else self.module
        known = getattr(owner, attribute)
        if isinstance(known, nn.Parameter):
            known.data = tensor
            return known
        setattr(owner, attribute, tensor)
        return tensor


def places_of(model: nn.Module) -> Iterator[Place]:
    """All parameters, then all buffers, then the tensors that quantised parameters have beside their codes."""
    modules = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        modules.append((prefix, module))
    for prefix, module in modules:
        for key, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield Place(prefix + key, module, key)
    for prefix, module in modules:
        for key, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            yield Place(prefix + key, module, key)
    for prefix, module in modules:
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield from _places_beside(prefix, module, key, parameter)


def _places_beside(prefix: str, module: nn.Module, key: str, parameter: nn.Parameter) -> Iterator[Place]:
    """A 4-bit parameter's quantisation state, an 8-bit one's codes and scales."""
    state = getattr(parameter, "quant_state", None)
    path = f"{key}.quant_state"
    if state is None and key == "weight":  # a sharded 4-bit weight keeps it in its layer
        state = getattr(module, "quant_state", None)
        path = "quant_state"
    for suffix in quant_state_of(state):
        yield Place(f"{prefix}{key}.quant_state.{suffix}", module, f"{path}.{suffix}")
    for attribute in ("CB", "SCB"):
        if not hasattr(parameter, attribute):
            continue
        owners = (parameter, getattr(module, "state", None))
        if any(isinstance(getattr(owner, attribute, None), torch.Tensor) for owner in owners):
            yield Place(f"{prefix}{key}.{attribute}", module, f"{key}.{attribute}")


def quant_state_of(state: object) -> Iterator[str]:
    """Names of the tensors in a 4-bit weight's quantisation state, nested state included."""
    for attribute in ("absmax", "code", "offset"):
        if isinstance(getattr(state, attribute, None), torch.Tensor):
            yield attribute
    nested = getattr(state, "state2", None)
    if nested is not None:
        yield from (f"state2.{attribute}" for attribute in quant_state_of(nested))


def file_name(name: str) -> str:
    """The name in the base's file of a tensor of a model with adapters."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


# ---- host tensors that wait to be placed or streamed: they have to stay what was read ----


@dataclass(frozen=True)
class Read:
    """What a host tensor was when it had been read from a file."""

    digest: Digest  # of its storage
    file: str | None = None  # whose mapped bytes it shares; None: it has memory of its own
    name: str = ""  # in the file


_READ: Registry[Read] = Registry()


def remember_read(tensor: Tensor, read: Read) -> None:
    """Keeps the digest of a host tensor that was just read from a file, for `checked_read`."""
    _READ.put(tensor, read)


def checked_read(name: str, tensor: Tensor) -> Read | None:
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


def require_as_read(model: nn.Module) -> None:
    """Raises MemoryFaultError where a host tensor of the model is no longer what was read from its file."""
    for name, tensor in tensors_of(model):
        if tensor.device.type == "cpu":
            checked_read(name, tensor)
