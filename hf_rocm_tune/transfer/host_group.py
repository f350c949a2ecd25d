"""The process group for what must not run over the path between cards: gloo stages everything through the host."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def host_group() -> ProcessGroup:
    """A gloo group over all ranks, made once; the default group where that is gloo. Collective the first time."""
    world = dist.group.WORLD
    assert world is not None, "asked for before the processes were joined"
    return _gloo_beside(world)


@cache
def _gloo_beside(world: ProcessGroup) -> ProcessGroup:
    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")
