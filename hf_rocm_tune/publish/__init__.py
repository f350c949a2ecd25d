"""A finished adapter: push to the Hub, model card, plots and report, merge, GGUF, generate, chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hf_rocm_tune.redaction import print_line


def say(line: str) -> None:
    """Print a progress line on standard error."""
    print_line(f"hf-rocm-tune: {' '.join(line.split())}", sys.stderr)


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Within the block transformers shows its progress bars on a terminal only."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
