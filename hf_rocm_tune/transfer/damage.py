"""How bytes that were read differ from what they should be: where, how much, and what is there instead.

Bytes are compared as integers, all of them. `diagnosis` describes the shipments of a run in the same terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer.diagnosis import ALIGNMENTS, POISON, first_run

_SLAB_BYTES = 4 << 20
_SHOWN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Bytes that are wrong.

    Attributes:
        nbytes: bytes that were compared.
        wrong: how many of them are wrong.
        first_offset: of the first.
        length: bytes of the first wrong run; right bytes between wrong ones count when fewer than 64 stand together.
        alignment: the largest of 20 MiB, 2 MiB, 64 KiB, 4 KiB, 256, 64, 4, 1 bytes that divides the offset; of offset
            0, that divides the length.
        zeros, poison, stale, flips: how many wrong bytes are 0, are what the destination was filled with before, are
            those of an earlier transfer, or differ in one bit. A byte may count as several.
        found: the first wrong bytes, in hexadecimal.
        right: what should be there.
    """

    nbytes: int
    wrong: int
    first_offset: int
    length: int
    alignment: int
    zeros: int
    poison: int
    stale: int
    flips: int
    found: str
    right: str

    @property
    def kind(self) -> str:
        """``zeros``, ``poison``, ``stale`` or ``bit_flip`` where all wrong bytes are that; ``mixed``, ``other``."""
        if self.wrong == self.flips and self.wrong <= 2:
            return "bit_flip"  # before the others, which a single flipped bit may happen to look like
        for kind in ("zeros", "poison", "stale"):
            if getattr(self, kind) == self.wrong:
                return kind
        return "mixed" if self.zeros + self.poison + self.stale > self.wrong // 2 else "other"


def examine(found: Tensor, right: Tensor, *, earlier: Tensor | None = None) -> Damage | None:
    """Compare bytes.

    Args:
        found: uint8[n] on the host, contiguous.
        right: uint8[n] on the host, contiguous.
        earlier: uint8[m] that was sent to the same place before, for telling stale bytes.

    Returns:
        None when they are equal.
    """
    assert found.numel() == right.numel(), "what is compared is of one size"
    if torch.equal(found, right):
        return None
    counts = torch.zeros(5, dtype=torch.int64)
    first, end, open_run = -1, -1, True
    for start in range(0, right.numel(), _SLAB_BYTES):
        read, wanted = found[start : start + _SLAB_BYTES], right[start : start + _SLAB_BYTES]
        wrong = read != wanted
        if open_run:
            begin, last, goes_on = first_run(wrong, already_in_one=first >= 0)
            if last > begin:
                first = start + begin if first < 0 else first
                end = start + last
            open_run = first < 0 or goes_on
        counts += _counts(read, wanted, wrong, None if earlier is None else earlier[start : start + _SLAB_BYTES])
    total, zeros, poison, stale, flips = counts.tolist()
    length, shown = end - first, slice(first, min(end, first + _SHOWN_BYTES))
    return Damage(
        nbytes=right.numel(),
        wrong=total,
        first_offset=first,
        length=length,
        alignment=next(size for size in ALIGNMENTS if (first or length) % size == 0),
        zeros=zeros,
        poison=poison,
        stale=stale,
        flips=flips,
        found=bytes(found[shown].tolist()).hex(),
        right=bytes(right[shown].tolist()).hex(),
    )


def _counts(read: Tensor, wanted: Tensor, wrong: Tensor, earlier: Tensor | None) -> Tensor:
    """int64[5]: wrong bytes, and of these zeros, poison, stale, one bit flipped."""
    stale = torch.zeros((), dtype=torch.int64)
    if earlier is not None:
        size = min(earlier.numel(), read.numel())
        stale = (wrong[:size] & (read[:size] == earlier[:size])).sum()
    difference = read ^ wanted
    one_bit = wrong & ((difference & (difference - 1)) == 0)
    zeros, poison = wrong & (read == 0), wrong & (read == POISON)
    return torch.stack([wrong.sum(), zeros.sum(), poison.sum(), stale, one_bit.sum()])
