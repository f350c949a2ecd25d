"""A few staging slots, allocated once, from which everything crosses to the device.

A slot is rewritten only after the copy that last read it has ended. Nothing above holds a slot longer than it takes to
fill it and queue its copy, so a batch that is abandoned, or an exception while packing, cannot starve the ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hf_rocm_tune.transfer.backend import Backend, Ticket

SMALLEST_SLOT_BYTES = 64 << 10


class Slot:
    """Staging memory, and the ticket of the last copy that read from it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.ticket: Ticket | None = None


class Ring:
    """At most `slots` slots of at most `slot_bytes` each, shared by all threads.

    Args:
        backend: allocates the staging memory. Where that is cheap, slots start small and grow to what is asked for.
        slot_bytes: bytes of a full slot, a multiple of 256.
        slots: how many.
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
        assert nbytes <= self.slot_bytes, "larger transfers are cut into chunks above"
        slot = self._take()
        try:
            if slot.ticket is not None:
                slot.ticket.join()
                slot.ticket = None
            yield slot, self._memory(slot, nbytes)
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    @property
    def allocated_bytes(self) -> int:
        """Staging memory held by slots that are not in use at the moment."""
        with self._changed:
            return sum(slot.buffer.numel() for slot in self._free if slot.buffer is not None)

    def _take(self) -> Slot:
        with self._changed:
            while True:
                ready = next((slot for slot in self._free if slot.ticket is None or slot.ticket.done()), None)
                if ready is not None:
                    self._free.remove(ready)
                    ready.ticket = None  # nothing to wait for
                    return ready
                if self._room:
                    self._room -= 1
                    return Slot()
                if self._free:
                    return self._free.popleft()
                self._changed.wait()

    def _memory(self, slot: Slot, nbytes: int) -> Tensor:
        if slot.buffer is None or slot.buffer.numel() < nbytes:
            wanted = self.slot_bytes
            if self._backend.staging_grows:
                wanted = min(wanted, max(SMALLEST_SLOT_BYTES, 1 << (nbytes - 1).bit_length()))
            slot.buffer = self._backend.staging(wanted)
        return slot.buffer[:nbytes]
