"""The one door to the device: everything that crosses does it here, verified on arrival."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, UsageError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, backend_for
from hf_rocm_tune.transfer.copies import Fetched, Fetcher, Pack, Parcel, Ring, Sender, Shipment, TransferSettings, pack
from hf_rocm_tune.transfer.digest import Digest, QueuedDigests, digest
from hf_rocm_tune.transfer.faults import FaultSpec, FaultyBackend
from hf_rocm_tune.transfer.ladder import Ladder
from hf_rocm_tune.transfer.raw_bytes import (
    as_bytes,
    check_plain,
    is_plain,
    map_tensors,
    named_tensors,
    ordinary,
    storage_bytes,
    tree_tensors,
    typed_view,
)
from hf_rocm_tune.transfer.report import TransferReport


@dataclass
class Entry:
    """Provenance of one storage.

    Attributes:
        provenance: ``transferred`` (verified on the way), ``derived`` (computed from such), ``unverified``.
        reason: why it counts as derived or unverified.
        shipment: of a batch, for its sources and verdict; None for weights, whose host source is not kept.
        digest: of all bytes of the storage, as they arrived or were computed; not known for batches.
    """

    provenance: str
    reason: str | None = None
    shipment: Shipment | None = None
    digest: Digest | QueuedDigests | None = None

    def known_digest(self) -> Digest | None:
        """The digest; waits for one that is still queued."""
        if isinstance(self.digest, QueuedDigests):
            (self.digest,) = self.digest.result()
        return self.digest


Known = TypeVar("Known")


class Registry(Generic[Known]):
    """What is known of tensors, by the storage that they share, without keeping them alive.

    By storage, so that views, ``param.data = moved`` and a ``Parameter`` made from a moved tensor are known too, and a
    new tensor that happens to get the same address is not. Each step is one dict operation, so it needs no lock, not
    even in a weak reference's end.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], Known]] = {}

    def put(self, tensor: Tensor, entry: Known) -> None:
        """Remember `entry` for the storage of `tensor`, in place of what was known before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._entries[key] = (weakref.ref(storage, partial(self._forget, key)), entry)

    def get(self, tensor: Tensor) -> Known | None:
        """What is known of the storage of `tensor`; None for sparse tensors, which have none."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        reference, entry = self._entries.get(storage._cdata, (None, None))
        return entry if reference is not None and reference() is storage else None

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._entries.get(key)
        if known is not None and known[0] is reference:
            del self._entries[key]


_live: weakref.WeakSet[Mover] = weakref.WeakSet()


