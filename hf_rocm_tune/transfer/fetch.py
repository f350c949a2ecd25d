"""The way back: device memory brought to the host, verified, as what is averaged there or goes on to another card.

A copy goes into a page-locked slot, in which the host may then work; the device digests its own bytes, and only the
digest travels. What arrives wrong is copied again, then read in the plainest way. What is larger than a slot is read
in the plainest way at once.

Not covered: what happens to the host memory after the verdict, and device memory that changed before `Fetcher.begin`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer.backend import Backend, Label, Part
from hf_rocm_tune.transfer.damage import examine
from hf_rocm_tune.transfer.digest import Digest, digest
from hf_rocm_tune.transfer.faults import FaultyBackend
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, typed_view
from hf_rocm_tune.transfer.report import TransferReport
from hf_rocm_tune.transfer.ring import Ring
from hf_rocm_tune.transfer.settings import TransferSettings

RUNGS = ("first_copy", "same_copy", "pageable")
"""Ways of reading, in order; each is verified."""


@dataclass(frozen=True)
class Errand:
    """What is fetched: its name and stage for incidents and faults, number of the transfer, whether it is verified,
    and the step for incidents."""

    name: str
    stage: str
    number: int
    verify: bool
    step: int | None


class Fetcher:
    """Brings device tensors to the host.

    Args:
        backend: whose device they are on, without injected faults; copies run on its queue.
        faulty: harms what arrives; None for nothing.
        settings: size of the slots, and what happens on a mismatch.
        report: counters to add to.

    Attributes:
        slot_bytes: the most that crosses in one piece, and without waiting.
    """

    def __init__(
        self, backend: Backend, faulty: FaultyBackend | None, settings: TransferSettings, report: TransferReport
    ) -> None:
        self.backend, self.faulty, self.settings, self.report = backend, faulty, settings, report
        self.slot_bytes = settings.slot_bytes or backend.default_slot_bytes
        self.ring = Ring(backend, slot_bytes=self.slot_bytes, slots=settings.slots)

    def begin(self, tensor: Tensor, errand: Errand) -> Fetched:
        """Queue the copy of a tensor of this device. Waits while all slots are taken.

        Args:
            tensor: of any dense dtype; it must not change before `Fetched.settle` has returned.
            errand: see `Errand`.
        """
        return Fetched(self, tensor.detach().contiguous(), errand)

    @contextmanager
    def fetched(self, tensor: Tensor, errand: Errand) -> Iterator[Fetched]:
        """The bytes of a tensor on the host for the length of a block.

        Raises:
            CorruptionError: see `Fetched.settle`.
        """
        found = self.begin(tensor, errand)
        try:
            found.settle()
            yield found
        finally:
            found.release()


class Fetched:
    """A tensor on its way to the host.

    Attributes:
        host: of the tensor's dtype and shape, in staging memory: to be used after `settle` and until `release`. It may
            be written to.
        digest: of the bytes that were fetched, after `settle`; None where they were not verified.
    """

    def __init__(self, fetcher: Fetcher, source: Tensor, errand: Errand) -> None:
        self._fetcher, self._errand = fetcher, errand
        self._source = as_bytes(source)  # kept: the caller may drop its tensor with the copy still queued
        self._slot = ExitStack()
        self.digest: Digest | None = None
        begun = time.perf_counter()
        size, backend = byte_count(source), fetcher.backend
        if size <= fetcher.slot_bytes:
            _, self._memory = self._slot.enter_context(fetcher.ring.slot(size))
        else:
            with torch.inference_mode(False):
                self._memory = torch.empty(size, dtype=torch.uint8)
        self.host = typed_view(self._memory, 0, source.dtype, source.shape)
        part = Part(errand.name, 0, size, 0, size)
        self._label = Label(errand.stage, errand.number, 0, (part,))
        backend.follow(self._source)
        self._expected = backend.digest(self._source) if errand.verify else None
        self._ticket = backend.copy(self._memory, self._source, self._label, blocking=size > fetcher.slot_bytes)
        self._queueing_seconds = time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for the bytes and prove them.

        Raises:
            CorruptionError: no way of reading them helped, or the settings say to stop. `host` then holds wrong bytes.
        """
        begun = time.perf_counter()
        self._ticket.wait()
        if self._expected is not None:
            self.digest = self._expected.result()
            self._prove(self.digest)
        else:
            self._harm(0)
        size = self._memory.numel()
        self._fetcher.report.add(
            self._errand.stage,
            tensors=1,
            bytes=size,
            verified_bytes=size if self.digest is not None else 0,
            transfer_seconds=self._queueing_seconds,
            verify_seconds=time.perf_counter() - begun,
        )

    def release(self) -> None:
        """Give the staging memory back. Does nothing the second time."""
        self._slot.close()

    def _prove(self, right: Digest) -> None:
        wrong: Tensor | None = None
        for attempt, rung in enumerate(RUNGS):
            if attempt:
                self._read_again(rung)
            self._harm(attempt)
            if digest(self._memory) == right:
                if wrong is not None:
                    self._tell(wrong, rung, "recovered")
                return
            wrong = self._memory.clone() if wrong is None else wrong
            if self._fetcher.settings.on_corruption == "stop":
                self._fail(wrong, rung, "stopped", "--on_corruption stop was asked for")
        assert wrong is not None
        self._fail(wrong, RUNGS[-1], "failed", f"{len(RUNGS)} ways of reading it did not help")

    def _read_again(self, rung: str) -> None:
        if rung == "pageable":
            self._memory.copy_(self._fetcher.backend.read_back(self._source))
        else:
            self._fetcher.backend.copy(self._memory, self._source, self._label, blocking=True)

    def _harm(self, attempt: int) -> None:
        if self._fetcher.faulty is not None:
            label = Label(self._label.stage, self._label.transfer, attempt, self._label.parts)
            self._fetcher.faulty.harm_in_place(self._memory, label)

    def _fail(self, wrong: Tensor, rung: str, outcome: str, why: str) -> None:
        self._tell(wrong, rung, outcome)
        raise CorruptionError(
            f"{self._errand.stage} tensor '{self._errand.name}' came from {self._fetcher.backend.device} to the host "
            f"wrong, and {why}. Nothing of it was used; run the doctor"
        )

    def _tell(self, wrong: Tensor, rung: str, outcome: str) -> None:
        recovered = outcome == "recovered"
        self._fetcher.report.add(self._errand.stage, mismatches=1, recovered=int(recovered))
        row: dict[str, Any] = {"step": self._errand.step, "stage": self._errand.stage, "tensor": self._errand.name}
        # What was right is known for certain only where a later reading had the right digest.
        damage = examine(wrong, self._memory) if recovered else None
        if damage is None:
            row |= {"kind": "unknown", "first_offset": 0, "length": wrong.numel()}
        else:
            row |= {"kind": damage.kind, "first_offset": damage.first_offset, "length": damage.length}
            row |= {"alignment": damage.alignment, "found": damage.found}
        self._fetcher.report.incident({**row, "rung": rung, "outcome": outcome})
