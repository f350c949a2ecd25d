"""What a rank knows of one collective of FSDP2, and the verdict on it from what all ranks know.

Every rank runs the same collectives in the same order, so the n-th record of one is the n-th of all. A record packs
what it knows into int64 words, whose number is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hf_rocm_tune.distributed.projections import MAGNITUDE, project, rounding_bound
from hf_rocm_tune.transfer.digest import digest, digest_on_device

_SUMS = 2
_SENT, _AVERAGED = 3, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """Weights of one unit that were gathered.

    Attributes:
        name: of the unit.
        sent: int64[2], the digest of what this rank sent.
        arrived: int64[ranks, 2], digests of what came from each rank, its own part too.
        nbytes: that came from the other ranks.
    """

    name: str
    sent: Tensor
    arrived: Tensor
    nbytes: int

    def words(self) -> Tensor:
        """See the module's description."""
        return torch.cat([self.sent, self.arrived.flatten()])


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduction:
    """Gradients of one unit that were averaged, each rank getting its part.

    Attributes:
        name: of the unit.
        number: counts those of the whole run, alike on all ranks; for injected faults.
        sent: copy of this rank's gradients, 1-dimensional: the parts of all ranks, one after the other.
        projected: float64[ranks, blocks, 3], `project` of each part, from the gradients and not from the copy.
        average: this rank's part of the average, 1-dimensional, in the memory that FSDP2 reads.
    """

    name: str
    number: int
    sent: Tensor
    projected: Tensor
    average: Tensor

    @property
    def nbytes(self) -> int:
        """That went to the other ranks."""
        return self.sent.nbytes - self.average.numel() * self.sent.element_size()

    def words(self, *, failed: bool = False) -> Tensor:
        """See the module's description.

        Args:
            failed: this rank could not make the average again.
        """
        flag = torch.full((1,), int(failed), dtype=torch.int64, device=self.average.device)
        got = project(self.average)[:, :MAGNITUDE]
        return torch.cat([flag, *(each.flatten().view(torch.int64) for each in (self.projected, got.contiguous()))])


Record = TypeVar("Record", bound=Gather | Reduction)


@dataclass(frozen=True, kw_only=True)
class Wrong(Generic[Record]):
    """A verdict that something is wrong.

    Attributes:
        record: of this rank.
        ranks: where it is wrong.
        kind: in a word or two.
        finite: False where gradients were not finite before, and nothing could be compared.
    """

    record: Record
    ranks: tuple[int, ...]
    kind: str
    finite: bool = True


def sums(flat: Tensor) -> Tensor:
    """int64[2] on the device of ``flat``: the digest's sums. Nothing is waited for on an accelerator."""
    if flat.device.type != "cpu":
        return digest_on_device(flat)
    found = digest(flat)
    return torch.tensor([found.s1, found.s2], dtype=torch.uint64).view(torch.int64)


def judge_gathers(gathers: Sequence[Gather], words: Sequence[Tensor]) -> tuple[list[Wrong[Gather]], list[Tensor]]:
    """Those that arrived wrong, and the words that are left.

    Args:
        gathers: of this rank.
        words: by rank, those of all its records, `gathers` first.
    """
    ranks = len(words)
    each = _SUMS * (1 + ranks)
    end = len(gathers) * each
    table = torch.stack([mine[:end] for mine in words]).view(ranks, len(gathers), 1 + ranks, _SUMS)
    sent, arrived = table[:, :, 0], table[:, :, 1:]  # [from, gather, sums], [at, gather, from, sums]
    right = (arrived == sent.transpose(0, 1)[None]).all(dim=3).all(dim=2)  # [at, gather]
    bad = [
        Wrong(record=gathers[number], ranks=tuple((~right[:, number]).nonzero().flatten().tolist()), kind="other bytes")
        for number in (~right).any(dim=0).nonzero().flatten().tolist()
    ]
    return bad, [mine[end:] for mine in words]


def judge_reductions(reductions: Sequence[Reduction], words: Sequence[Tensor]) -> list[Wrong[Reduction]]:
    """Those whose average is wrong somewhere, or could not be judged.

    An average is wrong when a projection on some rank is further from the mean of the sent ones than rounding may bring
    it, or when a rank says that it failed.
    """
    ranks, start = len(words), 0
    found: list[Wrong[Reduction]] = []
    for record in reductions:
        blocks = record.projected.shape[1]
        end = start + 1 + blocks * (ranks * _SENT + _AVERAGED)
        mine = torch.stack([each[start:end] for each in words])
        start = end
        failed = tuple(mine[:, 0].nonzero().flatten().tolist())
        numbers = mine[:, 1:].contiguous().view(torch.float64)
        sent = numbers[:, : ranks * blocks * _SENT].view(ranks, ranks, blocks, _SENT)  # [from, to, ...]
        got = numbers[:, ranks * blocks * _SENT :].view(ranks, blocks, _AVERAGED)
        expected = sum(sent[1:], start=sent[0]) / ranks
        if failed:
            found.append(Wrong(record=record, ranks=failed, kind="not made again"))
        elif not expected.isfinite().all():
            where = tuple((~sent.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist())
            found.append(Wrong(record=record, ranks=where, kind="not finite", finite=False))
        else:
            bound = rounding_bound(expected[..., MAGNITUDE], dtype=record.sent.dtype, ranks=ranks)
            off = (got - expected[..., :MAGNITUDE]).abs() / bound[..., None]
            wrong = ~(off <= 1).all(dim=2)  # [at, block]; also where the average alone is NaN
            if wrong.any():
                where = tuple(wrong.any(dim=1).nonzero().flatten().tolist())
                kind = "zeros" if bool((got[wrong] == 0).all()) else "wrong average"
                found.append(Wrong(record=record, ranks=where, kind=kind))
    return found
