"""Every average of gradients is compared before the optimizer uses it, and made again through the host if it is wrong.

A communication hook of DistributedDataParallel (its official extension point: buckets, overlap and ``no_sync`` stay)
records each bucket and has it averaged (`averaging`). After backward, before gradients are clipped, each rank packs
what it knows of all buckets of the step (projections of what it sent and of what it got, see `projections`, and a
digest of the average) into one int64 tensor; one gather over gloo makes all of it known to all. The verdict is
arithmetic on these very numbers, so every rank comes to the same one and no rank waits in a collective that another
does not enter. A wrong average is made again through the host from the gradients that were kept, and judged again;
when that is wrong too, every rank stops.

Cost: memory of one copy of the trainable gradients from backward to the verdict (of a LoRA's: tens of megabytes),
unless they are averaged through the host and DistributedDataParallel keeps gradients beside its buckets (its default);
over gloo, each rank tells the others 2.4 bytes per 1,000 bytes of float32 gradients, 78 per 1,000 bytes of those that
travel in 16 bits; one wait for the device a step. ``hf-rocm-tune bench comm`` measures the time.

Covered: the all-reduce on any back end, and the way of its result into ``parameter.grad``. With a cast to 16 bits,
what travels is judged, in the rounding of those 16 bits; the cast, which each rank computes by itself, is not.
PowerSGD's result is not the average, so it is only compared between the ranks. Not covered: a wrong average, equal on
all ranks, within the rounding bound; averages of buckets with NaN or infinities, which are named and passed on;
backward itself; of several synchronising backward passes in one step, all but the last. Nothing is judged with
``verify="off"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError, device_shortage
from hf_rocm_tune.ranks.averaging import GradBucket, GroupAveraging, HostAveraging, SyncSettings
from hf_rocm_tune.ranks.projections import MAGNITUDE, block_elements, digest_words, project, rounding_bound
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.host_group import host_group

STAGE = "gradients"
_HEADER, _SENT, _AVERAGED = 3, 3, 2
"""int64 words of a bucket: failed and the digest; of each of its blocks: projected before and after averaging."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A parameter in a bucket: its elements lie there from `start` on, the dimensions in memory order."""

    parameter: nn.Parameter
    start: int
    order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """The gradients of one bucket of DistributedDataParallel.

    Attributes:
        sent: the local gradients as they went into the average, 1-dimensional, kept until the verdict.
        wire: dtype in which the ranks' gradients are added up; None where the result is not to be their average, but
            near it, and nothing is projected.
        projected: `project` of what travels, taken from the bucket itself, not from a copy; float64[blocks, 3].
    """

    index: int  # DistributedDataParallel's number of it
    number: int  # counts the buckets of the whole run, alike on all ranks; for injected faults
    sent: Tensor
    wire: torch.dtype | None
    projected: Tensor
    places: tuple[_Place, ...]

    @classmethod
    def before_averaging(
        cls,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        *,
        number: int,
        wire: torch.dtype | None,
        copied: bool,
    ) -> Bucket:
        """Record a bucket as the communication hook gets it; ``copied``: the average will be written over it."""
        buffer = bucket.buffer()
        places, start = [], 0
        for parameter in bucket.parameters():
            places.append(_Place(parameter=parameter, start=start, order=_order_in_bucket(parameter)))
            start += parameter.numel()
        return cls(
            index=bucket.index(),
            number=number,
            sent=buffer.clone() if copied else buffer,
            wire=wire,
            projected=_project_sent(buffer, wire),
            places=tuple(places),
        )

    @property
    def name(self) -> str:
        """For incidents and for the patterns of injected faults."""
        return f"bucket {self.index}"

    def averaged(self) -> Tensor:
        """What the optimizer will read: the parameters' gradients as they are now, laid out like `sent`.

        A parameter that no rank used has no gradient; its place in the bucket is zero.
        """
        flat = []
        for place in self.places:
            gradient = place.parameter.grad
            if gradient is None:
                flat.append(self.sent.new_zeros(place.parameter.numel()))
            else:
                flat.append(gradient.detach().permute(place.order).reshape(-1))
        return torch.cat(flat)

    def write(self, average: Tensor) -> None:
        """Put `average`, laid out like `sent` and on the same device, into the parameters' gradients."""
        for place in self.places:
            gradient = place.parameter.grad
            if gradient is not None:
                ordered = gradient.permute(place.order)
                piece = average[place.start : place.start + gradient.numel()].view(ordered.shape)
                ordered.copy_(piece)  # device: both are on the parameter's device

    def pack(self, *, failed: bool) -> Tensor:
        """int64 words on the gradients' device: failed, digest of the average, projections of both; see `_judge`."""
        average = self.averaged()
        got = self.projected if self.wire is None else project(average, wire=self.wire)
        return torch.cat(
            [
                torch.full((1,), int(failed), dtype=torch.int64, device=average.device),
                digest_words(average),
                self.projected.flatten().view(torch.int64),
                got[:, :MAGNITUDE].flatten().view(torch.int64),
            ]
        )

    def changed_since(self) -> str | None:
        """What is wrong with the local gradients that were kept; None for nothing."""
        if self.wire is None:
            return None
        before, now = self.projected.cpu(), _project_sent(self.sent, self.wire).cpu()
        # In one rank's average nothing is rounded but the projections themselves.
        bound = rounding_bound(before[:, MAGNITUDE], dtype=torch.float64, ranks=1)
        if ((now - before).abs() > bound[:, None]).any():
            return "what was kept of its local gradients changed in memory"
        return None


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """On the average of one bucket; first and last element of the wrong blocks, or of all when the place is unknown."""

    finite: bool = True  # no rank's gradients held NaN or an infinity; otherwise nothing was compared
    ranks: tuple[int, ...] = ()  # whose average is wrong, or whose gradients were not finite
    kind: str | None = None  # ``zeros``, ``wrong average``, ``differs between ranks``, ``not made``; None when right
    first: int = 0
    last: int = 0


