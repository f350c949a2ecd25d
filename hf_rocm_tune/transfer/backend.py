"""What the transfer engine needs of a device, and the plain-CPU version of it.

A backend is one queue ("stream") of copies and digests that run in order beside the caller. Faults are put in here
(`hf_rocm_tune.transfer.faults`), so everything above runs the same with and without them.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest import Digest, digest


@dataclass(frozen=True)
class Part:
    """Bytes [begin, end) of a copy hold the bytes from `offset` on of tensor `name`, which has `nbytes` in all."""

    name: str
    begin: int
    end: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Label:
    """What a copy carries: `transfer` numbers the transfer, `attempt` counts its tries from 0."""

    stage: str
    transfer: int
    attempt: int
    parts: tuple[Part, ...]


class Ticket(Protocol):
    """A copy that was queued."""

    def done(self) -> bool:
        """Whether the copy has ended, well or not."""

    def join(self) -> None:
        """Wait until the copy has ended, well or not: its source may be rewritten then."""

    def wait(self) -> None:
        """Wait, and raise what the copy raised."""


class PendingDigest(Protocol):
    """A digest that was queued."""

    def result(self) -> Digest:
        """Wait for it."""


class Backend(Protocol):
    """One device and its copy queue. All of it may be called from several threads."""

    device: torch.device
    staging_grows: bool
    """Whether staging memory is cheap to allocate, so that slots start small and grow."""
    default_slot_bytes: int

    def staging(self, nbytes: int) -> Tensor:
        """Host memory to copy from, uint8[nbytes], page-locked where the device wants that."""

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        """Device memory, uint8[nbytes]. Long-lived memory (weights) is allocated for the caller's compute stream."""

    def follow(self, source: Tensor) -> None:
        """Let the queue wait for what the caller's compute stream has queued, before it reads device bytes `source`.

        The caller keeps `source` until the queue has read it.
        """

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        """Queue a copy of host bytes to device bytes, or back. `source` stays unchanged until the ticket is done."""

    def fill(self, target: Tensor, value: int) -> None:
        """Queue the filling of device bytes."""

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        """Queue a digest of device bytes, read by the processor that computes with them."""

    def read_back(self, target: Tensor) -> Tensor:
        """Device bytes as new host bytes, after everything queued; waits."""

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        """Make the caller's compute stream wait for the copy, and keep the memory until that stream is done with it."""

    def close(self) -> None:
        """End the queue. Does nothing the second time."""


class HostBackend:
    """Plain CPU: the "device" is other host memory, and a worker thread is the copy engine.

    The same code runs above it as above an accelerator, and the waits are real: a copy ends some time after it was
    queued. The worker ends with `close` or with the interpreter.
    """

    staging_grows = True
    default_slot_bytes = 8 << 20

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer")

    def staging(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def allocate(self, nbytes: int, *, long_lived: bool) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def follow(self, source: Tensor) -> None:
        """What the caller computes is done when it returns."""

    def copy(self, target: Tensor, source: Tensor, label: Label, *, blocking: bool = False) -> Ticket:
        ticket = _HostTicket(self._queue.submit(self._copy_now, target, source))
        if blocking:
            ticket.wait()
        return ticket

    def _copy_now(self, target: Tensor, source: Tensor) -> None:
        # Not torch's copy: above a few KiB it opens an OpenMP region, and the threads that this leaves behind for the
        # worker make libgomp see more threads than cores, whereupon it throttles those of the training thread.
        assert target.is_contiguous() and source.is_contiguous() and target.numel() == source.numel()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def fill(self, target: Tensor, value: int) -> None:
        self._queue.submit(ctypes.memset, target.data_ptr(), value, target.numel())

    def digest(self, target: Tensor, word_offset: int = 0) -> PendingDigest:
        return self._queue.submit(digest, target, word_offset=word_offset)

    def read_back(self, target: Tensor) -> Tensor:
        return self._queue.submit(target.clone).result()

    def hand_out(self, buffer: Tensor, ticket: Ticket) -> None:
        ticket.wait()

    def close(self) -> None:
        self._queue.shutdown(wait=True)


class _HostTicket:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def join(self) -> None:
        wait([self._future])

    def wait(self) -> None:
        self._future.result()
