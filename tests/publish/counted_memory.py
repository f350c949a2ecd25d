"""Counts the host memory that torch operations allocate: bytes alive now, and their peak.

Every storage that an operation returns and did not get is counted until it dies. Views, and tensors over mapped files,
cost nothing here, as they cost the process nothing of its own. Not covered: what torch allocates inside one operation.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Within the block, `now` and `peak` in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.set_:  # a tensor over memory that is there already: a mapped file, say
            return func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and _key(leaf) not in given | self._known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1
