"""The mover: the only way to the device. Everything is sent through it and verified on arrival."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError, TuneError, UsageError
from hf_rocm_tune.transfer.backend import Backend, Label, Part, backend_for
from hf_rocm_tune.transfer.digest import Digest, QueuedDigests, digest
from hf_rocm_tune.transfer.faults import FaultSpec, FaultyBackend
from hf_rocm_tune.transfer.interception import own_copies, serve, stop_serving
from hf_rocm_tune.transfer.layer_buffer import LayerBuffer
from hf_rocm_tune.transfer.mapped import InFile, in_file
from hf_rocm_tune.transfer.nested import named_tensors, tree_tensors, with_replaced
from hf_rocm_tune.transfer.raw_bytes import (
    Registry,
    as_bytes,
    dense,
    memory_order,
    not_plain,
    ordinary,
    plain,
    storage_bytes,
    typed_view,
)
from hf_rocm_tune.transfer.report import BETWEEN_CARDS, TransferReport
from hf_rocm_tune.transfer.staged_batch import StagedBatch, StagedBatches
from hf_rocm_tune.transfer.staging import Ring, Session, TransferSettings
from hf_rocm_tune.transfer.to_device import Segment, Sender, Transfer
from hf_rocm_tune.transfer.to_host import Fetched, Fetcher
from hf_rocm_tune.transfer.verifier import Verifier

STREAMED = "streamed: equal to its source on each arrival"


@dataclass
class Entry:
    provenance: str  # ``transferred`` (and verified), ``derived`` (computed from verified tensors), ``unverified``
    reason: str | None = None  # why it counts as derived or unverified
    transfer: Transfer | None = None  # of a batch, for its sources and verdict; None for weights
    digest: Digest | QueuedDigests | None = None  # of all bytes of the storage; None for batches

    def known_digest(self) -> Digest | None:
        """The digest; waits for one that is still queued."""
        if isinstance(self.digest, QueuedDigests):
            (self.digest,) = self.digest.result()
        return self.digest


_live: weakref.WeakSet[Mover] = weakref.WeakSet()


class Mover:
    """Moves host tensors to one device and verifies that they arrived.

    Weights go through `move`, which returns verified tensors. Batches go through `begin`, which returns at once with
    device tensors in flight, and `wait_verified`, which waits for the verdict and must be called before they are used.

    Args:
        device: ``cuda`` (also for HIP) or ``cpu``, where other host memory stands in for the device's.
        settings: what is verified, and the size of the ring.
        report: counters to add to; a new one by default.
        faults: faults to inject into the copies.
        backend: replaces the device's backend; faults are injected around it.

    Attributes:
        step: training step for incidents, set by the training loop.
        loaded: digests of tensors read from files, one for each reading, by the file's path and the tensor's name.

    All methods may be called from several threads. In a fork of the process that created it, where its threads do not
    exist, a mover raises. Not covered: changes of device memory after the verdict.
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
        self._session = Session(self.settings, self.report, self._faulty)
        self._verifier = Verifier(self._backend, self._sender, self._session)
        self._fetcher = Fetcher(plain, self._session)
        self._registry: Registry[Entry] = Registry()
        self._staged = StagedBatches(self._session)
        self.loaded: dict[tuple[str, str], set[Digest]] = {}
        self._closed = False
        self._process = os.getpid()
        self._copies_stage = "copies"
        self._direct_failures = 0
        self._failure: CorruptionError | None = None
        _live.add(self)
        if self.device.type == "cuda":
            serve(self)

    # ---- moving ---------------------------------------------------------------------------------------------

    def move(
        self,
        tensor: Tensor,
        *,
        name: str,
        stage: str = "weights",
        source: str | None = None,
        dtype: torch.dtype | None = None,
        transient: bool = False,
    ) -> Tensor:
        """Send one host tensor to the device, and wait until it is verified.

        Args:
            tensor: of any dense dtype, shape and strides.
            name: for incidents.
            stage: one of `STAGES`, for incidents.
            source: the file that it came from. None: the mapped safetensors file whose memory it is, if it is.
            dtype: to cast it to on the device; under ``verify="full"`` a sample must equal the CPU's cast bit for bit.
            transient: memory of a short-lived tensor is allocated without a wait for the caller's stream.

        Returns:
            A new tensor on the device, contiguous, without gradient history, that owns its storage.

        Raises:
            CorruptionError: no attempt brought the right bytes, or the device casts wrongly.
        """
        self._check_host(tensor, name)
        sent = dense(tensor)
        origin = in_file(tensor)  # not of `sent`, which may be a copy
        if source is not None:
            origin = InFile(source, name)
        file = None
        if origin is not None:
            file = origin.file
        segment = Segment(name, sent, 0, file)
        transfer = self._new_transfer(stage, [segment], sent)
        buffer = self._backend.allocate(transfer.nbytes, long_lived=not transient)
        self._sender.send(transfer, buffer, self._verifier.route, attempt=0)
        expected = transfer.expected  # the digest of the bytes that `send` has read
        segment.digest = expected
        self._finish(transfer, buffer)
        with ordinary():
            moved = typed_view(buffer, 0, sent.dtype, sent.shape)
        if transfer.verify:
            self._registry.put(moved, Entry("transferred", digest=expected))
            if origin is not None:
                self.read_from(origin.file, origin.tensor, expected)
        else:
            self._registry.put(moved, self._not_verified())
        if dtype is None or dtype == sent.dtype:
            return moved
        return self._cast(moved, sent, dtype, name, stage)

    def _cast(self, moved: Tensor, source: Tensor, dtype: torch.dtype, name: str, stage: str) -> Tensor:
        """The cast of a tensor that has arrived: a faulty kernel (pytorch#16448 gave zeros) runs after its digest."""
        cast = cast_on_device(moved, dtype)
        reason = "cast on the device, not compared"
        if self.settings.verify == "full":
            reason = "cast on the device, a sample compared with the CPU's cast"
            expected = _sample(source).to(dtype)
            right = _same(_sample(cast), expected)
            self.report.count("casts", checked=1, mismatches=int(not right))
            if not right:
                cast = cast_on_device(moved, dtype)
                recovered = _same(_sample(cast), expected)
                outcome = "recovered" if recovered else "stopped"
                self.report.incident({"stage": stage, "tensor": name, "kind": "wrong cast", "outcome": outcome})
                if not recovered:
                    pair = f"{moved.dtype} to {dtype}".replace("torch.", "")
                    raise CorruptionError(
                        f"{stage} tensor '{name}': {self.device} cast {pair} wrongly, twice, though its bytes arrived "
                        "intact: a fault of arithmetic, not of a transfer. It was not used; run hf-rocm-tune doctor "
                        "--full"
                    )
                self.report.count("casts", recovered=1)
        if self.was_verified(moved):
            self.mark_derived(cast, reason)
        else:
            self.mark_unverified(cast, self.reason(moved) or reason)
        return cast

    def read_from(self, file: str, name: str, digest: Digest) -> None:
        """Record the digest of a tensor that was read from a file, for the comparison with the file's SHA-256."""
        self.loaded.setdefault((file, name), set()).add(digest)

    # ---- copies that others ask for, see `interception` -----------------------------------------------------

    @contextmanager
    def copies_as(self, stage: str) -> Iterator[None]:
        """Within the block, copies that others ask for, in any thread, are reported as ``stage``, one of `STAGES`."""
        before = self._copies_stage
        self._copies_stage = stage
        try:
            yield
        finally:
            self._copies_stage = before

    def deliver(self, target: Tensor, source: Tensor, *, origin: str, stage: str | None = None) -> None:
        """Copy a host tensor into a tensor of this device, as ``target.copy_(source)``, and wait until it is verified.

        A cast runs on the host before the digest, as torch does it. ``origin``: who asked for it; ``stage``: one of
        `STAGES`, None: that of `copies_as`.
        """
        where = in_file(source)
        target, source = plain(target), plain(source)
        sent = _as_copied(source, target)
        in_a_row: Tensor | None = None  # the target, where its elements are next to each other in memory
        order = memory_order(target)
        if order is not None:
            in_a_row = target.detach().permute(order)
            sent = sent.permute(order)
        sent = dense(sent)
        if where is None:
            segment = Segment(described(target, origin), sent, 0, None)
        else:
            segment = Segment(where.tensor, sent, 0, where.file)
        transfer = self._new_transfer(stage or self._copies_stage, [segment], sent)
        transfer.origin = origin
        if in_a_row is None:
            buffer = self._backend.allocate(transfer.nbytes, long_lived=True)
        else:
            buffer = as_bytes(in_a_row)
            self._backend.follow(self._backend.mark())  # what was queued before may still use the memory
        self._sender.send(transfer, buffer, self._verifier.route, attempt=0)
        segment.digest = transfer.expected
        self._finish(transfer, buffer)
        if in_a_row is None:
            target.copy_(typed_view(buffer, 0, target.dtype, target.shape))
        if where is not None and transfer.verify:
            is_as_in_file = sent.data_ptr() == source.data_ptr()
            self.read_from(where.file, where.tensor, transfer.expected if is_as_in_file else digest(source))
        self._record_delivered(target, transfer, in_a_row)

    def _record_delivered(self, target: Tensor, transfer: Transfer, whole: Tensor | None) -> None:
        if not transfer.verify:
            self._registry.put(target, self._not_verified())
        elif whole is not None and _is_whole(whole):
            self._registry.put(target, Entry("transferred", digest=transfer.expected))
        elif self.provenance(target) != "unverified":
            self._registry.put(target, Entry("derived", "written in parts, each verified on arrival"))

    def collect(self, target: Tensor, source: Tensor, *, origin: str, stage: str | None = None) -> None:
        """Copy a tensor of this device into a host tensor, as ``target.copy_(source)``, verified. Waits.

        A cast runs on the device, as torch does it. Memory beside the target is that of the ring. ``origin`` and
        ``stage`` as for `deliver`.
        """
        self._check_open()
        target, source = plain(target), plain(source)
        sent = _as_copied(source, target)
        order = memory_order(target)
        if order is not None:
            in_a_row = target.detach().permute(order)
            self._collect_bytes(as_bytes(in_a_row), sent.permute(order).contiguous(), origin, stage)
            return
        with ordinary():
            host = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        self._collect_bytes(as_bytes(host), sent.contiguous(), origin, stage)
        target.copy_(host)

    def _collect_bytes(self, target: Tensor, source: Tensor, origin: str, stage: str | None) -> None:
        how = {"name": described(source, origin), "stage": stage or self._copies_stage, "origin": origin}
        data = as_bytes(source)
        step = self._fetcher.slot_bytes
        for start in range(0, data.numel(), step):
            with self._keeping_failure(), self._fetcher.fetched(data[start : start + step], **how) as fetched:
                target[start : start + step].copy_(fetched.host)

    def receive(self, target: Tensor, source: Tensor, sending: Mover, *, origin: str) -> None:
        """Copy a tensor of another card, which ``sending`` serves, into one of this card; verified on both. Waits.

        The driver's copy is tried first. One that arrived wrong is repeated through the host, and after three of them
        all copies take that way.
        """
        target, source = plain(target), plain(source)
        sent = _as_copied(source, target).contiguous()
        direct = self._direct_failures < _DIRECT_FAILURES
        if direct and self._receive_directly(target, sent, origin):
            return
        with ordinary():
            host = torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
        sending.collect(host, sent, origin=origin, stage=BETWEEN_CARDS)
        self.deliver(target, host, origin=origin, stage=BETWEEN_CARDS)
        if direct:
            self.report.add(BETWEEN_CARDS, recovered=1)
            self._report_direct(target, origin, "recovered")

    def _receive_directly(self, target: Tensor, sent: Tensor, origin: str) -> bool:
        """The driver's own copy from card to card. False: it arrived wrong."""
        number, verify = self._session.number(BETWEEN_CARDS)
        before = QueuedDigests([as_bytes(sent)]) if verify else None
        arrived = target.detach() if target.is_contiguous() else target.new_empty(target.shape)
        with own_copies():
            arrived.copy_(sent, non_blocking=True)
        self.inject(arrived, name=described(target, origin), stage=BETWEEN_CARDS, number=number, attempt=0)
        if before is not None and QueuedDigests([as_bytes(arrived)]).result() != before.result():
            self._direct_failures += 1
            self.report.add(BETWEEN_CARDS, mismatches=1)
            if self.settings.on_corruption == "stop":
                self._report_direct(target, origin, "stopped")
                with self._keeping_failure():
                    raise CorruptionError(
                        f"{described(target, origin)} arrived wrong on {self.device} from another card, and "
                        "--on_corruption stop is set. It was not used; run the doctor"
                    )
            return False
        if not target.is_contiguous():
            target.copy_(arrived)
        nbytes = sent.nbytes
        self.report.crossed("between_cards", origin, nbytes, verified=verify)
        self.report.add(BETWEEN_CARDS, tensors=1, bytes=nbytes, verified_bytes=nbytes if verify else 0)
        return True

    def _report_direct(self, target: Tensor, origin: str, outcome: str) -> None:
        """An incident of the driver's own copy between two cards."""
        row: dict[str, Any] = {"step": self.step, "stage": BETWEEN_CARDS, "tensor": described(target, origin)}
        self.report.incident({**row, "kind": "other", "retry": "through_host", "outcome": outcome})

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except CorruptionError as failure:
            self._failure = self._failure or failure
            raise

    def serves(self, device: torch.device) -> bool:
        """Whether `move_to` moves tensors to this device."""
        return device.type == self.device.type and (device.index or 0) == (self.device.index or 0)

    def move_to(self, device: torch.device, tensor: Tensor, *, name: str, **more: Any) -> Tensor:
        """As `move`, to a given device, which a mover of several devices needs."""
        assert self.serves(device), "the caller has checked that"
        return self.move(tensor, name=name, **more)

    def fetched(self, tensor: Tensor, *, name: str, stage: str) -> AbstractContextManager[Fetched]:
        """The bytes of a device tensor on the host, verified, within the block; see `copies.Fetcher`."""
        self._check_open()
        return self._fetcher.fetched(tensor, name=name, stage=stage)

    def mark(self) -> Any:
        """The current end of the caller's compute stream, for `Fetcher.begin`."""
        return self._backend.mark()

    def another_fetcher(self) -> Fetcher:
        """A fetcher with its own queue and slots, for copies to the host that run concurrently with others."""
        return Fetcher(backend_for(self.device), self._session)

    def layer_buffer(self, nbytes: int) -> LayerBuffer:
        """Device memory for contents that replace each other, which counts as verified because each of them is."""
        buffer = LayerBuffer(nbytes, self._backend, self._sender, self._verifier, self._session)
        if self.settings.verify == "full":
            self._registry.put(buffer.memory, Entry("transferred", STREAMED))
        else:
            self._registry.put(buffer.memory, self._not_verified())
        return buffer

    def begin(self, tree: Any, *, stage: str = "batches") -> Any:
        """Start the transfer of all host tensors of a nested batch, in one copy into one device allocation.

        ``tree``: nested mappings, lists, tuples and dataclasses of tensors and other objects. Returns the same
        structure with device tensors in flight: call `wait_verified` before using them. Tensors that are on the
        device, or moved already, and other objects are returned as they are; what is not from `stage_batch` is
        staged here.
        """
        self._check_open()
        named: dict[int, tuple[str, Tensor]] = {}  # by id: a tensor that occurs twice crosses once
        for name, tensor in named_tensors(tree):
            if not self._is_here(tensor):
                self._check_host(tensor, name)
                named[id(tensor)] = (name, tensor)
        arriving: list[Tensor] = []
        if named:
            batch = self._staged.batch_of(list(named.values()))
            arriving = self._send_batch(batch, stage)
        return with_replaced(tree, named, arriving)

    def _send_batch(self, batch: StagedBatch, stage: str) -> list[Tensor]:
        """Queue the copy of a batch's memory; returns its tensors on the device, in flight."""
        transfer = self._new_transfer(stage, batch.segments(), batch.memory)
        buffer = self._backend.allocate(max(transfer.nbytes, 1), long_lived=False)
        memory = buffer[: transfer.nbytes]
        self._sender.send(transfer, memory, self._verifier.route, attempt=0)
        sent: Digest | None = None
        if transfer.verify:
            transfer.arrived = self._backend.digest(memory)
            sent = transfer.expected
        self._staged.require_equal(batch, sent)  # it may have changed since it was staged
        self._registry.put(buffer, Entry("unverified", "its verification is still pending", transfer))
        return batch.layout.views(buffer)

    def stage_batch(self, tree: Any) -> Any:
        """Copy the host tensors of a nested batch into one memory, for `begin`: the originals may then be written to.

        The copies are compared with the originals unless ``verify`` is ``off``. Tensors on the device, and those
        without plain bytes, are returned as they are.
        """
        named: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named_tensors(tree):
            if tensor.device.type == "cpu" and not not_plain(tensor) and not self._is_here(tensor):
                named[id(tensor)] = (name, tensor)
        copies: list[Tensor] = []
        if named:
            batch = self._staged.stage(list(named.values()))
            copies = batch.layout.views(batch.memory)
        return with_replaced(tree, named, copies)

    def require_unchanged(self, tree: Any) -> None:
        """Check that staged host tensors have not changed; other tensors are ignored."""
        self._staged.require_unchanged(tree_tensors(tree))

    def changed(self, name: str, when: str) -> MemoryFaultError:
        """The error, reported as an incident, for a batch tensor that changed in host memory."""
        return self._staged.changed(name, when)

    def wait_verified(self, tree: Any) -> None:
        """Wait until every transfer of tensors in `tree` is verified, with retries after a mismatch.

        Afterwards the tensors may be used on the caller's current stream. Tensors that are not in flight are ignored.
        """
        for tensor in tree_tensors(tree):
            entry = self._registry.get(tensor)
            if entry is None or entry.transfer is None:
                continue
            transfer = entry.transfer
            if not transfer.is_done and transfer.failure is None:
                self._check_open()
            with transfer.lock:
                if transfer.failure is not None:
                    raise transfer.failure
                if not transfer.is_done:
                    self._finish(transfer, storage_bytes(tensor)[: transfer.nbytes])
                    known = Entry("transferred") if transfer.verify else self._not_verified()
                    entry.provenance = known.provenance
                    entry.reason = known.reason

    def _finish(self, transfer: Transfer, buffer: Tensor) -> None:
        try:
            with self._keeping_failure():
                self._verifier.finish(transfer, buffer)
        except CorruptionError as failure:
            transfer.failure = failure
            raise

    def _new_transfer(self, stage: str, segments: list[Segment], source: Tensor) -> Transfer:
        self._check_open()
        number, verify = self._session.number(stage)
        return Transfer(number, stage, segments, source, verify=verify)

    def _not_verified(self) -> Entry:
        return Entry("unverified", f"moved with --verify {self.settings.verify}, not verified")

    def _check_open(self) -> None:
        # Before any lock is taken: a thread that does not exist here may have held it at the fork.
        if self._process != os.getpid():
            raise UsageError(
                f"this mover was created by process {self._process}, and process {os.getpid()} was forked from it: the "
                "threads and the device of a mover do not survive a fork. Create one mover in each process, after the "
                "fork"
            )
        if self._closed:
            raise RuntimeError("the mover is closed")

    def _is_here(self, tensor: Tensor) -> bool:
        if self.device.type == "cpu":
            return self._registry.get(tensor) is not None
        return tensor.device == self.device

    def _check_host(self, tensor: Tensor, name: str) -> None:
        why = not_plain(tensor)
        if why:
            raise UsageError(f"tensor '{name}' {why}")
        if tensor.device.type != "cpu":
            raise UsageError(f"tensor '{name}' is on {tensor.device}; only host tensors are moved to {self.device}")

    # ---- provenance -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """Training step for incidents."""
        return self._session.step

    @step.setter
    def step(self, value: int | None) -> None:
        self._session.step = value

    def host_source(self, tensor: Tensor) -> Tensor | None:
        """The host tensor from which a batch tensor was copied; kept as long as the device memory. None for views."""
        entry = self._registry.get(tensor)
        if entry is None or entry.transfer is None:
            return None
        start = tensor.storage_offset() * tensor.element_size()
        for segment in entry.transfer.segments:
            same_type = segment.source.dtype == tensor.dtype and segment.source.shape == tensor.shape
            if segment.offset == start and same_type and tensor.is_contiguous():
                return segment.source
        return None

    def verdict_of(self, tensor: Tensor) -> Digest | None:
        """The digest of the whole storage of a verified batch tensor; None if it was not sent as one."""
        entry = self._registry.get(tensor)
        if entry is None or entry.provenance != "transferred":
            return None
        transfer = entry.transfer
        if transfer is None or transfer.nbytes != tensor.untyped_storage().nbytes():
            return None
        return transfer.expected

    def was_verified(self, tensor: Tensor) -> bool:
        """Whether its bytes were verified on arrival, or computed on the device from verified bytes."""
        return self.provenance(tensor) in ("transferred", "derived")

    def is_pending(self, tensor: Tensor) -> bool:
        """Whether it is in flight: nobody has waited for it yet."""
        entry = self._registry.get(tensor)
        return entry is not None and entry.transfer is not None and not entry.transfer.is_done

    def provenance(self, tensor: Tensor) -> str | None:
        """``transferred``, ``derived``, ``unverified`` (also while in flight), or None: unknown to this mover."""
        entry = self._registry.get(tensor)
        return None if entry is None else entry.provenance

    def reason(self, tensor: Tensor) -> str | None:
        """Why a tensor counts as derived or unverified."""
        entry = self._registry.get(tensor)
        return None if entry is None else entry.reason

    def digest_of(self, tensor: Tensor) -> Digest | None:
        """The digest with which a weight arrived or was derived; None for batches, views and unverified tensors."""
        entry = self._registry.get(tensor)
        if entry is None or not _is_whole(tensor):
            return None
        return entry.known_digest()

    def mark_derived(self, tensor: Tensor, reason: str, *, digest: Digest | None = None) -> None:
        """Declare that a device tensor was computed from verified ones (cast, quantised, initialised), and how.

        ``digest``: of the right bytes, if known. Otherwise, and for a part of a storage, the storage is digested now,
        without a wait: call this as soon as it is computed, and again when it is rewritten.
        """
        known = digest if _is_whole(tensor) else None
        self._registry.put(tensor, Entry("derived", reason, digest=known or QueuedDigests([storage_bytes(tensor)])))

    def mark_trained(self, tensor: Tensor, reason: str) -> None:
        """Declare that `tensor`, verified until now, will be changed by training: its digest is no longer known."""
        self._registry.put(tensor, Entry("derived", reason))

    def mark_unverified(self, tensor: Tensor, reason: str) -> None:
        """Declare that `tensor` was moved to the device unverified, with the reason."""
        self._registry.put(tensor, Entry("unverified", reason))

    def inject(self, tensor: Tensor, *, name: str, stage: str, number: int, attempt: int) -> None:
        """Inject the faults that were asked for, if any, into a contiguous tensor that this mover did not send.

        Attempts (from 0) with the same ``number``, the caller's own count, belong together.
        """
        if self._faulty is not None:
            data = as_bytes(tensor.detach())
            whole = Part(name, 0, data.numel(), 0, data.numel())
            # Below 0: not the number of a transfer.
            self._faulty.corrupt_in_place(data, Label(stage, -1 - number, attempt, (whole,)))

    def fault_injection(self) -> dict[str, Any] | None:
        """The fault specification and the number of faults injected so far; None without faults."""
        if self._faulty is None:
            return None
        return {**dataclasses.asdict(self._faulty.spec), "injected": self._faulty.injected}

    # ---- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the copy queue after its last copy. Provenance stays known. Does nothing the second time."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            if self.device.type == "cuda":
                stop_serving(self)
            self._backend.close()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
        self.raise_swallowed(error)

    @property
    def failure(self) -> CorruptionError | None:
        """The first transfer that could not be corrected. Some callers of a copy replace the error that it raised."""
        return self._failure

    def raise_swallowed(self, error: BaseException | None) -> None:
        """Raise the failed transfer from which ``error`` follows: whoever asked for the copy has replaced its error."""
        if self.failure is not None and isinstance(error, Exception) and not isinstance(error, TuneError):
            raise self.failure from error


