"""torch's own copies, not verified and not staged by us: what the checks of transfers put to the test.

Everything else moves tensors through the mover. Here the copy is the subject, so it is left to torch exactly as a user
would write it; and faults can be put in at this one place, to show that the checks see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.transfer.raw_bytes import as_bytes, typed_view

FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable")
"""What can be done to a copy: its destination zeroed wholly or from a 4 KiB boundary on, one bit flipped, the bytes of
the copy before it, no copy at all, or other wrong bytes each time."""

_RANGE_BYTES = 4096


class Copies(Protocol):
    """What copies."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """Copy as ``destination.copy_(source)`` does.

        Args:
            destination: written to.
            source: of the same shape; any device, any dtype, any strides.
            what: the case that this copy belongs to, in words.
            non_blocking: as torch's.
        """


class RawCopies:
    """As they are."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """See `Copies`."""
        destination.copy_(source, non_blocking=non_blocking)


class FaultyCopies:
    """Copies that go wrong on purpose.

    Args:
        kind: one of `FAULTS`.
        where: only copies whose case has this text in its words.
    """

    def __init__(self, kind: str, where: str = "") -> None:
        assert kind in FAULTS, kind
        self._kind, self._where = kind, where
        self._earlier: Tensor | None = None
        self._count = 0

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """See `Copies`."""
        hit = self._where in what and destination.numel() > 0
        if not (hit and self._kind == "drop"):
            destination.copy_(source, non_blocking=non_blocking)
        if not hit or self._kind == "drop":
            return
        wait_for(destination)  # what is written here comes after the copy, whatever stream that used
        data = as_bytes(destination.contiguous()).cpu().clone()
        harmed = self._harmed(data)
        destination.copy_(typed_view(harmed, 0, destination.dtype, destination.shape))
        wait_for(destination)

    def _harmed(self, data: Tensor) -> Tensor:
        """The bytes that shall be there instead."""
        harmed, third = data.clone(), data.numel() // 3
        self._count += 1
        if self._kind == "zeros":
            harmed.zero_()
        elif self._kind == "zero_range":
            harmed[data.numel() // 2 // _RANGE_BYTES * _RANGE_BYTES :] = 0
        elif self._kind == "flip":
            harmed[third] ^= 4
        elif self._kind == "unstable":
            harmed[third:] ^= 1 + self._count % 255
        elif self._earlier is not None:
            size = min(self._earlier.numel(), data.numel())
            harmed[:size] = self._earlier[:size]
        self._earlier = data
        return harmed


def copies_for(request: Mapping[str, Any]) -> Copies:
    """The copies that a request to a check asks for: faulty ones where its ``fault`` is one of ours."""
    fault = request.get("fault") or {}
    kind = fault.get("kind")
    return FaultyCopies(kind, fault.get("where", "")) if kind in FAULTS else RawCopies()


def wait_for(*tensors: Tensor) -> None:
    """Wait until all that was queued on the devices of these tensors has ended."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
