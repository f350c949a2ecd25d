"""Averages of one bucket of gradients over the ranks: by the process group, or staged through the host over gloo.

Through the host each bucket is copied to the host (verified), averaged over gloo, and copied back by the mover
(verified), in a thread beside backward: bit-identical to DistributedDataParallel over gloo, which copies unverified. A
rank with an error still takes part in every collective; `gradients.GradientCheck` reads the error before anything is
used.
"""

from __future__ import annotations

import threading
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

from hf_rocm_tune.cards.preflight import GradSync
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.host_group import averages_group
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.to_host import Fetched, Fetcher

Compression = Literal["none", "fp16", "bf16", "powersgd"]
GradBucket = Any
"""``torch.distributed.GradBucket``, which torch's annotations do not declare."""

STAGE = "buckets"


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    method: GradSync = "ddp"  # by the process group; ``host``: through the host, verified in both directions
    # ``fp16`` and ``bf16`` cast wider gradients; ``powersgd`` approximates them at rank 1, for ``ddp`` only
    compression: Compression = "none"
    powersgd_after: int = 100  # steps with plain averages before PowerSGD begins, at least 2

    def __post_init__(self) -> None:
        if self.method == "host" and self.compression == "powersgd":
            raise UsageError(
                "--grad_compression powersgd does not go with --grad_sync host: choose fp16 or bf16, or --grad_sync ddp"
            )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        chosen = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.compression, dtype)
        return chosen if chosen.itemsize < dtype.itemsize else dtype


class GroupAveraging:
    """Averages by the process group (RCCL, NCCL or gloo) with torch's own hooks, which raise their errors."""

    def __init__(self, model: DistributedDataParallel, settings: SyncSettings) -> None:
        self._settings = settings
        self._group = model.process_group
        self.between: int | None = 0  # bytes given to collectives; None: unknown
        self._powersgd: PowerSGDState | None = None
        if settings.compression == "powersgd":
            self._powersgd = PowerSGDState(self._group, start_powerSGD_iter=settings.powersgd_after)
            self.between = None
        # PowerSGD waits for further collectives in callbacks of gloo's threads: with several buckets in progress, all
        # of gloo's threads would wait for one another.
        self._one_by_one = self._powersgd is not None and dist.get_backend(self._group) != "nccl"

    def start(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._powersgd is not None:
            average = powerSGD_hook(self._powersgd, bucket)
            if self._one_by_one:
                average.wait()
            return average
        buffer = bucket.buffer()
        wire = self._settings.wire_dtype(buffer.dtype)
        assert self.between is not None
        self.between += buffer.numel() * wire.itemsize
        if wire == buffer.dtype:
            return default_hooks.allreduce_hook(self._group, bucket)
        hooks = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
        return hooks[wire](self._group, bucket)

    def forget(self, index: int) -> None:
        """The bucket was averaged again in another way."""
        if self._powersgd is not None:
            self._powersgd.error_dict.pop(index, None)


class HostAveraging:
    """Averages on the host; see the module's description. The constructor is collective."""

    def __init__(self, mover: Mover, settings: SyncSettings) -> None:
        self._mover = mover
        self._settings = settings
        averages_group()  # created here, on every rank, not in the middle of a step
        self._fetcher: Fetcher | None = None
        self._worker: _Worker | None = None
        self.failures: dict[int, str] = {}  # of this step on this rank, by the number of the bucket
        self._error: BaseException | None = None
        self.between = 0  # bytes given to collectives
        self.crossed = 0  # bytes copied to the host and back

    def step_begins(self) -> None:
        self.failures.clear()
        self._error = None

    def check(self) -> None:
        """Called after backward, before averages are used."""
        if self._error is not None:
            raise self._error

    def begin(self, local: Tensor, *, name: str, number: int) -> torch.futures.Future[Tensor]:
        """Begin to average gradients. Collective; all ranks call this for the same buckets in the same order."""
        if self._fetcher is None or self._worker is None:
            self._fetcher = self._mover.another_fetcher()
            self._worker = _Worker(local.device)
        landed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[local.device] if local.is_cuda else None)
        fetched = self._fetcher.begin(local, name=f"{name} to host", stage=STAGE)
        self._worker.tasks.put(partial(self._average, local, fetched, name, number, landed))
        return landed

    def _average(
        self, local: Tensor, fetched: Fetched, name: str, number: int, landed: torch.futures.Future[Tensor]
    ) -> None:
        """In the thread: verify what has arrived, average it, and copy the average to the device."""
        average = local
        host = fetched.host
        wire = self._settings.wire_dtype(host.dtype)
        try:
            group = averages_group()
            try:
                summed = self._to_be_summed(fetched, number, wire, group.size())
            except BaseException as error:  # `check` raises it where it can end the run
                self._error = self._error or error
                # This rank still takes part, with whatever these bytes are: the other ranks would add its next average
                # to this one. No memory is needed for it.
                summed = host.flatten().view(torch.uint8)[: host.numel() * wire.itemsize].view(wire)
            self.between += summed.nbytes
            self.crossed += host.nbytes + summed.nbytes
            dist.all_reduce(summed, group=group)
            if number not in self.failures and self._error is None:
                average = self._mover.move(summed, name=f"{name} to device", stage=STAGE).to(local.dtype)
        except CorruptionError:  # the mover has reported the incident
            self.failures[number] = f"the average could not be copied back to {self._mover.device}"
        except BaseException as error:  # likewise: this thread must continue
            self._error = self._error or error
        fetched.release()
        landed.set_result(average)

    def _to_be_summed(self, fetched: Fetched, number: int, wire: torch.dtype, ranks: int) -> Tensor:
        """This rank's summand, of dtype ``wire``. A bucket that arrived wrong is a failure, and is summed as it is."""
        try:
            fetched.wait_verified()
        except CorruptionError as failure:
            self.failures[number] = str(failure)
        return fetched.host.to(wire).div_(ranks)


class _Worker:
    """A thread that runs tasks in order. It ends with this object, and does not keep the interpreter alive."""

    def __init__(self, device: torch.device) -> None:
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self.tasks, device), name="gradients-average", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self.tasks, thread)


def _end(tasks: SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)  # a thread that runs during shutdown can abort the process; one that hangs is abandoned


def _work(tasks: SimpleQueue[Callable[[], None] | None], device: torch.device) -> None:
    on_card = device.type == "cuda"
    if on_card:
        torch.cuda.set_device(device)  # a new thread's device is card 0, where it would create a context
    with torch.cuda.stream(torch.cuda.Stream(device=device)) if on_card else nullcontext():
        while True:
            task = tasks.get()
            if task is None:
                return
            task()
            del task  # it refers to gradients
