"""Every average of gradients is compared before the optimizer uses it, and made again through the host if it is wrong.

A communication hook of DistributedDataParallel (its official extension point: buckets, overlap and ``no_sync`` stay)
records each bucket and has it averaged, by the process group (`averaging`) or through the host (`host_sync`). After
backward, before gradients are clipped, the ranks exchange what they sent and what they got, in one gather over gloo for
all buckets of the step, and judge each bucket (`projections`, `evidence`). A wrong one is averaged through the host
from the gradients that were kept, and judged again; when that is wrong too, every rank stops.

What it costs: memory of one copy of the trainable gradients from backward to the verdict (of a LoRA's gradients: tens
of megabytes), unless they are averaged through the host and DistributedDataParallel keeps gradients beside its buckets
(its default); over gloo, each rank tells the others 2.4 bytes per 1,000 bytes of float32 gradients, 78 per 1,000 bytes
of 16-bit ones and of those that are cast to 16 bits for the way; one wait for the device a step.
``benchmarks/gradient_check.py`` measures the time.

Covered: the all-reduce itself on any back end, and the way of its result into ``parameter.grad``. With a cast to 16
bits, what travels is judged, in the rounding of those 16 bits; the cast, which each rank computes by itself, is not.
With PowerSGD the result is not the average, so it is only compared between the ranks: equal on all of them, it passes.
Not covered: a wrong average, equal on all ranks, that stays within the rounding bound; averages of buckets with NaN or
infinities (after the cast), which are named and passed on; backward itself; of several synchronising backward passes in
one step, all but the last. Nothing is judged with ``verify="off"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.distributed.averaging import Averaging, GradBucket, GroupAveraging
from hf_rocm_tune.distributed.buckets import Bucket
from hf_rocm_tune.distributed.evidence import Verdict, judge, pack, unpack
from hf_rocm_tune.distributed.host_sync import HostAveraging
from hf_rocm_tune.distributed.projections import MAGNITUDE, rounding_bound
from hf_rocm_tune.distributed.sync_settings import SyncSettings
from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError, device_shortage
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.host_group import host_group

STAGE = "gradients"


class GradientCheck:
    """Has the gradients of one wrapped model averaged, and watches the averages. Made on every rank at the same time.

    Args:
        model: wrapped, before its first backward.
        mover: brings averages back to the device, holds the settings, the report and injected faults.
        settings: how gradients are averaged.

    Attributes:
        model, settings: see above.
        judging: whether averages are judged; not with ``verify="off"``.

    Raises:
        UsageError: the model has a communication hook already.
    """

    def __init__(self, model: DistributedDataParallel, mover: Mover, settings: SyncSettings | None = None) -> None:
        if model._comm_hooks:
            raise UsageError(
                "the DDP communication hook of this model is taken, so averages of gradients cannot be checked: remove "
                "comm_hook from the DistributedDataParallelKwargs, or train with --verify off, --grad_sync ddp and "
                "--grad_compression none"
            )
        self.model, self._mover = model, mover
        self.settings = settings or SyncSettings()
        self.judging = mover.settings.verify != "off"
        through_host = HostAveraging(mover, self.settings)
        self._through_host = through_host
        self._averaging: Averaging = (
            through_host if self.settings.way == "host" else GroupAveraging(model, self.settings)
        )
        self._copies = not self._averaging.keeps_buckets or model.gradient_as_bucket_view
        self._backwards = 0
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        host_group()  # made here, on every rank: not in the middle of a step
        self._pending: list[Bucket] = []
        self._packed: Tensor | None = None
        self._short_of_memory = False
        self._recorded = 0
        self._named_not_finite = False
        model.register_comm_hook(self, _record_and_average)

    @property
    def pending(self) -> bool:
        """Whether averages wait for their verdict."""
        return bool(self._pending)

    def describe(self) -> dict[str, Any]:
        """For the report: how gradients were averaged, what it moved and how long it was waited for, on this rank."""
        steps = max(self._backwards, 1)
        facts = self._averaging.facts()
        between, waited = facts["bytes_between_ranks"], facts["wait_seconds"]
        compressed = self.settings.compression == "powersgd"
        return {
            "way": self.settings.way,
            "compression": self.settings.compression,
            "process_group": dist.get_backend(self.model.process_group),
            "judged": "no" if not self.judging else "equal on all ranks" if compressed else "projections",
            "averages": self._backwards,
            "bytes_between_ranks_per_step": None if between is None else round(between / steps),
            "bytes_to_host_and_back_per_step": round(facts["bytes_crossed"] / steps),
            "wait_seconds": waited,
            "wait_seconds_per_step": None if waited is None else round(waited / steps, 6),
        }

    def before_averaging(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The hook: record the bucket, then have it averaged."""
        if bucket.index() == 0:
            self._pending.clear()  # another backward of the same step: this average includes the earlier one
            self._packed, self._short_of_memory = None, False
            self._averaging.step_begins()
            self._backwards += 1
        number, self._recorded = self._recorded, self._recorded + 1
        record = self._record(bucket, number) if self.judging else None
        average = self._averaging.start(bucket, number=number)
        if record is None or self._mover.fault_injection() is None:
            return average
        harmed = average.then(lambda done: self._harmed(done.value(), record, attempt=0))
        harmed.wait()  # one bucket after the other, so that a specification means the same buckets on every rank
        return harmed

    def _record(self, bucket: GradBucket, number: int) -> Bucket | None:
        wire = self._averaging.wire(bucket.buffer().dtype)
        try:
            record = Bucket.before_averaging(bucket, number=number, wire=wire, copied=self._copies)
        except RuntimeError as error:
            if device_shortage(error) is None:
                raise
            self._short_of_memory = True  # the other ranks wait for this average: it is made, and `collect` refuses it
            return None
        self._pending.append(record)
        return record

    def collect(self) -> None:
        """Take this rank's evidence on the averages of this step. Not collective.

        `settle` then needs no memory on the device, except to make a wrong average again.

        Raises:
            torch.OutOfMemoryError: there was no memory for an average, a copy or the evidence: do not use the averages.
            BaseException: see `averaging.Averaging.check`.
        """
        self._averaging.check()
        if self._short_of_memory:
            raise torch.OutOfMemoryError("no memory for a copy of the gradients that are averaged")
        if self._pending:
            failed = [self._averaging.failure(bucket.number) is not None for bucket in self._pending]
            self._packed = _pack(self._pending, failed)

    def settle(self, *, step: int) -> None:
        """Judge the averages of this step and put wrong ones right. Collective; afterwards they may be used.

        Args:
            step: number of the step, for incidents.

        Raises:
            CorruptionError: on every rank, when an average is wrong and cannot be made right.
            SeamError: nothing was averaged since the last time, though gradients are to be synchronised.
            torch.OutOfMemoryError: see `collect`, which is called when it was not called before.
        """
        if not self.judging:
            self.collect()
            return
        if not (self._pending or self._short_of_memory):
            raise SeamError(
                "cannot verify: DistributedDataParallel averaged no gradients in a step that ends with the optimizer; "
                "train with the versions that this package was checked with, or report the trainer that does this"
            )
        if self._packed is None:
            self.collect()
        buckets, self._pending = self._pending, []
        packed, self._packed = self._packed, None
        assert packed is not None
        self._mover.report.count(STAGE, buckets=len(buckets))
        verdicts = _verdicts(buckets, packed)
        self._name_what_is_not_finite(buckets, verdicts, step)
        wrong = [(bucket, verdict) for bucket, verdict in zip(buckets, verdicts, strict=True) if verdict.wrong]
        if wrong:
            self._mover.report.count(STAGE, mismatches=len(wrong))
            self._recover(wrong, step)

    # ---- making it again ------------------------------------------------------------------------------------

    def _recover(self, wrong: Sequence[tuple[Bucket, Verdict]], step: int) -> None:
        if self._mover.settings.on_corruption == "stop":
            self._tell(wrong, step, "all_reduce", "stopped")
            raise self._refusal(wrong, step, "--on_corruption stop was asked for")
        buckets = [bucket for bucket, _ in wrong]
        failures = [self._average_again(bucket) for bucket in buckets]
        again = _verdicts(buckets, _pack(buckets, [failure is not None for failure in failures]))
        bad = {bucket.number for bucket, verdict in zip(buckets, again, strict=True) if verdict.wrong}
        still = [(bucket, verdict) for bucket, verdict in wrong if bucket.number in bad]
        right = [(bucket, verdict) for bucket, verdict in wrong if bucket.number not in bad]
        self._tell(right, step, "host_staged", "recovered")
        self._tell(still, step, "host_staged", "failed")
        self._mover.report.count(STAGE, recovered=len(right))
        if still:
            own = [failure for failure in failures if failure]
            raise self._refusal(still, step, own[0] if own else "averaging it again through the host did not help")

    def _average_again(self, bucket: Bucket) -> str | None:
        """Average a bucket through the host. Collective, so a rank that cannot go on takes part all the same.

        The same operations as the stock average over gloo, in the same dtype: bit for bit its result. Only PowerSGD's
        is replaced by the average itself.

        Returns:
            None, or what went wrong on this rank.
        """
        spoilt = _spoilt(bucket)
        self._through_host.step_begins()
        average = self._through_host.begin(bucket.sent, name=bucket.name, number=bucket.number, is_last=False).wait()
        failure = self._through_host.failure(bucket.number)
        try:
            self._through_host.check()
        except RuntimeError as error:
            if device_shortage(error) is None:
                raise
            failure = "there was no memory for the one made again"
        if failure is None:
            bucket.write(self._harmed(average, bucket, attempt=1))
        self._averaging.forget(bucket.index)
        return spoilt or failure

    def _harmed(self, average: Tensor, bucket: Bucket, *, attempt: int) -> Tensor:
        self._mover.inject(average, name=bucket.name, stage=STAGE, number=bucket.number, attempt=attempt)
        return average

    # ---- telling --------------------------------------------------------------------------------------------

    def _refusal(self, wrong: Sequence[tuple[Bucket, Verdict]], step: int, why: str) -> CorruptionError:
        bucket, verdict = wrong[0]
        more = f" (and {len(wrong) - 1} more buckets)" if len(wrong) > 1 else ""
        return CorruptionError(
            f"the average of the gradients in {bucket.name}{more} is wrong at step {step} on ranks "
            f"{list(verdict.ranks)} ({verdict.kind} in {self._where(bucket, verdict)}), and {why}. It was not used; "
            "the checkpoints already written are intact: run the doctor, then start the same command again to continue "
            "from the newest one"
        )

    def _tell(self, found: Sequence[tuple[Bucket, Verdict]], step: int, rung: str, outcome: str) -> None:
        for bucket, verdict in found:
            size = bucket.sent.element_size()
            self._mover.report.incident(
                {
                    "step": step,
                    "stage": STAGE,
                    "tensor": self._where(bucket, verdict),
                    "bucket": bucket.index,
                    "ranks": list(verdict.ranks),
                    "kind": verdict.kind or "not finite",
                    "first_offset": verdict.first_element * size,
                    "length": (verdict.last_element + 1 - verdict.first_element) * size,
                    "rung": rung,
                    "outcome": outcome,
                }
            )

    def _where(self, bucket: Bucket, verdict: Verdict) -> str:
        """The parameter whose gradient is wrong, or the first and the last of them."""
        parameters = bucket.owners(verdict.first_element, verdict.last_element)
        names = [self._names[id(parameter)] for parameter in parameters]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"

    def _name_what_is_not_finite(self, buckets: Sequence[Bucket], verdicts: Sequence[Verdict], step: int) -> None:
        """Once for each stretch of steps: NaN or infinities that backward made are no fault of a transfer."""
        bad = [(bucket, verdict) for bucket, verdict in zip(buckets, verdicts, strict=True) if not verdict.finite]
        if not self._named_not_finite:
            self._tell(bad, step, "none", "passed on")
        self._named_not_finite = bool(bad)


