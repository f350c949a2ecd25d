"""The flags of a job on several cards or machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RanksArguments:
    """Their meaning is in the help of each."""

    grad_sync: Literal["auto", "ddp", "host"] = field(
        default="auto",
        metadata={
            "help": "How several processes average gradients: as DistributedDataParallel does over the process group, "
            "or through host memory over gloo, verified both ways. auto: what the preflight finds to work."
        },
    )
