"""Runs a module as two ranks that print a JSON line a case."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Outcomes = list[dict[str, dict[str, Any]]]
"""By rank, then by case."""


def start_pair(module: str, store: Path, checkout: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Both ranks, under way; each gets its number, the file in which they meet, and what else is given."""
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", module, str(rank), str(store), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        for rank in (0, 1)
    ]


def wait_for(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What each rank printed to both outputs; ranks that hang are killed and fail the test."""
    try:
        with ThreadPoolExecutor(len(ranks)) as together:  # a rank whose pipe is full would wait, and the other for it
            return list(together.map(lambda rank: rank.communicate(timeout=600), ranks))
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to one that has ended


def run_pair(module: str, store: Path, checkout: Path, *more: str) -> Outcomes:
    """What each rank reports, by case; both must end well."""
    ranks = start_pair(module, store, checkout, *more)
    ended = wait_for(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], [error[-2000:] for _, error in ended]
    rows = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in ended]
    return [{row["case"]: row for row in one} for one in rows]
