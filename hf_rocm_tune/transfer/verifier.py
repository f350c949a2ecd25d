"""What arrived on the device is verified; after a mismatch the damage is examined, and the transfer is sent again."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, SourceChangedError
from hf_rocm_tune.transfer.backend import Backend, Queued
from hf_rocm_tune.transfer.damage import POISON, Damage, examine
from hf_rocm_tune.transfer.raw_bytes import as_bytes
from hf_rocm_tune.transfer.report import own_origin
from hf_rocm_tune.transfer.retry import FIRST_COPY, TO_DEVICE, Retried, Route, copy_again
from hf_rocm_tune.transfer.staging import Session
from hf_rocm_tune.transfer.to_device import Segment, Sender, Transfer

Findings = list[tuple[Segment, Damage]]

_KEPT_AFTER = 3  # recoveries by the same route after which it is used from the start
_REMEMBERED_BYTES = 64 << 10
_LATE = Damage()
# Causes of wrong host-to-device transfers, by the kinds of damage for which each has been reported, the least alignment
# of its offset, the cause and its public source.
CAUSES = (
    (("zeros",), 4 << 10,
     "virtual-memory mapping (expandable_segments or a stream-ordered allocator): whole segments read as zeros",
     "ROCm/ROCm#6603, rocm-systems#10943"),
    (("zeros", "poison", "late"), 1, "fresh mapping visible late, stores lost", "rocm-systems#11693"),
    (("zeros",), 1, "page-locked memory allocated and freed by many processes at once", "rocm-systems#5815"),
    (("stale",), 1, "staging memory rewritten before its copy had ended", "pytorch/tutorials#3261"),
    (("stale", "late", "mixed", "other"), 1, "memory used on another stream without a wait", "ComfyUI#10501"),
    (("mixed", "other"), 1, "kernel and driver mix that is not supported", "ROCm/ROCm#6123"),
    (("bit_flip", "other"), 1, "marginal hardware: overclocking, undervolting, riser; GDDR6 has no ECC",
     "rocm-libraries#12344"),
)  # fmt: skip


def likely_causes(damage: Damage, device_type: str) -> list[str]:
    """Causes that fit, with their sources in brackets. A CPU run has none of an accelerator's."""
    if device_type == "cpu":
        return ["marginal hardware (rocm-libraries#12344)"]
    causes = []
    for kinds, alignment, text, source in CAUSES:
        is_aligned = not damage.first_offset or damage.alignment >= alignment
        if damage.kind in kinds and is_aligned:
            causes.append(f"{text} ({source})")
    return causes


