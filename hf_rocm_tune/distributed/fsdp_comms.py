"""FSDP2's two collectives with a look at what goes in and what comes out. Upstream's own do the work.

The digests and projections are queued on the stream that FSDP2 communicates on, so they come in order and wait for
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from hf_rocm_tune.distributed.fsdp_records import Gather, Reduction, sums
from hf_rocm_tune.distributed.projections import project
from hf_rocm_tune.errors import SeamError
from hf_rocm_tune.transfer import Mover

GATHERED = "gathered"


class Gathers(DefaultAllGather):
    """The all-gather of one unit's weights.

    Args:
        name: of the unit.
        records: each call adds one.
        mover: harms what arrives, where that was asked for.
        numbers: counts the collectives of the whole run, alike on all ranks.
    """

    def __init__(self, name: str, records: list[Gather], mover: Mover, numbers: Iterator[int]) -> None:
        self._name, self._records, self._mover, self._numbers = name, records, mover, numbers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Upstream's; ``input_tensor`` is this rank's part within ``output_tensor``."""
        sent = sums(input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()  # on an accelerator: the stream waits, not the host
        self._mover.inject(output_tensor, name=self._name, stage=GATHERED, number=next(self._numbers), attempt=0)
        arrived = torch.stack([sums(part) for part in output_tensor.view(group.size(), -1)])
        nbytes = output_tensor.nbytes - input_tensor.nbytes
        self._records.append(Gather(name=self._name, sent=sent, arrived=arrived, nbytes=nbytes))
        return work


class Reduces(DefaultReduceScatter):
    """The reduce-scatter of one unit's gradients.

    Args:
        name: of the unit.
        records: each call adds one.
        mover: harms the average, where that was asked for.
        numbers: see `Gathers`.
    """

    def __init__(self, name: str, records: list[Reduction], mover: Mover, numbers: Iterator[int]) -> None:
        self._name, self._records, self._mover, self._numbers = name, records, mover, numbers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Upstream's; ``input_tensor`` holds the parts of all ranks, one after the other."""
        if op != dist.ReduceOp.AVG:
            raise SeamError(
                f"cannot verify: FSDP2 reduces gradients by {op} instead of averaging them; train with --bf16"
            )
        projected = torch.stack([project(part) for part in input_tensor.view(group.size(), -1)])
        sent = input_tensor.clone()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if work is not None:
            work.wait()
        number = next(self._numbers)
        self._mover.inject(output_tensor, name=self._name, stage="gradients", number=number, attempt=0)
        self._records.append(
            Reduction(name=self._name, number=number, sent=sent, projected=projected, average=output_tensor)
        )
        return work
