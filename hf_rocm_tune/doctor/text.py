"""Text that is safe to show: what comes from a file of a stranger may hold anything."""

from __future__ import annotations


def plain(text: str) -> str:
    """One line of printable text: escape sequences, line breaks and the like become spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
