"""Where the ranks of one machine meet beside any process group: a private directory with small files of each rank.

Not covered: ranks on other machines; ranks in containers that do not share a process table.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hf_rocm_tune.errors import UsageError

_SAME_START_SECONDS = 2.0
"""psutil reckons from the time of boot, which moves when the clock is set."""


def make_place(directory: Path) -> None:
    """Make the directory, or see that it is this user's alone.

    Raises:
        UsageError: it is somebody else's, or open to others.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{directory}, where the ranks of this job meet, is not a directory that only you can use: remove it, or "
            "set TMPDIR to a directory of your own"
        )


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)


def read(file: Path) -> dict[str, Any] | None:
    """What a rank has written; None where there is nothing yet."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def born(pid: int) -> float:
    """When a process started, in seconds since the epoch; 0 when there is none. With it a number is not taken twice."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def is_alive(pid: int, since: float) -> bool:
    """Whether the very process that started at ``since`` still runs; one that waits to be reaped does not."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - since) < _SAME_START_SECONDS
        return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
