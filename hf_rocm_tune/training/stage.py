"""One save in progress, on all ranks: where it is written, what went wrong, and what the ranks agree on.

A rank that fails must not leave the save at once: the others wait for it in a barrier of upstream's. So a failure is
kept, the writing goes on as far as it can, and all ranks decide together in `failed`.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from hf_rocm_tune.errors import CorruptionError, TuneError, UsageError
from hf_rocm_tune.integrity.atomic import create_staging

_PROBE_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FULL = "disk full"


@dataclass(kw_only=True)
class Stage:
    """A staging directory and what happened in it.

    Attributes:
        root: the directory; it exists when ``usable``.
        usable: whether rank 0 could make it.
        need_bytes: about how much the weights take on disk.
        failure: the first thing that went wrong on this rank.
        push_wanted: upstream asked for a push of what is being written.
    """

    root: Path
    usable: bool = False
    need_bytes: int = 0
    failure: Exception | None = None
    push_wanted: bool = False

    def attempt(self, write: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Call ``write`` and keep what it raises. torch.save reports a full disk as a RuntimeError."""
        try:
            write(*arguments, **keywords)
        except (OSError, RuntimeError, SafetensorError, TuneError) as error:
            self.failure = self.failure or error


def open_stage(final: Path, *, rank: int, need_bytes: int) -> Stage:
    """Make a staging directory beside ``final`` on rank 0 and tell every rank; each looks whether it sees it."""
    stage = Stage(root=final.parent, need_bytes=need_bytes)
    name = None
    if rank == 0:
        try:
            name = str(create_staging(final))
        except OSError as error:
            stage.failure = error
    name = broadcast_object_list([name])[0]
    if name is None:
        return stage
    stage.root, stage.usable = Path(name), True
    if not stage.root.is_dir():
        stage.failure = UsageError(f"rank {rank} does not see {name}: put output_dir on a disk that all nodes share")
    return stage


def failed(stage: Stage) -> bool:
    """Whether some rank found the disk full. Collective: every rank hears of every failure and returns the same.

    Raises:
        Exception: this rank's own failure, if it is not a full disk.
        CorruptionError: another rank found corruption.
        TuneError: another rank failed otherwise.
    """
    error = stage.failure
    own = []
    if error is not None:
        kind = _FULL if is_disk_full(error, stage.root, stage.need_bytes) else type(error).__name__
        own = [(kind, str(error))]
    others = [(kind, text) for kind, text in gather_object(own) if kind != _FULL]
    if error is not None and own[0][0] != _FULL:
        raise error
    if others:
        kind, text = others[0]
        raise CorruptionError(text) if kind == CorruptionError.__name__ else TuneError(f"another rank: {kind}: {text}")
    return bool(gather_object(own))


def drop_stage(stage: Stage, *, rank: int) -> None:
    """Delete what is left of the staging directory, and give its space back."""
    if stage.failure is not None:
        stage.failure = None
        gc.collect()  # torch.save leaves its file open in a reference cycle when it fails, and so holds the space
    if rank == 0 and stage.usable:
        shutil.rmtree(stage.root, ignore_errors=True)


def is_disk_full(error: BaseException, directory: Path, need_bytes: int) -> bool:
    """Whether ``error``, raised while writing below ``directory``, comes from a full disk or an exhausted quota.

    torch.save and safetensors hide the error number, so the disk itself is asked for ``need_bytes`` (at least 1 MiB);
    the probe is that large because safetensors has already removed the file for which there was no room.
    """
    if isinstance(error, TuneError):
        return False
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(probe.fileno(), 0, max(need_bytes, _PROBE_BYTES))
            else:
                probe.write(b"\0" * _PROBE_BYTES)
    except OSError as found:
        return found.errno in _NO_ROOM
    return False
