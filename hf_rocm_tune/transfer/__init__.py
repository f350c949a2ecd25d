"""Verified transfers to the device: every byte is digested at its source and again where it will be read.

Reading order: `mover` (the only way to the device), `staging` (settings and staging memory), `to_device` and `to_host`
(the copies), `staged_batch` (a batch in one memory), `verifier` (what arrived on the device), `retry` (the policy
after a mismatch, of both directions), `digest`, `damage`, `backend` (CPU; HIP and CUDA), `faults`, `interception`
(where every copy of any other code comes to the mover), `mapped` (the file that a host tensor lies in).
"""

from __future__ import annotations

from hf_rocm_tune.transfer.backend import AcceleratorBackend, Backend, HostBackend
from hf_rocm_tune.transfer.digest import (
    Digest,
    QueuedDigests,
    TensorGroup,
    combine,
    digest,
    digest_on_device,
    triton_refusal,
)
from hf_rocm_tune.transfer.faults import FaultSpec, FaultyBackend
from hf_rocm_tune.transfer.mover import Mover, was_verified
from hf_rocm_tune.transfer.nested import map_tensors, named_tensors, tree_tensors
from hf_rocm_tune.transfer.report import STAGES, TransferReport, gb_per_s
from hf_rocm_tune.transfer.staging import Ring, TransferSettings
from hf_rocm_tune.transfer.to_host import host_copy

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
    "TensorGroup",
    "TransferReport",
    "TransferSettings",
    "combine",
    "digest",
    "digest_on_device",
    "gb_per_s",
    "host_copy",
    "map_tensors",
    "named_tensors",
    "tree_tensors",
    "triton_refusal",
    "was_verified",
]
