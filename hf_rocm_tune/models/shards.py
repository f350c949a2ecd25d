"""Tensors sharded over the ranks (FSDP2's ``DTensor``): a rank's shard, and its offset in the whole tensor.

FSDP2 shards every parameter along its first dimension: of n rows on R ranks, rank r has up to ``ceil(n/R)`` rows from
``r * ceil(n/R)`` on. A shard's bytes are consecutive, and the whole tensor's digest is the sum of the shards' digests,
each taken at its offset (`transfer.digest`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_rocm_tune.transfer import Digest, digest
from hf_rocm_tune.transfer.raw_bytes import as_bytes

_WORD = 4


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory, with the same ``requires_grad``; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded this model."""
    return isinstance(model, FSDPModule)


def fsdp_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """Names and modules that FSDP2 gathers as units; none if the model is not sharded."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Frees parameters that FSDP2 still keeps gathered. Between steps only."""
    for _, module in fsdp_modules(model):
        module.reshard()


def rows_of(rank: int, ranks: int, rows: int) -> tuple[int, int]:
    """First row of a rank's shard, and the row after its last."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def own_rows(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's rows of a plain tensor that is sharded like ``like``, as a view."""
    first, last = rows_of(like.device_mesh.get_local_rank(), like.device_mesh.size(), whole.shape[0])
    return whole[first:last]


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    """The DTensor of a rank's shard, laid out like ``like``. Nothing is communicated."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placer(model: nn.Module, place: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A ``place`` that moves only this rank's rows of a host tensor to the device and returns a sharded tensor.

    Args:
        model: sharded, all parameters on one mesh.
        place: moves one host tensor to the device, verified.
    """
    like = next(each for each in model.parameters() if isinstance(each, DTensor))

    def place_rows(tensor: Tensor, *, name: str, stage: str) -> Tensor:
        if tensor.dim() == 0:  # a step count, which is not sharded
            return place(tensor, name=name, stage=stage)
        moved = place(own_rows(tensor, like), name=name, stage=stage)
        return DTensor.from_local(
            moved, like.device_mesh, like.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    return place_rows


def shard_digest(tensor: DTensor) -> Digest:
    """Digest of this rank's shard at its offset; the sum over all ranks is the whole tensor's digest."""
    first, _ = rows_of(tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), tensor.shape[0])
    row_bytes = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size()
    return digest_at(tensor._local_tensor.detach(), first * row_bytes)


def digest_at(part: Tensor, start: int) -> Digest:
    """Digest of a part that begins at byte ``start`` of a tensor.

    A part may begin inside a 32-bit word, which then is the sum of two words padded with zeros.
    """
    inside = start % _WORD
    if inside == 0:
        return digest(part, word_offset=start // _WORD)
    filled = torch.cat([torch.zeros(inside, dtype=torch.uint8, device=part.device), as_bytes(part.contiguous())])
    found = digest(filled, word_offset=start // _WORD)
    return Digest(found.s1, found.s2, found.nbytes - inside)
