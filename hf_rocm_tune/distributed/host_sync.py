"""Gradients averaged on the host: nothing of them runs over the path between cards.

Each bucket is brought to the host in pieces as large as a page-locked slot (`transfer.fetch`, verified), averaged over
gloo, and brought back through the mover (verified). Two threads do it while backward goes on: one proves what has come
and begins the collectives, in the order of the buckets, which is the same on all ranks; the other waits for them and
brings the averages back. As many pieces as there are slots are under way at once.

A rank on which something goes wrong takes part in every collective all the same, gives its own gradients in place of
the average, and says so (`HostAveraging.failure`, `HostAveraging.check`): `gradients.GradientCheck` asks before
anything is used.

Two ranks get bit for bit what DistributedDataParallel gives over gloo: the same division and the same sum, in the same
dtype. From three ranks on the order of a sum may differ where a bucket is larger than a slot.

Cost: page-locked memory of the slots, host memory in the size of what is cast, nothing on the device but the averages.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm_tune.distributed.averaging import GradBucket, wire_dtype
from hf_rocm_tune.distributed.sync_settings import SyncSettings
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.fetch import Fetched, Fetcher
from hf_rocm_tune.transfer.host_group import averages_group

STAGE = "buckets"
_LANES = ("gradients-average", "gradients-return")
_ALIGNMENT = 256


@dataclass(kw_only=True, eq=False)
class _Average:
    """One bucket on its way.

    Attributes:
        local: its gradients, 1-dimensional, on the device.
        name: for incidents and for the patterns of injected faults.
        number: see `HostAveraging.begin`.
        wire: dtype in which it is added up.
        pieces_left: that have not come back.
        landed: gets the average.
        result: the average as far as it has come back.
    """

    local: Tensor
    name: str
    number: int
    wire: torch.dtype
    pieces_left: int
    begun: float
    is_last: bool
    landed: torch.futures.Future[Tensor]
    result: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class _Piece:
    """Elements `start` to `stop` of a bucket."""

    average: _Average
    start: int
    stop: int
    name: str
    fetched: Fetched
    summed: Tensor = field(default_factory=lambda: torch.empty(0))
    work: Any = None


class HostAveraging:
    """See the module's description. Made on every rank at the same time.

    Args:
        mover: brings averages to the device; its device, settings, report and injected faults count.
        settings: the compression counts.
    """

    keeps_buckets = True

    def __init__(self, mover: Mover, settings: SyncSettings) -> None:
        self._mover, self._settings = mover, settings
        averages_group()  # made here, on every rank: not in the middle of a step
        self._fetcher: Fetcher | None = None
        self._lanes: tuple[_Lane, ...] | None = None
        self._stream: Any = None
        self._failures: dict[int, str] = {}
        self._error: BaseException | None = None
        self._bytes = self._bytes_crossed = 0
        self._wait_seconds = 0.0

    # ---- what `Averaging` asks for ------------------------------------------------------------------------------

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """See `Averaging`."""
        return wire_dtype(self._settings, dtype)

    def step_begins(self) -> None:
        """See `Averaging`."""
        self._failures.clear()
        self._error = None

    def start(self, bucket: GradBucket, *, number: int) -> torch.futures.Future[Tensor]:
        """See `Averaging`."""
        return self.begin(bucket.buffer(), name=f"bucket {bucket.index()}", number=number, is_last=bucket.is_last())

    def failure(self, number: int) -> str | None:
        """See `Averaging`."""
        return self._failures.get(number)

    def check(self) -> None:
        """See `Averaging`."""
        if self._error is not None:
            raise self._error

    def forget(self, index: int) -> None:
        """See `Averaging`: nothing is kept from one step to the next."""

    def facts(self) -> dict[str, Any]:
        """See `Averaging`."""
        return {
            "bytes_between_ranks": self._bytes,
            "bytes_crossed": self._bytes_crossed,
            "wait_seconds": round(self._wait_seconds, 6),
        }

    # ---- one bucket ---------------------------------------------------------------------------------------------

    def begin(self, local: Tensor, *, name: str, number: int, is_last: bool) -> torch.futures.Future[Tensor]:
        """Begin to average gradients. Collective; all ranks begin the same in the same order.

        Args:
            local: 1-dimensional and contiguous, on the mover's device; must not change until the average is there.
            name: for incidents and for the patterns of injected faults.
            number: counts the buckets of the run, alike on all ranks.
            is_last: whether no other follows in this backward.

        Returns:
            Future of the average, of the dtype of `local` and on its device; see `Averaging.start`.
        """
        if self._lanes is None or self._fetcher is None:
            self._fetcher = self._mover.another_fetcher()
            self._stream = torch.cuda.Stream(device=local.device) if local.is_cuda else None
            self._lanes = tuple(_Lane(name, local.device) for name in _LANES)
        step = self._fetcher.slot_bytes // _ALIGNMENT * _ALIGNMENT // local.element_size()
        starts = range(0, local.numel(), step)
        average = _Average(
            local=local,
            name=name,
            number=number,
            wire=wire_dtype(self._settings, local.dtype),
            pieces_left=len(starts),
            begun=time.perf_counter(),
            is_last=is_last,
            landed=torch.futures.Future(devices=[local.device] if local.is_cuda else None),
        )
        for start in starts:
            stop = min(start + step, local.numel())
            part = name if len(starts) == 1 else f"{name} from {start}"
            fetched = self._fetcher.begin(local[start:stop], self._mover.errand(f"{part} to host", STAGE))
            piece = _Piece(average=average, start=start, stop=stop, name=part, fetched=fetched)
            self._lanes[0].put(partial(self._average_piece, piece))
        return average.landed

    def _average_piece(self, piece: _Piece) -> None:
        """In the first lane: prove what has come, and begin its average."""
        average = piece.average
        try:
            try:
                piece.fetched.settle()
            except CorruptionError as failure:
                self._failures.setdefault(average.number, str(failure))
            group = averages_group()
            host = piece.fetched.host
            piece.summed = (host if host.dtype == average.wire else host.to(average.wire)).div_(group.size())
            self._bytes += piece.summed.nbytes
            self._bytes_crossed += host.nbytes + piece.summed.nbytes
            piece.work = dist.all_reduce(piece.summed, group=group, async_op=True)
        except BaseException as error:  # `check` raises it where it can end the run: this thread must go on
            self._error = self._error or error
        assert self._lanes is not None
        self._lanes[1].put(partial(self._return_piece, piece))

    def _return_piece(self, piece: _Piece) -> None:
        """In the second lane: wait for the average, and bring it to the device."""
        average = piece.average
        try:
            if piece.work is not None:
                piece.work.wait()
            if self._error is None:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    self._bring_back(piece)
        except CorruptionError:  # the mover has made an incident of it, with all that it found
            text = f"the average could not be brought back to {self._mover.device}"
            self._failures.setdefault(average.number, text)
        except BaseException as error:  # as above
            self._error = self._error or error
        piece.fetched.release()
        average.pieces_left -= 1
        if not average.pieces_left:
            self._land(average)

    def _bring_back(self, piece: _Piece) -> None:
        average = piece.average
        moved = self._mover.move(piece.summed, name=f"{piece.name} to device", stage=STAGE).to(average.local.dtype)
        if moved.numel() == average.local.numel():
            average.result = moved
            return
        if average.result is None:
            average.result = torch.empty_like(average.local)
        average.result[piece.start : piece.stop] = moved

    def _land(self, average: _Average) -> None:
        if average.is_last:
            self._wait_seconds += time.perf_counter() - average.begun
        failed = average.number in self._failures or self._error is not None
        result = average.local if average.result is None or failed else average.result
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            average.landed.set_result(result)


class _Lane:
    """A thread that does one thing after the other. It ends with the object, and does not keep the interpreter."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._tasks, device), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def put(self, task: Callable[[], None]) -> None:
        """Have it done after all others."""
        self._tasks.put(task)


def _work(tasks: SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread is on card 0, and would make a context there
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds gradients
