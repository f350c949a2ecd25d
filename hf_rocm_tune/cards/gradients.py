"""Checks of gradient averages before the optimizer uses them; a wrong average is computed again through the host.

A communication hook of DistributedDataParallel records each bucket and starts its average (`averaging`). After backward
one gather over gloo of each rank's evidence lets every rank compute the same verdict. Cost: memory of one copy of the
trainable gradients, one wait for the device per step. Not covered: the cast to 16 bits, PowerSGD's approximation,
backward itself; buckets with NaN or infinities are reported and used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.agree import exchange
from hf_rocm_tune.cards.averaging import GradBucket, GroupAveraging, HostAveraging, SyncSettings
from hf_rocm_tune.errors import CorruptionError, SeamError, UsageError, device_shortage
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.transfer import Mover, digest, digest_on_device

STAGE = "gradients"
NOT_FINITE = "not finite"
# Words of a record: its header, and for every block the projections of what was sent and of the average.
_HEADER = 3
_SENT = 3
_AVERAGED = 2
"""int64 words of an average: failed and the digest; of each of its blocks: projected before and after averaging."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Average:
    """One average over the ranks: a bucket that every rank gets whole, or a tensor of which each rank gets a part."""

    name: str
    number: int  # counts the averages of the run, the same on all ranks; for injected faults
    sent: Tensor  # the local gradients that went into the average, 1-dimensional, kept until the verdict
    wire: torch.dtype | None  # dtype of the sums; None if they only approximate, and nothing is projected
    projected: Tensor  # float64[parts, blocks, 3], `project` of each part of what is sent, not of a copy
    averaged: Callable[[], Tensor]  # this rank's average as the optimizer will read it, 1-dimensional
    write: Callable[[Tensor], str | None]  # puts another there; returns why it could not
    row: Mapping[str, Any]  # for incidents; ``tensor``: whose gradients

    @property
    def size(self) -> int:
        parts, blocks = self.projected.shape[:2]
        return _HEADER + blocks * (parts * _SENT + _AVERAGED)

    def words(self, *, failed: bool) -> Tensor:
        """int64 words on the gradients' device: failed, digest of the average, projections of both; see `verdict`."""
        average = self.averaged()
        parts = len(self.projected)
        got = self.projected[0] if self.wire is None else project(average, wire=self.wire)
        flag = torch.full((1,), int(failed), dtype=torch.int64, device=average.device)
        same = digest_words(average) if parts == 1 else flag.new_zeros(2)
        of_sent = self.projected.flatten().view(torch.int64)
        of_average = got[:, :MAGNITUDE].flatten().view(torch.int64)
        return torch.cat([flag, same, of_sent, of_average])

    def verdict(self, words: Tensor) -> WrongAverage | None:
        """The verdict from int64[ranks, size], the words of all ranks, on the host; None if the average is right.

        Wrong: a projection differs from the mean of the sent ones by more than rounding, the ranks' bits differ, or a
        rank failed.
        """
        ranks = len(words)
        parts, blocks = self.projected.shape[:2]
        header = words[:, :_HEADER]
        numbers = words[:, _HEADER:].contiguous().view(torch.float64)
        sent, averaged = numbers.split([parts * blocks * _SENT, blocks * _AVERAGED], dim=1)
        failed = marked(header[:, 0] != 0)
        if failed:
            return WrongAverage(record=self, ranks=failed, kind="not made")
        if self.wire is not None:
            sent = sent.view(ranks, parts, blocks, _SENT)
            averaged = averaged.view(ranks, blocks, _AVERAGED)
            expected = sum(sent[1:], start=sent[0]) / ranks
            if not expected.isfinite().all():
                where = marked((~sent.isfinite()).flatten(1).any(dim=1))
                return WrongAverage(record=self, ranks=where, kind=NOT_FINITE)
            bound = rounding_bound(expected[..., MAGNITUDE], dtype=self.wire, ranks=ranks)
            off = (averaged - expected[..., :MAGNITUDE]).abs() / bound[..., None]
            wrong = ~(off <= 1).all(dim=-1)  # or only the average is NaN
            if wrong.any():
                kind = "zeros" if bool((averaged[wrong] == 0).all()) else "wrong average"
                return WrongAverage(record=self, ranks=marked(wrong.any(dim=1)), kind=kind)
        differing = marked((header[:, 1:] != header[0, 1:]).any(dim=1))
        if differing:
            return WrongAverage(record=self, ranks=differing, kind="differs between ranks")
        return None


