"""How several ranks average their gradients: the settings, and what cannot go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_rocm_tune.errors import UsageError

Way = Literal["ddp", "host"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]

WAYS = ("ddp", "host")
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How gradients are averaged.

    Attributes:
        way: ``ddp``: by the process group, as DistributedDataParallel does; ``host``: each bucket is brought to the
            host, averaged there over gloo, and brought back, verified both ways.
        compression: what travels between the ranks. ``fp16`` and ``bf16`` are casts of wider gradients, 16-bit ones are
            left as they are; ``powersgd`` is an approximation of rank 1 with error feedback, for ``ddp`` only.
        powersgd_after: steps with plain averages before PowerSGD begins, 2 or more.

    Raises:
        UsageError: a value that is not valid, or PowerSGD on the host.
    """

    way: Way = "ddp"
    compression: Compression = "none"
    powersgd_after: int = 100

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise UsageError(f"grad_sync is '{self.way}'; choose one of {', '.join(WAYS)}")
        if self.compression not in COMPRESSIONS:
            raise UsageError(f"grad_compression is '{self.compression}'; choose one of {', '.join(COMPRESSIONS)}")
        if self.way == "host" and self.compression == "powersgd":
            raise UsageError(
                "--grad_compression powersgd does not go with --grad_sync host: choose fp16 or bf16, or --grad_sync ddp"
            )
        if self.powersgd_after < 2:
            raise UsageError(f"powersgd_after is {self.powersgd_after}; give a whole number from 2 on")
