"""The process group for what must not run over the path between cards: gloo stages everything through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Weak: a group that outlives destroy_process_group ends the interpreter with an abort.
_beside: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def host_group() -> ProcessGroup:
    """A gloo group over all ranks, made once; the default group where that is gloo. Collective the first time."""
    world = dist.group.WORLD
    assert world is not None, "asked for before the processes were joined"
    if dist.get_backend(world) == "gloo":
        return world
    if world not in _beside:
        _beside[world] = dist.new_group(backend="gloo")
    return _beside[world]
