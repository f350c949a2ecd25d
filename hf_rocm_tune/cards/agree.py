"""Small exchanges between ranks: a decision of rank 0 or its error, maxima, values of all ranks, and equal replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from hf_rocm_tune.errors import CorruptionError, TuneError, listed
from hf_rocm_tune.host_group import host_group
from hf_rocm_tune.models.sharding import all_gather_named
from hf_rocm_tune.transfer import QueuedDigests

T = TypeVar("T")


def on_main_process(decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0 and return its result on every rank. Collective."""
    state = PartialState()
    if state.num_processes == 1:
        return decide()
    outcome: list[Any] = [None]
    if state.is_main_process:
        try:
            outcome = [(True, decide())]
        except TuneError as error:
            outcome = [(False, error)]
    broadcast_object_list(outcome)
    decided, value = outcome[0]
    if not decided:
        raise value
    result: T = value
    return result


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """The maximum of each number over all ranks. Collective, over gloo."""
    return [int(max(of_ranks)) for of_ranks in zip(*all_gather_floats(values), strict=True)]


def all_gather_floats(values: Sequence[float]) -> list[list[float]]:
    """The values of each rank, in the order of the ranks, as float64. Collective, over gloo."""
    if PartialState().num_processes == 1:
        return [list(values)]
    return [row.tolist() for row in exchange(torch.tensor(list(values), dtype=torch.float64))]


def exchange(mine: Tensor) -> list[Tensor]:
    """The tensors of all ranks, of the same shape on each. Collective, over gloo."""
    group = host_group()
    of_all_ranks = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(of_all_ranks, mine, group=group)
    return of_all_ranks


def compare_replicas(tensors: Iterable[tuple[str, Tensor]], when: str) -> int:
    """Compare the digests of tensors, which have the same names on every rank, over all ranks. Collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    rows = list(tensors)
    digests = QueuedDigests([tensor.detach() for _, tensor in rows]).result()
    mine = {name: digest.hex() for (name, _), digest in zip(rows, digests, strict=True)}
    first, *others = all_gather_named(mine)
    differing: dict[str, list[int]] = {}
    for rank, theirs in enumerate(others, 1):
        for name in sorted(first.keys() | theirs.keys()):
            if first.get(name) != theirs.get(name):
                differing.setdefault(name, []).append(rank)
    if differing:
        named = listed([f"{name} (ranks {ranks})" for name, ranks in differing.items()], 5)
        raise CorruptionError(f"{when}: ranks differ from rank 0 in {named}: training stops")
    return len(mine)
