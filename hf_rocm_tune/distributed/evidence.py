"""What the ranks tell each other about one bucket, and what follows from it, alike on every rank.

Each rank packs what it knows of all buckets of a step into one int64 tensor; one gather over gloo makes all of it known
to all. The verdict is element by element arithmetic on these very numbers, so every rank comes to the same one and no
rank waits in a collective that another does not enter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.distributed.buckets import Bucket
from hf_rocm_tune.distributed.projections import MAGNITUDE, block_elements, rounding_bound
from hf_rocm_tune.transfer.digest import digest, digest_on_device

_HEADER = 3
_SENT, _AVERAGED = 3, 2


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """On the average of one bucket.

    Attributes:
        finite: whether no rank's gradients held NaN or an infinity; otherwise nothing was compared.
        ranks: those whose average is wrong, or whose gradients were not finite.
        kind: ``zeros``, ``wrong average``, ``differs between ranks``, ``not made``; None when it is right.
        first_element: where the first wrong block begins; 0 when the place is not known.
        last_element: where the last one ends; the bucket's last element when the place is not known.
    """

    finite: bool = True
    ranks: tuple[int, ...] = ()
    kind: str | None = None
    first_element: int = 0
    last_element: int = 0

    @property
    def wrong(self) -> bool:
        """Whether the average must not be used."""
        return self.kind is not None


def pack(bucket: Bucket, *, failed: bool = False) -> Tensor:
    """int64 words on the gradients' device: failed, digest of the average, projections of both; see `judge`."""
    average = bucket.averaged()
    words = [
        torch.full((1,), int(failed), dtype=torch.int64, device=average.device),
        _digest_words(average),
        bucket.projected.flatten().view(torch.int64),
        bucket.project_averaged(average)[:, :MAGNITUDE].flatten().view(torch.int64),
    ]
    return torch.cat(words)


def unpack(buckets: Sequence[Bucket], gathered: Sequence[Tensor]) -> Iterator[tuple[Bucket, list[Tensor]]]:
    """Each bucket with every rank's words on it; `gathered` holds by rank what `pack` gave for all buckets, joined."""
    start = 0
    for bucket in buckets:
        end = start + _HEADER + bucket.projected.shape[0] * (_SENT + _AVERAGED)
        yield bucket, [words[start:end] for words in gathered]
        start = end


def judge(bucket: Bucket, words: Sequence[Tensor]) -> Verdict:
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
    if header[:, 0].any():
        failed = tuple(header[:, 0].nonzero().flatten().tolist())
        return Verdict(ranks=failed, kind="not made", last_element=last)
    other = (header[:, 1:] != header[0, 1:]).any(dim=1)
    differing = tuple(other.nonzero().flatten().tolist())
    if bucket.wire is None:
        return Verdict(ranks=differing, kind="differs between ranks" if differing else None, last_element=last)
    expected = sum(sent[1:], start=sent[0]) / len(words)
    if not expected.isfinite().all():
        first, last = _span(~expected.isfinite().all(dim=1), bucket)
        ranks = tuple((~sent.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist())
        return Verdict(finite=False, ranks=ranks, first_element=first, last_element=last)
    bound = rounding_bound(expected[:, MAGNITUDE], dtype=bucket.wire, ranks=len(words))
    off = (averaged - expected[:, :MAGNITUDE]).abs() / bound[:, None]
    wrong = ~(off <= 1).all(dim=2)  # also where the average alone is NaN
    if wrong.any():
        ranks = tuple(wrong.any(dim=1).nonzero().flatten().tolist())
        lost = bool((averaged[wrong] == 0).all())
        first, last = _span(wrong.any(dim=0), bucket)
        kind = "zeros" if lost else "wrong average"
        return Verdict(ranks=ranks, kind=kind, first_element=first, last_element=last)
    if differing:
        return Verdict(ranks=differing, kind="differs between ranks", last_element=last)
    return Verdict()


def _span(blocks: Tensor, bucket: Bucket) -> tuple[int, int]:
    """First and last element of the blocks that a bool mask marks."""
    marked = blocks.nonzero().flatten()
    size = block_elements(bucket.wire or bucket.sent.dtype)
    return int(marked[0]) * size, min(int(marked[-1] + 1) * size, bucket.sent.numel()) - 1


def _digest_words(flat: Tensor) -> Tensor:
    """int64[2]: the digest's sums, on the device of `flat`. Nothing is waited for on an accelerator."""
    if flat.device.type != "cpu":
        return digest_on_device(flat)
    found = digest(flat)
    return torch.tensor([found.s1, found.s2], dtype=torch.uint64).view(torch.int64)
