"""What FSDP2 sends between the cards in every step, judged before the optimizer uses any of it.

FSDP2 gathers each unit's weights before its forward and its backward, and averages gradients so that each rank gets its
part. Both are done by the stock collectives; this stands around them, through FSDP2's own extension points
(``set_custom_all_gather``, ``set_custom_reduce_scatter``):

* of weights, each rank takes the digest of what it sends, before the collective, and of each rank's part as it arrived;
* of gradients, it takes two projections of what it sends to each rank, and of the part that it gets (`projections`).

They are queued on the stream that FSDP2 communicates on, so they wait for nothing on the host. Every rank runs the same
collectives in the same order, so the n-th record of one is the n-th of all. At the end of the micro-step one exchange
over gloo lets every rank judge every collective, alike. A wrong average is made again through the host from the copy
that was kept. Weights that arrived wrong have been computed with: every rank stops before the optimizer.

Cost: reading once what is gathered, memory of one copy of the gradients, one exchange per micro-step of 16 bytes per
rank and unit, and one wait for the device. Covered: weights in training and evaluation, gradients. Not covered: the
copies that FSDP2 makes on the card before and after its collectives; averages that are wrong within the rounding bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from hf_rocm_tune import upstream
from hf_rocm_tune.errors import CorruptionError, SeamError
from hf_rocm_tune.ranks.gradients import beyond_rounding
from hf_rocm_tune.ranks.projections import MAGNITUDE, digest_words, project
from hf_rocm_tune.transfer import Mover, digest
from hf_rocm_tune.transfer.host_group import host_group

STAGE, GATHERED = "gradients", "gathered"
_READS = 3
_SUMS = 2
_SENT, _AVERAGED = 3, 2
_ADVICE = (
    "The step was not used and the checkpoints already written are intact: run the doctor, then start the same command "
    "again to continue from the newest one, or train without FSDP2"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gather:
    """Weights of one unit that were gathered."""

    name: str
    sent: Tensor  # int64[2], the digest of what this rank sent
    arrived: Tensor  # int64[ranks, 2], digests of what came from each rank, its own part too
    nbytes: int  # that came from the other ranks

    def words(self) -> Tensor:
        return torch.cat([self.sent, self.arrived.flatten()])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reduction:
    """Gradients of one unit that were averaged, each rank getting its part."""

    name: str
    number: int  # counts those of the whole run, alike on all ranks; for injected faults
    sent: Tensor  # copy of this rank's gradients, 1-dimensional: the parts of all ranks, one after the other
    projected: Tensor  # float64[ranks, blocks, 3], `project` of each part, from the gradients and not from the copy
    average: Tensor  # this rank's part of the average, 1-dimensional, in the memory that FSDP2 reads

    @property
    def nbytes(self) -> int:
        """That went to the other ranks."""
        return self.sent.nbytes - self.average.numel() * self.sent.element_size()

    def words(self, *, failed: bool = False) -> Tensor:
        """int64 words, as many on all ranks; ``failed``: this rank could not make the average again."""
        flag = torch.full((1,), int(failed), dtype=torch.int64, device=self.average.device)
        got = project(self.average)[:, :MAGNITUDE]
        return torch.cat([flag, *(each.flatten().view(torch.int64) for each in (self.projected, got.contiguous()))])


_Record = TypeVar("_Record", bound=_Gather | _Reduction)


@dataclass(frozen=True, kw_only=True)
class _Wrong(Generic[_Record]):
    """A record of this rank whose collective went wrong, on which ranks, and how; not ``finite``: nothing was compared,
    because gradients were not finite before."""

    record: _Record
    ranks: tuple[int, ...]
    kind: str
    finite: bool = True


class _Gathers(DefaultAllGather):
    """FSDP2's all-gather of one unit's weights, with a record of each call."""

    def __init__(self, name: str, records: list[_Gather], mover: Mover, numbers: Iterator[int]) -> None:
        self._name, self._records, self._mover, self._numbers = name, records, mover, numbers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Upstream's; ``input_tensor`` is this rank's part within ``output_tensor``."""
        sent = digest_words(input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()  # on an accelerator: the stream waits, not the host
        self._mover.inject(output_tensor, name=self._name, stage=GATHERED, number=next(self._numbers), attempt=0)
        arrived = torch.stack([digest_words(part) for part in output_tensor.view(group.size(), -1)])
        nbytes = output_tensor.nbytes - input_tensor.nbytes
        self._records.append(_Gather(name=self._name, sent=sent, arrived=arrived, nbytes=nbytes))
        return work


class _Reduces(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one unit's gradients, with a record of each call."""

    def __init__(self, name: str, records: list[_Reduction], mover: Mover, numbers: Iterator[int]) -> None:
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
        self._mover.inject(output_tensor, name=self._name, stage=STAGE, number=number, attempt=0)
        self._records.append(
            _Reduction(name=self._name, number=number, sent=sent, projected=projected, average=output_tensor)
        )
        return work


class Traffic:
    """Watches one sharded model. Made on every rank at the same time.

    Args:
        model: sharded by FSDP2, before its first forward.
        units: its FSDP2 modules with their names.
        mover: brings averages back to the device, holds the settings, the report and injected faults.
    """

    def __init__(self, model: nn.Module, units: Sequence[tuple[str, Any]], mover: Mover) -> None:
        for seam in ("fsdp2_gather", "fsdp2_reduce"):
            upstream.resolve(seam)
        self._model, self._mover = model, mover
        self._gathers: list[_Gather] = []
        self._reductions: list[_Reduction] = []
        self._averaged = self._reductions_made = self._steps = self._bytes = 0
        self._named_not_finite = False
        host_group()  # made here, on every rank: not in the middle of a step
        numbers = itertools.count()  # counts the collectives of the whole run, alike on all ranks
        for name, module in units:
            module.set_custom_all_gather(_Gathers(name or "root", self._gathers, mover, numbers))
            module.set_custom_reduce_scatter(_Reduces(name or "root", self._reductions, mover, numbers))

    @property
    def pending(self) -> bool:
        """Whether anything waits for its verdict."""
        return bool(self._gathers or self._reductions)

    def collect(self) -> None:
        """As of `GradientCheck`: there is nothing to take beforehand."""

    def require_averages(self) -> None:
        """Called before gradients are clipped.

        Raises:
            SeamError: none were averaged since the last time.
        """
        self._steps += 1
        averaged, self._averaged = self._averaged, 0
        if averaged == 0:
            raise SeamError(
                "cannot verify: FSDP2 averaged no gradients in a step that ends with the optimizer; train with the "
                "versions that this package was checked with, or report the trainer that does this"
            )

    def settle(self, *, step: int) -> None:
        """Judge all that was sent since the last time, and make wrong averages again. Collective.

        Args:
            step: number of the step, for incidents.

        Raises:
            CorruptionError: on every rank, when weights arrived wrong, or an average cannot be made right.
        """
        gathers, reductions = list(self._gathers), list(self._reductions)
        self._gathers.clear()
        self._reductions.clear()
        records: list[_Gather | _Reduction] = [*gathers, *reductions]
        words = _exchange([record.words() for record in records])
        self._mover.report.count(GATHERED, checked=len(gathers))
        self._mover.report.count(STAGE, buckets=len(reductions))
        self._averaged += len(reductions)
        self._reductions_made += len(reductions)
        self._bytes += sum(record.nbytes for record in records)
        bad, words = _judge_gathers(gathers, words)
        if bad:
            self._mover.report.count(GATHERED, mismatches=len(bad))
            self._tell(GATHERED, bad, step, "all_gather", "stopped")
            raise CorruptionError(
                f"weights of {bad[0].record.name} that FSDP2 gathered from the other cards arrived wrong at step "
                f"{step} on ranks {list(bad[0].ranks)}{_more(bad)}. {_ADVICE}"
            )
        judged = _judge_reductions(reductions, words)
        if not self._named_not_finite:  # once for each stretch of steps: NaN of backward's are no fault of a transfer
            self._tell(STAGE, [each for each in judged if not each.finite], step, "none", "passed on")
        self._named_not_finite = not all(each.finite for each in judged)
        if wrong := [each for each in judged if each.finite]:
            self._mover.report.count(STAGE, mismatches=len(wrong))
            self._recover(wrong, step)

    def describe(self) -> dict[str, Any]:
        """For the report: how gradients were averaged, and what travelled between the ranks for it and for weights."""
        return {
            "way": "fsdp2",
            "compression": "none",
            "process_group": dist.get_backend(),
            "judged": "projections",
            "gathered_judged": "digests",
            "averages": self._reductions_made,
            "bytes_between_ranks_per_step": round(self._bytes / max(self._steps, 1)),
        }

    def _recover(self, wrong: Sequence[_Wrong[_Reduction]], step: int) -> None:
        if self._mover.settings.on_corruption == "stop":
            self._tell(STAGE, wrong, step, "reduce_scatter", "stopped")
            raise _refusal(wrong, step, "--on_corruption stop was asked for")
        records = [each.record for each in wrong]
        failures = [self._average_again(record) for record in records]
        words = _exchange(
            [record.words(failed=failure is not None) for record, failure in zip(records, failures, strict=True)]
        )
        again = {id(each.record) for each in _judge_reductions(records, words)}
        still = [each for each in wrong if id(each.record) in again]
        right = [each for each in wrong if id(each.record) not in again]
        self._tell(STAGE, right, step, "host_staged", "recovered")
        self._tell(STAGE, still, step, "host_staged", "failed")
        self._mover.report.count(STAGE, recovered=len(right))
        if still:
            own = next((failure for failure in failures if failure), "averaging it again through the host did not help")
            raise _refusal(still, step, own)

    def _average_again(self, record: _Reduction) -> str | None:
        """Average through the host and put this rank's part where the optimizer reads it. Collective.

        Returns:
            None, or what went wrong on this rank.
        """
        group = host_group()
        right, host = digest(record.sent), record.sent.cpu()
        for _ in range(_READS - 1):
            if digest(host) == right:
                break
            host = record.sent.cpu()
        failure = None if digest(host) == right else f"its local gradients came to the host wrong {_READS} times"
        host = host.clone() if host is record.sent else host
        host.div_(group.size())
        dist.all_reduce(host, group=group)
        part = host.view(group.size(), -1)[group.rank()]
        try:
            average = self._mover.move(part, name=record.name, stage="adapter")
        except CorruptionError:  # the mover has made an incident of it, with all that it found
            return failure or f"the one made again could not be brought back to {self._mover.device}"
        if not self._is_read_by_the_optimizer(record.average):
            return failure or "its gradients were converted since, so that it cannot be put in their place"
        record.average.copy_(average)  # device: from this device's memory to itself
        self._mover.inject(record.average, name=record.name, stage=STAGE, number=record.number, attempt=1)
        return failure

    def _is_read_by_the_optimizer(self, average: Tensor) -> bool:
        """FSDP2's gradients are views of the average, unless it had to convert it."""
        place = average.untyped_storage().data_ptr()
        gradients = (each.grad for each in self._model.parameters())
        return any(
            isinstance(each, DTensor) and each._local_tensor.untyped_storage().data_ptr() == place for each in gradients
        )

    def _tell(self, stage: str, found: Sequence[_Wrong[Any]], step: int, rung: str, outcome: str) -> None:
        for each in found:
            self._mover.report.incident(
                {
                    "step": step,
                    "stage": stage,
                    "tensor": each.record.name,
                    "ranks": list(each.ranks),
                    "kind": each.kind,
                    "rung": rung,
                    "outcome": outcome,
                }
            )


def _exchange(mine: Sequence[Tensor]) -> list[Tensor]:
    """By rank the int64 words of all records, joined. One collective, over gloo."""
    joined = torch.cat(list(mine)).cpu() if mine else torch.zeros(0, dtype=torch.int64)
    group = host_group()
    everyone = [torch.empty_like(joined) for _ in range(group.size())]
    dist.all_gather(everyone, joined, group=group)
    return everyone


def _judge_gathers(gathers: Sequence[_Gather], words: Sequence[Tensor]) -> tuple[list[_Wrong[_Gather]], list[Tensor]]:
    """Those that arrived wrong, and the words that are left.

    Args:
        gathers: of this rank.
        words: by rank, those of all its records, `gathers` first.
    """
    ranks = len(words)
    end = len(gathers) * _SUMS * (1 + ranks)
    table = torch.stack([mine[:end] for mine in words]).view(ranks, len(gathers), 1 + ranks, _SUMS)
    sent, arrived = table[:, :, 0], table[:, :, 1:]  # [from, gather, sums], [at, gather, from, sums]
    right = (arrived == sent.transpose(0, 1)[None]).all(dim=3).all(dim=2)  # [at, gather]
    bad = [
        _Wrong(record=gathers[number], ranks=_where(~right[:, number]), kind="other bytes")
        for number in _where((~right).any(dim=0))
    ]
    return bad, [mine[end:] for mine in words]


def _judge_reductions(reductions: Sequence[_Reduction], words: Sequence[Tensor]) -> list[_Wrong[_Reduction]]:
    """Those whose average is wrong somewhere, or could not be judged.

    An average is wrong when a projection on some rank is further from the mean of the sent ones than rounding may bring
    it, or when a rank says that it failed.
    """
    ranks, start = len(words), 0
    found: list[_Wrong[_Reduction]] = []
    for record in reductions:
        blocks = record.projected.shape[1]
        end = start + 1 + blocks * (ranks * _SENT + _AVERAGED)
        mine = torch.stack([each[start:end] for each in words])
        start = end
        numbers = mine[:, 1:].contiguous().view(torch.float64)
        sent = numbers[:, : ranks * blocks * _SENT].view(ranks, ranks, blocks, _SENT)  # [from, to, ...]
        got = numbers[:, ranks * blocks * _SENT :].view(ranks, blocks, _AVERAGED)
        expected = sum(sent[1:], start=sent[0]) / ranks
        if failed := _where(mine[:, 0] != 0):
            found.append(_Wrong(record=record, ranks=failed, kind="not made again"))
        elif not expected.isfinite().all():
            where = _where((~sent.isfinite()).flatten(1).any(dim=1))
            found.append(_Wrong(record=record, ranks=where, kind="not finite", finite=False))
        elif (wrong := beyond_rounding(got, expected, dtype=record.sent.dtype, ranks=ranks)).any():
            kind = "zeros" if bool((got[wrong] == 0).all()) else "wrong average"
            found.append(_Wrong(record=record, ranks=_where(wrong.any(dim=1)), kind=kind))
    return found


def _where(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _more(found: Sequence[_Wrong[Any]]) -> str:
    return f" (and {len(found) - 1} more times)" if len(found) > 1 else ""


def _refusal(wrong: Sequence[_Wrong[_Reduction]], step: int, why: str) -> CorruptionError:
    first = wrong[0]
    return CorruptionError(
        f"the average of the gradients of {first.record.name}{_more(wrong)} is wrong at step {step} on ranks "
        f"{list(first.ranks)} ({first.kind}), and {why}. {_ADVICE}"
    )
