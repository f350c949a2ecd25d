"""Batches copied into one host memory each: one crosses in one transfer, and its collator may reuse its own memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rocm_tune.errors import MemoryFaultError
from hf_rocm_tune.transfer.digest import Digest, combine, digest, digest_range
from hf_rocm_tune.transfer.raw_bytes import Registry, as_bytes, dense, ordinary, storage_bytes, typed_view
from hf_rocm_tune.transfer.staging import Session
from hf_rocm_tune.transfer.to_device import ALIGNMENT, Segment

_COPIES = 3


class StagedTensor(NamedTuple):
    """One tensor of a `Layout`, as `Segment`."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    digest: Digest | None

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a batch lie in one memory, aligned as on the device; it does not keep the memory alive."""

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
            if digest(memory[tensor.offset : tensor.end], word_offset=tensor.offset // 4) != tensor.digest:
                return tensor.name
        return ""

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in ``memory``, uint8[n] on the host or on a device."""
        with ordinary():
            return [typed_view(memory, tensor.offset, tensor.dtype, tensor.shape) for tensor in self.tensors]


class StagedBatch(NamedTuple):
    """A batch in one host memory, uint8[n]."""

    memory: Tensor
    layout: Layout

    def segments(self) -> list[Segment]:
        """For a transfer of the whole memory."""
        segments = []
        for tensor, source in zip(self.layout.tensors, self.layout.views(self.memory), strict=True):
            segments.append(Segment(tensor.name, source, tensor.offset, digest=tensor.digest))
        return segments


class StagedBatches:
    """The batches that a mover has staged, known by their memory as long as anything else keeps that.

    Args:
        session: of the mover; with ``verify="off"`` copies are not compared.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._layouts: Registry[Layout] = Registry()

    def batch_of(self, named: Sequence[tuple[str, Tensor]]) -> StagedBatch:
        """The staged batch of these tensors; staged now if they were not, or if these are not all, in order."""
        tensors = [tensor for _, tensor in named]
        layout = self._layouts.get(tensors[0])
        if layout is None or not layout.holds(tensors):
            return self.stage(named)
        return StagedBatch(storage_bytes(tensors[0]), layout)

    def stage(self, named: Sequence[tuple[str, Tensor]]) -> StagedBatch:
        """Copy dense host tensors into one memory."""
        memory, layout = _copy_into_one(named, verified=self._session.settings.verify != "off")
        self._layouts.put(memory, layout)
        return StagedBatch(memory, layout)

    def require_unchanged(self, tensors: Iterable[Tensor]) -> None:
        """Check the memories of those tensors that lie in staged batches; others are ignored."""
        compared: set[int] = set()  # several tensors lie in one staged batch
        for tensor in tensors:
            layout = self._layouts.get(tensor)
            if layout is not None and id(layout) not in compared:
                compared.add(id(layout))
                self.require_equal(StagedBatch(storage_bytes(tensor), layout))

    def require_equal(self, batch: StagedBatch, now: Digest | None = None) -> None:
        """``now``: the digest of the batch's memory, where it has been taken."""
        if batch.layout.digest is None or (now or digest(batch.memory)) == batch.layout.digest:
            return
        raise self.changed(batch.layout.changed_in(batch.memory), "after it was read from the loader")

    def changed(self, name: str, when: str) -> MemoryFaultError:
        """The error, reported as an incident, for a batch tensor that changed in host memory."""
        row: dict[str, Any] = {"step": self._session.step, "stage": "batches", "kind": "source_changed"}
        self._session.report.incident({**row, "outcome": "stopped", "tensor": name})
        return MemoryFaultError(
            f"batch tensor '{name}' changed in host memory {when}",
            "Look for code that writes to batches, or test the memory; the same command continues from the newest "
            "checkpoint",
        )


def _copy_into_one(named: Sequence[tuple[str, Tensor]], *, verified: bool) -> tuple[Tensor, Layout]:
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
    return memory, Layout(tuple(tensors), whole)
