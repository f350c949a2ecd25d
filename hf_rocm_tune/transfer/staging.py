"""What all transfers of a mover share: settings, a session, and staging memory (`Ring`)."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.backend import Backend, Queued
from hf_rocm_tune.transfer.faults import FaultyBackend
from hf_rocm_tune.transfer.raw_bytes import ordinary
from hf_rocm_tune.transfer.report import TransferReport

MODES = {"verify": ("full", "sample", "off"), "on_corruption": ("recover", "stop")}
SAMPLE_EVERY = 16
"""Of ``verify="sample"``: every 16th transfer of a stage."""
SMALLEST_SLOT_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How transfers are verified, and what happens on a mismatch."""

    verify: str = "full"  # every transfer; ``sample``: the first and every 16th of each stage; ``off``: none
    on_corruption: str = "recover"  # send again in other ways; ``stop``: raise at the first mismatch
    slots: int = 4  # of the ring, which takes at most ``slots * slot_bytes`` of host memory
    # A multiple of 256; None: 32 MiB page-locked on an accelerator, up to 8 MiB on the host.
    slot_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, modes in MODES.items():
            given = getattr(self, name)
            if given not in modes:
                raise UsageError(f"{name} is '{given}'; choose one of {', '.join(modes)}")
        if self.slots < 1:
            raise UsageError(f"slots is {self.slots}; give a whole number of at least 1")
        if self.slot_bytes is not None and (self.slot_bytes < 4096 or self.slot_bytes % 256):
            raise UsageError(f"slot_bytes is {self.slot_bytes}; give a multiple of 256, at least 4096")


class Session:
    """What all transfers of a mover share; ``step``: of training, for incidents."""

    def __init__(self, settings: TransferSettings, report: TransferReport, faulty: FaultyBackend | None) -> None:
        self.settings = settings
        self.report = report
        self.faulty = faulty
        self.step: int | None = None
        self.sent: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def number(self, stage: str) -> tuple[int, bool]:
        """The number of a new transfer, and whether it is verified."""
        with self._lock:
            number = next(self._numbers)
            earlier = self.sent[stage]
            self.sent[stage] += 1
        sampled = self.settings.verify == "sample" and earlier % SAMPLE_EVERY == 0
        return number, self.settings.verify == "full" or sampled


@dataclass(eq=False)
class Slot:
    buffer: Tensor | None = None
    ticket: Queued | None = None  # of the last copy that uses it


class Ring:
    """At most `slots` slots of at most `slot_bytes` each, allocated once, shared by all threads.

    A slot is rewritten only after the last copy from it has ended. Callers hold a slot only while they fill it and
    queue its copy, so a dropped batch, or an exception while packing, cannot exhaust the ring.
    """

    def __init__(self, backend: Backend, *, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._backend = backend
        self._room = slots
        self._free: deque[Slot] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def slot(self, nbytes: int) -> Iterator[tuple[Slot, Tensor]]:
        """Yield a free slot and `nbytes` of its memory; set ``slot.ticket`` to the copy that reads them.

        Waits for a slot, and for the end of its last copy.
        """
        assert nbytes <= self.slot_bytes, "callers split larger transfers into chunks"
        slot = self._take()
        try:
            if slot.ticket is not None:
                slot.ticket.join()
                slot.ticket = None
            if slot.buffer is None or slot.buffer.numel() < nbytes:
                grown = max(SMALLEST_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
                wanted = min(self.slot_bytes, grown) if self._backend.staging_grows else self.slot_bytes
                slot.buffer = self._backend.staging(wanted)
            yield slot, slot.buffer[:nbytes]
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    def _take(self) -> Slot:
        with self._changed:
            while True:
                ready = next((slot for slot in self._free if slot.ticket is None or slot.ticket.done()), None)
                if ready is not None:
                    self._free.remove(ready)
                    ready.ticket = None
                    return ready
                if self._room:
                    self._room -= 1
                    return Slot()
                if self._free:
                    return self._free.popleft()
                self._changed.wait()


def pageable(nbytes: int) -> Tensor:
    with ordinary():
        return torch.empty(nbytes, dtype=torch.uint8)
