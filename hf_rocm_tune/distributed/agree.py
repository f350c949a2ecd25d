"""One rank decides, all ranks hear it, and a refusal is heard too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from hf_rocm_tune.errors import TuneError

T = TypeVar("T")


def on_main_process(decide: Callable[[], T]) -> T:
    """Calls ``decide`` on rank 0 and gives its result to every rank. Collective.

    Args:
        decide: its result must be picklable when there are several ranks.

    Raises:
        TuneError: on every rank what it raised on rank 0, so that none waits for a rank that has left.
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
