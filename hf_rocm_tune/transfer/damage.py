"""How bytes that were read differ from what they should be; and what checks send to find that out.

Checks (the doctor's, the preflight's) put torch's own copies to the test, not verified and not staged by us; faults can
be put into these, too (`FaultyCopies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_rocm_tune.transfer.raw_bytes import as_bytes, typed_view

POISON = 0xA5
"""Byte with which memory is filled before bytes are sent again: what is still there never arrived."""
ALIGNMENTS = (20 << 20, 2 << 20, 64 << 10, 4 << 10, 256, 64, 4, 1)

_SLAB_BYTES = 4 << 20
_SHOWN_BYTES = 16
_JOINED_GAP = 64


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Bytes that are wrong.

    Attributes:
        nbytes: bytes that were compared.
        wrong: how many of them are wrong.
        first_offset: of the first of them, in bytes.
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
        """``zeros``, ``poison``, ``stale`` or ``bit_flip`` where all wrong bytes are that; ``mixed``, ``other``;
        ``late`` where none is wrong any more."""
        if not self.wrong:
            return "late"
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
    """int64[5]: wrong bytes, and of these zeros, poison, stale, one bit flipped."""
    stale = torch.zeros((), dtype=torch.int64)
    if earlier is not None:
        size = min(earlier.numel(), read.numel())
        stale = (wrong[:size] & (read[:size] == earlier[:size])).sum()
    difference = read ^ wanted
    one_bit = wrong & ((difference & (difference - 1)) == 0)
    zeros, poison = wrong & (read == 0), wrong & (read == POISON)
    return torch.stack([wrong.sum(), zeros.sum(), poison.sum(), stale, one_bit.sum()])


def _first_run(wrong: Tensor, *, already_in_one: bool) -> tuple[int, int, bool]:
    """(begin, end, may go on behind it) of the first run in a bool mask; it begins at 0 when already in one."""
    places = wrong.nonzero().flatten()
    if not places.numel() or (already_in_one and int(places[0]) > _JOINED_GAP):
        return 0, 0, False
    breaks = (places.diff() > _JOINED_GAP).nonzero().flatten()
    end = int(places[breaks[0]] if breaks.numel() else places[-1]) + 1
    return 0 if already_in_one else int(places[0]), end, not breaks.numel() and wrong.numel() - end <= _JOINED_GAP


# ---- bytes of which each tells where it belongs -------------------------------------------------------------
#
# A constant, or random bytes without a key, would not show that something came from the wrong place.

PIECE_WORDS = 1 << 20
"""Words that are worth making or comparing at a time: temporaries stay at a few tens of MiB."""


def pattern(number: int, start: int, count: int, device: torch.device) -> Tensor:
    """Words of one of many patterns.

    A bijective mixing of position and number (multiply, shift, multiply), without the top two bits, and odd: never
    zero, and never NaN when read as float32.

    Args:
        number: of the pattern; two of them have hardly a word in common at the same place.
        start: position of the first word.
        count: how many.
        device: where they are computed; no copy is involved.

    Returns:
        int32[count].
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = ((index + 1) * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 13)) & 0x3FFFFFFF | 1).to(torch.int32)


def fill_with_pattern(buffer: Tensor, number: int, *, keep: int = 0xFF) -> Tensor:
    """Write a pattern from its beginning over the bytes of a tensor, on its own device.

    Args:
        buffer: uint8[n] and contiguous, of any n.
        keep: bits of each byte that are kept, the others are 0: 1 for bytes that shall be bool.

    Returns:
        `buffer`.
    """
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        piece[:] = _bytes(number, start, piece, keep)
    return buffer


def count_wrong(buffer: Tensor, number: int, *, keep: int = 0xFF) -> int:
    """Bytes of a tensor that are not those of a pattern from its beginning on, counted on its own device.

    Args:
        buffer: as in `fill_with_pattern`, as `keep`.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        wrong += (piece != _bytes(number, start, piece, keep)).sum()
    return int(wrong)


def _bytes(number: int, start: int, piece: Tensor, keep: int) -> Tensor:
    """What should stand in a piece that begins at byte `start`, a multiple of 4."""
    right = pattern(number, start // 4, -(-piece.numel() // 4), piece.device).view(torch.uint8)[: piece.numel()]
    return right if keep == 0xFF else right & keep


# ---- torch's own copies, and faulty ones --------------------------------------------------------------------

FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable")
"""What can be done to a copy: its destination zeroed wholly or from a 4 KiB boundary on, one bit flipped, the bytes of
the copy before it, no copy at all, or other wrong bytes each time."""

_RANGE_BYTES = 4096


class Copies(Protocol):
    """What copies."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """Copy as ``destination.copy_(source)`` does.

        Args:
            destination: written to.
            source: of the same shape; any device, any dtype, any strides.
            what: the case that this copy belongs to, in words.
            non_blocking: as torch's.
        """


class RawCopies:
    """As they are."""

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """See `Copies`."""
        destination.copy_(source, non_blocking=non_blocking)


class FaultyCopies:
    """Copies that go wrong on purpose.

    Args:
        kind: one of `FAULTS`.
        where: only copies whose case has this text in its words.
    """

    def __init__(self, kind: str, where: str = "") -> None:
        assert kind in FAULTS, kind
        self._kind, self._where = kind, where
        self._earlier: Tensor | None = None
        self._count = 0

    def copy(self, destination: Tensor, source: Tensor, *, what: str, non_blocking: bool = False) -> None:
        """See `Copies`."""
        hit = self._where in what and destination.numel() > 0
        if not (hit and self._kind == "drop"):
            destination.copy_(source, non_blocking=non_blocking)
        if not hit or self._kind == "drop":
            return
        wait_for(destination)  # what is written here comes after the copy, whatever stream that used
        data = as_bytes(destination.contiguous()).cpu().clone()
        harmed = self._harmed(data)
        destination.copy_(typed_view(harmed, 0, destination.dtype, destination.shape))
        wait_for(destination)

    def _harmed(self, data: Tensor) -> Tensor:
        """The bytes that shall be there instead."""
        harmed, third = data.clone(), data.numel() // 3
        self._count += 1
        if self._kind == "zeros":
            harmed.zero_()
        elif self._kind == "zero_range":
            harmed[data.numel() // 2 // _RANGE_BYTES * _RANGE_BYTES :] = 0
        elif self._kind == "flip":
            harmed[third] ^= 4
        elif self._kind == "unstable":
            harmed[third:] ^= 1 + self._count % 255
        elif self._earlier is not None:
            size = min(self._earlier.numel(), data.numel())
            harmed[:size] = self._earlier[:size]
        self._earlier = data
        return harmed


def copies_for(request: Mapping[str, Any]) -> Copies:
    """The copies that a request to a check asks for: faulty ones where its ``fault`` is one of ours."""
    fault = request.get("fault") or {}
    kind = fault.get("kind")
    return FaultyCopies(kind, fault.get("where", "")) if kind in FAULTS else RawCopies()


def wait_for(*tensors: Tensor) -> None:
    """Wait until all that was queued on the devices of these tensors has ended."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