_Found = tuple[Bucket, _Verdict]


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
        self._through_host = HostAveraging(mover, self.settings)
        self._averaging = self._through_host if self.settings.way == "host" else GroupAveraging(model, self.settings)
        self._copies = not self._averaging.keeps_buckets or model.gradient_as_bucket_view
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        host_group()  # made here, on every rank: not in the middle of a step
        self._pending: list[Bucket] = []
        self._packed: Tensor | None = None
        self._short_of_memory = self._named_not_finite = False
        self._backwards = self._recorded = 0
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
            BaseException: see `averaging.HostAveraging.check`.
        """
        self._averaging.check()
        if self._short_of_memory:
            raise torch.OutOfMemoryError("no memory for a copy of the gradients that are averaged")
        if self._pending:
            failed = [self._averaging.failure(bucket.number) is not None for bucket in self._pending]
            self._packed = _pack(self._pending, failed)

    def settle(self, *, step: int) -> None:
        """Judge the averages of this step and make wrong ones again. Collective; afterwards they may be used.

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
        found = list(zip(buckets, _verdicts(buckets, packed), strict=True))
        bad = [(bucket, verdict) for bucket, verdict in found if not verdict.finite]
        if not self._named_not_finite:  # once for each stretch of steps: NaN of backward's are no fault of a transfer
            self._tell(bad, step, "none", "passed on")
        self._named_not_finite = bool(bad)
        if wrong := [(bucket, verdict) for bucket, verdict in found if verdict.kind is not None]:
            self._mover.report.count(STAGE, mismatches=len(wrong))
            self._recover(wrong, step)

    def _recover(self, wrong: Sequence[_Found], step: int) -> None:
        if self._mover.settings.on_corruption == "stop":
            self._tell(wrong, step, "all_reduce", "stopped")
            raise self._refusal(wrong, step, "--on_corruption stop was asked for")
        buckets = [bucket for bucket, _ in wrong]
        failures = [self._average_again(bucket) for bucket in buckets]
        again = _verdicts(buckets, _pack(buckets, [failure is not None for failure in failures]))
        bad = {bucket.number for bucket, verdict in zip(buckets, again, strict=True) if verdict.kind is not None}
        still = [(bucket, verdict) for bucket, verdict in wrong if bucket.number in bad]
        right = [(bucket, verdict) for bucket, verdict in wrong if bucket.number not in bad]
        self._tell(right, step, "host_staged", "recovered")
        self._tell(still, step, "host_staged", "failed")
        self._mover.report.count(STAGE, recovered=len(right))
        if still:
            own = next((failure for failure in failures if failure), "averaging it again through the host did not help")
            raise self._refusal(still, step, own)

    def _average_again(self, bucket: Bucket) -> str | None:
        """Average a bucket through the host. Collective, so a rank that cannot go on takes part all the same.

        The same operations as the stock average over gloo, in the same dtype: bit for bit its result. Only PowerSGD's
        is replaced by the average itself.

        Returns:
            None, or what went wrong on this rank.
        """
        changed = bucket.changed_since()
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
        return changed or failure

    def _harmed(self, average: Tensor, bucket: Bucket, *, attempt: int) -> Tensor:
        self._mover.inject(average, name=bucket.name, stage=STAGE, number=bucket.number, attempt=attempt)
        return average

    def _refusal(self, wrong: Sequence[_Found], step: int, why: str) -> CorruptionError:
        bucket, verdict = wrong[0]
        more = f" (and {len(wrong) - 1} more buckets)" if len(wrong) > 1 else ""
        return CorruptionError(
            f"the average of the gradients in {bucket.name}{more} is wrong at step {step} on ranks "
            f"{list(verdict.ranks)} ({verdict.kind} in {self._where(bucket, verdict)}), and {why}. It was not used; "
            "the checkpoints already written are intact: run the doctor, then start the same command again to continue "
            "from the newest one"
        )

    def _tell(self, found: Sequence[_Found], step: int, rung: str, outcome: str) -> None:
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
                    "first_offset": verdict.first * size,
                    "length": (verdict.last + 1 - verdict.first) * size,
                    "rung": rung,
                    "outcome": outcome,
                }
            )

    def _where(self, bucket: Bucket, verdict: _Verdict) -> str:
        """The parameter whose gradient is wrong, or the first and the last of them."""
        names = [
            self._names[id(place.parameter)]
            for place in bucket.places
            if place.start <= verdict.last and verdict.first < place.start + place.parameter.numel()
        ]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


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
    return torch.cat([bucket.pack(failed=flag) for bucket, flag in zip(buckets, failed, strict=True)]).cpu()


