"""Gloo process groups for communication that must not use the path between cards: gloo works on host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Weak: a group that outlives destroy_process_group ends the interpreter with an abort.
_made: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def host_group() -> ProcessGroup:
    """A gloo group over all ranks, created once; the default group if it is gloo. Collective the first time."""
    return _world() if dist.get_backend(_world()) == "gloo" else _group("host")


def averages_group() -> ProcessGroup:
    """A gloo group over all ranks for averages of gradients only, created once. Collective the first time.

    A thread beside the training loop starts these averages. gloo matches collectives by their order in a group, so
    those of the loop and of DistributedDataParallel must be in another group.
    """
    return _group("averages")


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "called before init_process_group"
    return world


def _group(purpose: str) -> ProcessGroup:
    groups = _made.setdefault(_world(), {})
    if purpose not in groups:
        groups[purpose] = dist.new_group(backend="gloo")
    return groups[purpose]
