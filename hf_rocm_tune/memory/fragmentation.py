"""How torch's allocator holds the device's memory, and when its cache should be given back before a request fails.

`Reading` is made from torch's own counters, so that the decision can be tried on recorded ones. Words: *allocated* is
what tensors hold; *reserved* is what the allocator has taken from the driver; *inactive split* is free, in blocks that
are partly in use, so it cannot be given back; the *largest free block* is the largest request that is served from what
is reserved. Sources: torch's memory management notes, and ``torch.cuda.memory_stats`` for the names of counters.

Between steps much of what is reserved is free in every healthy run: activations come back to it. What tells
fragmentation is memory that was reserved and never in use at any one time: ``reserved - peak of allocated``. It is a
lower bound, because the peak is that of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory of one device at one moment, in bytes.

    Attributes:
        total: of the device.
        free: of the device, as the driver says; what other processes hold is not free.
        allocated: held by tensors.
        allocated_peak: the most that tensors held at once since the process began.
        reserved: taken from the driver.
        inactive_split: free, in blocks of which another part is in use.
        largest_free: the largest block that is reserved and free.
        retries: how often a request failed at first and was served after the cache was given back.
    """

    total: int
    free: int
    allocated: int
    allocated_peak: int
    reserved: int
    inactive_split: int
    largest_free: int
    retries: int

    @classmethod
    def of(cls, stats: Mapping[str, int], segments: Iterable[Mapping[str, Any]], *, free: int, total: int) -> Reading:
        """From ``torch.cuda.memory_stats``, ``torch.cuda.memory_snapshot`` and ``torch.cuda.mem_get_info``."""
        return cls(
            total=total,
            free=free,
            allocated=stats.get("allocated_bytes.all.current", 0),
            allocated_peak=stats.get("allocated_bytes.all.peak", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
            inactive_split=stats.get("inactive_split_bytes.all.current", 0),
            largest_free=largest_free_block(segments),
            retries=stats.get("num_alloc_retries", 0),
        )

    @property
    def never_in_use(self) -> int:
        """Reserved beyond the most that tensors ever held at once."""
        return max(0, self.reserved - self.allocated_peak)

    def for_log(self) -> dict[str, float]:
        """The figures that are logged beside the loss, in GiB."""
        return {
            "memory/allocated_gib": round(self.allocated / _GIB, 3),
            "memory/reserved_gib": round(self.reserved / _GIB, 3),
            "memory/inactive_split_gib": round(self.inactive_split / _GIB, 3),
            "memory/largest_free_gib": round(self.largest_free / _GIB, 3),
        }


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When the cache is given back.

    Attributes:
        little_free: share of the device below which its free memory counts as little.
        much_unused: share of the device above which memory that was never in use counts as much.
        pause: steps between two times; giving back costs the requests after it.
    """

    little_free: float = 0.05
    much_unused: float = 0.10
    pause: int = 50


def reason_to_empty(now: Reading, earlier: Reading | None, rule: Rule) -> str | None:
    """Why the cache should be given back at the next safe point; None when it should stay.

    Either there is little left for the driver to give and much of what is reserved was never in use, or the allocator
    has had to give its cache back in the middle of a step since the earlier reading, which is the last thing it does
    before a request fails.
    """
    if earlier is not None and now.retries > earlier.retries:
        return f"{now.retries - earlier.retries} requests failed at first and were served from a cache given back"
    if now.free < rule.little_free * now.total and now.never_in_use > rule.much_unused * now.total:
        return (
            f"{now.never_in_use / _GIB:.1f} GiB are reserved beyond what was ever in use at once, and "
            f"{now.free / _GIB:.1f} GiB are left"
        )
    return None


def largest_free_block(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the largest block that is reserved and free, from ``torch.cuda.memory_snapshot``."""
    blocks = (block for segment in segments for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)


def read(device: torch.device) -> Reading:
    """The memory of an accelerator now. Waits for nothing on the device."""
    free, total = torch.cuda.mem_get_info(device)
    here = torch.cuda.current_device() if device.index is None else device.index
    segments = (one for one in torch.cuda.memory_snapshot() if one["device"] == here)
    return Reading.of(torch.cuda.memory_stats(device), segments, free=free, total=total)
