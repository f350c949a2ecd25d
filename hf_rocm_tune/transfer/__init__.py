"""Verified transfers to the device: every byte is digested at its source and again where it will be read.

Reading order: `mover` (the door), `shipment` (packing and sending), `ring`, `digest`, `ladder`, `damage`, then the
backends: `backend` (the interface, plain CPU), `accelerator` (HIP and CUDA), `faults` (faults on purpose).
"""

from __future__ import annotations

from hf_rocm_tune.transfer.accelerator import AcceleratorBackend
from hf_rocm_tune.transfer.backend import Backend, HostBackend
from hf_rocm_tune.transfer.digest import Digest, QueuedDigests, combine, digest, digest_on_device
from hf_rocm_tune.transfer.faults import FaultSpec, FaultyBackend
from hf_rocm_tune.transfer.mover import Mover, was_verified
from hf_rocm_tune.transfer.redirect import redirected
from hf_rocm_tune.transfer.report import STAGES, TransferReport, gb_per_s
from hf_rocm_tune.transfer.ring import Ring
from hf_rocm_tune.transfer.settings import TransferSettings
from hf_rocm_tune.transfer.tree import map_tensors, tree_tensors

__all__ = [
    "STAGES",
    "AcceleratorBackend",
    "Backend",
    "Digest",
    "FaultSpec",
    "FaultyBackend",
    "HostBackend",
    "Mover",
    "QueuedDigests",
    "Ring",
    "TransferReport",
    "TransferSettings",
    "combine",
    "digest",
    "digest_on_device",
    "gb_per_s",
    "map_tensors",
    "redirected",
    "tree_tensors",
    "was_verified",
]
