"""Device memory that holds one content after the other, each verified when it arrives and again before it is replaced.

For weights that live in host memory and visit the card while they compute (`models.streaming`). The digest of each
content is known from the load, so that a visit costs one pass over host memory, which packs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import MemoryFaultError, SourceChangedError
from hf_rocm_tune.transfer.backend import Backend, Queued
from hf_rocm_tune.transfer.digest import Digest
from hf_rocm_tune.transfer.staging import Session
from hf_rocm_tune.transfer.to_device import Segment, Sender, Transfer
from hf_rocm_tune.transfer.verifier import Verifier

STAGE = "streamed"
ADVICE = "The same command continues from the newest checkpoint; if it happens again, run the doctor and a memory test"


@dataclass(frozen=True)
class Content:
    name: str  # for incidents
    segments: list[Segment]  # in order of their offsets, with their digests there; at most the buffer's bytes
    digest: Digest  # of all bytes, with zeros in the gaps

    @property
    def nbytes(self) -> int:
        return self.segments[-1].end


class LayerBuffer:
    """One piece of device memory. `send` and `wait_verified` alternate; each may be called from any thread."""

    def __init__(self, nbytes: int, backend: Backend, sender: Sender, verifier: Verifier, session: Session) -> None:
        self._backend = backend
        self._sender = sender
        self._verifier = verifier
        self._session = session
        self.memory = backend.allocate(nbytes, long_lived=True)  # uint8[nbytes], once
        self._holds: Content | None = None  # verified
        self._leaving: tuple[Content, Queued] | None = None
        self._pending: tuple[Content, Transfer, Queued | None] | None = None

    def mark(self) -> Any:
        """The current end of the caller's compute stream on this device, for `send`."""
        return self._backend.mark()

    def send(self, content: Content, after: Any) -> None:
        """Queue a content's transfer, and the last check of what it replaces; nothing is overwritten before the mark
        ``after``."""
        number, verify = self._session.number(STAGE)
        transfer = Transfer(number, STAGE, content.segments, None, verify=verify, pieces=[content.digest])
        memory = self.memory[: content.nbytes]
        self._backend.follow(after)
        if self._holds is not None:
            self._leaving = self._holds, self._backend.digest(self.memory[: self._holds.nbytes])
            self._holds = None
        self._sender.send(transfer, memory, self._verifier.route, attempt=0)
        self._pending = content, transfer, self._backend.digest(memory) if verify else None

    def wait_verified(self) -> None:
        """Wait until what was sent is verified; afterwards the caller's compute stream may read it.

        Raises `CorruptionError`: it could not be transferred correctly; `MemoryFaultError`: it changed in host memory
        and no file has it, or what it replaced changed on the device.
        """
        if self._pending is None:
            return
        content, transfer, arrived = self._pending
        self._pending = None
        if self._leaving is not None:
            left, left_digest = self._leaving
            self._leaving = None
            self._require(left, left_digest)
        try:
            self._verifier.finish(transfer, self.memory[: content.nbytes], arrived)
        except SourceChangedError as error:
            raise MemoryFaultError(f"streamed weights changed in host memory: {content.name}", ADVICE) from error
        self._holds = content if transfer.verify else None

    @property
    def has_arrived(self) -> bool:
        """Whether the last copy of what was sent has ended."""
        ticket = None if self._pending is None else self._pending[1].ticket
        return ticket is None or ticket.done()

    def check(self) -> None:
        """Compare what it holds with what arrived; waits. Raises `MemoryFaultError` if it has changed."""
        if self._holds is not None:
            self._backend.follow(self._backend.mark())
            self._require(self._holds, self._backend.digest(self.memory[: self._holds.nbytes]))

    def _require(self, content: Content, digest: Queued) -> None:
        if digest.result().same_words(content.digest):
            return
        self._session.report.add(STAGE, mismatches=1)
        row: dict[str, Any] = {"step": self._session.step, "stage": STAGE, "tensor": content.name}
        self._session.report.incident({**row, "kind": "changed on the device", "outcome": "stopped"})
        what = f"streamed weights changed in device memory after their arrival: {content.name}"
        raise MemoryFaultError(what, ADVICE)
