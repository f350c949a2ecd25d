"""What all ranks of a job must have alike before they train: versions, settings, rows, and one output directory.

Ranks that one launcher started have it without saying. On several machines each one has its own Python environment,
command line, data and disks, and a difference would show as a hang, or not at all. All of it goes over gloo, a few
kilobytes, before the model is loaded. The model's files are not compared here: the digests of the loaded weights are,
before the first step (`integrity.replicas`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import PartialState

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.host_group import host_group

MAY_DIFFER = frozenset({"model_name_or_path", "dataset_name", "datasets", "chat_template_path", "local_rank"})
"""Settings that name what lies on each machine's own disk."""

_ROWS_LOOKED_AT = 64
_SECONDS_TO_APPEAR = 10.0
"""A network file system may show a new file to other machines late."""

T = TypeVar("T")


def require_same(versions: Mapping[str, str | None], settings: Mapping[str, Any]) -> None:
    """Refuse to go on where ranks have other versions or settings than rank 0. Collective.

    Args:
        versions: of what is installed here.
        settings: resolved settings by name; `MAY_DIFFER` is left out.

    Raises:
        UsageError: on every rank, naming the first difference.
    """
    compared = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
    _require_alike(
        {name: f"{name} {value or 'not installed'}" for name, value in versions.items()},
        "install the same versions on every machine",
    )
    _require_alike(
        {name: f"--{name} {json.dumps(value, default=str)}" for name, value in compared.items()},
        "start the same command on every machine, with --machine_rank as the only difference",
    )


def require_same_rows(rows: Any, split: str) -> None:
    """Refuse to go on where ranks have other rows than rank 0. Collective.

    Their number is compared, and the content of 64 of them, evenly spread. Not covered: a stream, which has no number
    of rows; accelerate has rank 0 read it for all.

    Args:
        rows: a dataset, or anything with a length and rows by number; else nothing is compared.
        split: for the message.

    Raises:
        UsageError: on every rank.
    """
    said = "a stream"
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        count = len(rows)
        numbers = sorted({index * count // _ROWS_LOOKED_AT for index in range(_ROWS_LOOKED_AT)}) if count else []
        text = json.dumps([rows[number] for number in numbers], sort_keys=True, default=str)
        said = f"{count} {split} rows with the digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    _require_alike({split: said}, "give every machine the same data")


def require_shared(directory: Path) -> None:
    """Refuse to go on where a rank does not see rank 0's output directory. Collective.

    Rank 0 writes checkpoints and result, and every rank reads the checkpoint that the run goes on from.

    Raises:
        UsageError: on every rank, naming the machines that do not see it.
    """
    token = _gather(f"_seen-{secrets.token_hex(8)}")[0]
    probe, first = directory / token, PartialState().is_main_process
    if first:
        probe.touch()
    try:
        _gather(None)  # the file is there now
        seen = _gather((_host(), _appears(probe)))
    finally:
        if first:
            probe.unlink(missing_ok=True)
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise UsageError(
            f"--output_dir {directory} of {seen[0][0]} is not what {', '.join(blind)} has there: put it on a disk that "
            "all machines share at the same path (NFS, sshfs); rank 0 writes the checkpoints, and every rank reads them"
        )


def any_rank(here: bool) -> bool:
    """Whether it is so on some rank. Collective."""
    return any(_gather(here))


def _require_alike(mine: Mapping[str, str], advice: str) -> None:
    everyone = _gather((_host(), dict(mine)))
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        different = [name for name in first.keys() | theirs.keys() if first.get(name) != theirs.get(name)]
        if different:
            name = min(different)
            more = f" ({len(different)} differences in all)" if len(different) > 1 else ""
            raise UsageError(
                f"rank {rank} on {host} has {theirs.get(name, f'no {name}')}, rank 0 on {first_host} has "
                f"{first.get(name, f'no {name}')}{more}: {advice}"
            )


def _appears(file: Path, clock: Callable[[], float] = time.monotonic) -> bool:
    deadline = clock() + _SECONDS_TO_APPEAR
    while not file.exists():
        if clock() > deadline:
            return False
        time.sleep(0.1)
    return True


def _host() -> str:
    return os.uname().nodename


def _gather(mine: T) -> list[T]:
    """What each rank gives, in the order of the ranks; over gloo."""
    if PartialState().num_processes == 1:
        return [mine]
    group = host_group()
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, mine, group=group)
    return rows
