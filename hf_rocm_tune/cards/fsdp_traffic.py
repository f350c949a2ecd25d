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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hf_rocm_tune import upstream
from hf_rocm_tune.cards.agree import exchange
from hf_rocm_tune.cards.gradients import (
    MAGNITUDE,
    STAGE,
    AverageJudge,
    WrongAverage,
    digest_words,
    judged,
    marked,
    packed,
    project,
    verdicts,
)
from hf_rocm_tune.errors import CorruptionError, SeamError
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.transfer import Mover, digest

GATHERED = "gathered"
_READS = 3
_SUMS = 2
_SENT, _AVERAGED = 3, 2  # projections of a block, before and after averaging


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """One all-gather: weights of a unit, or partial sums that each rank adds up (`tensor_parallel`)."""

    name: str
    sent: Tensor  # int64[2], the digest of what this rank sent
    arrived: Tensor  # int64[ranks, 2], digests of what arrived from each rank, including its own part
    nbytes: int  # from the other ranks

    def words(self, *, failed: bool) -> Tensor:
        return torch.cat([self.sent, self.arrived.flatten()])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reduction:
    name: str
    number: int  # counts the collectives of the run, the same on all ranks; for injected faults
    sent: Tensor  # copy of this rank's gradients, 1-dimensional: the concatenated parts for all ranks
    projected: Tensor  # float64[ranks, blocks, 3], `project` of each part, from the gradients, not from the copy
    average: Tensor  # this rank's part of the average, 1-dimensional, in the memory that FSDP2 reads

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes - self.average.numel() * self.sent.element_size()

    @property
    def size(self) -> int:
        ranks, blocks = self.projected.shape[:2]
        return 1 + blocks * (ranks * _SENT + _AVERAGED)

    def words(self, *, failed: bool) -> Tensor:
        """int64 words, the same number on all ranks; ``failed``: this rank could not compute the average again."""
        flag = torch.full((1,), int(failed), dtype=torch.int64, device=self.average.device)
        got = project(self.average)[:, :MAGNITUDE]
        return torch.cat([flag, *(each.flatten().view(torch.int64) for each in (self.projected, got.contiguous()))])

    def verdict(self, words: Tensor) -> WrongAverage | None:
        """As that of `gradients.Bucket`; each rank has its own part of the average, so nothing is compared."""
        ranks, blocks = self.projected.shape[:2]
        if failed := marked(words[:, 0] != 0):
            return WrongAverage(record=self, ranks=failed, kind="not made again")
        numbers = words[:, 1:].contiguous().view(torch.float64)
        sent = numbers[:, : ranks * blocks * _SENT].view(ranks, ranks, blocks, _SENT)  # [from, to, ...]
        got = numbers[:, ranks * blocks * _SENT :].view(ranks, blocks, _AVERAGED)
        return judged(self, sent, got, dtype=self.sent.dtype)


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
    def __init__(self, name: str, records: list[_Reduction], mover: Mover, numbers: Iterator[int]) -> None:
        self._name, self._records, self._mover, self._numbers = name, records, mover, numbers

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
        self._records.append(
            _Reduction(name=self._name, number=number, sent=sent, projected=projected, average=output_tensor)
        )
        return work


class Gathers(AverageJudge):
    """Checks what was gathered from the other ranks, in `records`. The constructor is collective."""

    way, message = "", ""  # in reports; in the error, with ``%s`` for the name of the first wrong one

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
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
                f"library versions that this package was tested with{self._advice}"
            )

    def settle(self, *, step: int) -> None:
        """Check all collectives since the last call. Collective."""
        self._settle([], step)

    def _settle(self, others: Sequence[_Reduction], step: int) -> list[Tensor]:
        """Check what was gathered, with the same result on all ranks; the remaining words, by rank."""
        gathers, self.records[:] = list(self.records), []
        records: list[Gather | _Reduction] = [*gathers, *others]
        self._bytes += sum(record.nbytes for record in records)
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
                f"newest one{self._advice}"
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
    _rung, _advice = "reduce_scatter", ", or train without FSDP2"

    def __init__(self, model: nn.Module, units: Sequence[tuple[str, Any]], mover: Mover) -> None:
        super().__init__(mover)
        for seam in ("fsdp2_gather", "fsdp2_reduce"):
            upstream.resolve(seam)
        self._model = model
        self._reductions: list[_Reduction] = []
        for name, module in units:
            module.set_custom_all_gather(_AllGather(name or "root", self.records, mover, self.numbers))
            module.set_custom_reduce_scatter(_ReduceScatter(name or "root", self._reductions, mover, self.numbers))

    @property
    @override
    def pending(self) -> bool:
        return bool(self.records or self._reductions)

    @override
    def settle(self, *, step: int) -> None:
        reductions, self._reductions[:] = list(self._reductions), []
        self._mover.report.count(STAGE, buckets=len(reductions))
        self.made += len(reductions)
        self._conclude(verdicts(reductions, self._settle(reductions, step)), step)

    @override
    def describe(self) -> dict[str, Any]:
        judged = {"judged": "projections", "gathered_judged": "digests", "averages": self.made}
        return {**super().describe(), **judged}

    def _said(self, wrong: WrongAverage) -> tuple[str, str]:
        return f"of {wrong.record.name}", ""

    def _place(self, wrong: WrongAverage) -> dict[str, Any]:
        return {"tensor": wrong.record.name}

    def _average_again(self, record: _Reduction) -> str | None:
        group = host_group()
        right, host = digest(record.sent), record.sent.cpu()
        for _ in range(_READS - 1):
            if digest(host) == right:
                break
            host = record.sent.cpu()
        failure = None if digest(host) == right else f"its local gradients arrived wrong on the host {_READS} times"
        host = host.clone() if host is record.sent else host
        host.div_(group.size())
        dist.all_reduce(host, group=group)
        part = host.view(group.size(), -1)[group.rank()]
        try:
            average = self._mover.move(part, name=record.name, stage="adapter")
        except CorruptionError:  # the mover has reported the incident
            return failure or f"the one computed again could not be copied back to {self._mover.device}"
        if not self._is_read_by_the_optimizer(record.average):
            return failure or "its gradients were converted since, so it cannot replace them"
        record.average.copy_(average)  # device: from this device's memory to itself
        self._mover.inject(record.average, name=record.name, stage=STAGE, number=record.number, attempt=1)
        return failure

    def _is_read_by_the_optimizer(self, average: Tensor) -> bool:
        """Whether gradients are views of the average: not if FSDP2 had to convert it."""
        place = average.untyped_storage().data_ptr()
        gradients = (each.grad for each in self._model.parameters())
        return any(
            isinstance(each, DTensor) and each._local_tensor.untyped_storage().data_ptr() == place for each in gradients
        )
