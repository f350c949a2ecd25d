"""Files past the system's cache of them in host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_from_disk(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it as it lies on disk: it is flushed, and the system forgets its cached pages where it can.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file
