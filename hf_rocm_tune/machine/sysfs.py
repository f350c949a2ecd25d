"""Readers of the kernel's small text files. They never raise: what cannot be read is None, with the reason.

The root is a :class:`~hf_rocm_tune.machine.sysfs_tree.Tree` (the machine, or a recording of one) or a directory.
Covered: missing, forbidden, empty, binary and oversized files. Not covered: a file that is well formed and wrong.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hf_rocm_tune.machine.sysfs_recording import Recording as Recording
from hf_rocm_tune.machine.sysfs_tree import LiveTree as LiveTree
from hf_rocm_tune.machine.sysfs_tree import RecordedTree as RecordedTree
from hf_rocm_tune.machine.sysfs_tree import RecordingTree as RecordingTree
from hf_rocm_tune.machine.sysfs_tree import Tree as Tree
from hf_rocm_tune.machine.sysfs_tree import as_tree as as_tree

# The kernel hands out at most one page (4 KiB) per sysfs attribute; /proc and /boot files may be larger.
MAX_BYTES = 1 << 20

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """A value that was read, or None and the reason why it could not be.

    Attributes:
        value: what was read; None where nothing usable was there.
        reason: one line; empty exactly where ``value`` is not None.
    """

    value: T | None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.value is None) == bool(self.reason), "a reading has either a value or a reason"


def known(value: T | None, reason: str) -> Reading[T]:
    """A reading of ``value``, with ``reason`` only where there is none."""
    return Reading(value=value) if value is not None else Reading(value=None, reason=reason)


def unknown(reason: str) -> Reading[T]:
    """A reading without a value."""
    return Reading(value=None, reason=reason)


def derived(reading: Reading[T], convert: Callable[[T], U | None], complaint: str) -> Reading[U]:
    """What ``convert`` makes of a reading; ``complaint`` is the reason where it makes None of it."""
    return unknown(reading.reason) if reading.value is None else known(convert(reading.value), complaint)


def refused(path: str, error: OSError) -> str:
    """One line for a path that the system would not read."""
    if error.errno == errno.EFBIG:
        return f"/{path}: more than {MAX_BYTES} bytes"
    return f"/{path}: {os.strerror(error.errno) if error.errno else type(error).__name__}"


def read_bytes(root: Tree | Path, path: str) -> Reading[bytes]:
    """The content of a file of at most ``MAX_BYTES``; empty counts as unreadable."""
    path = path.lstrip("/")
    try:
        raw = as_tree(root).read(path, MAX_BYTES)
    except OSError as error:
        return unknown(refused(path, error))
    return Reading(value=raw) if raw else unknown(f"/{path}: empty")


def read_text(root: Tree | Path, path: str) -> Reading[str]:
    """The stripped text of a file. Empty, binary and oversized files count as unreadable."""
    path = path.lstrip("/")
    raw = read_bytes(root, path)
    if raw.value is None:
        return unknown(raw.reason)
    if b"\0" in raw.value:
        return unknown(f"/{path}: binary, not text")
    try:
        text = raw.value.decode("utf-8").strip()
    except UnicodeDecodeError:
        return unknown(f"/{path}: binary, not text")
    return Reading(value=text) if text else unknown(f"/{path}: empty")


def parse_int(text: str) -> int | None:
    """A plain ASCII decimal number of at most 64 bits, or None. ``int()`` alone takes ``1_0``, ``+1`` and more."""
    plain = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if plain and int(text) < 1 << 64 else None


def read_int(root: Tree | Path, path: str) -> Reading[int]:
    """A file that holds one decimal number."""
    text = read_text(root, path)
    return derived(text, parse_int, f"/{path.lstrip('/')}: not a number: {(text.value or '')[:40]!r}")


def read_properties(root: Tree | Path, path: str) -> Reading[dict[str, int]]:
    """A file of ``name number`` lines, as KFD writes them. Lines of another form are left out."""
    text = read_text(root, path)
    if text.value is None:
        return unknown(text.reason)
    fields = [line.split() for line in text.value.splitlines()]
    numbers = {pair[0]: parse_int(pair[1]) for pair in fields if len(pair) == 2}
    found = {name: number for name, number in numbers.items() if number is not None}
    return known(found or None, f"/{path.lstrip('/')}: no line of the form 'name number'")


def list_names(root: Tree | Path, path: str) -> Reading[list[str]]:
    """The names in a directory, sorted; an empty directory is read, with nothing in it."""
    path = path.lstrip("/")
    try:
        return Reading(value=as_tree(root).names(path))
    except OSError as error:
        return unknown(refused(path, error))


def list_numbered(root: Tree | Path, path: str) -> Reading[list[int]]:
    """The entries of a directory whose names are numbers, in numeric order. Other entries are left out."""
    names = list_names(root, path)
    if names.value is None:
        return unknown(names.reason)
    return Reading(value=sorted(number for number in map(parse_int, names.value) if number is not None))


def read_link_name(root: Tree | Path, path: str, absent: str = "") -> Reading[str]:
    """The last part of what a symbolic link points at, which is how sysfs names drivers and groups.

    Args:
        root: the machine.
        path: of the link.
        absent: the reason to give where there is no such link, where that has a meaning of its own.
    """
    path = path.lstrip("/")
    try:
        target = as_tree(root).link(path)
    except OSError as error:
        return unknown(absent if absent and error.errno == errno.ENOENT else refused(path, error))
    return known(target.rstrip("/").rpartition("/")[2] or None, f"/{path}: points at nothing")
