"""The kernel's small files below a root directory: ``/``, or one that a test has built. Imports no torch.

No reader raises: what cannot be read (missing, forbidden, empty, binary) is None, and `Files.unread` holds
the reason by path. A path has no leading slash (``sys/class/kfd``). Not covered: a well-formed file with a wrong value,
and a driver that hangs inside a read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Files:
    """The files below ``root``; ``unread``: why the paths that were asked for in vain could not be read."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.unread: dict[str, str] = {}

    def _fail(self, path: str, reason: str | None) -> None:
        self.unread[path] = f"/{path}: {reason}"

    def content(self, path: str) -> bytes | None:
        """A whole file, which is not empty."""
        reason = "empty"
        content = b""
        try:
            content = (self.root / path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            reason = getattr(error, "strerror", None) or "cannot be read"
        if not content:
            self._fail(path, reason)
        return content or None

    def text(self, path: str) -> str | None:
        """The stripped text of a file."""
        content = self.content(path)
        if content is None:
            return None
        text = content.decode("utf-8", errors="replace").strip()
        if not text:
            self._fail(path, "empty")
            return None
        if "\0" in text or "\ufffd" in text:
            self._fail(path, "binary, not text")
            return None
        return text

    def parsed(self, path: str, parse: Callable[[str], T | None], complaint: str) -> T | None:
        """``parse`` applied to a file's text; ``complaint``: what it is not, where that is None."""
        text = self.text(path)
        value = None if text is None else parse(text)
        if text is not None and value is None:
            self._fail(path, f"{complaint}: {text[:40]!r}")
        return value

    def matching(self, path: str, pattern: str) -> str | None:
        """A file's text if it matches a regular expression as a whole."""
        return self.parsed(path, lambda text: text if re.fullmatch(pattern, text, re.ASCII) else None, "unexpected")

    def hexadecimal(self, path: str) -> int | None:
        return self.parsed(path, parse_hex, "not a hexadecimal number")

    def properties(self, path: str) -> dict[str, int] | None:
        """A file of ``name number`` lines, as KFD writes them. Lines of another form are left out."""

        def parse(text: str) -> dict[str, int] | None:
            pairs = [line.split() for line in text.splitlines()]
            numbers = {pair[0]: parse_int(pair[1]) for pair in pairs if len(pair) == 2}
            return {name: number for name, number in numbers.items() if number is not None} or None

        return self.parsed(path, parse, "no line of the form 'name number'")

    def names(self, path: str) -> list[str] | None:
        """The names in a directory, sorted."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError as error:
            self._fail(path, error.strerror)
            return None

    def numbered(self, path: str) -> list[int] | None:
        """The entries of a directory whose names are numbers, in numeric order."""
        names = self.names(path)
        return None if names is None else sorted(n for n in map(parse_int, names) if n is not None)

    def link(self, path: str) -> str:
        """The text of a symbolic link; empty, without a reason, where there is no such link."""
        try:
            return os.readlink(self.root / path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._fail(path, error.strerror)
            return ""

    def last(self, path: str) -> str | None:
        """The last part of a symbolic link's target: a driver, a group."""
        return self.link(path).rstrip("/").rpartition("/")[2] or None


def parse_int(text: str) -> int | None:
    """A plain ASCII decimal number of at most 64 bits. ``int()`` alone takes ``1_0``, ``+1`` and more."""
    if not re.fullmatch("[0-9]{1,20}", text):
        return None
    number = int(text)
    return number if number < 1 << 64 else None


def parse_hex(text: str) -> int | None:
    return int(text, 16) if re.fullmatch("0[xX][0-9a-fA-F]{1,16}", text) else None