def watch(
    model: nn.Module, mover: Mover, earlier: GradientCheck | None, settings: SyncSettings | None = None
) -> GradientCheck | None:
    """The check of a model's averages, which has them made as the settings say.

    Args:
        model: as it is trained.
        mover: see `GradientCheck`.
        earlier: the check of an earlier training, kept when it watches the same model.
        settings: see `GradientCheck`; those of an earlier check stay.

    Returns:
        None when nothing is verified and all is as DistributedDataParallel does it, or when something else averages.

    Raises:
        UsageError: see `GradientCheck`; or something else averages, and the settings ask for what only
            DistributedDataParallel has.
    """
    settings = settings or SyncSettings()
    stock = settings.way == "ddp" and settings.compression == "none"
    wrapped = getattr(model, "_orig_mod", model)  # torch.compile stands around DistributedDataParallel
    if not isinstance(wrapped, DistributedDataParallel):
        if stock:
            return None
        raise UsageError(
            f"--grad_sync {settings.way} with --grad_compression {settings.compression} needs DistributedDataParallel, "
            f"and this model is a {type(wrapped).__name__}: choose --grad_sync ddp with --grad_compression none"
        )
    if stock and mover.settings.verify == "off":
        return None
    return earlier if earlier is not None and earlier.model is wrapped else GradientCheck(wrapped, mover, settings)


