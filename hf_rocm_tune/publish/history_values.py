"""Values out of JSON that may be of any form: asked for by path, and given only where they are of the wanted kind."""

from __future__ import annotations

import math
from typing import Any


def find(content: Any, *path: str) -> Any:
    """The value at a path of keys; None where a part of the path is not there."""
    for key in path:
        if not isinstance(content, dict) or key not in content:
            return None
        content = content[key]
    return content


def number(content: Any, *path: str) -> float | None:
    """A finite number; None for anything else."""
    value = find(content, *path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float holds
        return None


def count(content: Any, *path: str) -> int:
    """A number that counts something; 0 where there is none."""
    return int(number(content, *path) or 0)


def text(content: Any, *path: str) -> str:
    """A string; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, str) else ""


def table(content: Any, *path: str) -> dict[str, Any]:
    """An object; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, dict) else {}


def items(content: Any, *path: str) -> list[Any]:
    """A list; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, list) else []


def plain(value: Any, *, depth: int = 4) -> str:
    """One value in a line: numbers to six digits, lists and objects written out to a depth."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple | dict) and not depth:
        return "..."
    if isinstance(value, list | tuple):
        return ", ".join(plain(one, depth=depth - 1) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={plain(one, depth=depth - 1)}" for key, one in value.items())
    return str(value)


def size(nbytes: float) -> str:
    """A number of bytes, in units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def duration(seconds: float) -> str:
    """Seconds as people say them: "42 s", "3 min 5 s", "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
