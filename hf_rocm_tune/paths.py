"""Paths as a user gives them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_user(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~name`` expanded; left as it is where nobody has that name.

    Unlike Path.expanduser, which raises RuntimeError there.
    """
    return Path(os.path.expanduser(path))
