"""Backends whose device memory is poisoned before anything is sent to it.

Allocators hand out memory again, so what was never written may hold the right bytes of an earlier transfer by chance.
A run need not care; the drill wants every copy that did not happen to show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_rocm_tune.transfer import AcceleratorBackend, Backend, HostBackend
from hf_rocm_tune.transfer.diagnosis import POISON


class PoisonedHost(HostBackend):
    """Plain CPU, each destination filled with `POISON` first."""

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        """As in the base; the filling is queued before any copy."""
        buffer = super().allocate(nbytes, long_lived=long_lived)
        self.fill(buffer, POISON)
        return buffer


class PoisonedAccelerator(AcceleratorBackend):
    """A HIP or CUDA device, each destination filled with `POISON` first, on the copy stream."""

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        """As in the base; the filling is queued before any copy."""
        buffer = super().allocate(nbytes, long_lived=long_lived)
        self.fill(buffer, POISON)
        return buffer


def poisoned(device: torch.device) -> Backend:
    """The backend for a device, ``cuda`` or ``cpu``."""
    return PoisonedAccelerator(device) if device.type == "cuda" else PoisonedHost()
