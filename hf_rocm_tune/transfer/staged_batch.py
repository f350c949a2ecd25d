"""A batch copied into one host memory, so that it crosses in one transfer and its collator may reuse its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest import Digest, combine, digest, digest_range
from hf_rocm_tune.transfer.raw_bytes import as_bytes, dense, ordinary, typed_view
from hf_rocm_tune.transfer.to_device import ALIGNMENT

_COPIES = 3


class StagedTensor(NamedTuple):
    """One tensor of a `StagedBatch`, as `Segment`."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    digest: Digest | None


@dataclass(frozen=True)
class StagedBatch:
    """Layout of copies of host tensors, aligned in one memory as on the device; it does not keep the memory alive."""

    tensors: tuple[StagedTensor, ...]
    digest: Digest | None  # of the memory, with zeros in the gaps; None: not verified

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, whose first one lies in this memory, are exactly the tensors of this batch, in order."""
        storage = tensors[0].untyped_storage()
        return len(tensors) == len(self.tensors) and all(
            tensor.untyped_storage() is storage
            and tensor.storage_offset() * tensor.element_size() == known.offset
            and (tensor.dtype, tensor.shape) == (known.dtype, known.shape)
            and tensor.is_contiguous()
            for tensor, known in zip(tensors, self.tensors, strict=True)
        )

    def changed_in(self, memory: Tensor) -> str:
        """The name of the first tensor that has changed; empty if only gaps have."""
        for tensor in self.tensors:
            copied = typed_view(memory, tensor.offset, tensor.dtype, tensor.shape)
            if digest(copied, word_offset=tensor.offset // 4) != tensor.digest:
                return tensor.name
        return ""


def stage_batch(named: Sequence[tuple[str, Tensor]], *, verified: bool) -> tuple[Tensor, StagedBatch]:
    """Copy dense host tensors into one memory, uint8[n].

    ``verified``: compare the copies with the originals' digests, and copy again, up to twice, if they differ.
    """
    starts = []
    end = 0
    for _, tensor in named:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + tensor.nbytes
    with ordinary():
        memory = torch.zeros(end, dtype=torch.uint8)
    for _ in range(_COPIES):
        tensors = []
        for (name, tensor), start in zip(named, starts, strict=True):
            source = dense(tensor)
            size = tensor.nbytes
            original = None
            if verified:
                original = digest_range(source, 0, size, word_offset=start // 4, copy_to=memory[start : start + size])
            else:
                memory[start : start + size].copy_(as_bytes(source))
            tensors.append(StagedTensor(name, start, tensor.dtype, tensor.shape, original))
        whole = digest(memory) if verified else None
        if whole is None or whole.same_words(combine(part.digest for part in tensors if part.digest is not None)):
            break
    return memory, StagedBatch(tuple(tensors), whole)
