"""Tensors that are sharded over the ranks (FSDP2's ``DTensor``): a rank's own part, and its place in the whole.

FSDP2 cuts every parameter along its first dimension: of n rows and R ranks, rank r has the rows from ``r * ceil(n/R)``
on, up to ``ceil(n/R)`` of them. Bytes are therefore consecutive, and the digest of the whole is the sum of the digests
of the parts, each taken at its own place (`transfer.digest`).
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
    """This rank's part of a sharded tensor, sharing its memory, with the same ``requires_grad``; others as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded this model."""
    return isinstance(model, FSDPModule)


def fsdp_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """The modules that FSDP2 gathers as units, with their names; none where the model is not sharded."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Drop what FSDP2 still keeps gathered, so that parameters are the ranks' own parts again. Between steps only."""
    for _, module in fsdp_modules(model):
        module.reshard()


def rows_of(rank: int, ranks: int, rows: int) -> tuple[int, int]:
    """First row of a rank's part, and the row after its last."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def own_rows(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a plain tensor that this rank has of ``like``, as a view."""
    first, last = rows_of(like.device_mesh.get_local_rank(), like.device_mesh.size(), whole.shape[0])
    return whole[first:last]


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    """A rank's part as the sharded tensor that it belongs to, laid out like ``like``. Nothing is communicated."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placer(model: nn.Module, place: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A ``place`` that brings only this rank's rows of a whole host tensor to the device, as a sharded tensor.

    Args:
        model: sharded; all of its parameters lie on one mesh.
        place: brings one host tensor to the device, verified.
    """
    like = next(each for each in model.parameters() if isinstance(each, DTensor))

    def place_rows(tensor: Tensor, *, name: str, stage: str) -> Tensor:
        if tensor.dim() == 0:  # a step count: no rank has a part of it
            return place(tensor, name=name, stage=stage)
        moved = place(own_rows(tensor, like), name=name, stage=stage)
        return DTensor.from_local(
            moved, like.device_mesh, like.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    return place_rows


def shard_digest(tensor: DTensor) -> Digest:
    """Digest of this rank's part at its place in the whole; the sum over all ranks is the digest of the whole."""
    first, _ = rows_of(tensor.device_mesh.get_local_rank(), tensor.device_mesh.size(), tensor.shape[0])
    row_bytes = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size()
    return digest_at(tensor._local_tensor.detach(), first * row_bytes)


def digest_at(part: Tensor, start: int) -> Digest:
    """Digest of a part that begins at byte ``start`` of a whole.

    A part may begin within a 32-bit word: that word is then the sum of two, each filled up with zeros.
    """
    inside = start % _WORD
    if inside == 0:
        return digest(part, word_offset=start // _WORD)
    filled = torch.cat([torch.zeros(inside, dtype=torch.uint8, device=part.device), as_bytes(part.contiguous())])
    found = digest(filled, word_offset=start // _WORD)
    return Digest(found.s1, found.s2, found.nbytes - inside)