@dataclass(frozen=True, kw_only=True)
class WrongAverage:
    """An average that is wrong, or could not be checked because gradients held NaN or infinity (`NOT_FINITE`)."""

    record: Average  # this rank's record of it
    ranks: tuple[int, ...]  # those with a wrong average, or with gradients that were not finite
    kind: str  # ``zeros``, ``wrong average``, ``differs between ranks``, ``not made`` or `NOT_FINITE`


class AverageCheck:
    """Judges averages, and computes wrong ones again through the host. The constructor is collective.

    ``collective``: which computes averages first; ``advice``: the end of the error.
    """

    def __init__(self, mover: Mover, settings: SyncSettings, *, collective: str, advice: str = "") -> None:
        self._mover = mover
        self._collective = collective
        self._advice = advice
        self.through_host = HostAveraging(mover, settings)
        self._named_not_finite = False
        host_group()  # created here, on every rank, not in the middle of a step

    def conclude(self, records: Sequence[Average], of_all_ranks: Sequence[Tensor], step: int) -> list[Average]:
        """The averages that were wrong, and are right now, from all ranks' words. Collective: verdicts are the same."""
        judged = _verdicts(records, of_all_ranks)
        wrong = [verdict for verdict in judged if verdict.kind != NOT_FINITE]
        not_finite = [verdict for verdict in judged if verdict.kind == NOT_FINITE]
        if not self._named_not_finite:  # once per series of steps: NaN from backward is not a transfer fault
            self._report(not_finite, step, "none", "passed on")
        self._named_not_finite = bool(not_finite)
        if not wrong:
            return []
        self._mover.report.count(STAGE, mismatches=len(wrong))
        if self._mover.settings.on_corruption == "stop":
            self._report(wrong, step, self._collective, "stopped")
            raise self._refusal(wrong, step, "--on_corruption stop is set")
        records = [verdict.record for verdict in wrong]
        failures = [self._again(record) for record in records]
        words_again = exchange(joined_words(records, [failure is not None for failure in failures]))
        verdicts_again = _verdicts(records, words_again)
        wrong_again = {id(verdict.record) for verdict in verdicts_again if verdict.kind != NOT_FINITE}
        recovered = [verdict for verdict in wrong if id(verdict.record) not in wrong_again]
        failed = [verdict for verdict in wrong if id(verdict.record) in wrong_again]
        self._report(recovered, step, "host_staged", "recovered")
        self._report(failed, step, "host_staged", "failed")
        self._mover.report.count(STAGE, recovered=len(recovered))
        if failed:
            own = next((failure for failure in failures if failure), "averaging it again through the host failed too")
            raise self._refusal(failed, step, own)
        return records

    def _again(self, record: Average) -> str | None:
        """Average again: the operations of the stock average over gloo, in the same dtype, so bit-identical.

        Only PowerSGD's result is replaced by the average itself. A rank with an error takes part, and returns it.
        """
        host = self.through_host
        host.step_begins()
        average = host.begin(record.sent, name=record.name, number=record.number).wait()
        failure = host.failures.get(record.number)
        try:
            host.check()
        except RuntimeError as error:
            if device_shortage(error) is None:
                raise
            failure = "there was no memory to compute it again"
        if failure is not None:
            return failure
        parts = len(record.projected)
        average = average if parts == 1 else average.view(parts, -1)[host_group().rank()]
        self._mover.inject(average, name=record.name, stage=STAGE, number=record.number, attempt=1)
        return record.write(average)

    def _refusal(self, wrong: Sequence[WrongAverage], step: int, why: str) -> CorruptionError:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return CorruptionError(
            f"the average of the gradients of {wrong[0].record.row['tensor']}{more} is wrong at step {step} on ranks "
            f"{list(wrong[0].ranks)} ({wrong[0].kind}), and {why}. It was not used; the checkpoints already written "
            "are intact: run the doctor, then start the same command again to continue from the newest one"
            f"{self._advice}"
        )

    def _report(self, verdicts: Sequence[WrongAverage], step: int, retry: str, outcome: str) -> None:
        for verdict in verdicts:
            common = {"step": step, "stage": STAGE, "ranks": list(verdict.ranks), "kind": verdict.kind}
            self._mover.report.incident({**common, **verdict.record.row, "retry": retry, "outcome": outcome})


