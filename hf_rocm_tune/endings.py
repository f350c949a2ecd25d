"""How a process of ours ended, and the record of it that its group shares.

The ranks that were started together on one machine print one line, not one a rank: the first to record its ending in
the temporary directory speaks for the group. Ranks that torch's agent starts again read there how the last try ended.

A rank that no agent started (mpirun, srun, a shell) is never started again by anybody, and a shell may start one job
after another as the same parent: there a record counts only when it is newer than the process that reads it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_rocm_tune.redaction import one_line

PROGRAM = "hf-rocm-tune"
INTERRUPTED = 130
#: Names the file in which a launcher wants to find ``{"code": int, "message": str}``; with ``"follows": true`` it was
#: not printed, because the launcher may know better, see `Ending`.
EXIT_FILE_VARIABLE = "HF_ROCM_TUNE_EXIT_FILE"
#: Endings that a restart cannot change: wrong input, and corruption that could not be recovered.
FINAL_CODES = frozenset({2, 3})
#: Endings after which a worker that torchrun restarts refuses at once: those, and being asked to end.
REFUSED_CODES = FINAL_CODES | {INTERRUPTED}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Args:
        code: its exit code.
        message: one line that says what is wrong, what was found and what to do.
        rank: the global rank of the process.
        follows: it only follows from another rank's end; a launcher that knows of that one tells it instead.
    """

    code: int
    message: str
    rank: int = 0
    follows: bool = False

    def line(self) -> str:
        """The line for the terminal; it names the rank where that is not the first."""
        who = f"[rank {self.rank}] " if self.rank else ""
        kind = "interrupted" if self.code == INTERRUPTED else "error"
        return f"{PROGRAM}: {who}{kind}: {one_line(self.message)}"


class Group:
    """The ranks that one launcher started on this machine, and the record of how they ended.

    One file for each try (torchrun restarts a group): the file appears complete or not at all. It stands beside the
    file that our launcher asks for, so that two launches by one process do not meet, else in the temporary directory.
    A try is known by the agent's count and the port of its ranks: either alone may stay what it was.
    """

    def __init__(self, *, directory: Path, key: str, attempt: str, newer_than_ns: int) -> None:
        self._directory = directory
        self._key = key
        self._attempt = attempt
        self._newer_than_ns = newer_than_ns

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Group | None:
        """The group of this process, or None for a process that was started alone."""
        if "TORCHELASTIC_RUN_ID" not in environ and number(environ, "WORLD_SIZE", 1) < 2:
            return None
        run = "".join(c if c.isalnum() else "_" for c in environ.get("TORCHELASTIC_RUN_ID", "mpi"))
        parent = os.getppid()
        # A process id comes back after some time; with the parent's start time the key never does.
        key = f"{PROGRAM}-{os.getuid()}-{run}-{parent}-{_start_time(parent)}"
        wanted = environ.get(EXIT_FILE_VARIABLE)
        directory = Path(wanted).parent if wanted else Path(tempfile.gettempdir())
        count = number(environ, "TORCHELASTIC_RESTART_COUNT")
        return cls(
            directory=directory,
            key=key,
            attempt=f"{count}.{number(environ, 'MASTER_PORT')}",
            newer_than_ns=0 if "TORCHELASTIC_RUN_ID" in environ else _own_start_ns(),
        )

    def claim(self, ending: Ending) -> bool:
        """Record ``ending`` as the group's; False when another rank of this try was first."""
        path = self._path()
        if path.exists() and not self._counts(path):
            with suppress(OSError):  # another user's
                path.unlink()
        descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}-", dir=self._directory)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(ending), file)
            os.link(temporary, path)
        except FileExistsError:
            # A file of another user cannot be our group's: the line is rather printed twice than not at all.
            return not self._counts(path)
        finally:
            os.unlink(temporary)
        return True

    def spoken(self) -> bool:
        """Whether a rank of this try has recorded its ending."""
        return self._counts(self._path())

    def final_ending(self) -> Ending | None:
        """The ending of an earlier try after which there must be no other, or None."""
        endings = (Ending(**json.loads(path.read_text(encoding="utf-8"))) for path in self._earlier())
        return next((ending for ending in endings if ending.code in REFUSED_CODES), None)

    def last_message(self) -> str | None:
        """What the try before this one recorded."""
        newest = max(self._earlier(), key=lambda path: path.stat().st_mtime_ns, default=None)
        return str(json.loads(newest.read_text(encoding="utf-8"))["message"]) if newest else None

    def _earlier(self) -> list[Path]:
        found = self._directory.glob(f"{self._key}-*.json")
        return [path for path in found if path != self._path() and self._counts(path)]

    def meeting_place(self) -> Path:
        """See the function of this name."""
        return self._directory / f"{self._key}-{self._attempt}-ranks"

    def _path(self) -> Path:
        return self._directory / f"{self._key}-{self._attempt}.json"

    def _counts(self, path: Path) -> bool:
        """Whether a file is there, this user's, and not of an earlier job."""
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        return found.st_uid == os.getuid() and found.st_mtime_ns >= self._newer_than_ns


def number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """A number from the environment; what is none is refused by the entry point, in its own words."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot (``/proc/PID/stat`` field 22); "0" where that is not told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]


def _own_start_ns() -> int:
    """When this process started, in nanoseconds of the wall clock; 0 where that is not told."""
    try:
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    age_s = uptime_s - int(_start_time(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)
