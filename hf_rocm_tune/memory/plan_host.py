"""What training takes of the host's memory. Most of it is assumed, and labelled so. Pure arithmetic: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_rocm_tune.memory.plan import Estimate, Variant

GIB = 1 << 30
#: Sizes of host memory that are common, in GiB.
HOSTS = (16, 32)

#: Assumed: the system and a desktop session.
SYSTEM_BYTES = 5 * GIB // 2
#: Assumed: Python, torch, the ROCm runtime and its kernels in one training process.
PROCESS_BYTES = 3 * GIB
#: The page-locked ring of the verified transfer: 4 slots of 32 MiB (``transfer/settings.py``).
RING_BYTES = 4 * 32 * (1 << 20)
#: Assumed: a data loader's worker.
WORKER_BYTES = GIB // 2


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's memory while training.

    Args:
        parts: bytes by part, all processes together.
        total: their sum.
        fits: by GiB of host memory, whether it is enough.
    """

    parts: Mapping[str, float]
    total: float
    fits: Mapping[int, bool]


def host(variant: Variant, estimate: Estimate, *, workers: int = 0) -> Host:
    """What the training processes of one choice take.

    Weight files are mapped and read through the ring: their pages are cache, which the system takes back. What a
    checkpoint gathers on the host is a copy of adapter and optimizer state.
    """
    cards = estimate.case.cards
    state = variant.optimizer.kept(variant.weights.trained)
    trained = sum(tensor.nbytes for tensor in variant.weights.trained)
    parts = {
        "system": float(SYSTEM_BYTES),
        "processes": float(cards * PROCESS_BYTES),
        "page-locked ring": float(cards * RING_BYTES),
        "a checkpoint being written": float(trained + state),
    }
    if variant.optimizer.paged:
        parts["paged optimizer state"] = float(cards * state)
    if workers:
        parts["data loader workers"] = float(cards * workers * WORKER_BYTES)
    total = sum(parts.values())
    return Host(parts=parts, total=total, fits={size: total <= size * GIB for size in HOSTS})
