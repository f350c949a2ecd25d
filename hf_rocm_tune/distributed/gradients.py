"""Every average of gradients is compared before the optimizer uses it, and made again through the host if it is wrong.

A communication hook of DistributedDataParallel (its official extension point: buckets, overlap and ``no_sync`` stay)
records each bucket before the stock all-reduce averages it. After backward, before gradients are clipped, the ranks
exchange what they sent and what they got, in one gather over gloo for all buckets of the step, and judge each bucket
(`projections`, `evidence`). A wrong one is brought to the host from the copy that was kept, averaged over gloo, brought
back through the mover, and judged again; when that is wrong too, every rank stops.

What it costs: memory of one copy of the trainable gradients from backward to the verdict (of a LoRA's gradients: tens
of megabytes); about 10 bytes per 1,000 bytes of float32 gradients over gloo, 160 of 16-bit ones; one wait for the
device a step. ``benchmarks/gradient_check.py`` measures the time.

Covered: the all-reduce itself on any back end, and the way of its result into ``parameter.grad``. Not covered: a wrong
average, equal on all ranks, that stays within the rounding bound; averages of buckets with NaN or infinities, which
are named and passed on; backward itself; of several synchronising backward passes in one step, all but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hf_rocm_tune.distributed.buckets import Bucket
from hf_rocm_tune.distributed.evidence import Verdict, judge, pack, unpack
from hf_rocm_tune.distributed.projections import MAGNITUDE, project, rounding_bound
from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError
from hf_rocm_tune.transfer import Mover, digest
from hf_rocm_tune.transfer.host_group import host_group

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

STAGE = "gradients"
_READS = 3
"""Tries to bring a bucket to the host."""


class GradientCheck:
    """Watches the averages of one wrapped model. Made on every rank at the same time.

    Args:
        model: wrapped, before its first backward.
        mover: brings averages back to the device, holds the settings, the report and injected faults.

    Raises:
        UsageError: the model has a communication hook already.
    """

    def __init__(self, model: DistributedDataParallel, mover: Mover) -> None:
        if model._comm_hooks:
            raise UsageError(
                "the DDP communication hook of this model is taken, so averages of gradients cannot be checked: remove "
                "comm_hook from the DistributedDataParallelKwargs, or train with --verify off"
            )
        self._model, self._mover = model, mover
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._group = host_group()
        self._pending: list[Bucket] = []
        self._recorded = 0
        self._named_not_finite = False
        model.register_comm_hook(self, _record_and_average)

    @property
    def pending(self) -> bool:
        """Whether averages wait for their verdict."""
        return bool(self._pending)

    def before_averaging(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The hook: record the bucket, then average it as DistributedDataParallel does."""
        if bucket.index() == 0:
            self._pending.clear()  # another backward of the same step: this average includes the earlier one
        record = Bucket.before_averaging(bucket, number=self._recorded)
        self._recorded += 1
        self._pending.append(record)
        average = allreduce_hook(self._model.process_group, bucket)
        if self._mover.fault_injection() is None:
            return average
        return average.then(lambda done: self._harmed(done.value(), record, attempt=0))

    def settle(self, *, step: int) -> None:
        """Judge the averages of this step and put wrong ones right. Collective; afterwards they may be used.

        Args:
            step: number of the step, for incidents.

        Raises:
            CorruptionError: on every rank, when an average is wrong and cannot be made right.
            SeamError: nothing was averaged since the last time, though gradients are to be synchronised.
        """
        if not self._pending:
            raise SeamError(
                "cannot verify: DistributedDataParallel averaged no gradients in a step that ends with the optimizer; "
                "train with the versions that this package was checked with, or report the trainer that does this"
            )
        buckets, self._pending = self._pending, []
        self._mover.report.count(STAGE, buckets=len(buckets))
        verdicts = self._verdicts(buckets)
        self._name_what_is_not_finite(buckets, verdicts, step)
        wrong = [(bucket, verdict) for bucket, verdict in zip(buckets, verdicts, strict=True) if verdict.wrong]
        if wrong:
            self._mover.report.count(STAGE, mismatches=len(wrong))
            self._recover(wrong, step)

    def _verdicts(self, buckets: Sequence[Bucket], failed: Sequence[bool] | None = None) -> list[Verdict]:
        packed = [pack(bucket, failed=bad) for bucket, bad in zip(buckets, failed or [False] * len(buckets), strict=True)]
        mine = torch.cat(packed).cpu()
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        return [judge(bucket, words) for bucket, words in unpack(buckets, everyone)]

    # ---- making it again ------------------------------------------------------------------------------------

    def _recover(self, wrong: Sequence[tuple[Bucket, Verdict]], step: int) -> None:
        if self._mover.settings.on_corruption == "stop":
            self._fail(wrong, wrong, step, "all_reduce", "stopped", "--on_corruption stop was asked for")
        buckets = [bucket for bucket, _ in wrong]
        failures = [self._average_again(bucket) for bucket in buckets]
        again = self._verdicts(buckets, [failure is not None for failure in failures])
        if any(verdict.wrong for verdict in again):
            still = [(bucket, verdict) for bucket, verdict in zip(buckets, again, strict=True) if verdict.wrong]
            own = next((failure for failure in failures if failure), "averaging through the host gave a wrong one too")
            self._fail(still, wrong, step, "host_staged", "failed", own)
        for bucket, verdict in wrong:
            self._incident(bucket, verdict, step, "host_staged", "recovered")
        self._mover.report.count(STAGE, recovered=len(wrong))

    def _average_again(self, bucket: Bucket) -> str | None:
        """Average a bucket through the host. Collective, so a rank that cannot go on takes part all the same.

        The same operations as the stock average over gloo, in the same dtype: bit for bit its result.

        Returns:
            None, or what went wrong on this rank.
        """
        host, failure = _to_host(bucket)
        host.div_(self._group.size())
        dist.all_reduce(host, group=self._group)
        try:
            average = self._mover.move(host, name=bucket.name, stage="adapter")
        except CorruptionError as error:
            return failure or str(error)
        bucket.write(self._harmed(average, bucket, attempt=1))
        return failure

    def _harmed(self, average: Tensor, bucket: Bucket, *, attempt: int) -> Tensor:
        self._mover.inject(average, name=bucket.name, stage=STAGE, number=bucket.number, attempt=attempt)
        return average

    # ---- telling --------------------------------------------------------------------------------------------

    def _fail(
        self,
        still: Sequence[tuple[Bucket, Verdict]],
        found: Sequence[tuple[Bucket, Verdict]],
        step: int,
        rung: str,
        outcome: str,
        why: str,
    ) -> None:
        recovered = [pair for pair in found if pair[0] not in [bucket for bucket, _ in still]]
        for bucket, verdict in still:
            self._incident(bucket, verdict, step, rung, outcome)
        for bucket, verdict in recovered:
            self._incident(bucket, verdict, step, rung, "recovered")
        bucket, verdict = still[0]
        more = f" (and {len(still) - 1} more buckets)" if len(still) > 1 else ""
        raise CorruptionError(
            f"the averaged gradients of {bucket.name}{more} are wrong on ranks {list(verdict.ranks)} at step {step} "
            f"({verdict.kind}, {', '.join(self._owners(bucket, verdict)[:2])}), and {why}. They were not used and "
            "nothing was saved since; the checkpoints already written are intact: run the doctor"
        )

    def _incident(self, bucket: Bucket, verdict: Verdict, step: int, rung: str, outcome: str) -> None:
        size = bucket.sent.element_size()
        owners = self._owners(bucket, verdict)
        self._mover.report.incident(
            {
                "step": step,
                "stage": STAGE,
                "tensor": owners[0] if len(owners) == 1 else f"{owners[0]} .. {owners[-1]}",
                "bucket": bucket.index,
                "ranks": list(verdict.ranks),
                "kind": verdict.kind or "not finite",
                "first_offset": verdict.first_element * size,
                "length": (verdict.last_element + 1 - verdict.first_element) * size,
                "rung": rung,
                "outcome": outcome,
            }
        )

    def _owners(self, bucket: Bucket, verdict: Verdict) -> list[str]:
        parameters = bucket.owners(verdict.first_element, verdict.last_element)
        return [self._names.get(id(parameter), "?") for parameter in parameters]

    def _name_what_is_not_finite(self, buckets: Sequence[Bucket], verdicts: Sequence[Verdict], step: int) -> None:
        """Once for each stretch of steps: NaN or infinities that backward made are no fault of a transfer."""
        bad = [(bucket, verdict) for bucket, verdict in zip(buckets, verdicts, strict=True) if not verdict.finite]
        if bad and not self._named_not_finite:
            for bucket, verdict in bad:
                self._incident(bucket, verdict, step, "none", "passed on")
        self._named_not_finite = bool(bad)


def _to_host(bucket: Bucket) -> tuple[Tensor, str | None]:
    """The copy that was kept, on the host, and what is wrong with it: compared on the way and with what was sent."""
    right = digest(bucket.sent)
    for _ in range(_READS):
        host = bucket.sent.cpu()
        if digest(host) == right:
            break
    else:
        return host, f"its local gradients came to the host wrong {_READS} times"
    host = host.clone() if host is bucket.sent else host
    sums, before = project(host), bucket.projected.cpu()
    # In one rank's average nothing is rounded but the projections themselves.
    bound = rounding_bound(before[:, MAGNITUDE], dtype=torch.float64, ranks=1)
    if ((sums - before).abs() > bound[:, None]).any():
        return host, "the copy that was kept of its local gradients changed in memory"
    return host, None


def _record_and_average(check: GradientCheck, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return check.before_averaging(bucket)


# DistributedDataParallel compares the annotations themselves, and here they are text.
_record_and_average.__annotations__ = get_type_hints(_record_and_average)