SAMPLE_ELEMENTS = 64 << 10
"""Elements in each of the three pieces of a cast that are compared."""


def cast_on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype=dtype)


def _sample(tensor: Tensor) -> Tensor:
    """The first, middle and last elements; a small tensor whole."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 3 * SAMPLE_ELEMENTS:
        return flat
    middle = (flat.numel() - SAMPLE_ELEMENTS) // 2
    return torch.cat([flat.narrow(0, start, SAMPLE_ELEMENTS) for start in (0, middle, flat.numel() - SAMPLE_ELEMENTS)])


def _same(result: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bytes, or differ only in the bits of their NaNs."""
    return digest(result) == digest(expected) or digest(_plain_nan(result)) == digest(_plain_nan(expected))


def _plain_nan(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor.isnan(), float("nan")) if tensor.is_floating_point() else tensor


def _as_copied(source: Tensor, target: Tensor) -> Tensor:
    """A source as ``target.copy_(source)`` takes it: of the target's dtype, cast where it is, and of its shape."""
    sent = source.detach()
    if sent.dtype != target.dtype:
        sent = sent.to(target.dtype)
    return sent.expand(target.shape)


_DIRECT_FAILURES = 3  # copies between two cards that arrived wrong, after which all go through the host


def described(tensor: Tensor, origin: str) -> str:
    """Shape and dtype of a tensor without a name, and who asked for its copy."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} of {origin}"


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def was_verified(tensor: Tensor) -> bool:
    """Whether any mover of this process has verified `tensor`."""
    return any(mover.was_verified(tensor) for mover in list(_live))