class Mover:
    """Moves host tensors to one device and proves that they arrived.

    Weights go through `move`, which returns when the bytes are right. Batches go through `begin`, which returns at once
    with device tensors in flight, and `settle`, which waits for the verdict and must be called before they are used.

    Args:
        device: ``cuda`` (HIP and CUDA alike) or ``cpu``; on the CPU a worker thread plays the copy engine.
        settings: what is verified, and the size of the ring.
        report: counters to add to; a new one by default.
        faults: faults to inject into the copies.
        backend: replaces the one chosen by device; faults still go round it.

    Attributes:
        step: training step for incidents, set by the training loop.
        loaded: digests of what was read from files, by name of the file and of the tensor.

    All methods may be called from several threads. A mover belongs to the process that made it: in a
    fork of it, where its queue's threads do not exist, it raises. Not covered: what happens to device memory after the
    verdict.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        settings: TransferSettings | None = None,
        report: TransferReport | None = None,
        faults: FaultSpec | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.settings = settings or TransferSettings()
        self.report = report or TransferReport()
        plain = backend or backend_for(device)
        self._faulty = FaultyBackend(plain, faults) if faults else None
        self._backend: Backend = self._faulty or plain
        self.device = plain.device
        slot_bytes = self.settings.slot_bytes or plain.default_slot_bytes
        self._sender = Sender(self._backend, Ring(self._backend, slot_bytes=slot_bytes, slots=self.settings.slots))
        self._ladder = Ladder(self._backend, self._sender, self.settings, self.report)
        self._fetcher = Fetcher(plain, self._faulty, self.settings, self.report, self._enter)
        self._registry: Registry[Entry] = Registry()
        self._packs: Registry[Pack] = Registry()  # of host memory
        self.loaded: dict[tuple[str, str], Digest] = {}
        self._numbers = itertools.count()
        self._sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        _live.add(self)

    # ---- moving ---------------------------------------------------------------------------------------------

    def move(
        self,
        tensor: Tensor,
        *,
        name: str,
        stage: str = "weights",
        source: str | None = None,
        transient: bool = False,
    ) -> Tensor:
        """Send one host tensor and wait for its verdict.

        Args:
            tensor: host tensor of any dense dtype, shape and strides.
            name: for incidents, for example the parameter's name.
            stage: ``weights``, ``batches``, ``adapter`` or ``optimizer``.
            source: the file it came from, for incidents.
            transient: it is not kept: its memory is taken without a wait for what the caller has queued.

        Returns:
            A new tensor on the device, same dtype and shape, contiguous, without gradient history, that owns its
            storage.

        Raises:
            CorruptionError: it could not be brought over right (`SourceChangedError`: `tensor` changed meanwhile).
            UsageError: it is not a dense host tensor.
        """
        self._check_host(tensor, name)
        parcel = Parcel(name, tensor, 0, source)
        shipment = self._new_shipment(stage, [parcel], tensor)
        buffer = self._backend.allocate(shipment.nbytes, long_lived=not transient)
        self._sender.send(shipment, buffer, self._ladder.route, attempt=0)
        parcel.digest = arrived = shipment.expected
        self._finish(shipment, buffer)
        with ordinary():
            moved = typed_view(buffer, 0, tensor.dtype, tensor.shape)
        self._registry.put(moved, Entry("transferred", digest=arrived) if shipment.verify else self._not_verified())
        if source is not None and shipment.verify:
            self.loaded[source.rpartition("/")[2], name] = arrived
        return moved

    def serves(self, device: torch.device) -> bool:
        """Whether `move_to` brings tensors to this device."""
        return device.type == self.device.type and (device.index or 0) == (self.device.index or 0)

    def move_to(
        self, device: torch.device, tensor: Tensor, *, name: str, stage: str = "weights", source: str | None = None
    ) -> Tensor:
        """As `move` for a weight whose device is known; a mover of several devices needs to be told which."""
        assert self.serves(device), "asked before"
        return self.move(tensor, name=name, stage=stage, source=source)

    def fetched(self, tensor: Tensor, *, name: str, stage: str) -> AbstractContextManager[Fetched]:
        """The bytes of a tensor of this device on the host, verified, for the length of a block; see `copies.Fetcher`.

        Raises:
            CorruptionError: it could not be brought over right.
        """
        self._check_open()
        return self._fetcher.fetched(tensor, name=name, stage=stage)

    def mark(self) -> Any:
        """The place in the caller's compute stream behind all that it has queued, for `Fetcher.begin`."""
        return self._backend.mark()

    def another_fetcher(self) -> Fetcher:
        """A way to the host with a queue and slots of its own, for tensors that cross beside what is sent."""
        return Fetcher(backend_for(self.device), self._faulty, self.settings, self.report, self._enter)

    def begin(self, tree: Any, *, stage: str = "batches") -> Any:
        """Start the transfer of all host tensors of a nested batch, in one copy into one device allocation.

        Args:
            tree: dicts, mappings, lists, tuples, named tuples and dataclasses of tensors and anything else. What is
                not from `pack` is packed here.
            stage: as in `move`.

        Returns:
            The same structure with device tensors in flight: call `settle` before using them. Tensors that are already
            on the device, or already moved, and everything that is no tensor are the same objects as before.
        """
        self._check_open()
        given: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named_tensors(tree):
            if not self._is_here(tensor):
                given.setdefault(id(tensor), (name, tensor))
        if not given:
            return map_tensors(tree, lambda tensor: tensor)
        tensors = [tensor for _, tensor in given.values()]
        packed = self._packs.get(tensors[0])
        if packed is None or not packed.holds(tensors):
            for name, tensor in given.values():
                self._check_host(tensor, name)
            return self.begin(self.pack(tree), stage=stage)
        source = storage_bytes(tensors[0])
        parcels = [
            Parcel(known.name, tensor, known.offset, digest=known.digest)
            for tensor, known in zip(tensors, packed.tensors, strict=True)
        ]
        shipment = self._new_shipment(stage, parcels, source)
        buffer = self._backend.allocate(max(shipment.nbytes, 1), long_lived=False)
        self._sender.send(shipment, buffer[: shipment.nbytes], self._ladder.route, attempt=0)
        # It may have waited, and what was sent is what was packed.
        self._require_equal(packed, source, shipment.expected if shipment.verify else None)
        with ordinary():
            arrived = {
                id(tensor): typed_view(buffer, known.offset, known.dtype, known.shape)
                for tensor, known in zip(tensors, packed.tensors, strict=True)
            }
        self._registry.put(buffer, Entry("unverified", "its verdict is still awaited", shipment))
        return map_tensors(tree, lambda tensor: arrived.get(id(tensor), tensor))

    def pack(self, tree: Any) -> Any:
        """Copies of the host tensors of a nested batch, side by side, for `begin`: the originals may be written to.

        The copies are compared with the originals unless nothing is to be verified. Tensors that are on the device, or
        have no plain bytes, are the same objects as before.
        """
        given: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named_tensors(tree):
            if tensor.device.type == "cpu" and is_plain(tensor) and not self._is_here(tensor):
                given.setdefault(id(tensor), (name, tensor))
        if not given:
            return map_tensors(tree, lambda tensor: tensor)
        memory, packed = pack(list(given.values()), verified=self.settings.verify != "off")
        self._packs.put(memory, packed)
        with ordinary():
            copies = {
                key: typed_view(memory, known.offset, known.dtype, known.shape)
                for key, known in zip(given, packed.tensors, strict=True)
            }
        return map_tensors(tree, lambda tensor: copies.get(id(tensor), tensor))

    def require_unchanged(self, tree: Any) -> None:
        """Look again at host tensors that were packed; others are passed by.

        Raises:
            MemoryFaultError: they have changed since.
        """
        looked_at: list[Pack] = []
        for tensor in tree_tensors(tree):
            packed = self._packs.get(tensor)
            if packed is not None and not any(packed is each for each in looked_at):
                looked_at.append(packed)
                self._require_equal(packed, storage_bytes(tensor))

    def _require_equal(self, packed: Pack, memory: Tensor, found: Digest | None = None) -> None:
        if packed.digest is None or (found or digest(memory)) == packed.digest:
            return
        row: dict[str, Any] = {"step": self.step, "stage": "batches", "kind": "source_changed", "outcome": "stopped"}
        name = packed.changed_in(memory)
        self.report.incident({**row, "tensor": name})
        raise MemoryFaultError(
            f"batch tensor '{name}' changed in host memory after it was read from the loader",
            "Look for code that writes to batches, or test the memory; the same command continues from the newest "
            "checkpoint",
        )

    def settle(self, tree: Any) -> None:
        """Wait for the verdict of every transfer in flight that tensors of `tree` belong to, and put it right if bad.

        Afterwards the tensors may be used on the caller's current stream. Tensors that are not in flight are passed by.

        Raises:
            CorruptionError: a tensor could not be brought over right; raised again each time it is asked.
        """
        for tensor in tree_tensors(tree):
            entry = self._registry.get(tensor)
            if entry is None or entry.shipment is None:
                continue
            shipment = entry.shipment
            if not shipment.settled and shipment.failure is None:
                self._check_open()
            with shipment.lock:
                if shipment.failure is not None:
                    raise shipment.failure
                if not shipment.settled:
                    with ordinary():
                        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                        everything.set_(tensor.untyped_storage(), 0, (shipment.nbytes,), (1,))
                    self._finish(shipment, everything)
                    known = Entry("transferred") if shipment.verify else self._not_verified()
                    entry.provenance, entry.reason = known.provenance, known.reason

    def _finish(self, shipment: Shipment, buffer: Tensor) -> None:
        """Wait for the verdict, recover if need be, hand out, count."""
        begun = time.perf_counter()
        try:
            if shipment.ticket is not None:
                self._judge(shipment, buffer)
                self._backend.hand_out(buffer, shipment.ticket)
        except CorruptionError as failure:
            shipment.failure = failure
            raise
        shipment.settled = True
        shipment.verify_seconds += time.perf_counter() - begun
        nbytes = sum(parcel.nbytes for parcel in shipment.parcels)
        self.report.add(
            shipment.stage,
            tensors=len(shipment.parcels),
            bytes=nbytes,
            verified_bytes=nbytes if shipment.verify else 0,
            transfer_seconds=shipment.transfer_seconds,
            verify_seconds=shipment.verify_seconds,
        )

    def _judge(self, shipment: Shipment, buffer: Tensor) -> None:
        if not shipment.verify or not shipment.nbytes:
            return
        # Only now, not behind the copy: a batch may have waited for its use since, and memory changes bits.
        if not shipment.matches(self._backend.digest(buffer).result()):
            self._ladder.recover(shipment, buffer)
        self._ladder.remember(shipment)

    def _new_shipment(self, stage: str, parcels: list[Parcel], source: Tensor) -> Shipment:
        number, verify, _ = self._enter(stage)
        return Shipment(number, stage, parcels, source, verify=verify)

    def _enter(self, stage: str) -> tuple[int, bool, int | None]:
        """The number of a new transfer, whether it is verified, and the training step."""
        self._check_open()
        with self._lock:
            number, earlier = next(self._numbers), self._sent[stage]
            self._sent[stage] += 1
        sampled = self.settings.verify == "sample" and earlier % self.settings.sample_every == 0
        return number, self.settings.verify == "full" or sampled, self.step

    def _not_verified(self) -> Entry:
        return Entry("unverified", f"moved under --verify {self.settings.verify}, not among the verified")

    def _check_open(self) -> None:
        # Before any lock is touched: a thread that does not exist here may have held it at the fork.
        if self._process != os.getpid():
            raise UsageError(
                f"this mover was made by process {self._process}, and process {os.getpid()} was forked from it: the "
                "threads and the device behind a mover do not survive a fork. Make a mover of its own in each process, "
                "after the fork"
            )
        if self._closed:
            raise RuntimeError("the mover is closed")

    def _is_here(self, tensor: Tensor) -> bool:
        if self.device.type == "cpu":
            return self._registry.get(tensor) is not None
        return tensor.device == self.device

    def _check_host(self, tensor: Tensor, name: str) -> None:
        check_plain(tensor, name)
        if tensor.device.type != "cpu":
            raise UsageError(f"tensor '{name}' is on {tensor.device}; only host tensors are moved to {self.device}")

    # ---- what is known --------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """Training step that incidents carry."""
        return self._ladder.step

    @step.setter
    def step(self, value: int | None) -> None:
        self._ladder.step = value

    def host_source(self, tensor: Tensor) -> Tensor | None:
        """The host tensor that a batch tensor came from; kept as long as the device memory lives. None for views."""
        entry = self._registry.get(tensor)
        if entry is None or entry.shipment is None:
            return None
        start = tensor.storage_offset() * tensor.element_size()
        for parcel in entry.shipment.parcels:
            same_type = parcel.source.dtype == tensor.dtype and parcel.source.shape == tensor.shape
            if parcel.offset == start and same_type and tensor.is_contiguous():
                return parcel.source
        return None

    def was_verified(self, tensor: Tensor) -> bool:
        """Whether its bytes were proven on arrival, or were computed on the device from such bytes."""
        return self.provenance(tensor) in ("transferred", "derived")

    def is_pending(self, tensor: Tensor) -> bool:
        """Whether it is in flight: `settle` has not been called for it."""
        entry = self._registry.get(tensor)
        return entry is not None and entry.shipment is not None and not entry.shipment.settled

    def provenance(self, tensor: Tensor) -> str | None:
        """``transferred``, ``derived``, ``unverified`` (also while in flight), or None: not known here."""
        entry = self._registry.get(tensor)
        return None if entry is None else entry.provenance

    def reason(self, tensor: Tensor) -> str | None:
        """Why a tensor counts as derived or unverified."""
        entry = self._registry.get(tensor)
        return None if entry is None else entry.reason

    def digest_of(self, tensor: Tensor) -> Digest | None:
        """The digest with which a weight arrived or was derived; None for batches, views and unverified tensors."""
        entry = self._registry.get(tensor)
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        return entry.known_digest() if entry is not None and whole else None

    def mark_derived(self, tensor: Tensor, reason: str, *, digest: Digest | None = None) -> None:
        """Declare that `tensor` was computed on the device from verified tensors (cast, quantised, initialised).

        Args:
            tensor: on the device.
            reason: how.
            digest: of its bytes as they must be, where known. Otherwise it is taken now, without a wait: call this as
                soon as the tensor is computed, and again when it is rewritten.
        """
        self._registry.put(tensor, Entry("derived", reason, digest=digest or QueuedDigests([storage_bytes(tensor)])))

    def mark_trained(self, tensor: Tensor, reason: str) -> None:
        """Declare that `tensor`, verified until now, is changed by training from here on: its bytes are not known."""
        self._registry.put(tensor, Entry("derived", reason))

    def mark_unverified(self, tensor: Tensor, reason: str) -> None:
        """Declare that `tensor` came to the device unverified, and why."""
        self._registry.put(tensor, Entry("unverified", reason))

    def inject(self, tensor: Tensor, *, name: str, stage: str, number: int, attempt: int) -> None:
        """Let injected faults, where they are asked for, harm a contiguous tensor that did not come through this door.

        Args:
            tensor: on the device; harmed in place.
            name: for the patterns of the fault specification.
            stage: likewise.
            number: the caller's own count, so that attempts at the same thing are known as such.
            attempt: from 0 on.
        """
        if self._faulty is not None:
            data = as_bytes(tensor.detach())
            whole = Part(name, 0, data.numel(), 0, data.numel())
            self._faulty.harm_in_place(data, Label(stage, -1 - number, attempt, (whole,)))  # below 0: no shipment's

    def fault_injection(self) -> dict[str, Any] | None:
        """The fault specification and how many faults were injected so far; None when none are asked for."""
        if self._faulty is None:
            return None
        return {**dataclasses.asdict(self._faulty.spec), "injected": self._faulty.injected}

    # ---- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the copy queue after what is in it. What is known of tensors stays. Does nothing the second time."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def was_verified(tensor: Tensor) -> bool:
    """Whether any mover of this process has verified `tensor`."""
    return any(mover.was_verified(tensor) for mover in list(_live))
