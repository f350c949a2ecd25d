"""What happens when a verdict is bad: look, then send again in ever plainer ways."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, SourceChangedError
from hf_rocm_tune.transfer.backend import Backend
from hf_rocm_tune.transfer.copies import DIRECT, Parcel, Route, Sender, Shipment, TransferSettings
from hf_rocm_tune.transfer.damage import ALIGNMENTS, POISON, Damage, examine
from hf_rocm_tune.transfer.digest import digest
from hf_rocm_tune.transfer.raw_bytes import gather, ordinary
from hf_rocm_tune.transfer.report import TransferReport

RUNGS = (
    Route("same_copy"),
    Route("fresh_slot", staging="fresh"),
    Route("synchronous", blocking=True),
    Route("pageable", staging="pageable", blocking=True),
    Route("small_chunks", staging="pageable", blocking=True, chunk_bytes=64 << 10),
)
"""In order; each is verified like the first copy, into memory that was poisoned before."""

Findings = list[tuple[Parcel, Damage]]

_REMEMBERED_BYTES = 64 << 10
_LATE = Damage(
    nbytes=0, wrong=0, first_offset=0, length=0, alignment=ALIGNMENTS[0],
    zeros=0, poison=0, stale=0, flips=0, found="", right="",
)  # fmt: skip


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
    Cause(("stale", "late", "mixed", "other"), "memory used on another stream without a wait", "ComfyUI#10501"),
    Cause(("mixed", "other"), "kernel and driver mix that is not supported", "ROCm/ROCm#6123"),
    Cause(
        ("bit_flip", "other"),
        "marginal hardware: overclocking, undervolting, riser; GDDR6 has no ECC",
        "rocm-libraries#12344",
    ),
)
"""Of host-to-device transfers: what is found at the destination, and what has been seen to cause it."""


def likely_causes(damage: Damage, device_type: str) -> list[str]:
    """Causes that fit, the source in brackets. A plain-CPU run has none of an accelerator's."""
    if device_type == "cpu":
        return ["marginal hardware (rocm-libraries#12344)"]
    return [
        f"{row.text} ({row.source})"
        for row in CAUSES
        if damage.kind in row.kinds and (not damage.first_offset or damage.alignment >= row.least_alignment)
    ]