def _pack(buckets: Sequence[Bucket], failed: Sequence[bool]) -> Tensor:
    return torch.cat([pack(bucket, failed=flag) for bucket, flag in zip(buckets, failed, strict=True)]).cpu()


def _verdicts(buckets: Sequence[Bucket], mine: Tensor) -> list[Verdict]:
    """Exchange what each rank packed, and judge. Collective."""
    group = host_group()
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [judge(bucket, words) for bucket, words in unpack(buckets, everyone)]


def _spoilt(bucket: Bucket) -> str | None:
    """What is wrong with the local gradients that were kept; None for nothing."""
    if bucket.wire is None:
        return None
    before, now = bucket.projected.cpu(), bucket.project_sent().cpu()
    # In one rank's average nothing is rounded but the projections themselves.
    bound = rounding_bound(before[:, MAGNITUDE], dtype=torch.float64, ranks=1)
    if ((now - before).abs() > bound[:, None]).any():
        return "what was kept of its local gradients changed in memory"
    return None


def _record_and_average(
    check: GradientCheck,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # see `averaging.GradBucket`
) -> torch.futures.Future[Tensor]:
    return check.before_averaging(bucket)


# DistributedDataParallel compares the annotations themselves, and here they are text.
_record_and_average.__annotations__ = get_type_hints(_record_and_average)
