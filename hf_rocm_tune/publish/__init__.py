"""A finished adapter: push to the Hub, model card, plots and report, merge, generate, evaluate."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a progress line on standard error."""
    print(f"hf-rocm-tune: {' '.join(line.split())}", file=sys.stderr, flush=True)
