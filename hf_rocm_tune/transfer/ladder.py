"""What happens when a verdict is bad: look, then send again in ever plainer ways."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, SourceChangedError
from hf_rocm_tune.transfer.backend import Backend
from hf_rocm_tune.transfer.damage import POISON, Difference, Examiner, likely_causes
from hf_rocm_tune.transfer.digest import digest
from hf_rocm_tune.transfer.report import TransferReport
from hf_rocm_tune.transfer.settings import TransferSettings
from hf_rocm_tune.transfer.shipment import DIRECT, Parcel, Route, Sender, Shipment

RUNGS = (
    Route("same_copy"),
    Route("fresh_slot", staging="fresh"),
    Route("synchronous", blocking=True),
    Route("pageable", staging="pageable", blocking=True),
    Route("small_chunks", staging="pageable", blocking=True, chunk_bytes=64 << 10),
)
"""In order; each is verified like the first copy, into memory that was poisoned before."""

Findings = list[tuple[Parcel, Difference]]


class Ladder:
    """Recovers shipments in place, and keeps the way of sending that helped.

    Attributes:
        route: how transfers are sent at first.
        step: number of the training step, for incidents.
    """

    def __init__(self, backend: Backend, sender: Sender, settings: TransferSettings, report: TransferReport) -> None:
        self.route = DIRECT
        self.step: int | None = None
        self.examiner = Examiner(backend)
        self._backend, self._sender, self._settings, self._report = backend, sender, settings, report
        self._helped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def recover(self, shipment: Shipment, buffer: Tensor) -> None:
        """Make the device memory right after a bad verdict; `buffer` is uint8[shipment.nbytes].

        Raises:
            SourceChangedError: the source no longer has the bytes that were digested.
            CorruptionError: no rung helped, or the settings say to stop.
        """
        findings = self.examiner.differences(shipment, buffer)
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
        last = self.examiner.differences(shipment, buffer)
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

    def _row(self, shipment: Shipment, parcel: Parcel, found: Difference, rung: str, outcome: str) -> dict[str, Any]:
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
