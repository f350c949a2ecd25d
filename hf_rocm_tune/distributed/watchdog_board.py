"""Where the watchdogs of one machine meet: a directory of their own with one small file for each rank.

Every rank rewrites its file in place, so that a full disk does not silence it, and reads those of the others. When one
declares a stall it makes a file that the others see; they leave their statements beside it. The last one to leave
takes the directory away; what a killed rank has left is taken away with it.

Not covered: ranks on other machines; ranks in containers that do not share a process table, who do not meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rocm_tune.distributed.watchdog_proc import born, is_alive
from hf_rocm_tune.errors import UsageError

_DECLARED, _FINISHED = "declared", "finished"
_BLOCK_BYTES, _WHERE_BYTES = 512, 128
_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one rank stands.

    Args:
        rank: its number in the job.
        pid: its process.
        born: see `watchdog_proc.born`.
        tick: grows while its watchdog runs; a process that is stopped as a whole no longer ticks.
        where: what it is at: "in step 12".
        silent_s: seconds without progress that its watchdog has seen.
        overdue: whether that is more than it allows itself.
    """

    rank: int
    pid: int
    born: str
    tick: int
    where: str
    silent_s: float
    overdue: bool

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return is_alive(self.pid, self.born)


class Board:
    """One rank's place in the meeting directory; it exists from here to `leave`.

    Args:
        directory: the same for all ranks of one job on one machine, and for none of another job.
        rank: of this process.

    Raises:
        UsageError: the directory is somebody else's, or open to others.
        OSError: it cannot be made.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self.rank = directory, rank
        self._born = born(os.getpid())
        self._file = self._open()
        self.show(tick=0, silent_s=0.0, overdue=False)
        self.mark("at the start")

    def _open(self) -> int:
        for attempt in range(_TRIES):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            _refuse_foreign(self._directory)
            try:
                return os.open(self._of(self.rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last rank to leave has just taken it away
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def show(self, *, tick: int, silent_s: float, overdue: bool) -> None:
        """Let the others see how this rank stands."""
        mine = {"rank": self.rank, "pid": os.getpid(), "born": self._born}
        mine |= {"tick": tick, "silent_s": round(silent_s, 3), "overdue": overdue}
        os.pwrite(self._file, json.dumps(mine).encode("ascii").ljust(_BLOCK_BYTES), 0)

    def mark(self, where: str) -> None:
        """Let the others see what this rank is at; by the thread that is at it, so that it stays true when all of the
        process is stopped."""
        os.pwrite(self._file, where.encode("ascii").ljust(_WHERE_BYTES)[:_WHERE_BYTES], _BLOCK_BYTES)

    def others(self) -> list[Standing]:
        """The other ranks that have come and not left, whether they live or not."""
        found = [_read_standing(file) for file in self._directory.glob("rank-*")]
        return sorted((each for each in found if each and each.rank != self.rank), key=lambda each: each.rank)

    def declare(self) -> bool:
        """Tell the others of a stall; False when another rank was first."""
        try:
            descriptor = os.open(self._directory / _DECLARED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(str(self.rank))
        return True

    def is_declared(self) -> bool:
        """Whether some rank has declared a stall."""
        return (self._directory / _DECLARED).exists()

    def declared_by(self) -> Standing | None:
        """Who declared it; None where that is not known (yet, or any more)."""
        with contextlib.suppress(OSError, ValueError):
            return _read_standing(self._of(int((self._directory / _DECLARED).read_text(encoding="utf-8"))))
        return None

    def state(self, statement: Mapping[str, Any]) -> None:
        """Leave this rank's statement, in place of an earlier one."""
        target = self._directory / f"statement-{self.rank}"
        temporary = target.with_name(f".{target.name}")
        temporary.write_text(json.dumps(statement), encoding="utf-8")
        temporary.replace(target)

    def statement(self, rank: int) -> dict[str, Any] | None:
        """What a rank has stated."""
        try:
            found = json.loads((self._directory / f"statement-{rank}").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else None
        except (OSError, ValueError):
            return None

    def finish(self) -> None:
        """Let those that answered go."""
        (self._directory / _FINISHED).touch(mode=0o600)

    def is_finished(self) -> bool:
        """Whether they may go."""
        return (self._directory / _FINISHED).exists() or not self._directory.exists()

    def leave(self, *, without: Collection[int] = ()) -> None:
        """This rank is done; when no living one is left, so is the directory.

        Args:
            without: processes that are about to be killed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._of(self.rank).unlink()
        os.close(self._file)
        if not any(each.alive for each in self.others() if each.pid not in without):
            shutil.rmtree(self._directory, ignore_errors=True)

    def _of(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"


def _read_standing(file: Path) -> Standing | None:
    """None for one that is gone, or is being written."""
    try:
        raw = file.read_bytes()
        where = raw[_BLOCK_BYTES:].decode("ascii").strip()
        return Standing(**json.loads(raw[:_BLOCK_BYTES]), where=where)
    except (OSError, ValueError, TypeError):
        return None


def _refuse_foreign(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{directory}, where the ranks of this job meet, is not a directory that only you can use: remove it, or "
            "set TMPDIR to a directory of your own"
        )
