"""The C library's allocator, told to give large blocks back to the system as soon as they are freed.

glibc raises its threshold for separate mappings to the largest block that was ever freed (up to 32 MiB), and keeps
smaller ones for itself. A merge allocates and frees blocks of all sizes below that, so the process would grow to
several times of what is alive in it: 267 MB instead of 89 MB in a merge of 0.6 GB of experts
(``benchmarks/merge_memory.py``, 2026-11-21). It lasts for the rest of the process, so it is for a process of our own.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc; setting it also stops its growth (mallopt(3))
_BYTES = 1 << 20


def give_back_freed_blocks() -> bool:
    """Map blocks of 1 MiB and more separately. False where the C library is not glibc, and nothing was done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _BYTES))
