"""Transfers to the host: the `Fetcher` and what it has `Fetched`; `host_copy` for a single tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, Queued
from hf_rocm_tune.transfer.damage import examine
from hf_rocm_tune.transfer.digest import Digest, digest
from hf_rocm_tune.transfer.interception import own_copies
from hf_rocm_tune.transfer.raw_bytes import as_bytes, typed_view
from hf_rocm_tune.transfer.report import own_origin
from hf_rocm_tune.transfer.retry import FROM_DEVICE, Retried, Route, copy_again
from hf_rocm_tune.transfer.staging import Ring, Session, pageable


class Fetcher:
    """Copies device tensors to the host, verified, for averages on the host and for transfers to another card.

    A copy goes into a page-locked slot, in which the host may then work; the device digests its own bytes, and only the
    digest is sent. A wrong copy is repeated, then read through pageable memory, as are tensors larger than a slot
    (``slot_bytes``). Not covered: host memory after the verdict, and device memory that changed before `begin`.
    """

    def __init__(self, backend: Backend, session: Session) -> None:
        self.backend = backend
        self.session = session
        self.slot_bytes = session.settings.slot_bytes or backend.default_slot_bytes
        self.ring = Ring(backend, slot_bytes=self.slot_bytes, slots=session.settings.slots)

    def begin(self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, origin: str = "") -> Fetched:
        """Queue the copy of a tensor of this device, after ``mark`` (None: now). Waits while all slots are taken."""
        mark = mark if tensor.is_contiguous() else None
        return Fetched(self, tensor.detach().contiguous(), name, stage, mark, origin)

    @contextmanager
    def fetched(
        self, tensor: Tensor, *, name: str, stage: str, mark: Any = None, origin: str = ""
    ) -> Iterator[Fetched]:
        fetched = self.begin(tensor, name=name, stage=stage, mark=mark, origin=origin)
        try:
            fetched.wait_verified()
            yield fetched
        finally:
            fetched.release()


class Fetched:
    """A tensor in transfer to the host.

    Attributes:
        host: of the tensor's dtype and shape, in staging memory: valid after `wait_verified` until `release`; writable.
        digest: of the fetched bytes, after `wait_verified`; None if they are not verified.
    """

    def __init__(self, fetcher: Fetcher, source: Tensor, name: str, stage: str, mark: Any, origin: str) -> None:
        """Takes staging memory and queues the copy; what goes wrong here, as a shortage of memory, releases it."""
        self._session = fetcher.session
        self._backend = fetcher.backend
        self._name = name
        self._stage = stage
        self._origin = origin or own_origin(stage)
        self._step = self._session.step
        self._source = as_bytes(source)  # kept alive: the caller may drop its tensor while the copy is queued
        self.digest: Digest | None = None
        begun = time.perf_counter()
        size = source.nbytes
        number, verify = self._session.number(stage)
        self._label = Label(stage, number, 0, (Part(name, 0, size, 0, size),))
        fits_slot = size <= fetcher.slot_bytes
        self._slot = ExitStack()
        if fits_slot:
            _, self._memory = self._slot.enter_context(fetcher.ring.slot(size))
        else:
            self._memory = pageable(size)
        self.host = typed_view(self._memory, 0, source.dtype, source.shape)
        try:
            self._backend.follow(mark or self._backend.mark())
            self._expected = self._backend.digest(self._source) if verify else None
            # A copy to pageable memory blocks, so it runs in `wait_verified`.
            self._ticket = self._copy() if fits_slot else None
        except BaseException:
            self.release()
            raise
        self._queueing_seconds = time.perf_counter() - begun

    def wait_verified(self) -> None:
        begun = time.perf_counter()
        (self._ticket or self._copy(blocking=True)).result()
        if self._expected is not None:
            self.digest = self._expected.result()
            self._verify(self.digest)
        else:
            self._corrupt(0)
        size = self._memory.numel()
        self._session.report.crossed("to_host", self._origin, size, verified=self.digest is not None)
        self._session.report.add(
            self._stage,
            tensors=1,
            bytes=size,
            verified_bytes=size if self.digest is not None else 0,
            transfer_seconds=self._queueing_seconds,
            verify_seconds=time.perf_counter() - begun,
        )

    def release(self) -> None:
        """Release the staging memory. Does nothing the second time."""
        self._slot.close()

    def _verify(self, expected: Digest) -> None:
        """Compare the first copy with the device's digest, and copy again if they differ."""
        self._corrupt(0)
        if digest(self._memory) == expected:
            return
        wrong = self._memory.clone()
        ended = copy_again(FROM_DEVICE, self._read_again, on_corruption=self._session.settings.on_corruption)
        self._report(wrong, ended)
        if ended.outcome != "recovered":
            raise CorruptionError(
                f"{self._stage} tensor '{self._name}' from {self._backend.device} arrived wrong on the host, and "
                f"{ended.why}. It was not used; run the doctor"
            )

    def _read_again(self, attempt: int, route: Route) -> bool:
        """Copy by `route` and digest the device's bytes anew, for the first digest may have been read wrongly, too."""
        if route.staging == "pageable":
            self._memory.copy_(self._backend.read_back(self._source))
        else:
            self._copy(blocking=route.blocking)
        self._corrupt(attempt)
        self.digest = self._backend.digest(self._source).result()
        return digest(self._memory) == self.digest

    def _copy(self, *, blocking: bool = False) -> Queued:
        return self._backend.copy(self._memory, self._source, self._label, blocking=blocking)

    def _corrupt(self, attempt: int) -> None:
        if self._session.faulty is not None:
            self._session.faulty.corrupt_in_place(self._memory, self._label._replace(attempt=attempt))

    def _report(self, wrong: Tensor, ended: Retried) -> None:
        recovered = ended.outcome == "recovered"
        self._session.report.add(self._stage, mismatches=1, recovered=int(recovered))
        # The right bytes are known only if a later reading had the right digest.
        damage = examine(wrong, self._memory) if recovered else None
        if damage is not None:
            description = damage.for_report()
        else:
            description = {"kind": "unknown", "first_offset": 0, "length": wrong.numel()}
        self._session.report.incident(
            {
                "step": self._step,
                "stage": self._stage,
                "tensor": self._name,
                **description,
                "retry": ended.route.name,
                "outcome": ended.outcome,
            }
        )


_COPIES = 3


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy of ``tensor`` on the host, compared with the device's digest and repeated if it differs.

    Nothing is reported or raised: one that stays wrong is found when it, or the file written from it, is compared.
    """
    right = digest(tensor.detach())
    for _ in range(_COPIES):
        with own_copies():
            host = tensor.detach().cpu()
        if digest(host) == right:
            break
    return host.contiguous()
