"""Small exchanges between ranks: a decision of rank 0 or its error, maxima, and values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from hf_rocm_tune.errors import TuneError
from hf_rocm_tune.transfer.host_group import host_group

T = TypeVar("T")


def on_main_process(decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0 and return its result on every rank. Collective.

    Args:
        decide: with several ranks its result must be picklable.

    Raises:
        TuneError: on every rank, the error raised on rank 0, so that no rank waits for one that has ended.
    """
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


def highest(values: Sequence[int]) -> list[int]:
    """The maximum of each number over all ranks. Collective, over gloo."""
    if PartialState().num_processes == 1:
        return list(values)
    mine = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=host_group())
    result: list[int] = mine.tolist()
    return result


def everyone(values: Sequence[float]) -> list[list[float]]:
    """The values of each rank, in the order of the ranks, as float64. Collective, over gloo."""
    if PartialState().num_processes == 1:
        return [list(values)]
    mine = torch.tensor(list(values), dtype=torch.float64)
    group = host_group()
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]
