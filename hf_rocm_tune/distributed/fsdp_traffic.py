"""What FSDP2 sends between the cards in every step, judged before the optimizer uses any of it.

FSDP2 gathers each unit's weights before its forward and its backward, and averages gradients so that each rank gets its
part. Both are done by the stock collectives; this stands around them, through FSDP2's own extension points
(``set_custom_all_gather``, ``set_custom_reduce_scatter``):

* of weights, each rank takes the digest of what it sends, before the collective, and of each rank's part as it arrived;
* of gradients, it takes two projections of what it sends to each rank, and of the part that it gets (`projections`).

All of it stays on the device until the end of the micro-step; then one exchange over gloo lets every rank judge every
collective, alike. A wrong average is made again through the host from the copy that was kept. Weights that arrived
wrong have been computed with: there is nothing to put right, so every rank stops before the optimizer.

What it costs: reading once what is gathered (by the digest kernel, beside the collective of the next unit), memory of
one copy of the gradients, one exchange per micro-step of 16 bytes per rank and unit, and one wait for the device.

Covered: weights in training and evaluation, gradients. Not covered: the copies that FSDP2 makes on the card before and
after its collectives; averages that are wrong within the rounding bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_rocm_tune import upstream
from hf_rocm_tune.distributed.fsdp_comms import GATHERED, Gathers, Reduces
from hf_rocm_tune.distributed.fsdp_records import Gather, Reduction, Wrong, judge_gathers, judge_reductions
from hf_rocm_tune.errors import CorruptionError, SeamError
from hf_rocm_tune.transfer import Mover, digest
from hf_rocm_tune.transfer.host_group import host_group

STAGE = "gradients"
_READS = 3


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
        self._gathers: list[Gather] = []
        self._reductions: list[Reduction] = []
        self._averaged = self._reductions_made = self._steps = self._bytes = 0
        self._named_not_finite = False
        host_group()  # made here, on every rank: not in the middle of a step
        numbers = itertools.count()
        for name, module in units:
            module.set_custom_all_gather(Gathers(name or "root", self._gathers, mover, numbers))
            module.set_custom_reduce_scatter(Reduces(name or "root", self._reductions, mover, numbers))

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
        """Judge all that was sent since the last time, and put wrong averages right. Collective.

        Args:
            step: number of the step, for incidents.

        Raises:
            CorruptionError: on every rank, when weights arrived wrong, or an average cannot be made right.
        """
        gathers, reductions = list(self._gathers), list(self._reductions)
        self._gathers.clear()
        self._reductions.clear()
        records: list[Gather | Reduction] = [*gathers, *reductions]
        words = _exchange([record.words() for record in records])
        self._mover.report.count(GATHERED, checked=len(gathers))
        self._mover.report.count(STAGE, buckets=len(reductions))
        self._averaged += len(reductions)
        self._reductions_made += len(reductions)
        self._bytes += sum(record.nbytes for record in records)
        bad, words = judge_gathers(gathers, words)
        if bad:
            self._mover.report.count(GATHERED, mismatches=len(bad))
            self._tell(GATHERED, bad, step, "all_gather", "stopped")
            raise _weights_refusal(bad, step)
        wrong = judge_reductions(reductions, words)
        self._name_what_is_not_finite([each for each in wrong if not each.finite], step)
        wrong = [each for each in wrong if each.finite]
        if wrong:
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

    # ---- making an average again ----------------------------------------------------------------------------

    def _recover(self, wrong: Sequence[Wrong[Reduction]], step: int) -> None:
        if self._mover.settings.on_corruption == "stop":
            self._tell(STAGE, wrong, step, "reduce_scatter", "stopped")
            raise _average_refusal(wrong, step, "--on_corruption stop was asked for")
        records = [each.record for each in wrong]
        failures = [self._average_again(record) for record in records]
        words = _exchange(
            [record.words(failed=failure is not None) for record, failure in zip(records, failures, strict=True)]
        )
        again = {id(each.record) for each in judge_reductions(records, words)}
        still = [each for each in wrong if id(each.record) in again]
        right = [each for each in wrong if id(each.record) not in again]
        self._tell(STAGE, right, step, "host_staged", "recovered")
        self._tell(STAGE, still, step, "host_staged", "failed")
        self._mover.report.count(STAGE, recovered=len(right))
        if still:
            own = next((failure for failure in failures if failure), None)
            raise _average_refusal(still, step, own or "averaging it again through the host did not help")

    def _average_again(self, record: Reduction) -> str | None:
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

    # ---- telling --------------------------------------------------------------------------------------------

    def _tell(self, stage: str, found: Sequence[Wrong[Any]], step: int, rung: str, outcome: str) -> None:
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

    def _name_what_is_not_finite(self, bad: Sequence[Wrong[Reduction]], step: int) -> None:
        """Once for each stretch of steps: NaN or infinities that backward made are no fault of a transfer."""
        if not self._named_not_finite:
            self._tell(STAGE, bad, step, "none", "passed on")
        self._named_not_finite = bool(bad)


def _exchange(mine: Sequence[Tensor]) -> list[Tensor]:
    """By rank the int64 words of all records, joined. One collective, over gloo."""
    joined = torch.cat(list(mine)).cpu() if mine else torch.zeros(0, dtype=torch.int64)
    group = host_group()
    everyone = [torch.empty_like(joined) for _ in range(group.size())]
    dist.all_gather(everyone, joined, group=group)
    return everyone


def _more(found: Sequence[Wrong[Any]]) -> str:
    return f" (and {len(found) - 1} more times)" if len(found) > 1 else ""


_ADVICE = (
    "The step was not used and the checkpoints already written are intact: run the doctor, then start the same command "
    "again to continue from the newest one, or train without FSDP2"
)


def _weights_refusal(bad: Sequence[Wrong[Gather]], step: int) -> CorruptionError:
    first = bad[0]
    return CorruptionError(
        f"weights of {first.record.name} that FSDP2 gathered from the other cards arrived wrong at step {step} on "
        f"ranks {list(first.ranks)}{_more(bad)}. {_ADVICE}"
    )


def _average_refusal(wrong: Sequence[Wrong[Reduction]], step: int, why: str) -> CorruptionError:
    first = wrong[0]
    return CorruptionError(
        f"the average of the gradients of {first.record.name}{_more(wrong)} is wrong at step {step} on ranks "
        f"{list(first.ranks)} ({first.kind}), and {why}. {_ADVICE}"
    )
