"""Checks of what FSDP2 sends between the cards in every step, before the optimizer uses any of it.

The stock collectives run inside wrappers, set through FSDP2's own extension points. Of weights each rank digests what
it sends, and each rank's part as it arrived; of gradients it computes two projections of what it sends, and of its part
of the average. At the end of the micro-step one exchange over gloo lets every rank check every collective, with the
same result: the n-th records of all ranks belong together. A wrong average is computed again through the host. Wrong
weights have already been used: every rank stops before the optimizer. Cost: one read of what is gathered, memory of one
copy of the gradients. Not covered: the copies that FSDP2 makes on the card; wrong averages within the rounding bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import exchange
from hf_rocm_tune.cards.averaging import SyncSettings
from hf_rocm_tune.cards.gradients import STAGE, Average, AverageJudge, digest_words, marked, packed, project
from hf_rocm_tune.errors import CorruptionError, SeamError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.transfer import Mover

GATHERED = "gathered"
_SUMS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """One all-gather: weights of a unit, or partial sums that each rank adds up (`tensor_parallel`)."""

    name: str
    sent: Tensor  # int64[2], the digest of what this rank sent
    arrived: Tensor  # int64[ranks, 2], digests of what arrived from each rank, including its own part
    nbytes: int  # from the other ranks

    def words(self, *, failed: bool) -> Tensor:
        return torch.cat([self.sent, self.arrived.flatten()])


class _AllGather(DefaultAllGather):
    def __init__(self, name: str, records: list[Gather], mover: Mover, numbers: Iterator[int]) -> None:
        self._name, self._records, self._mover, self._numbers = name, records, mover, numbers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        sent = digest_words(input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()  # on an accelerator: the stream waits, not the host
        self._mover.inject(output_tensor, name=self._name, stage=GATHERED, number=next(self._numbers), attempt=0)
        arrived = torch.stack([digest_words(part) for part in output_tensor.view(group.size(), -1)])
        nbytes = output_tensor.nbytes - input_tensor.nbytes
        self._records.append(Gather(name=self._name, sent=sent, arrived=arrived, nbytes=nbytes))
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(
        self, name: str, records: list[Average], mover: Mover, numbers: Iterator[int], write: Callable[..., str | None]
    ) -> None:
        self._name, self._records, self._mover, self._numbers, self._write = name, records, mover, numbers, write

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
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
        self._mover.inject(output_tensor, name=self._name, stage=STAGE, number=number, attempt=0)
        record = Average(
            name=self._name,
            number=number,
            sent=sent,
            wire=sent.dtype,
            projected=projected,
            averaged=lambda: output_tensor,  # in the memory that FSDP2 reads
            write=partial(self._write, output_tensor),
            said=(f"of {self._name}", ""),
            row={"tensor": self._name},
        )
        self._records.append(record)
        return work


class Gathers:
    """Checks what was gathered from the other ranks, in `records`. The constructor is collective."""

    way, message = "", ""  # in reports; in the error, with ``%s`` for the name of the first wrong one
    advice = ""  # the end of errors

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.records: list[Gather] = []
        self.made = 0  # averages or sums since the start
        self.numbers = itertools.count()  # counts the collectives of the run, the same on all ranks
        self._made_before = self._steps = self._bytes = 0
        host_group()  # created here, on every rank, not in the middle of a step

    @property
    def pending(self) -> bool:
        return bool(self.records)

    def require_averages(self) -> None:
        self._steps += 1
        made, self._made_before = self.made - self._made_before, self.made
        if made == 0:
            raise SeamError(
                "cannot verify: the ranks exchanged no gradients in a step that ends with the optimizer; use the "
                f"library versions that this package was tested with{self.advice}"
            )

    def settle(self, *, step: int) -> None:
        """Check all collectives since the last call. Collective."""
        self._settle([], step)

    def _settle(self, others: Sequence[Average], step: int) -> list[Tensor]:
        """Check what was gathered, with the same result on all ranks; the remaining words, by rank."""
        gathers, self.records[:] = list(self.records), []
        records = [*gathers, *others]
        self._bytes += sum(gather.nbytes for gather in gathers)
        self._bytes += sum(each.sent.nbytes - each.sent.nbytes // len(each.projected) for each in others)
        everyone = exchange(packed(records, [False] * len(records)))
        report = self._mover.report
        report.count(GATHERED, checked=len(gathers))
        ranks = len(everyone)
        end = len(gathers) * _SUMS * (1 + ranks)
        table = torch.stack([mine[:end] for mine in everyone]).view(ranks, len(gathers), 1 + ranks, _SUMS)
        sent, arrived = table[:, :, 0], table[:, :, 1:]  # [from, gather, sums], [at, gather, from, sums]
        right = (arrived == sent.transpose(0, 1)[None]).all(dim=3).all(dim=2)  # [at, gather]
        bad = [(gathers[number].name, list(marked(~right[:, number]))) for number in marked((~right).any(dim=0))]
        for name, at in bad:
            row = {"step": step, "stage": GATHERED, "tensor": name, "ranks": at, "kind": "other bytes"}
            report.incident({**row, "rung": "all_gather", "outcome": "stopped"})
        if bad:
            report.count(GATHERED, mismatches=len(bad))
            (name, at), *more = bad
            also = f" (and {len(more)} more times)" if more else ""
            raise CorruptionError(
                f"{self.message % name} at step {step} on ranks {at}{also}. The step was not used and the checkpoints "
                "already written are intact: run the doctor, then start the same command again to continue from the "
                f"newest one{self.advice}"
            )
        return [mine[end:] for mine in everyone]

    def describe(self) -> dict[str, Any]:
        """For the report: how the ranks exchanged gradients and sums, and the bytes that each sent for them."""
        sent = round(self._bytes / max(self._steps, 1))
        common = {"way": self.way, "compression": "none", "process_group": dist.get_backend()}
        return {**common, "bytes_between_ranks_per_step": sent}


class Traffic(Gathers):
    """Checks the collectives of a model that FSDP2 has sharded."""

    way, message = "fsdp2", "weights of %s that FSDP2 gathered from the other cards arrived wrong"
    advice = ", or train without FSDP2"

    def __init__(self, model: nn.Module, units: Sequence[tuple[str, Any]], mover: Mover) -> None:
        super().__init__(mover)
        for seam in ("fsdp2_gather", "fsdp2_reduce"):
            upstream.resolve(seam)
        self._model = model
        self._judge = AverageJudge(mover, SyncSettings(way="host"), rung="reduce_scatter", advice=self.advice)
        self._averages: list[Average] = []
        for name, module in units:
            name = name or "root"
            module.set_custom_all_gather(_AllGather(name, self.records, mover, self.numbers))
            module.set_custom_reduce_scatter(_ReduceScatter(name, self._averages, mover, self.numbers, self._write))

    @property
    @override
    def pending(self) -> bool:
        return bool(self.records or self._averages)

    @override
    def settle(self, *, step: int) -> None:
        averages, self._averages[:] = list(self._averages), []
        self._mover.report.count(STAGE, buckets=len(averages))
        self.made += len(averages)
        self._judge.conclude(averages, self._settle(averages, step), step)

    @override
    def describe(self) -> dict[str, Any]:
        judged = {"judged": "projections", "gathered_judged": "digests", "averages": self.made}
        return {**super().describe(), **judged}

    def _write(self, read: Tensor, average: Tensor) -> str | None:
        memory = read.untyped_storage().data_ptr()
        gradients = [each.grad._local_tensor for each in self._model.parameters() if isinstance(each.grad, DTensor)]
        if all(each.untyped_storage().data_ptr() != memory for each in gradients):
            return "its gradients were converted since, so it cannot replace them"
        read.copy_(average)  # device: from this device's memory to itself
        return None
