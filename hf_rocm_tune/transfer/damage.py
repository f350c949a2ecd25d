"""How wrong bytes differ from the right ones (`examine`), and the test patterns and copies of checks.

The doctor and the preflight test torch's own copies, neither verified nor staged by the mover.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POISON = 0xA5
"""The byte with which memory is filled before data is sent again: where it remains, nothing arrived."""
ALIGNMENTS = (20 << 20, 2 << 20, 64 << 10, 4 << 10, 256, 64, 4, 1)

_SLAB_BYTES = 4 << 20
_SHOWN_BYTES = 16
_JOINED_GAP = 64


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A description of wrong bytes. A wrong byte may count as zero, poison, stale and a flip at once."""

    nbytes: int  # that were compared
    wrong: int  # of these
    first_offset: int  # of the first wrong byte
    length: int  # of the first wrong run, which may contain runs of fewer than 64 right bytes
    alignment: int  # the largest of `ALIGNMENTS` that divides the offset; for offset 0, that divides the length
    zeros: int  # wrong bytes that are 0
    poison: int  # ... that equal the destination's earlier fill
    stale: int  # ... that equal an earlier transfer
    flips: int  # ... that differ in one bit
    found: str  # the first wrong bytes, in hexadecimal
    right: str  # the bytes that should be there

    @property
    def kind(self) -> str:
        """``zeros``, ``poison``, ``stale`` or ``bit_flip`` if all wrong bytes are of that kind; ``mixed``; ``other``;
        ``late`` if none is wrong any more."""
        if not self.wrong:
            return "late"
        if self.wrong == self.flips and self.wrong <= 2:
            return "bit_flip"  # first, because a flipped bit can look like one of the others
        for kind in ("zeros", "poison", "stale"):
            if getattr(self, kind) == self.wrong:
                return kind
        return "mixed" if self.zeros + self.poison + self.stale > self.wrong // 2 else "other"

    def for_report(self) -> dict[str, Any]:
        """What an incident says of it."""
        keys = ("kind", "first_offset", "length", "alignment", "found")
        return {key: getattr(self, key) for key in keys}


def examine(found: Tensor, right: Tensor, *, earlier: Tensor | None = None) -> Damage | None:
    """Compare bytes; None if they are equal."""
    assert found.numel() == right.numel(), "both sides have the same size"
    if torch.equal(found, right):
        return None
    counts = torch.zeros(5, dtype=torch.int64)
    first, end, open_run = -1, -1, True
    for start in range(0, right.numel(), _SLAB_BYTES):
        read, wanted = found[start : start + _SLAB_BYTES], right[start : start + _SLAB_BYTES]
        wrong = read != wanted
        if open_run:
            begin, last, goes_on = _first_run(wrong, already_in_one=first >= 0)
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
    """int64[5]: numbers of wrong bytes, and of these zeros, poison, stale, one bit flipped."""
    stale = torch.zeros((), dtype=torch.int64)
    if earlier is not None:
        size = min(earlier.numel(), read.numel())
        stale = (wrong[:size] & (read[:size] == earlier[:size])).sum()
    difference = read ^ wanted
    one_bit = wrong & ((difference & (difference - 1)) == 0)
    zeros, poison = wrong & (read == 0), wrong & (read == POISON)
    return torch.stack([wrong.sum(), zeros.sum(), poison.sum(), stale, one_bit.sum()])


def _first_run(wrong: Tensor, *, already_in_one: bool) -> tuple[int, int, bool]:
    """(begin, end, may continue after the mask) of the first run in a bool mask; begins at 0 if already in a run."""
    positions = wrong.nonzero().flatten()
    if not positions.numel() or (already_in_one and int(positions[0]) > _JOINED_GAP):
        return 0, 0, False
    breaks = (positions.diff() > _JOINED_GAP).nonzero().flatten()
    end = int(positions[breaks[0]] if breaks.numel() else positions[-1]) + 1
    return 0 if already_in_one else int(positions[0]), end, not breaks.numel() and wrong.numel() - end <= _JOINED_GAP


# ---- position-dependent test patterns -----------------------------------------------------------------------
#
# A constant pattern would not show that data came from the wrong place.

PIECE_WORDS = 1 << 20
"""Words that are generated or compared at a time: temporaries stay at a few tens of MiB."""


def pattern(number: int, start: int, count: int, device: torch.device) -> Tensor:
    """Words of a test pattern, int32[count]: a bijective mixing of position and number (multiply, shift, multiply),
    without the top two bits, and odd: never zero, and never NaN when read as float32."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = ((index + 1) * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 13)) & 0x3FFFFFFF | 1).to(torch.int32)


def fill_with_pattern(buffer: Tensor, number: int, *, keep: int = 0xFF) -> Tensor:
    """Overwrite the bytes of a tensor with a pattern from its beginning, on its own device, and return it."""
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        piece[:] = _bytes(number, start, piece, keep)
    return buffer


def count_wrong(buffer: Tensor, number: int, *, keep: int = 0xFF) -> int:
    """The number of bytes that differ from a pattern, counted on the tensor's device; see `fill_with_pattern`."""
    wrong = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        wrong += (piece != _bytes(number, start, piece, keep)).sum()
    return int(wrong)


def _bytes(number: int, start: int, piece: Tensor, keep: int) -> Tensor:
    """The right bytes of a piece that begins at byte `start`, a multiple of 4."""
    right = pattern(number, start // 4, -(-piece.numel() // 4), piece.device).view(torch.uint8)[: piece.numel()]
    return right if keep == 0xFF else right & keep


# ---- torch's own copies -------------------------------------------------------------------------------------


class Copies:
    """torch's copies: what a check of them calls, and where tests put faults in."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """Call ``destination.copy_(source, non_blocking=non_blocking)``; ``what`` describes the test case."""
        destination.copy_(source, non_blocking=non_blocking)


def wait_for(*tensors: Tensor) -> None:
    """Synchronise the devices of these tensors."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
