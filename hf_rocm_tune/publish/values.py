"""Values out of JSON that may be of any form, and how they are shown in a line of text or of Markdown."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

_ACTIVE = re.compile(r"([\\`*_\[\]<>|#~$])")  # in Markdown


def find(content: Any, *path: str) -> Any:
    """The value at a path of keys; None if a part of the path is missing."""
    for key in path:
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content


def number(content: Any, *path: str) -> float | None:
    """A finite number; None for anything else."""
    value = find(content, *path)
    with suppress(OverflowError):  # a whole number that no float holds
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def count(content: Any, *path: str) -> int:
    """A count; 0 if there is none."""
    return int(number(content, *path) or 0)


def text(content: Any, *path: str) -> str:
    """A string; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, str) else ""


def mapping(content: Any, *path: str) -> dict[str, Any]:
    """An object; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, dict) else {}


def items(content: Any, *path: str) -> list[Any]:
    """A list; empty for anything else."""
    value = find(content, *path)
    return value if isinstance(value, list) else []


def plain(value: Any) -> str:
    """One value in a line: numbers to four digits, texts of a list side by side, what else is in one as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text_or_json(item)}" for key, item in value.items())
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, list):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def figure(value: float | None) -> str:
    """A number to four digits, whole ones in full; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def prose(value: str) -> str:
    """A foreign text, escaped for Markdown, in one line."""
    return _ACTIVE.sub(r"\\\1", " ".join(value.split()))


def code(value: str) -> str:
    """A foreign value as code, also within a table."""
    if not value.strip():
        return ""
    shown = " ".join(value.split()).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`"
