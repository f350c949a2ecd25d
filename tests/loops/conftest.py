"""Runs a file in a process of its own, with or without the simulated card."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import simcard

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
Done = subprocess.CompletedProcess[str]
RunFile = Callable[..., Done]


@pytest.fixture(scope="session")
def card() -> dict[str, str]:
    """What a process needs to have the simulated card."""
    try:
        return simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    """``run_file(*words, env=...)``: a Python command line in an empty directory; its result is what it printed."""

    def run(*words: object, env: dict[str, str] | None = None) -> Done:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **(env or {})}
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )

    return run


def losses(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("epoch")]
