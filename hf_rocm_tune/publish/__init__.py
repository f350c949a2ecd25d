"""A finished adapter: push to the Hub, model card, plots and report, merge, GGUF, generate, chat."""

from __future__ import annotations

import sys

from hf_rocm_tune.redaction import print_line


def say(line: str) -> None:
    """Print a progress line on standard error."""
    print_line(f"hf-rocm-tune: {' '.join(line.split())}", sys.stderr)
