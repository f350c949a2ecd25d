"""Where and how received bytes differ from what was sent, and what is known to cause that."""

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