def _verdicts(buckets: Sequence[Bucket], mine: Tensor) -> list[_Verdict]:
    """Exchange what each rank packed, and judge. Collective."""
    group = host_group()
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    found, start = [], 0
    for bucket in buckets:
        end = start + _HEADER + bucket.projected.shape[0] * (_SENT + _AVERAGED)
        found.append(_judge(bucket, [words[start:end] for words in everyone]))
        start = end
    return found


def _judge(bucket: Bucket, words: Sequence[Tensor]) -> _Verdict:
    """The verdict on a bucket from every rank's words, on the host.

    An average is wrong when a projection on some rank is further from the mean of the sent ones than rounding may
    bring it, when the ranks hold other bits than each other, or when a rank says that it failed. Of a bucket without
    projections, which is not to hold the average but something near it, only the last two are known.
    """
    blocks = bucket.projected.shape[0]
    header = torch.stack([each[:_HEADER] for each in words])
    numbers = torch.stack([each[_HEADER:] for each in words]).view(torch.float64)
    sent = numbers[:, : blocks * _SENT].view(len(words), blocks, _SENT)
    averaged = numbers[:, blocks * _SENT :].view(len(words), blocks, _AVERAGED)
    last = bucket.sent.numel() - 1
    if failed := _marked(header[:, 0] != 0):
        return _Verdict(ranks=failed, kind="not made", last=last)
    differing = _marked((header[:, 1:] != header[0, 1:]).any(dim=1))
    if bucket.wire is not None:
        expected = sum(sent[1:], start=sent[0]) / len(words)
        if not expected.isfinite().all():
            ranks = _marked((~sent.isfinite()).flatten(1).any(dim=1))
            first, last = _span(~expected.isfinite().all(dim=1), bucket)
            return _Verdict(finite=False, ranks=ranks, first=first, last=last)
        wrong = beyond_rounding(averaged, expected, dtype=bucket.wire, ranks=len(words))
        if wrong.any():
            first, last = _span(wrong.any(dim=0), bucket)
            kind = "zeros" if bool((averaged[wrong] == 0).all()) else "wrong average"
            return _Verdict(ranks=_marked(wrong.any(dim=1)), kind=kind, first=first, last=last)
    if differing:
        return _Verdict(ranks=differing, kind="differs between ranks", last=last)
    return _Verdict()


def beyond_rounding(averaged: Tensor, expected: Tensor, *, dtype: torch.dtype, ranks: int) -> Tensor:
    """Which blocks of an average no rounding explains; also where the average alone is NaN.

    Args:
        averaged: float64[ranks, blocks, 2], the projections of the average on each rank.
        expected: float64[..., blocks, 3], the mean over the ranks of what `project` gave of what they sent.
        dtype: in which gradients were added up.
        ranks: over how many.

    Returns:
        bool[ranks, blocks].
    """
    bound = rounding_bound(expected[..., MAGNITUDE], dtype=dtype, ranks=ranks)
    off = (averaged - expected[..., :MAGNITUDE]).abs() / bound[..., None]
    return ~(off <= 1).all(dim=2)


def _marked(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


def _span(blocks: Tensor, bucket: Bucket) -> tuple[int, int]:
    """First and last element of the blocks that a bool mask marks."""
    marked = _marked(blocks)
    size = block_elements(bucket.wire or bucket.sent.dtype)
    return marked[0] * size, min((marked[-1] + 1) * size, bucket.sent.numel()) - 1


def _project_sent(flat: Tensor, wire: torch.dtype | None) -> Tensor:
    if wire is None:
        return torch.empty(0, MAGNITUDE + 1, dtype=torch.float64, device=flat.device)
    return project(flat.to(wire))


def _order_in_bucket(parameter: nn.Parameter) -> tuple[int, ...]:
    """The dimensions as torch's reducer lays the gradient out (``initialize_bucket_views``): as the parameter is laid
    out, where that is dense. `GradBucket.gradients` does not heed that: its views are right for contiguous ones only.
    """
    order = tuple(sorted(range(parameter.dim()), key=parameter.stride, reverse=True))
    return order if parameter.permute(order).is_contiguous() else tuple(range(parameter.dim()))


def _record_and_average(
    check: GradientCheck,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # see `averaging.GradBucket`
) -> torch.futures.Future[Tensor]:
    return check.before_averaging(bucket)


# DistributedDataParallel compares the annotations themselves, and here they are text.
_record_and_average.__annotations__ = get_type_hints(_record_and_average)
