"""Measured damage in words: evidence lines of findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = ((20 << 20, "20 MiB"), (2 << 20, "2 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB"))
_SHOWN = 3


def damage_words(damage: Mapping[str, Any]) -> str:
    """One line about a ``Damage``: how much, where, how aligned, and what is there instead."""
    wrong, nbytes, first = damage["wrong"], damage["nbytes"], damage["first_offset"]
    shares = [
        f"{100 * damage[key] / wrong:.0f} % {words}"
        for key, words in (
            ("zeros", "zeros"),
            ("poison", "poison (never written)"),
            ("stale", "of an earlier transfer"),
            ("flips", "differ in one bit"),
        )
        if damage[key] / wrong >= 0.01
    ]
    return (
        f"{wrong:,} of {nbytes:,} bytes wrong, the first at offset {first:,}{_aligned(damage)}, in a run of "
        f"{damage['length']:,}; {', '.join(shares) or 'other bytes'}; found {damage['found']} instead of "
        f"{damage['right']}"
    )


def _aligned(damage: Mapping[str, Any]) -> str:
    unit = next((words for size, words in _UNITS if damage["alignment"] >= size), None)
    if unit is None:
        return ""
    return f" (a multiple of {unit})" if damage["first_offset"] else f" (the run is a multiple of {unit})"


def problem_lines(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line each for the first few problems: the case, and its damage where reading it back showed any."""
    lines = []
    for problem in problems[:_SHOWN]:
        damage = problem.get("damage")
        lines.append(f"{problem['case']}: {damage_words(damage) if damage else 'right when it was read back'}")
    left = len(problems) - _SHOWN
    return [*lines, f"and {left} more"] if left > 0 else lines


def size_words(nbytes: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    for unit, words in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {words}"
    return f"{nbytes:.0f} bytes"