class Ladder:
    """Recovers shipments in place, and keeps the way of sending that helped.

    Attributes:
        route: how transfers are sent at first.
        step: number of the training step, for incidents.
    """

    def __init__(self, backend: Backend, sender: Sender, settings: TransferSettings, report: TransferReport) -> None:
        self.route = DIRECT
        self.step: int | None = None
        self._recent: deque[Tensor] = deque(maxlen=32)
        self._backend, self._sender, self._settings, self._report = backend, sender, settings, report
        self._helped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def recover(self, shipment: Shipment, buffer: Tensor) -> None:
        """Make the device memory right after a bad verdict; `buffer` is uint8[shipment.nbytes].

        Raises:
            SourceChangedError: the source no longer has the bytes that were digested.
            CorruptionError: no rung helped, or the settings say to stop.
        """
        findings = self._differences(shipment, buffer)
        self._report.add(shipment.stage, mismatches=len(findings))
        self._check_sources(shipment)
        if self._settings.on_corruption == "stop":
            self._fail(shipment, findings, "first_copy", "stopped", "--on_corruption stop was asked for")
        for attempt, route in enumerate(RUNGS, start=1):
            self._backend.fill(buffer, POISON)
            self._sender.send(shipment, buffer, route, attempt=attempt)
            if shipment.matches(self._backend.digest(buffer).result()):
                self._recovered(shipment, findings, route)
                return
        last = self._differences(shipment, buffer)
        self._fail(shipment, last, RUNGS[-1].name, "failed", "five ways of sending it again did not help")

    def _check_sources(self, shipment: Shipment) -> None:
        for parcel in shipment.parcels:
            if digest(parcel.source, word_offset=parcel.offset // 4) != parcel.digest:
                row = {"kind": "source_changed", "outcome": "stopped", **self._where(shipment, parcel)}
                self._report.incident(row)
                raise SourceChangedError(
                    f"the host source of {shipment.stage} tensor '{parcel.name}' changed while it was being sent, so "
                    "this is not a transfer fault: look for code that writes to a batch after the collator returned "
                    "it, for a model file that is being rewritten, or for faulty host memory"
                )

    def _recovered(self, shipment: Shipment, findings: Findings, route: Route) -> None:
        for parcel, difference in findings:
            self._report.incident(self._row(shipment, parcel, difference, route.name, "recovered"))
        self._report.add(shipment.stage, recovered=len(findings))
        with self._lock:
            self._helped[route.name] += 1
            if self._helped[route.name] >= self._settings.keep_route_after and route.name != RUNGS[0].name:
                self.route = route

    def _fail(self, shipment: Shipment, findings: Findings, rung: str, outcome: str, why: str) -> None:
        for parcel, difference in findings:
            self._report.incident(self._row(shipment, parcel, difference, rung, outcome))
        parcel, difference = findings[0]
        causes = likely_causes(difference, self._backend.device.type)
        more = f" (and {len(findings) - 1} more tensors)" if len(findings) > 1 else ""
        raise CorruptionError(
            f"{shipment.stage} tensor '{parcel.name}'{more} arrived wrong on {self._backend.device}: {difference.kind} "
            f"from byte {difference.first_offset} for {difference.length} bytes of {parcel.nbytes}, and {why}. "
            f"Seen with: {'; '.join(causes)}. Nothing of it was used; run the doctor"
        )

    def _row(self, shipment: Shipment, parcel: Parcel, found: Damage, rung: str, outcome: str) -> dict[str, Any]:
        return {
            **self._where(shipment, parcel),
            "kind": found.kind,
            "first_offset": found.first_offset,
            "length": found.length,
            "alignment": found.alignment,
            "found": found.found,
            "causes": likely_causes(found, self._backend.device.type),
            "rung": rung,
            "outcome": outcome,
        }

    def _where(self, shipment: Shipment, parcel: Parcel) -> dict[str, Any]:
        place: dict[str, Any] = {"step": self.step, "stage": shipment.stage, "tensor": parcel.name}
        return {**place, "source": parcel.file} if parcel.file else place

    # ---- looking --------------------------------------------------------------------------------------------

    def remember(self, shipment: Shipment) -> None:
        """Keep up to 64 KiB of each tensor of a shipment that arrived right, to tell stale bytes from others."""
        source = shipment.source
        if shipment.nbytes <= _REMEMBERED_BYTES and source is not shipment.parcels[0].source:
            heads = [source[each.offset : each.offset + each.nbytes] for each in shipment.parcels]  # a pack of ours
        else:
            heads = [_head(parcel) for parcel in shipment.parcels if parcel.nbytes]
        with self._lock:
            self._recent.extend(heads)

    def _differences(self, shipment: Shipment, buffer: Tensor) -> Findings:
        """The tensors that are wrong in device memory. Never empty: if all is right now, it arrived late."""
        wrong = []
        for parcel in shipment.parcels:
            place = buffer[parcel.offset : parcel.offset + parcel.nbytes]
            if parcel.nbytes and self._backend.digest(place, parcel.offset // 4).result() != parcel.digest:
                wrong.append((parcel, self._difference(shipment, parcel, place)))
        return wrong or [(shipment.parcels[0], _LATE)]

    def _difference(self, shipment: Shipment, parcel: Parcel, place: Tensor) -> Damage:
        found = self._backend.read_back(place)
        expected = torch.empty_like(found)
        gather(parcel.source, 0, parcel.nbytes, expected)
        damage = examine(found, expected) or _LATE
        with self._lock:
            recent = list(self._recent)
        first = damage.first_offset
        for head in chain(recent, (_head(other) for other in shipment.parcels if other is not parcel)):
            earlier = head[first : first + damage.length]
            if earlier.numel() >= 8 and torch.equal(earlier, found[first : first + earlier.numel()]):
                return replace(damage, stale=damage.wrong)
        return damage


def _head(parcel: Parcel) -> Tensor:
    end = min(parcel.nbytes, _REMEMBERED_BYTES)
    with ordinary():
        head = torch.empty(end, dtype=torch.uint8)
    gather(parcel.source, 0, end, head)
    return head
