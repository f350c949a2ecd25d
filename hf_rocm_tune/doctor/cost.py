"""What verification costs on this machine: the same transfers with and without it, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer import Mover, TransferSettings

_ROUNDS = 7
_BATCH_SHAPE = (4, 2048)
_BATCHES_A_ROUND = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed of one kind of transfer, alone and waited for, in 10^6 bytes a second; medians.

    A run overlaps its batches with compute, so what a step pays is less than this.
    """

    what: str
    verified_mb_per_s: float
    unverified_mb_per_s: float


def measure(device: torch.device) -> list[Cost]:
    """Times a large weight and a batch of token ids, labels and mask, with the settings that runs use by default."""
    mib = 64 if device.type == "cuda" else 16
    weight = torch.randn(mib << 18)
    batch = {name: torch.randint(0, 32_000, _BATCH_SHAPE) for name in ("input_ids", "labels", "attention_mask")}
    batch_bytes = sum(tensor.nbytes for tensor in batch.values())

    def send_weight(mover: Mover) -> Tensor:
        return mover.move(weight, name="weight")

    def send_batches(mover: Mover) -> None:
        for _ in range(_BATCHES_A_ROUND):
            mover.settle(mover.begin(batch))

    return [
        _compare(device, f"one weight of {mib} MiB", weight.nbytes, send_weight),
        _compare(device, f"batches of {batch_bytes >> 10} KiB", batch_bytes * _BATCHES_A_ROUND, send_batches),
    ]


def _compare(device: torch.device, what: str, nbytes: int, send: Callable[[Mover], object]) -> Cost:
    speeds: dict[str, list[float]] = {"full": [], "off": []}
    full = Mover(device, settings=TransferSettings(verify="full"))
    off = Mover(device, settings=TransferSettings(verify="off"))
    with full, off:
        for _ in range(_ROUNDS + 1):
            for mover in (full, off):
                begun = time.perf_counter()
                arrived = send(mover)
                if device.type == "cuda":
                    # A transfer that is not verified is not waited for either.
                    torch.cuda.current_stream(device).synchronize()
                speeds[mover.settings.verify].append(nbytes / (time.perf_counter() - begun) / 1e6)
                del arrived
    # The first round allocates, and is left out.
    median = {verify: round(statistics.median(values[1:]), 1) for verify, values in speeds.items()}
    return Cost(what=what, verified_mb_per_s=median["full"], unverified_mb_per_s=median["off"])
