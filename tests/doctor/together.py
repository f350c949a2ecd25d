"""Children side by side: most of what a test of a child takes is waiting for it to start, or to be killed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def together(calls: Mapping[Key, Callable[[], Result]], *, workers: int) -> dict[Key, Result]:
    """The results of all calls by their keys; the first exception among them is raised.

    Args:
        calls: each starts its children and waits for them.
        workers: how many at a time: two where children compute, more where they only start and end.
    """
    with ThreadPoolExecutor(workers) as pool:
        running = {key: pool.submit(call) for key, call in calls.items()}
        return {key: future.result() for key, future in running.items()}