class Verifier:
    """Verifies transfers in device memory and recovers them there.

    Attributes:
        route: the way of first attempts: `FIRST_COPY`, or a retry's that has helped three times.
    """

    def __init__(self, backend: Backend, sender: Sender, session: Session) -> None:
        self.route = FIRST_COPY
        self._recent: deque[Tensor] = deque(maxlen=32)  # up to 64 KiB of each tensor sent, to recognise stale bytes
        self._backend = backend
        self._sender = sender
        self._session = session
        self._report = session.report
        self._helped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def finish(self, transfer: Transfer, buffer: Tensor, arrived: Queued | None = None) -> None:
        """Verify device memory, recover it if needed, let the caller's compute stream wait for it, and count it.

        ``arrived``: its digest; without one, that which was queued behind the copy, or one that is taken now. What
        changes while a batch waits is found by the sentinels, after its use.
        """
        begun = time.perf_counter()
        if transfer.verify and transfer.nbytes:
            arrived = arrived or transfer.arrived or self._backend.digest_beside(buffer)
            if not transfer.matches(arrived.result()):
                self._recover(transfer, buffer)
            if transfer.source is not None:  # else its sources are kept
                heads = [_head(segment) for segment in transfer.segments]
                with self._lock:
                    self._recent.extend(heads)
        if transfer.ticket is not None:
            self._backend.hand_out(buffer, transfer.ticket)
        transfer.is_done = True
        nbytes = sum(segment.nbytes for segment in transfer.segments)
        origin = transfer.origin or own_origin(transfer.stage)
        self._report.crossed("to_device", origin, nbytes, verified=transfer.verify)
        self._report.add(
            transfer.stage,
            tensors=len(transfer.segments),
            bytes=nbytes,
            verified_bytes=nbytes if transfer.verify else 0,
            transfer_seconds=transfer.transfer_seconds,
            verify_seconds=transfer.verify_seconds + time.perf_counter() - begun,
        )

    def _recover(self, transfer: Transfer, buffer: Tensor) -> None:
        """Correct the device memory after a mismatch; `buffer` is uint8[transfer.nbytes]."""
        self._check_sources(transfer)
        findings = self._differences(transfer, buffer)
        self._report.add(transfer.stage, mismatches=len(findings))

        def send_again(attempt: int, route: Route) -> bool:
            self._backend.fill(buffer, POISON)
            self._sender.send(transfer, buffer, route, attempt=attempt)
            return transfer.matches(self._backend.digest(buffer).result())

        ended = copy_again(TO_DEVICE, send_again, on_corruption=self._session.settings.on_corruption)
        if ended.outcome == "recovered":
            self._recovered(transfer, findings, ended)
        else:
            last = findings if ended.outcome == "stopped" else self._differences(transfer, buffer)
            self._fail(transfer, last, ended)

    def _check_sources(self, transfer: Transfer) -> None:
        for segment in transfer.segments:
            if segment.is_right(segment.source):
                continue
            again = segment.read_again() if segment.read_again is not None else None
            reread = again is not None and segment.is_right(again)
            outcome = "recovered" if reread else "stopped"
            self._report.incident({"kind": "source_changed", "outcome": outcome, **self._where(transfer, segment)})
            if reread and again is not None:
                segment.source = again
            else:
                self._report.add(transfer.stage, mismatches=1)
                raise SourceChangedError(
                    f"the host source of {transfer.stage} tensor '{segment.name}' changed while it was being sent, so "
                    "this is not a transfer fault. Likely causes: code that modifies a batch after collation, a model "
                    "file that is being rewritten, or faulty host memory"
                )

    def _recovered(self, transfer: Transfer, findings: Findings, ended: Retried) -> None:
        self._report_incidents(transfer, findings, ended)
        self._report.add(transfer.stage, recovered=len(findings))
        with self._lock:
            self._helped[ended.route.name] += 1
            if self._helped[ended.route.name] >= _KEPT_AFTER and ended.route != TO_DEVICE[0]:
                self.route = ended.route

    def _fail(self, transfer: Transfer, findings: Findings, ended: Retried) -> NoReturn:
        self._report_incidents(transfer, findings, ended)
        segment, difference = findings[0]
        causes = likely_causes(difference, self._backend.device.type)
        more = f" (and {len(findings) - 1} more tensors)" if len(findings) > 1 else ""
        raise CorruptionError(
            f"{transfer.stage} tensor '{segment.name}'{more} arrived wrong on {self._backend.device}: "
            f"{difference.kind} from byte {difference.first_offset} for {difference.length} bytes of "
            f"{segment.nbytes}, and {ended.why}. Seen with: {'; '.join(causes)}. It was not used; run the doctor"
        )

    def _report_incidents(self, transfer: Transfer, findings: Findings, ended: Retried) -> None:
        for segment, damage in findings:
            self._report.incident(
                {
                    **self._where(transfer, segment),
                    **damage.for_report(),
                    "causes": likely_causes(damage, self._backend.device.type),
                    "retry": ended.route.name,
                    "outcome": ended.outcome,
                }
            )

    def _where(self, transfer: Transfer, segment: Segment) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self._session.step, "stage": transfer.stage, "tensor": segment.name}
        return {**row, "source": segment.file} if segment.file else row

    # ---- examining ------------------------------------------------------------------------------------------

    def _differences(self, transfer: Transfer, buffer: Tensor) -> Findings:
        """The tensors that are wrong in device memory. Never empty: if all are right now, the bytes arrived late."""
        wrong = []
        for segment in transfer.segments:
            here = buffer[segment.offset : segment.end]
            if segment.nbytes and self._backend.digest(here, segment.offset // 4).result() != segment.digest:
                wrong.append((segment, self._difference(transfer, segment, here)))
        return wrong or [(transfer.segments[0], _LATE)]

    def _difference(self, transfer: Transfer, segment: Segment, here: Tensor) -> Damage:
        arrived = self._backend.read_back(here)
        damage = examine(arrived, as_bytes(segment.source)) or _LATE
        with self._lock:
            recent = list(self._recent)
        first = damage.first_offset
        for head in chain(recent, (_head(other) for other in transfer.segments if other is not segment)):
            earlier = head[first : first + damage.length]
            if earlier.numel() >= 8 and torch.equal(earlier, arrived[first : first + earlier.numel()]):
                return replace(damage, stale=damage.wrong)
        return damage


def _head(segment: Segment) -> Tensor:
    return as_bytes(segment.source)[:_REMEMBERED_BYTES].clone()
