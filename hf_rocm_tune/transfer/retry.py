"""The retry policy of both directions: what arrived wrong is copied again, in ever simpler ways, until it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Route:
    """A way to send: staging memory (``ring``, ``fresh`` or ``pageable``), blocking or not, and the chunk size."""

    name: str
    staging: str = "ring"
    blocking: bool = False
    chunk_bytes: int | None = None


FIRST_COPY = Route("first_copy")

TO_DEVICE = (
    Route("same_copy"),
    Route("fresh_slot", staging="fresh"),
    Route("synchronous", blocking=True),
    Route("pageable", staging="pageable", blocking=True),
    Route("small_chunks", staging="pageable", blocking=True, chunk_bytes=64 << 10),
)
"""In order; each fills the destination with poison first, and is verified like the first copy."""

FROM_DEVICE = (Route("same_copy", blocking=True), Route("pageable", staging="pageable", blocking=True))
"""In order; each is verified, beside a new digest of the device's bytes, for the first may have been read wrongly."""

THROUGH_HOST = (Route("same_copy"), Route("same_copy"))
"""From one card to another, both halves again."""


@dataclass(frozen=True)
class Retried:
    """How a mismatch ended; ``route``: the one that was used last; ``why``: it was not recovered, for the error."""

    route: Route
    outcome: Literal["recovered", "stopped", "failed"]
    why: str = ""


def copy_again(routes: Sequence[Route], attempt: Callable[[int, Route], bool], *, on_corruption: str) -> Retried:
    """After a mismatch of the first copy: copy again until the bytes are right, or there is no route left.

    Args:
        routes: ways to copy, in the order in which they are tried.
        attempt: copies in one of them, and returns whether the bytes are right; its number counts from 1.
        on_corruption: ``stop``: nothing is tried (`TransferSettings`).
    """
    if on_corruption == "stop":
        return Retried(FIRST_COPY, "stopped", "--on_corruption stop is set")
    for number, route in enumerate(routes, start=1):
        if attempt(number, route):
            return Retried(route, "recovered")
    return Retried(routes[-1], "failed", f"all {len(routes)} retries failed")
