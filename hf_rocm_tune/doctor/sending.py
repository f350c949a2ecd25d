"""One transfer of the drill, and the truth about it by another way than the digests: the bytes, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Mover, TransferReport
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather


class Listener(TransferReport):
    """A report that hands over the incidents of one transfer at a time instead of keeping those of all."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[dict[str, Any]] = []

    def incident(self, row: Mapping[str, Any]) -> None:
        """Keep it until it is taken."""
        self._heard.append(dict(row))

    def take(self) -> list[dict[str, Any]]:
        """The incidents since the last call."""
        heard, self._heard = self._heard, []
        return heard


def begin(mover: Mover, stage: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Send as a run would: batches in one copy, to be settled; anything else tensor by tensor.

    Raises:
        CorruptionError: see `Mover.move`; for batches it comes from `Mover.settle`.
    """
    if stage == "batches":
        in_flight: dict[str, Tensor] = mover.begin(tensors)
        return in_flight
    return {name: mover.move(tensor, name=name, stage=stage) for name, tensor in tensors.items()}


def same_bytes(arrived: Tensor, source: Tensor) -> bool:
    """Whether a tensor on the device, read back, has the bytes of its host source."""
    right = torch.empty(byte_count(source), dtype=torch.uint8)
    # Gathered through an aligned view, as packing does; NaN are compared as bytes like everything else.
    gather(source, 0, right.numel(), right)
    return arrived.shape == source.shape and torch.equal(as_bytes(arrived.cpu()), right)
