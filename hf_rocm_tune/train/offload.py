"""Activations saved for backward are kept in host memory (``--activation_offloading``), verified in both directions.

Autograd passes each tensor that it saves to ``saved_tensors_hooks``. Its storage is copied to page-locked memory on a
separate stream, the copy is compared with the digest taken on the device, and only then is the device memory released:
a bad copy is read again while the original still exists. In backward, storages are copied back in reverse order, ahead
of their use; the device digests them before anything reads them. A wrong copy is sent again by the mover's retry ladder
if host memory still has the right digest; host memory that has changed ends the run.

A storage is copied once, however many tensors share it, and comes back with the same strides: results are bit-identical
to those without offloading. These stay on the device: parameters, buffers and batches; small tensors; tensor
subclasses; what is saved after the last layer (the loss), which backward needs first; and what does not fit into host
memory. Layers that are recomputed offload only their inputs.

Not covered: what autograd functions keep other than by ``save_for_backward`` (bitsandbytes' 8-bit products).
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.models.recompute import layers_of
from hf_rocm_tune.transfer import Digest, Mover, digest
from hf_rocm_tune.transfer.backend import Backend, Label, Part, PendingDigest, Ticket
from hf_rocm_tune.transfer.copies import ALIGNMENT, Fetched
from hf_rocm_tune.transfer.damage import examine
from hf_rocm_tune.transfer.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

STAGE = "activations"
SMALLEST_BYTES = 64 << 10
"""Smaller storages stay on the device: queueing a copy costs more time than copying their bytes."""
SLAB_BYTES = 64 << 20
HOST_SHARE = 0.5
"""The largest share of the host memory available at the start that the ranks of a machine page-lock together."""


@dataclass(eq=False)
class _Slab:
    """Page-locked memory that is filled from its start, and empty again when all parts of it are released."""

    memory: Tensor
    filled: int = 0
    users: int = 0


Place = tuple[_Slab, Tensor]
"""A slab and uint8[n] of it."""


class HostMemory:
    """Page-locked memory in slabs that are never freed: the most that was needed at one time, up to ``limit`` bytes."""

    def __init__(self, backend: Backend, limit: int) -> None:
        self._backend, self._limit = backend, limit
        self._slabs: list[_Slab] = []
        # Records may be deleted in any thread at any point, so they only queue their memory here.
        self._released: deque[tuple[_Slab, Future[Any], Ticket | None]] = deque()
        self.nbytes = 0

    def take(self, nbytes: int) -> Place | None:
        """Allocate ``nbytes``; None where the limit is reached."""
        self._reclaim()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        slab = next((each for each in self._slabs if each.memory.numel() - each.filled >= size), None)
        if slab is None:
            # torch rounds page-locked memory up to a power of two by itself.
            wanted = max(SLAB_BYTES, 1 << (size - 1).bit_length())
            if self.nbytes + wanted > self._limit:
                return None
            slab = _Slab(self._backend.staging(wanted))
            self._slabs.append(slab)
            self.nbytes += wanted
        start, slab.filled, slab.users = slab.filled, slab.filled + size, slab.users + 1
        return slab, slab.memory[start : start + nbytes]

    def release(self, slab: _Slab, out: Future[Any], back: Ticket | None) -> None:
        """Release a part, once the copy into it (``out``) and the last copy from it (``back``) have ended."""
        self._released.append((slab, out, back))

    def _reclaim(self) -> None:
        for _ in range(len(self._released)):
            slab, out, back = self._released.popleft()
            if out.done() and (back is None or back.done()):
                slab.users -= 1
                slab.filled = slab.filled if slab.users else 0
            else:
                self._released.append((slab, out, back))


@dataclass(eq=False, kw_only=True)
class _Record:
    """A device storage whose bytes are on the host or in transfer to it. It lives as long as backward may need it."""

    name: str
    version: int  # autograd's count of in-place writes
    source: Tensor | None  # uint8, all bytes of the storage; None when they were released
    out: Future[Digest | None]  # the digest, when the copy to the host is verified
    memory: HostMemory
    slab: _Slab
    host: Tensor
    arrived: Tensor | None = None
    back: Ticket | None = None
    verdict: PendingDigest | None = None
    is_settled: bool = False

    def __del__(self) -> None:
        self.memory.release(self.slab, self.out, self.back)


@dataclass(frozen=True, eq=False)
class _Saved:
    """What autograd keeps instead of a tensor."""

    record: _Record
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: Tensor) -> Tensor:
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage.untyped_storage(), self.offset, self.shape, self.stride)


class ActivationOffload(saved_tensors_hooks):
    """A context around forward passes that offloads what they save for backward; see the module's description.

    Args:
        model: nothing is offloaded after its last layer.
        mover: for the model's device; at most as many bytes as its ring holds are in transfer in each direction.
        smallest_bytes: storages below this size stay on the device.
        limit_bytes: the most host memory; None: this rank's part of half of what is available now.

    Raises:
        CorruptionError: from forward or backward: a tensor could not be copied correctly, or changed on the host.
    """

    def __init__(
        self, model: nn.Module, mover: Mover, *, smallest_bytes: int = SMALLEST_BYTES, limit_bytes: int | None = None
    ) -> None:
        super().__init__(self._pack, self._unpack)
        self._mover, self._fetcher = mover, mover.another_fetcher()
        self._backend: Backend = self._fetcher.faulty or self._fetcher.backend
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = int(HOST_SHARE * psutil.virtual_memory().available) // ranks
        self._memory = HostMemory(self._fetcher.backend, available if limit_bytes is None else limit_bytes)
        self._smallest, self._window = smallest_bytes, mover.settings.slots * self._fetcher.slot_bytes
        self._verifier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[_Record]] = weakref.WeakKeyDictionary()
        self._leaving: deque[tuple[weakref.ref[_Record], Future[Digest | None], int]] = deque()
        self._bytes_leaving = 0
        self._order: list[weakref.ref[_Record]] = []
        self._next_back = self._bytes_ahead = 0
        self._is_on = self._was_full = False
        if layers := layers_of(model):
            layers[0].register_forward_pre_hook(lambda *_: self._switch(True))
            layers[-1].register_forward_hook(lambda *_: self._switch(False))

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory held."""
        return self._memory.nbytes

    def __enter__(self) -> None:
        """Begin a forward pass; what was saved in earlier ones can still be copied back."""
        self._release(0)
        self._order = [each for each in self._order if each() is not None]
        self._next_back, self._bytes_ahead = len(self._order), 0
        self._switch(True)
        super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self._switch(False)
        super().__exit__(*raised)

    def _switch(self, on: bool) -> None:
        self._is_on = on

    # ---- forward ------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not (self._is_on and self._may_leave(tensor)):
            return tensor.detach()  # the tensor itself would hold the graph that holds it
        known = self._known.get(storage := tensor.untyped_storage())
        record = known() if known is not None else None
        if record is None or record.version != tensor._version:
            record = self._send(tensor)
            if record is None:
                return tensor.detach()
            self._known[storage] = weakref.ref(record)
        return _Saved(record, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _may_leave(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device == self._mover.device
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._smallest
            and self._mover.provenance(tensor) is None
        )

    def _send(self, tensor: Tensor) -> _Record | None:
        """Queue the copy of a storage to the host; None if host memory is full."""
        source = storage_bytes(tensor)
        size = source.numel()
        self._release(max(self._window - size, 0))
        if (place := self._memory.take(size)) is None:
            if not self._was_full:
                full = f"{self._memory.nbytes / 2**30:.1f} GiB of host memory are in use"
                logger.warning("--activation_offloading: %s, the other activations stay on the card", full)
            self._was_full = True
            return None
        name = f"saved.{len(self._order)}"
        fetched = self._fetcher.begin(source, name=f"{name}.to_host", stage=STAGE, into=place[1])
        out, (slab, host) = self._verifier.submit(_verified, fetched), place
        record = _Record(
            name=name, version=tensor._version, source=source, out=out, memory=self._memory, slab=slab, host=host
        )
        self._leaving.append((weakref.ref(record), out, size))
        self._bytes_leaving += size
        self._order.append(weakref.ref(record))
        self._next_back = len(self._order)
        return record

    def _release(self, most: int) -> None:
        """Release the device memory of verified copies; waits until at most ``most`` bytes are in transfer."""
        while self._leaving and (self._bytes_leaving > most or self._leaving[0][1].done()):
            known, out, size = self._leaving.popleft()
            self._bytes_leaving -= size
            out.result()
            if (record := known()) is not None:
                record.source = None

    # ---- backward -----------------------------------------------------------------------------------------------

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        record = saved.record
        right = record.out.result()
        if record.source is not None:  # the last storages are still on the device
            return saved.over(record.source)
        if record.arrived is None:
            self._begin(record)
        if not record.is_settled:
            self._settle(record, right)
        self._look_ahead()
        assert record.arrived is not None
        return saved.over(record.arrived)

    def _begin(self, record: _Record) -> None:
        """Queue the copy back to the device."""
        size = record.host.numel()
        number, _, _ = self._fetcher.number_transfer(STAGE)
        label = Label(STAGE, number, 0, (Part(f"{record.name}.to_device", 0, size, 0, size),))
        record.arrived = self._backend.allocate(size, long_lived=False)
        record.back = self._backend.copy(record.arrived, record.host, label)
        record.verdict = self._backend.digest(record.arrived) if record.out.result() is not None else None
        self._bytes_ahead += size

    def _look_ahead(self) -> None:
        """Begin copying what backward will probably need next: what was saved before."""
        while self._next_back and self._bytes_ahead < self._window:
            self._next_back -= 1
            record = self._order[self._next_back]()
            if record is not None and record.source is None and record.arrived is None:
                self._begin(record)

    def _settle(self, record: _Record, right: Digest | None) -> None:
        """Wait for a copy to the device, verify it, and let the caller's stream wait for it."""
        begun, size = time.perf_counter(), record.host.numel()
        assert record.arrived is not None and record.back is not None, "begun above"
        found = None if record.verdict is None else record.verdict.result()
        self._backend.hand_out(record.arrived, record.back)
        counts = {"tensors": 1, "bytes": size, "verified_bytes": 0 if right is None else size}
        self._fetcher.report.add(STAGE, **counts, verify_seconds=time.perf_counter() - begun)
        if found != right:
            record.arrived = self._recover(record, record.arrived, right)
        record.is_settled = True
        self._bytes_ahead -= size

    def _recover(self, record: _Record, wrong: Tensor, right: Digest | None) -> Tensor:
        """Send a storage again after wrong bytes arrived on the device."""
        report, name = self._fetcher.report, f"{record.name}.to_device"
        row: dict[str, Any] = {"step": self._mover.step, "stage": STAGE, "tensor": name}
        report.add(STAGE, mismatches=1)
        if digest(record.host) != right:
            row["kind"] = "changed on the host"
            raise self._failed(row, "changed in host memory before backward needed it: run a memory test")
        damage = examine(self._backend.read_back(wrong), record.host)
        row["kind"] = "late" if damage is None else damage.kind
        if damage is not None:
            row |= {"first_offset": damage.first_offset, "length": damage.length, "alignment": damage.alignment}
        if self._fetcher.settings.on_corruption == "stop":
            raise self._failed(row, "arrived wrong on the device, and --on_corruption stop is set", "stopped")
        moved = self._mover.move(record.host, name=name, stage=STAGE, transient=True)
        if digest(moved) != right:  # `move` itself verifies only as the settings say
            raise self._failed(row, "arrived wrong on the device twice")
        report.add(STAGE, recovered=1)
        report.incident({**row, "rung": "sent again", "outcome": "recovered"})
        return moved

    def _failed(self, row: dict[str, Any], why: str, outcome: str = "failed") -> CorruptionError:
        self._fetcher.report.incident({**row, "outcome": outcome})
        return CorruptionError(f"{STAGE} tensor '{row['tensor']}' {why}. It was not used; run the doctor")


def _verified(fetched: Fetched) -> Digest | None:
    fetched.settle()
    return fetched.digest
