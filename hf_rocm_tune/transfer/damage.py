"""How wrong bytes differ from the right ones (`examine`), and the test patterns and copies of checks.

The doctor and the preflight test torch's own copies, neither verified nor staged by the mover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

POISON = 0xA5
"""The byte with which memory is filled before data is sent again: where it remains, nothing arrived."""
ALIGNMENTS = (20 << 20, 2 << 20, 64 << 10, 4 << 10, 256, 64, 4, 1)

_SLAB_BYTES = 4 << 20
_SHOWN_BYTES = 16
_GRAIN_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A description of wrong bytes. A wrong byte may count as zero, poison, stale and a flip at once."""

    nbytes: int = 0  # that were compared
    wrong: int = 0  # of these
    first_offset: int = 0  # of the first wrong byte
    length: int = 0  # of the first wrong run: to the first 64 bytes, aligned, that are all right
    alignment: int = ALIGNMENTS[0]  # the largest that divides the offset; for offset 0, that divides the length
    zeros: int = 0  # wrong bytes that are 0
    poison: int = 0  # ... that equal the destination's earlier fill
    stale: int = 0  # ... that equal an earlier transfer
    flips: int = 0  # ... that differ in one bit
    found: str = ""  # the first wrong bytes, in hexadecimal
    right: str = ""  # the bytes that should be there

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
        keys = ("kind", "first_offset", "length", "alignment", "found")
        return {key: getattr(self, key) for key in keys}


def examine(arrived: Tensor, right: Tensor, *, earlier: Tensor | None = None) -> Damage | None:
    """Compare bytes; None if they are equal. ``earlier``: what was sent before, to tell stale bytes."""
    assert arrived.numel() == right.numel(), "both sides have the same size"
    if torch.equal(arrived, right):
        return None
    counts = torch.zeros(5, dtype=torch.int64)
    grains = []
    for start in range(0, right.numel(), _SLAB_BYTES):
        part = slice(start, start + _SLAB_BYTES)
        difference = arrived[part] ^ right[part]
        wrong = difference != 0
        grains.append(functional.pad(wrong, (0, -wrong.numel() % _GRAIN_BYTES)).view(-1, _GRAIN_BYTES).any(1))
        stale = torch.zeros_like(wrong)
        if earlier is not None:
            old = earlier[part]
            stale[: old.numel()] = arrived[part][: old.numel()] == old[: wrong.numel()]
        one_bit = difference & (difference - 1) == 0
        kinds = (arrived[part] == 0, arrived[part] == POISON, stale, one_bit)
        counts += torch.stack([wrong.sum(), *((wrong & kind).sum() for kind in kinds)])
    total, zeros, poison, stale_bytes, flips = counts.tolist()
    bad = torch.cat(grains)
    begin = int(bad.int().argmax())
    end = begin + int(torch.cat([bad[begin:], bad.new_zeros(1)]).int().argmin())
    run = slice(begin * _GRAIN_BYTES, end * _GRAIN_BYTES)
    offsets = (arrived[run] != right[run]).nonzero()
    first = run.start + int(offsets[0])
    length = int(offsets[-1] - offsets[0]) + 1
    shown = slice(first, first + min(length, _SHOWN_BYTES))
    return Damage(
        nbytes=right.numel(),
        wrong=total,
        first_offset=first,
        length=length,
        alignment=next(size for size in ALIGNMENTS if (first or length) % size == 0),
        zeros=zeros,
        poison=poison,
        stale=stale_bytes,
        flips=flips,
        found=bytes(arrived[shown].tolist()).hex(),
        right=bytes(right[shown].tolist()).hex(),
    )


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
    """Overwrite the bytes of a tensor with a pattern, of which ``keep`` masks each byte, on its own device."""
    for piece, right in _pieces(buffer, number, keep):
        piece[:] = right
    return buffer


def count_wrong(buffer: Tensor, number: int, *, keep: int = 0xFF) -> int:
    """The number of bytes that differ from a pattern, counted on the tensor's device; see `fill_with_pattern`."""
    wrong = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for piece, right in _pieces(buffer, number, keep):
        wrong += (piece != right).sum()
    return int(wrong)


def _pieces(buffer: Tensor, number: int, keep: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        right = pattern(number, start // 4, -(-piece.numel() // 4), piece.device).view(torch.uint8)[: piece.numel()]
        yield piece, right if keep == 0xFF else right & keep


# ---- torch's own copies -------------------------------------------------------------------------------------


class Copies:
    """torch's copies: what a check of them calls, and where tests put faults in."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """Call ``destination.copy_(source, non_blocking=non_blocking)``; ``what`` describes the test case."""
        destination.copy_(source, non_blocking=non_blocking)


def wait_for(*tensors: Tensor) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
