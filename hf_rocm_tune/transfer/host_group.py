"""Process groups for what must not run over the path between cards: gloo stages everything through the host."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Weak: a group that outlives destroy_process_group ends the interpreter with an abort.
_beside: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_averages: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def host_group() -> ProcessGroup:
    """A gloo group over all ranks, made once; the default group where that is gloo. Collective the first time."""
    world = _world()
    if dist.get_backend(world) == "gloo":
        return world
    return _made(_beside, world)


def averages_group() -> ProcessGroup:
    """A gloo group over all ranks that only averages of gradients use, made once. Collective the first time.

    They are begun by a thread beside the training loop. gloo matches collectives by their order in a group, so whatever
    the loop and DistributedDataParallel call meanwhile must be in another one.
    """
    return _made(_averages, _world())


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "asked for before the processes were joined"
    return world


def _made(groups: WeakKeyDictionary[ProcessGroup, ProcessGroup], world: ProcessGroup) -> ProcessGroup:
    if world not in groups:
        groups[world] = dist.new_group(backend="gloo")
    return groups[world]