def joined_words(records: Sequence[Any], failed: Sequence[bool]) -> Tensor:
    words = [record.words(failed=flag) for record, flag in zip(records, failed, strict=True)]
    return torch.cat(words).cpu() if words else torch.zeros(0, dtype=torch.int64)


def _verdicts(records: Sequence[Average], of_all_ranks: Sequence[Tensor]) -> list[WrongAverage]:
    """The averages that are wrong or could not be checked, from all ranks' words of these records in turn."""
    if not records:
        return []
    words_of_records = torch.stack(list(of_all_ranks)).split([record.size for record in records], dim=1)
    verdicts = []
    for record, words in zip(records, words_of_records, strict=True):
        verdict = record.verdict(words)
        if verdict is not None:
            verdicts.append(verdict)
    return verdicts


def marked(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


# ---- DistributedDataParallel -------------------------------------------------------------------------------


class GradientCheck:
    """Averages the gradients of one wrapped model and checks them. The constructor is collective."""

    def __init__(self, model: DistributedDataParallel, mover: Mover, settings: SyncSettings) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_contiguous():  # its bucket would have another layout
                raise UsageError(
                    f"{name} is not contiguous in memory, so averages of its gradient cannot be checked: make it "
                    "contiguous, or train with --verify off"
                )
        self.model = model
        self._mover = mover
        self._settings = settings
        self.judging = mover.settings.verify != "off"
        self._check = AverageCheck(mover, settings, collective="all_reduce")
        self._host = self._check.through_host
        self._group = None if settings.method == "host" else GroupAveraging(model, settings)
        self._copies = self._group is not None or model.gradient_as_bucket_view  # else buckets keep what was sent
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.pending: list[Average] = []
        self._words: Tensor | None = None
        self._short_of_memory = False
        self._backwards = 0
        self._recorded = 0
        model.register_comm_hook(self, _record_and_average)

    def describe(self) -> dict[str, Any]:
        steps = max(self._backwards, 1)
        averaging = self._group or self._host
        if not self.judging:
            judged = "no"
        elif self._settings.compression == "powersgd":
            judged = "equal on all ranks"
        else:
            judged = "projections"
        between_ranks = None
        if averaging.between is not None:
            between_ranks = round(averaging.between / steps)
        to_host_and_back = 0
        if self._group is None:
            to_host_and_back = round(self._host.crossed / steps)
        return {
            "method": self._settings.method,
            "compression": self._settings.compression,
            "process_group": dist.get_backend(self.model.process_group),
            "judged": judged,
            "averages": self._backwards,
            "bytes_between_ranks_per_step": between_ranks,
            "bytes_to_host_and_back_per_step": to_host_and_back,
        }

    def before_averaging(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self.pending.clear()  # another backward of the same step: its average includes the earlier one
            self._words = None
            self._short_of_memory = False
            self._host.step_begins()
            self._backwards += 1
        number = self._recorded
        self._recorded += 1
        if self.judging:
            try:
                self._record(bucket, number)
            except RuntimeError as error:
                if device_shortage(error) is None:
                    raise
                self._short_of_memory = True  # the other ranks wait for this average; `collect` raises afterwards
        name = f"bucket {bucket.index()}"
        if self._group is not None:
            average = self._group.start(bucket)
        else:
            average = self._host.begin(bucket.buffer(), name=name, number=number)
        if not self.judging or self._short_of_memory or self._mover.fault_injection() is None:
            return average

        def injected(done: torch.futures.Future[Tensor]) -> Tensor:
            averaged = done.value()
            self._mover.inject(averaged, name=name, stage=STAGE, number=number, attempt=0)
            return averaged

        average = average.then(injected)
        average.wait()  # one bucket at a time, so that a specification selects the same buckets on every rank
        return average

    def _record(self, bucket: GradBucket, number: int) -> None:
        buffer = bucket.buffer()
        index = bucket.index()
        parameters = tuple(bucket.parameters())
        sent = buffer.clone() if self._copies else buffer  # it will be overwritten
        if self._settings.compression == "powersgd":
            wire = None
            projected = torch.empty(0, MAGNITUDE + 1, dtype=torch.float64, device=buffer.device)
        else:
            wire = self._settings.wire_dtype(buffer.dtype)
            projected = project(buffer.to(wire))
        names = [self._names[id(parameter)] for parameter in parameters]
        where = names[0]
        if len(names) > 1:
            where = f"{names[0]} .. {names[-1]}"
        record = Average(
            name=f"bucket {index}",
            number=number,
            sent=sent,
            wire=wire,
            projected=projected[None],
            averaged=partial(_gradients_of, parameters, sent),
            write=partial(_write, parameters),
            row={"tensor": where, "bucket": index, "length": sent.nbytes},
        )
        self.pending.append(record)

    def collect(self) -> None:
        """Collect this rank's evidence on the averages of this step. Not collective.

        `wait_verified` then needs device memory only to compute a wrong average again.
        """
        self._host.check()
        if self._short_of_memory:
            raise torch.OutOfMemoryError("no memory for a copy of the gradients to be averaged")
        if self.pending:
            self._words = joined_words(self.pending, [bucket.number in self._host.failures for bucket in self.pending])

    def wait_verified(self, *, step: int) -> None:
        """Check the averages of this step and compute wrong ones again. Collective; afterwards they may be used."""
        if not self.judging:
            self.collect()
            return
        if not (self.pending or self._short_of_memory):
            raise SeamError(
                "cannot verify: DistributedDataParallel averaged no gradients in a step that ends with the optimizer; "
                "use the library versions that this package was tested with, or report the trainer that does this"
            )
        if self._words is None:
            self.collect()
        buckets = self.pending
        self.pending = []
        mine = self._words
        self._words = None
        assert mine is not None
        self._mover.report.count(STAGE, buckets=len(buckets))
        for bucket in self._check.conclude(buckets, exchange(mine), step):
            if self._group is not None:
                self._group.forget(bucket.row["bucket"])


def _gradients_of(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """The gradients in the layout of a bucket; zeros where no rank used a parameter."""
    pieces = []
    for parameter in parameters:
        if parameter.grad is None:
            pieces.append(like.new_zeros(parameter.numel()))
        else:
            pieces.append(parameter.grad.detach().reshape(-1))
    return torch.cat(pieces)


def _write(parameters: Sequence[nn.Parameter], average: Tensor) -> None:
    pieces = average.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(piece.view_as(parameter.grad))  # device: both are on the parameter's device


def watch(
    model: nn.Module, mover: Mover, earlier: GradientCheck | None, settings: SyncSettings | None = None
) -> GradientCheck | None:
    settings = settings or SyncSettings()
    stock = settings.method == "ddp" and settings.compression == "none"
    wrapped = getattr(model, "_orig_mod", model)  # torch.compile wraps DistributedDataParallel
    if not isinstance(wrapped, DistributedDataParallel):
        if stock:
            return None
        raise UsageError(
            f"--grad_sync {settings.method} with --grad_compression {settings.compression} needs "
            f"DistributedDataParallel, and this model is a {type(wrapped).__name__}: "
            f"choose --grad_sync ddp with --grad_compression none"
        )
    if stock and mover.settings.verify == "off":
        return None
    if earlier is not None and earlier.model is wrapped:
        return earlier
    return GradientCheck(wrapped, mover, settings)


def _record_and_average(
    check: GradientCheck,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # see `averaging.GradBucket`
) -> torch.futures.Future[Tensor]:
    return check.before_averaging(bucket)


# DistributedDataParallel compares annotations by identity, and here they are strings.
_record_and_average.__annotations__ = get_type_hints(_record_and_average)


# ---- projections --------------------------------------------------------------------------------------------
#
# Of each block of a bucket of gradients `g` are computed, in float64, P1 = sum(g[i]), P2 = sum(w[i] * g[i]) and
# A = sum(|g[i]|), with fixed weights `-1 <= w[i] < 1`, all different within a block, those of neighbours far apart. P1
# and P2 are linear: those of an average over R ranks equal the average of the ranks', except for rounding. P1 detects
# lost, zeroed or added values, P2 swapped ones. What is cast before it is sent is projected after the cast.
#
# **The bound.** `e` is the spacing at 1 (torch.finfo.eps) of the dtype of the sums. An element of the average comes
# from R divisions by R (exact for a power of two) and R-1 additions, in any order: `k = R-1` or `k = R` roundings, and
# the error is at most `((1+e)^k - 1) * mean_r |g_r[i]|` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
# ed., section 4.2); of both projections of a block at most `((1+e)^k - 1) * mean_r A_r`. Added to that are `3 R t` per
# element for underflow (`t`: the smallest normal number where denormals may be flushed, else the smallest denormal)
# and `(4n + 4R + 16) u A` for n elements per block and `u = 2^-53`, the rounding of the projections themselves.
# Not detected: a change within the bound, for float32 below `5e-4` of the mean magnitude of an element, for bfloat16
# (two ranks) below 2 of them, in a block of 4,096 and of 256 elements.

MAGNITUDE = 2
"""Column of `project` with the sum of magnitudes, after the projections."""

_SLAB = 1 << 18
"""Elements converted to float64 at a time: 2 MiB, which stays in a processor's cache."""
_DEVICE_SLAB = 1 << 22


def block_elements(dtype: torch.dtype) -> int:
    return 256 if dtype.itemsize < 4 else 4096


def project(flat: Tensor, *, wire: torch.dtype | None = None) -> Tensor:
    """float64[blocks, 3] on the same device: sum, weighted sum, sum of magnitudes. The last block may be short."""
    size = block_elements(wire or flat.dtype)
    weights = _weights(size, flat.device)
    columns = torch.empty(-(-flat.numel() // size), 3, dtype=torch.float64, device=flat.device)
    slab_elements = _SLAB if flat.device.type == "cpu" else _DEVICE_SLAB
    step = min(slab_elements, columns.shape[0] * size)
    scratch = torch.empty(step, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        slab = scratch[: -(-piece.numel() // size) * size]
        slab[: piece.numel()] = piece
        slab[piece.numel() :] = 0
        slab = slab.view(-1, size)
        rows = columns[start // size : start // size + slab.shape[0]]
        rows[:, MAGNITUDE] = torch.linalg.vector_norm(slab, ord=1, dim=1)
        if flat.device.type == "cpu":
            rows[:, :MAGNITUDE] = slab @ weights.t()
        else:  # not a product of float64 matrices: gfx1100 has only slow kernels for that
            rows[:, 0] = slab.sum(1)
            rows[:, 1] = slab.mul_(weights[1]).sum(1)
    return columns


def rounding_bound(magnitude: Tensor, *, dtype: torch.dtype, ranks: int) -> Tensor:
    """float64[blocks], the largest difference between a projection of an average and the average of the projections.

    ``magnitude``: float64[blocks], the mean over the ranks of each block's sum of magnitudes.
    """
    kind = torch.finfo(dtype)
    elements = block_elements(dtype)
    roundings = ranks - 1 if ranks & (ranks - 1) == 0 else ranks
    averaging = math.expm1(roundings * math.log1p(kind.eps))
    projecting = (4 * elements + 4 * ranks + 16) * 2.0**-53
    lost = kind.smallest_normal * (kind.eps if dtype == torch.float16 else 1.0)
    return magnitude * (averaging + projecting) + 3 * ranks * elements * lost


def digest_words(flat: Tensor) -> Tensor:
    """int64[2]: the digest's sums, on the device of ``flat``, without a wait on an accelerator."""
    if flat.device.type != "cpu":
        return digest_on_device(flat)
    sums = digest(flat)
    return torch.tensor([sums.s1, sums.s2], dtype=torch.uint64).view(torch.int64)


@cache
def _weights(size: int, device: torch.device) -> Tensor:
    """float64[2, size]: ones, and multiples of the golden ratio modulo 1, stretched to [-1, 1). Exact everywhere."""
    index = torch.arange(1, size + 1, device=device)
    golden = (index * 40503 % 65536).to(torch.float64) / 32768 - 1  # 40503 = 2^16 / 1.618, odd: all values differ
    return torch.stack([torch.ones_like(golden), golden])
