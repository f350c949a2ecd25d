"""Collectives of tensors on simulated cards: gloo's, on host copies of them.

It stands in for RCCL, and for gloo's own staging of CUDA tensors; a CPU build of torch has neither. Unlike theirs, a
collective of cards' tensors has ended when its call returns. Tensors on the host are gloo's own business; RCCL refuses
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Work, _create_work_from_future


def install() -> None:
    """What asks for ``nccl`` or ``gloo`` gets this."""
    torch.cuda.nccl.version = lambda: (0, 0, 0)
    dist.distributed_c10d._NCCL_AVAILABLE = True
    dist.distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    dist.distributed_c10d.ProcessGroupNCCL = Rccl
    dist.distributed_c10d.ProcessGroupGloo = Gloo


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)


def _on_host(tree: Any, copies: dict[int, Tensor], *, read: bool) -> Any:
    """The same with host tensors, which are noted by the identity of what they are for."""
    if isinstance(tree, (list, tuple)):
        return [_on_host(each, copies, read=read) for each in tree]
    if not isinstance(tree, Tensor):
        return tree
    if tree.device.type == "cpu":
        raise RuntimeError("No backend type associated with device type cpu")
    copies[id(tree)] = tree.detach().cpu() if read else torch.empty_like(tree, device="cpu")
    return copies[id(tree)]


class _Group(dist.ProcessGroup):
    """A process group whose tensors may be on simulated cards."""

    takes_host_tensors: bool

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.inner = ProcessGroupGloo(PrefixStore("staged", store), rank, size, timeout=timeout)
        self.options = self.inner.options

    def _staged(self, name: str, reads: bool, written: Any, *rest: Any, **options: Any) -> Work:
        """One of gloo's collectives; `reads`: it reads what it writes."""
        operation = getattr(self.inner, name)
        if self.takes_host_tensors and not any(tensor.is_cuda for tensor in _tensors((written, rest))):
            return operation(written, *rest, **options)
        copies: dict[int, Tensor] = {}
        inputs = _on_host(rest, copies, read=True)
        operation(_on_host(written, copies, read=reads), *inputs, **options).wait()
        devices = set()
        for tensor in _tensors(written):
            tensor.detach().copy_(copies[id(tensor)])
            devices.add(tensor.device)
        future: Any = torch.futures.Future(devices=list(devices))
        future.set_result(written)
        return _create_work_from_future(future)

    allreduce = partialmethod(_staged, "allreduce", True)
    allreduce_coalesced = partialmethod(_staged, "allreduce_coalesced", True)
    broadcast = partialmethod(_staged, "broadcast", True)
    reduce = partialmethod(_staged, "reduce", True)
    send = partialmethod(_staged, "send", True)
    recv = partialmethod(_staged, "recv", False)
    allgather = partialmethod(_staged, "allgather", False)
    _allgather_base = all_gather_single = partialmethod(_staged, "_allgather_base", False)
    reduce_scatter = partialmethod(_staged, "reduce_scatter", False)
    _reduce_scatter_base = reduce_scatter_single = partialmethod(_staged, "_reduce_scatter_base", False)
    gather = partialmethod(_staged, "gather", False)
    scatter = partialmethod(_staged, "scatter", False)

    def barrier(self, opts: Any = None) -> Work:
        """Of the hosts."""
        return self.inner.barrier()

    def _set_sequence_number_for_group(self) -> None:
        self.inner._set_sequence_number_for_group()


class Gloo(_Group):
    """Gloo, as in a build of torch that has cards."""

    takes_host_tensors = True
    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.inner)

    def getBackendName(self) -> str:
        """DistributedDataParallel asks."""
        return "gloo"


class Rccl(_Group):
    """RCCL.

    Args:
        store, rank, size: as for any.
        options: torch fills them.
    """

    takes_host_tensors = False
    _device_types = (torch.device("cuda"),)
    _name = ""

    class Options:
        """What torch sets."""

        _timeout: timedelta

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)

    def getBackendName(self) -> str:
        """DistributedDataParallel asks."""
        return "nccl"

    def setGroupName(self, name: str) -> None:
        """torch's own keeps it in its backends, and this has none."""
        self._name = name

    def getGroupName(self) -> str:
        """DeviceMesh asks."""
        return self._name
