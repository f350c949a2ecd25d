"""How one bucket of gradients is averaged, and the way that leaves it to the process group.

The other way, through the host, is in `host_sync`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.distributed.sync_settings import SyncSettings

GradBucket = Any
"""``torch.distributed.GradBucket``: it is there; torch's annotations do not say so."""


class Averaging(Protocol):
    """A way of averaging buckets. All ranks begin the same buckets in the same order."""

    keeps_buckets: bool
    """Whether the memory of a bucket still holds the local gradients after backward."""

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """In what dtype gradients of `dtype` are added up; None where the result is not their average but near it."""

    def step_begins(self) -> None:
        """The first bucket of a backward is about to come."""

    def start(self, bucket: GradBucket, *, number: int) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket; `number` counts the buckets of the run. The future gives its average.

        It may give anything where `failure` or `check` says so; the other ranks are not kept waiting.
        """

    def failure(self, number: int) -> str | None:
        """What went wrong with a bucket of this step on this rank; None for nothing. Asked after backward."""

    def check(self) -> None:
        """Asked after backward, before averages are used.

        Raises:
            torch.OutOfMemoryError: this rank found no memory for an average of this step.
            BaseException: what else went wrong beside the training loop, a lost connection for one.
        """

    def forget(self, index: int) -> None:
        """The average of this bucket (its index in DistributedDataParallel) was made again in another way."""

    def facts(self) -> dict[str, Any]:
        """For the report, of this rank: ``bytes_between_ranks``, what it gave to collectives; ``bytes_crossed``, what
        came to the host and went back; ``wait_seconds``, from the last bucket's coming until the last average was on
        the device. None for what is not known.
        """


class GroupAveraging:
    """The process group averages: RCCL, NCCL or gloo, by torch's own communication hooks.

    Args:
        model: wrapped; its process group averages.
        settings: the compression counts.
    """

    keeps_buckets = False

    def __init__(self, model: DistributedDataParallel, settings: SyncSettings) -> None:
        self._group, self._settings = model.process_group, settings
        self._powersgd = (
            PowerSGDState(self._group, start_powerSGD_iter=settings.powersgd_after)
            if settings.compression == "powersgd"
            else None
        )
        # PowerSGD waits for further collectives in what gloo's threads call back: with several buckets under way, all
        # of gloo's threads would wait for one another.
        self._one_by_one = self._powersgd is not None and dist.get_backend(self._group) != "nccl"
        self._bytes = 0

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """See `Averaging`."""
        return None if self._powersgd is not None else wire_dtype(self._settings, dtype)

    def step_begins(self) -> None:
        """See `Averaging`."""

    def start(self, bucket: GradBucket, *, number: int) -> torch.futures.Future[Tensor]:
        """See `Averaging`."""
        if self._powersgd is not None:
            average = powerSGD_hook(self._powersgd, bucket)
            if self._one_by_one:
                average.wait()
            return average
        buffer = bucket.buffer()
        wire = wire_dtype(self._settings, buffer.dtype)
        self._bytes += buffer.numel() * wire.itemsize
        if wire == buffer.dtype:
            return default_hooks.allreduce_hook(self._group, bucket)
        hooks = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
        return hooks[wire](self._group, bucket)

    def failure(self, number: int) -> str | None:
        """See `Averaging`: whatever goes wrong is the process group's to say."""
        return None

    def check(self) -> None:
        """See `Averaging`: the hooks themselves raise."""

    def forget(self, index: int) -> None:
        """See `Averaging`: what PowerSGD has left out of this average is not owed any more."""
        if self._powersgd is not None:
            self._powersgd.error_dict.pop(index, None)

    def facts(self) -> dict[str, Any]:
        """See `Averaging`. PowerSGD's bytes are not counted; the process group does not say how long it took."""
        unknown = self._powersgd is not None
        return {"bytes_between_ranks": None if unknown else self._bytes, "bytes_crossed": 0, "wait_seconds": None}


def wire_dtype(settings: SyncSettings, dtype: torch.dtype) -> torch.dtype:
    """In what dtype gradients of `dtype` travel and are added up."""
    casts = {"fp16": torch.float16, "bf16": torch.bfloat16}
    chosen = casts.get(settings.compression, dtype)
    return chosen if chosen.itemsize < dtype.itemsize else dtype
