"""A bar on the terminal while something takes its time."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_WIDTH = 30
_SECONDS_BETWEEN = 0.1


class Progress:
    """Shows how far a count has come, on a terminal only, and wipes itself away at the end.

    Args:
        what: the word in front of the bar.
        total: the count at which all is done.
        stream: stderr unless given, so that what a command prints can be piped.
    """

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self._what, self._total = what, max(total, 1)
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._done = 0
        self._drawn_at = 0.0

    def advance(self, count: int = 1) -> None:
        """Add to what is done."""
        self._done += count
        now = time.monotonic()
        if self._shown and now - self._drawn_at >= _SECONDS_BETWEEN:
            self._drawn_at = now
            filled = min(_WIDTH * self._done // self._total, _WIDTH)
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\r{self._what:<16} [{bar}] {self._done:,} of {self._total:,}")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
