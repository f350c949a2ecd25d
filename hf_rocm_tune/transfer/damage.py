"""How bytes that were read differ from what they should be: where, how much, and what is there instead.

Bytes are compared as integers, all of them. `Diagnosis` describes the shipments of a run in the same terms.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer.backend import Backend
from hf_rocm_tune.transfer.raw_bytes import gather
from hf_rocm_tune.transfer.shipment import Parcel, Shipment

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


# ----------------------------------------------------------------------------------------------------
# Where and how received bytes differ from what was sent, and what is known to cause that.

POISON = 0xA5
"""Byte with which memory is filled before bytes are sent again: what is still there never arrived."""
ALIGNMENTS = (20 << 20, 2 << 20, 64 << 10, 4 << 10, 256, 64, 4, 1)

_READ_BYTES = 4 << 20
_JOINED_GAP = 64
_REMEMBERED_BYTES = 64 << 10


@dataclass(frozen=True)
class Difference:
    """The first run of wrong bytes in a tensor.

    Attributes:
        first_offset: byte offset in the tensor.
        length: bytes of the run; right bytes between wrong ones count when fewer than 64 stand together.
        alignment: the largest of 20 MiB, 2 MiB, 64 KiB, 4 KiB, 256, 64, 4, 1 bytes that divides the offset.
        kind: what is there instead: ``zeros``, ``poison``, ``stale`` (an earlier transfer's bytes), ``bit_flip``,
            ``other``; ``late`` when the bytes were right when read again.
        found: the first bytes found there, in hexadecimal.
    """

    first_offset: int
    length: int
    alignment: int
    kind: str
    found: str


LATE = Difference(0, 0, ALIGNMENTS[0], "late", "")


@dataclass(frozen=True)
class Cause:
    """A likely cause with its public source."""

    kinds: tuple[str, ...]
    text: str
    source: str
    least_alignment: int = 1


CAUSES = (
    Cause(
        ("zeros",),
        "virtual-memory mapping (expandable_segments or a stream-ordered allocator): whole segments read as zeros",
        "ROCm/ROCm#6603, rocm-systems#10943",
        least_alignment=4 << 10,
    ),
    Cause(("zeros", "poison", "late"), "fresh mapping visible late, stores lost", "rocm-systems#11693"),
    Cause(("zeros",), "page-locked memory allocated and freed by many processes at once", "rocm-systems#5815"),
    Cause(("stale",), "staging memory rewritten before its copy had ended", "pytorch/tutorials#3261"),
    Cause(("stale", "late", "other"), "memory used on another stream without a wait", "ComfyUI#10501"),
    Cause(("other",), "kernel and driver mix that is not supported", "ROCm/ROCm#6123"),
    Cause(
        ("bit_flip", "other"),
        "marginal hardware: overclocking, undervolting, riser; GDDR6 has no ECC",
        "rocm-libraries#12344",
    ),
)
"""Of host-to-device transfers: what is found at the destination, and what has been seen to cause it."""

HOST_CAUSES = (
    Cause(("bit_flip", "other", "zeros", "poison", "stale", "late"), "marginal hardware", "rocm-libraries#12344"),
)


def likely_causes(difference: Difference, device_type: str) -> list[str]:
    """Causes that fit, the source in brackets. A plain-CPU run has none of an accelerator's."""
    rows = HOST_CAUSES if device_type == "cpu" else CAUSES
    return [
        f"{row.text} ({row.source})"
        for row in rows
        if difference.kind in row.kinds and difference.alignment >= row.least_alignment
    ]


class Examiner:
    """Looks at what arrived. Remembers the beginnings of recent transfers, to tell stale bytes from others."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._recent: deque[Tensor] = deque(maxlen=32)
        self._lock = threading.Lock()  # other threads send and remember while one looks at what went wrong

    def remember(self, shipment: Shipment) -> None:
        """Keep up to 64 KiB of each tensor of a shipment that arrived right."""
        heads = [_head(parcel) for parcel in shipment.parcels if parcel.nbytes]
        with self._lock:
            self._recent.extend(heads)

    def differences(self, shipment: Shipment, buffer: Tensor) -> list[tuple[Parcel, Difference]]:
        """The tensors that are wrong in device memory. Never empty: if all is right now, it arrived late."""
        wrong = []
        for parcel in shipment.parcels:
            place = buffer[parcel.offset : parcel.offset + parcel.nbytes]
            if not parcel.nbytes:
                continue
            if self._backend.digest(place, parcel.offset // 4).result() != parcel.digest:
                wrong.append((parcel, self._first_difference(shipment, parcel, place) or LATE))
        return wrong or [(shipment.parcels[0], LATE)]

    def _first_difference(self, shipment: Shipment, parcel: Parcel, place: Tensor) -> Difference | None:
        first, end = -1, -1
        runs: list[tuple[Tensor, Tensor]] = []
        for start in range(0, parcel.nbytes, _READ_BYTES):
            stop = min(start + _READ_BYTES, parcel.nbytes)
            found = self._backend.read_back(place[start:stop])
            expected = torch.empty_like(found)
            gather(parcel.source, start, stop, expected)
            begin, last, goes_on = first_run(found != expected, already_in_one=first >= 0)
            if last > begin:
                first = start + begin if first < 0 else first
                end = start + last
                runs.append((found[begin:last], expected[begin:last]))
            if first >= 0 and not goes_on:
                break
        if first < 0:
            return None
        found = torch.cat([run for run, _ in runs])
        flipped = sum(int(byte).bit_count() for run, right in runs for byte in (run ^ right)[:16].tolist())
        kind = self._kind(shipment, parcel, first, found, flipped)
        alignment = next(size for size in ALIGNMENTS if first % size == 0)
        return Difference(first, end - first, alignment, kind, bytes(found[:16].tolist()).hex())

    def _kind(self, shipment: Shipment, parcel: Parcel, first: int, found: Tensor, flipped: int) -> str:
        if not found.any():
            return "zeros"
        if found.numel() == 1 and flipped == 1:
            return "bit_flip"  # before poison, which a single flipped bit may happen to look like
        if bool((found == POISON).all()):
            return "poison"
        siblings = (_head(other) for other in shipment.parcels if other is not parcel)
        with self._lock:
            recent = list(self._recent)
        for head in itertools.chain(recent, siblings):
            earlier = head[first : first + found.numel()]
            if earlier.numel() >= 8 and torch.equal(earlier, found[: earlier.numel()]):
                return "stale"
        return "other"


def _head(parcel: Parcel) -> Tensor:
    end = min(parcel.nbytes, _REMEMBERED_BYTES)
    with torch.inference_mode(False):
        head = torch.empty(end, dtype=torch.uint8)
    gather(parcel.source, 0, end, head)
    return head


def first_run(wrong: Tensor, *, already_in_one: bool) -> tuple[int, int, bool]:
    """(begin, end, may go on behind it) of the first run in a bool mask; it begins at 0 when already in one."""
    places = wrong.nonzero().flatten()
    if not places.numel() or (already_in_one and int(places[0]) > _JOINED_GAP):
        return 0, 0, False
    breaks = (places.diff() > _JOINED_GAP).nonzero().flatten()
    end = int(places[breaks[0]] if breaks.numel() else places[-1]) + 1
    return 0 if already_in_one else int(places[0]), end, not breaks.numel() and wrong.numel() - end <= _JOINED_GAP


# ----------------------------------------------------------------------------------------------------
# Bytes of which each tells where it belongs: what checks send, and what memory must go on holding.
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
