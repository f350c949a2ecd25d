"""The page cache of the operating system: how much of a file is in it, and how to get a file out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_DROPPED = 0.01
"""Share of a file that may stay in the cache and the file still counts as dropped (a page under way, metadata)."""
_READ_BYTES = 8 << 20


def warm(files: Iterable[Path]) -> None:
    """Read the files once, so that they are in the cache if they fit."""
    buffer = bytearray(_READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(files: Sequence[Path]) -> str | None:
    """Ask the system to forget the files' pages (``posix_fadvise`` DONTNEED, after writing back what is dirty).

    Returns:
        None when it has, else why the cache is not cold.
    """
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise"
    for file in files:
        handle = os.open(file, os.O_RDWR)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    share = cached_share(files)
    if share is None:
        return "whether the files have left the page cache cannot be seen on this system"
    if share > _DROPPED:
        return f"{100 * share:.0f} % of the files stay in the page cache (a file system in memory keeps all of them)"
    return None


def cached_share(files: Iterable[Path]) -> float | None:
    """Share of the files' pages that are in the cache, by ``mincore``; None where the system cannot say.

    Linux answers for files that the caller may write only; for others it says that everything is cached.
    """
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    pages = cached = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        with file.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as mapped:
            count = -(-size // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(mapped)
            try:
                failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), states)
            finally:
                del first  # the map cannot be closed while something points into it
            if failed:
                return None
            pages += count
            cached += sum(state & 1 for state in bytes(states))
    return cached / pages if pages else 0.0
