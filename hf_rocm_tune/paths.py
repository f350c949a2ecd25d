"""Paths as a user gives them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def expand_user(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~name`` expanded; left as it is where nobody has that name.

    Unlike Path.expanduser, which raises RuntimeError there.
    """
    return Path(os.path.expanduser(path))


def can_be_file(path: Path) -> bool:
    """Whether a file can be written there: in a directory that exists, no directory itself, its name not too long."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return os.path.isdir(path.absolute().parent)
    except OSError:
        return False
