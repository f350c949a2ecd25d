"""Readers of the kernel's small text files. They never raise: what cannot be read is None, with the reason.

A root other than ``/`` reads a recorded or an invented machine. Covered: missing, forbidden, empty, binary and
oversized files. Not covered: a file that is well formed and wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

# The kernel hands out at most one page (4 KiB) per sysfs attribute; /proc and /boot files may be larger.
MAX_BYTES = 1 << 20

T = TypeVar("T")


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


def read_text(root: Path, path: str) -> Reading[str]:
    """The stripped text of ``root/path``. Empty, binary and oversized files count as unreadable."""
    file = root / path.lstrip("/")
    try:
        with file.open("rb") as handle:
            raw = handle.read(MAX_BYTES + 1)
    except OSError as error:
        return Reading(value=None, reason=f"{file}: {error.strerror or type(error).__name__}")
    if len(raw) > MAX_BYTES:
        return Reading(value=None, reason=f"{file}: more than {MAX_BYTES} bytes")
    if b"\0" in raw:
        return Reading(value=None, reason=f"{file}: binary, not text")
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        return Reading(value=None, reason=f"{file}: binary, not text")
    return Reading(value=text) if text else Reading(value=None, reason=f"{file}: empty")


def parse_int(text: str) -> int | None:
    """A plain ASCII decimal number of at most 64 bits, or None. ``int()`` alone takes ``1_0``, ``+1`` and more."""
    plain = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if plain and int(text) < 1 << 64 else None


def read_int(root: Path, path: str) -> Reading[int]:
    """A file that holds one decimal number."""
    text = read_text(root, path)
    if text.value is None:
        return Reading(value=None, reason=text.reason)
    number = parse_int(text.value)
    if number is None:
        return Reading(value=None, reason=f"{root / path.lstrip('/')}: not a number: {text.value[:40]!r}")
    return Reading(value=number)


def read_properties(root: Path, path: str) -> Reading[dict[str, int]]:
    """A file of ``name number`` lines, as KFD writes them. Lines of another form are left out."""
    text = read_text(root, path)
    if text.value is None:
        return Reading(value=None, reason=text.reason)
    fields = [line.split() for line in text.value.splitlines()]
    numbers = {pair[0]: parse_int(pair[1]) for pair in fields if len(pair) == 2}
    found = {name: number for name, number in numbers.items() if number is not None}
    if not found:
        return Reading(value=None, reason=f"{root / path.lstrip('/')}: no line of the form 'name number'")
    return Reading(value=found)


def list_numbered(root: Path, path: str) -> Reading[list[int]]:
    """The entries of a directory whose names are numbers, in numeric order. Other entries are left out."""
    directory = root / path.lstrip("/")
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError as error:
        return Reading(value=None, reason=f"{directory}: {error.strerror or type(error).__name__}")
    return Reading(value=sorted(number for number in map(parse_int, names) if number is not None))
