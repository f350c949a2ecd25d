"""What a launcher puts into the environment of the ranks of a job, for tests that start the ranks themselves."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environments(exit_file: Path, each: Sequence[dict[str, str]] = ({}, {}), **common: str) -> list[dict[str, str]]:
    """One for each rank. Every call is another launch, never a restart of an earlier one.

    Args:
        exit_file: where the launcher wants to find how the job ended; one of an earlier launch is taken away.
        each: variables of each rank, as many as there are ranks.
        common: variables of all.
    """
    exit_file.parent.mkdir(parents=True, exist_ok=True)
    exit_file.unlink(missing_ok=True)
    port = str(free_port())
    world = {
        "WORLD_SIZE": str(len(each)),
        "LOCAL_WORLD_SIZE": str(len(each)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": f"/torchelastic/{port}/attempt_0/0/error.json",
        "HF_ROCM_TUNE_EXIT_FILE": str(exit_file),
    }
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(each))]
    return [{**world, **common, **number, **own} for number, own in zip(numbers, each, strict=True)]
