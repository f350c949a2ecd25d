"""Runs a file in a process of its own, with or without the simulated card."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_rocm_tune.transfer import copy_on_card
from tests import simcard
from tests.e2e.command import CommandServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = ("-m", "hf_rocm_tune.script")
Done = subprocess.CompletedProcess[str]
RunFile = Callable[..., Done]
WARNINGS = {"PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def card() -> dict[str, str]:
    """What a process needs to have the simulated card."""
    try:
        found = simcard.environment()
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    copy_on_card.build()
    return found


@pytest.fixture(scope="session")
def server_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], CommandServer]]:
    """Forks processes that have imported the libraries, with the card or without; one is started when it is needed."""
    started: dict[bool, CommandServer] = {}

    def server(with_card: bool) -> CommandServer:
        if with_card not in started:
            env = simcard.environment() if with_card else {}
            started[with_card] = CommandServer(tmp_path_factory.mktemp("loops"), {**env, **WARNINGS})
        return started[with_card]

    yield server
    for one in started.values():
        one.close()


@pytest.fixture
def run_file(server_for: Callable[[bool], CommandServer], tmp_path: Path) -> RunFile:
    """``run_file(*words, env=...)``: a Python command line in an empty directory; its result is what it printed.

    A file, and `-m hf_rocm_tune.script` with one, run in a process that is forked with the libraries imported; all else
    in a new one.
    """

    def run(*words: object, env: dict[str, str] | None = None) -> Done:
        env = env or {}
        command = [str(word) for word in words]
        if command[0].startswith("-") and tuple(command[:2]) != SCRIPT:
            # as `CommandServer`: not what a test of this process has set for Accelerate, it would take the card away
            kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
            environment = {**kept, "PYTHONPATH": str(ROOT), **WARNINGS, **env}
            return subprocess.run(
                [sys.executable, *command],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
            )
        server = server_for("SIMCARD" in env)
        if tuple(command[:2]) == SCRIPT:
            result = server.run(*command[2:], env={**env, "VERB": "script"}, cwd=tmp_path)
        else:
            result = server.run(*command[1:], env={**env, "SCRIPT": command[0]}, cwd=tmp_path)
        return subprocess.CompletedProcess(command, result.code, result.stdout, result.stderr)

    return run


def losses(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("epoch")]
