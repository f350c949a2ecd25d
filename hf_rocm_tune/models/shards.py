"""Tensors sharded over the ranks (``DTensor``): a rank's shard, and its offset in the whole tensor.

Of n rows (or columns) on R ranks, rank r has up to ``ceil(n/R)`` from ``r * ceil(n/R)`` on. The whole tensor's digest
is the sum of the shards' digests, each taken at its offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hf_rocm_tune.transfer import Digest, digest
from hf_rocm_tune.transfer.raw_bytes import as_bytes

_WORD = 4
TENSOR_PARALLEL = "tp_size"
"""Attribute of a tensor-parallel model; accelerate and transformers read it too."""


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory, with the same ``requires_grad``; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule) or TENSOR_PARALLEL in model.__dict__


def fsdp_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Frees parameters that FSDP2 still keeps gathered. Between steps only."""
    for _, module in fsdp_modules(model):
        module.reshard()


def rows_of(rank: int, ranks: int, rows: int) -> tuple[int, int]:
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def cut_of(tensor: DTensor) -> int | None:
    """The dimension along which a tensor is sharded; None if every rank has all of it."""
    (placement,) = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    return part_of(whole, cut_of(like), like.device_mesh)


def part_of(whole: Tensor, dim: int | None, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a plain tensor that is sharded along ``dim``, as a view."""
    if dim is None:
        return whole
    first, last = rows_of(mesh.get_local_rank(), mesh.size(), whole.shape[dim])
    return whole.narrow(dim, first, last - first)


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placer(model: nn.Module, place: Callable[..., Tensor], parameters: Sequence[Tensor] = ()) -> Callable[..., Tensor]:
    """A ``place`` that moves only this rank's part of a host tensor to the device and returns a sharded tensor."""
    adapters = "|".join(map(re.escape, getattr(model, "peft_config", {})))
    likes = {re.sub(rf"\.({adapters})(?=\.|$)", "", name): parameter for name, parameter in model.named_parameters()}

    def place_part(tensor: Tensor, *, name: str, stage: str) -> Tensor:
        state = re.match(r"optimizer\.state\.(\d+)\.", name)
        like = parameters[int(state[1])] if state else likes[name]
        if tensor.dim() == 0 or not isinstance(like, DTensor):  # a step count, which is not sharded
            return place(tensor, name=name, stage=stage)
        return as_shard(place(own_part(tensor, like), name=name, stage=stage), like)

    return place_part


def shard_digest(tensor: DTensor) -> Digest:
    """Digest of this rank's shard at its offset; the sum over all ranks is the whole tensor's digest."""
    mesh, part = tensor.device_mesh, tensor._local_tensor.detach()
    dim, rank = cut_of(tensor), mesh.get_local_rank()
    if dim is None:
        return digest(part) if rank == 0 else Digest(0, 0, 0)
    if dim == 0:
        first, _ = rows_of(rank, mesh.size(), tensor.shape[0])
        return digest_at(part, first * (tensor.numel() // max(tensor.shape[0], 1)) * tensor.element_size())
    # Columns are not consecutive. Zeros add nothing to a digest, so the shard is digested inside a tensor of zeros.
    whole = part.new_zeros(tensor.shape)
    own_part(whole, tensor).copy_(part)  # device: from this device's memory to itself
    sums = digest(whole)
    return Digest(sums.s1, sums.s2, part.nbytes)


def digest_at(part: Tensor, start: int) -> Digest:
    """Digest of a part that begins at byte ``start`` of a tensor, possibly inside a 32-bit word."""
    inside = start % _WORD
    if inside == 0:
        return digest(part, word_offset=start // _WORD)
    filled = torch.cat([torch.zeros(inside, dtype=torch.uint8, device=part.device), as_bytes(part.contiguous())])
    sums = digest(filled, word_offset=start // _WORD)
    return Digest(sums.s1, sums.s2, sums.nbytes - inside)
