"""Which tensor of which safetensors file a host tensor is, told by its address: its memory is the mapped file's.

Loaders such as safetensors return views of the mapped file. The kernel lists the mapped files of a process with their
addresses (``/proc/self/maps``, see proc(5)), and the file's header lists its tensors with their offsets. So no library
needs to tell where its tensors came from.
"""

from __future__ import annotations

import bisect
import os
import re
import threading
from typing import NamedTuple

from torch import Tensor

from hf_rocm_tune.safetensors_header import read_header

_MAPS = "/proc/self/maps"
_SUFFIX = ".safetensors"
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(/.*)")


class InFile(NamedTuple):
    file: str
    tensor: str  # its name in the file


class _Region(NamedTuple):
    start: int  # address of its first byte
    end: int
    offset: int  # in the file
    file: str


_regions: list[_Region] = []
_headers: dict[tuple[str, int, int, int], dict[tuple[int, int], str]] = {}
_lock = threading.Lock()


def in_file(tensor: Tensor) -> InFile | None:
    """The entry of a safetensors file whose bytes are exactly those of a contiguous host tensor; None: it has none.

    A file that was replaced or deleted since it was mapped has none.
    """
    if not tensor.nbytes or not tensor.is_contiguous() or tensor.untyped_storage().resizable():
        return None  # memory that torch has allocated is of no file
    if tensor.is_pinned():
        return None  # nor is page-locked memory, as of the batches of many loaders
    address = tensor.data_ptr()
    with _lock:
        region = _region_of(address)
        if region is None or address + tensor.nbytes > region.end:
            return None
        begin = address - region.start + region.offset
        name = _entries(region.file).get((begin, begin + tensor.nbytes))
    return None if name is None else InFile(region.file, name)


def _region_of(address: int) -> _Region | None:
    region = _known(address)
    if region is None or _mapped_there(region) != region.file:
        _read_maps()
        region = _known(address)
    return region


def _mapped_there(region: _Region) -> str | None:
    """The file that is mapped at these addresses now: an address is used again when a file is unmapped."""
    try:
        return os.readlink(f"/proc/self/map_files/{region.start:x}-{region.end:x}")
    except OSError:
        return None


def _known(address: int) -> _Region | None:
    at = bisect.bisect_right(_regions, address, key=lambda region: region.start) - 1
    if at >= 0 and _regions[at].start <= address < _regions[at].end:
        return _regions[at]
    return None


def _read_maps() -> None:
    global _regions
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as lines:
            candidates = [line.rstrip("\n") for line in lines if _SUFFIX in line]
    except OSError:  # another system than Linux: no tensor is known to be in a file
        candidates = []
    regions = []
    for line in candidates:
        match = _LINE.match(line)
        if match and match[4].endswith(_SUFFIX):
            regions.append(_Region(int(match[1], 16), int(match[2], 16), int(match[3], 16), match[4]))
    _regions = sorted(regions)


def _entries(file: str) -> dict[tuple[int, int], str]:
    """The names of a file's tensors by the begin and end of their bytes in it; empty for a file that is none."""
    try:
        state = os.stat(file)
        key = (file, state.st_ino, state.st_size, state.st_mtime_ns)
        if key not in _headers:
            _headers[key] = {(entry.begin, entry.end): entry.name for entry in read_header(file)}
        return _headers[key]
    except (OSError, ValueError):
        return {}
