"""Averages of one bucket of gradients over the ranks: by the process group, or staged through the host over gloo.

The path through the host does not use the link between cards. Each bucket is copied to the host in pieces of at most a
page-locked slot (verified), averaged over gloo, and copied back by the mover (verified). Two threads do this during
backward: one verifies what has arrived and starts the collectives, in the order of the buckets, which is the same on
all ranks; the other waits for them and copies the averages back. At most as many pieces as slots are in progress.

A rank with an error still takes part in every collective, returns its own gradients instead of the average, and records
the error (`failure`, `check`), which `gradients.GradientCheck` reads before anything is used.

Two ranks get bit-identical results to DistributedDataParallel over gloo: the same division and the same sum, in the
same dtype. With more ranks the order of a sum may differ if a bucket is larger than a slot. Cost: page-locked memory of
the slots, host memory for casts, and device memory for the averages only.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.copies import Fetched, Fetcher
from hf_rocm_tune.transfer.host_group import averages_group

Way = Literal["ddp", "host"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]
GradBucket = Any
"""``torch.distributed.GradBucket``, which torch's annotations do not declare."""

STAGE = "buckets"
_WAYS = ("ddp", "host")
_COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How gradients are averaged.

    Attributes:
        way: ``ddp``: by the process group, as DistributedDataParallel does; ``host``: each bucket is copied to the
            host, averaged there over gloo, and copied back, verified in both directions.
        compression: what is sent between the ranks: ``fp16`` and ``bf16`` cast wider gradients (16-bit ones stay as
            they are); ``powersgd`` is an approximation of rank 1 with error feedback, for ``ddp`` only.
        powersgd_after: steps with plain averages before PowerSGD begins, at least 2.

    Raises:
        UsageError: a value is not valid, or PowerSGD is combined with ``host``.
    """

    way: Way = "ddp"
    compression: Compression = "none"
    powersgd_after: int = 100

    def __post_init__(self) -> None:
        if self.way not in _WAYS:
            raise UsageError(f"grad_sync is '{self.way}'; choose one of {', '.join(_WAYS)}")
        if self.compression not in _COMPRESSIONS:
            raise UsageError(f"grad_compression is '{self.compression}'; choose one of {', '.join(_COMPRESSIONS)}")
        if self.way == "host" and self.compression == "powersgd":
            raise UsageError(
                "--grad_compression powersgd does not go with --grad_sync host: choose fp16 or bf16, or --grad_sync ddp"
            )
        if self.powersgd_after < 2:
            raise UsageError(f"powersgd_after is {self.powersgd_after}; give a whole number of at least 2")

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` are sent and summed."""
        chosen = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.compression, dtype)
        return chosen if chosen.itemsize < dtype.itemsize else dtype


class GroupAveraging:
    """Averages by the process group (RCCL, NCCL or gloo) with torch's own communication hooks.

    Attributes:
        keeps_buckets: whether the memory of a bucket still holds the local gradients after backward.
    """

    keeps_buckets = False

    def __init__(self, model: DistributedDataParallel, settings: SyncSettings) -> None:
        self._group, self._settings = model.process_group, settings
        self._powersgd = (
            PowerSGDState(self._group, start_powerSGD_iter=settings.powersgd_after)
            if settings.compression == "powersgd"
            else None
        )
        # PowerSGD waits for further collectives in callbacks of gloo's threads: with several buckets in progress, all
        # of gloo's threads would wait for one another.
        self._one_by_one = self._powersgd is not None and dist.get_backend(self._group) != "nccl"
        self._bytes = 0

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients are summed; None if the result only approximates their average."""
        return None if self._powersgd is not None else self._settings.wire_dtype(dtype)

    def step_begins(self) -> None:
        """Called before the first bucket of a backward pass."""

    def start(self, bucket: GradBucket, *, number: int) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket; ``number`` counts the buckets of the run. Returns a future of the average."""
        if self._powersgd is not None:
            average = powerSGD_hook(self._powersgd, bucket)
            if self._one_by_one:
                average.wait()
            return average
        buffer = bucket.buffer()
        wire = self._settings.wire_dtype(buffer.dtype)
        self._bytes += buffer.numel() * wire.itemsize
        if wire == buffer.dtype:
            return default_hooks.allreduce_hook(self._group, bucket)
        hooks = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
        return hooks[wire](self._group, bucket)

    def failure(self, number: int) -> str | None:
        """None: the process group raises its errors itself."""
        return None

    def check(self) -> None:
        """Nothing to check: the hooks raise their errors themselves."""

    def forget(self, index: int) -> None:
        """Drop PowerSGD's error feedback of a bucket that was averaged again in another way."""
        if self._powersgd is not None:
            self._powersgd.error_dict.pop(index, None)

    def facts(self) -> dict[str, Any]:
        """As `HostAveraging.facts`; None for unknown values."""
        unknown = self._powersgd is not None
        return {"bytes_between_ranks": None if unknown else self._bytes, "bytes_crossed": 0, "wait_seconds": None}


@dataclass(kw_only=True, eq=False)
class _Average:
    """One bucket in progress: its gradients on the device, the dtype of the sum, the result so far."""

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
    """Elements ``start`` to ``stop`` of a bucket."""

    average: _Average
    start: int
    stop: int
    name: str
    fetched: Fetched
    summed: Tensor | None = None
    work: Any = None


