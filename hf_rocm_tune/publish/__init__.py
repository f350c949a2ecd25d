"""What is done with a finished adapter: push to the Hub, model card, plots and report, merge, generate, evaluate."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a line about the work, beside what a command prints on standard output."""
    print(f"hf-rocm-tune: {' '.join(line.split())}", file=sys.stderr, flush=True)
