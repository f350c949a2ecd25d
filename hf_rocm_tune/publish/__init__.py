"""What is done with a finished adapter: push to the Hub, model card, plots and report, merge, generate, evaluate."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from hf_rocm_tune.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """argparse with its errors as ``UsageError``: one line; the usage is one ``--help`` away."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def say(line: str) -> None:
    """Print a line about the work, beside what a command prints on standard output."""
    print(f"hf-rocm-tune: {' '.join(line.split())}", file=sys.stderr, flush=True)