class HostAveraging:
    """Averages on the host; see the module's description. The constructor is collective."""

    keeps_buckets = True

    def __init__(self, mover: Mover, settings: SyncSettings) -> None:
        self._mover, self._settings = mover, settings
        averages_group()  # created here, on every rank, not in the middle of a step
        self._fetcher: Fetcher | None = None
        self._lanes: tuple[_Lane, ...] | None = None
        self._stream: Any = None
        self._failures: dict[int, str] = {}
        self._error: BaseException | None = None
        self._bytes = self._bytes_crossed = 0
        self._wait_seconds = 0.0

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients are summed."""
        return self._settings.wire_dtype(dtype)

    def step_begins(self) -> None:
        """Called before the first bucket of a backward pass."""
        self._failures.clear()
        self._error = None

    def start(self, bucket: GradBucket, *, number: int) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket; see `begin`."""
        return self.begin(bucket.buffer(), name=f"bucket {bucket.index()}", number=number, is_last=bucket.is_last())

    def failure(self, number: int) -> str | None:
        """The error of a bucket of this step on this rank, after backward; None without one."""
        return self._failures.get(number)

    def check(self) -> None:
        """Called after backward, before averages are used."""
        if self._error is not None:
            raise self._error

    def forget(self, index: int) -> None:
        """Nothing is kept from one step to the next."""

    def facts(self) -> dict[str, Any]:
        """For the report, on this rank: ``bytes_between_ranks``: given to collectives; ``bytes_crossed``: copied to the
        host and back; ``wait_seconds``: from the start of the last bucket until the last average was on the device.
        """
        return {
            "bytes_between_ranks": self._bytes,
            "bytes_crossed": self._bytes_crossed,
            "wait_seconds": round(self._wait_seconds, 6),
        }

    def begin(self, local: Tensor, *, name: str, number: int, is_last: bool) -> torch.futures.Future[Tensor]:
        """Begin to average gradients. Collective; all ranks call this for the same buckets in the same order.

        Returns:
            Future of the average, of the dtype of ``local`` and on its device. After an error (see `failure` and
            `check`) its value is undefined, but the other ranks are not kept waiting.
        """
        if self._lanes is None or self._fetcher is None:
            self._fetcher = self._mover.another_fetcher()
            self._stream = torch.cuda.Stream(device=local.device) if local.is_cuda else None
            self._lanes = _Lane("gradients-average", local.device), _Lane("gradients-return", local.device)
        step = self._fetcher.slot_bytes // _ALIGNMENT * _ALIGNMENT // local.element_size()
        starts = range(0, local.numel(), step)
        average = _Average(
            local=local,
            name=name,
            number=number,
            wire=self._settings.wire_dtype(local.dtype),
            pieces_left=len(starts),
            begun=time.perf_counter(),
            is_last=is_last,
            landed=torch.futures.Future(devices=[local.device] if local.is_cuda else None),
        )
        for start in starts:
            stop = min(start + step, local.numel())
            part = name if len(starts) == 1 else f"{name} from {start}"
            fetched = self._fetcher.begin(local[start:stop], name=f"{part} to host", stage=STAGE)
            piece = _Piece(average=average, start=start, stop=stop, name=part, fetched=fetched)
            self._lanes[0].put(partial(self._average_piece, piece))
        return average.landed

    def _average_piece(self, piece: _Piece) -> None:
        """In the first thread: verify what has arrived, and start its average."""
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
        except BaseException as error:  # `check` raises it where it can end the run: this thread must continue
            self._error = self._error or error
        assert self._lanes is not None
        self._lanes[1].put(partial(self._return_piece, piece))

    def _return_piece(self, piece: _Piece) -> None:
        """In the second thread: wait for the average, and copy it to the device."""
        average = piece.average
        try:
            if piece.work is not None:
                piece.work.wait()
            if self._error is None:
                with self._own_stream():
                    self._copy_back(piece)
        except CorruptionError:  # the mover has reported the incident
            text = f"the average could not be copied back to {self._mover.device}"
            self._failures.setdefault(average.number, text)
        except BaseException as error:  # as above
            self._error = self._error or error
        piece.fetched.release()
        average.pieces_left -= 1
        if not average.pieces_left:
            if average.is_last:
                self._wait_seconds += time.perf_counter() - average.begun
            failed = average.number in self._failures or self._error is not None
            with self._own_stream():
                average.landed.set_result(average.local if average.result is None or failed else average.result)

    def _copy_back(self, piece: _Piece) -> None:
        average = piece.average
        assert piece.summed is not None
        moved = self._mover.move(piece.summed, name=f"{piece.name} to device", stage=STAGE).to(average.local.dtype)
        if moved.numel() == average.local.numel():
            average.result = moved
            return
        if average.result is None:
            average.result = torch.empty_like(average.local)
        average.result[piece.start : piece.stop] = moved

    def _own_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Lane:
    """A thread that runs tasks in order. It ends with this object, and does not keep the interpreter alive."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._tasks, device), name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._tasks, thread)

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task."""
        self._tasks.put(task)


def _end(tasks: SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)  # a thread that runs during shutdown can abort the process; one that hangs is abandoned


def _work(tasks: SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread's device is card 0, where it would create a context
    while (task := tasks.get()) is not None:
        task()
        del task  # it refers to gradients
