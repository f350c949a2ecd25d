"""How one of our processes ends: one line and an exit code for every error that we raise on purpose.

``run_guarded`` is the only place that turns an exception into an exit code. A group of ranks prints one line, not one
a rank: the first rank to record its ending in the temporary directory speaks for the group. The same record makes a
worker that torchrun restarts after wrong input (2) or corruption (3) refuse at once, because it would fail again, and
so after an interruption (130), because nobody asked for it to go on.

SIGTERM ends a run like Ctrl-C does, with 130: one code says that the run was asked to end and that the same command
goes on from where it is. (A shell would say 143 for a process that SIGTERM killed; nothing was killed here.)

Not covered: ranks on several machines print one line a machine, because the record is a local file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hf_rocm_tune.errors import OutOfMemoryError, TuneError

PROGRAM = "hf-rocm-tune"
#: Names the file in which a launcher wants to find ``{"code": int, "message": str}``.
EXIT_FILE_VARIABLE = "HF_ROCM_TUNE_EXIT_FILE"
INTERRUPTED = 130
#: Endings that a restart cannot change: wrong input, and corruption that could not be recovered.
FINAL_CODES = frozenset({2, 3})
#: Endings after which a worker that torchrun restarts refuses at once: those, and being asked to end.
_REFUSED_CODES = FINAL_CODES | {INTERRUPTED}

_OUT_OF_MEMORY_ADVICE = (
    "lower --per_device_train_batch_size (and raise --gradient_accumulation_steps by as much), lower --max_length, "
    "or add --load_in_4bit"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Args:
        code: its exit code.
        message: one line that says what is wrong, what was found and what to do.
        rank: the global rank of the process.
    """

    code: int
    message: str
    rank: int = 0

    def line(self) -> str:
        """The line for the terminal; it names the rank where that is not the first."""
        who = f"[rank {self.rank}] " if self.rank else ""
        kind = "interrupted" if self.code == INTERRUPTED else "error"
        return f"{PROGRAM}: {who}{kind}: {self.message}"


def run_guarded(main: Callable[[], int], *, environ: Mapping[str, str] | None = None) -> int:
    """Run an entry point and turn what it raises into an exit code.

    Args:
        main: the entry point; what it returns is the exit code.
        environ: the environment that torchrun and the launcher filled; ``os.environ`` unless given.

    Returns:
        The code of ``main``; a ``TuneError``'s own code, after one line on stderr; 130 for Ctrl-C and, within
        `sigterm_as_interrupt`, SIGTERM; 1 for any other exception, whose traceback is printed because it is our bug.
    """
    environ = os.environ if environ is None else environ
    group = _Group.of(environ)
    earlier = group.final_ending() if group else None
    if earlier is not None:
        _end(earlier, group, environ)
        return earlier.code
    rank = _number(environ, "RANK", 0)
    try:
        return main()
    except KeyboardInterrupt as stop:
        ending = Ending(code=INTERRUPTED, message=str(stop) or "stopped by Ctrl-C", rank=rank)
    except Exception as error:
        known = as_tune_error(error)
        if known is None:
            if _follows_from_a_peer(error, group):
                return 1
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        ending = Ending(code=known.exit_code, message=str(known), rank=rank)
    _end(ending, group, environ)
    return ending.code


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block SIGTERM raises ``KeyboardInterrupt``, where it would have killed the process.

    The trainer replaces this while it trains, so that a checkpoint is written. It does nothing outside the main thread
    and where somebody else has set a handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


_interrupt.ends_the_process = True  # type: ignore[attr-defined]  # so the trainer may take its place


def as_tune_error(error: BaseException) -> TuneError | None:
    """The error of ours that ``error`` is or stands for, or None where it is nobody's but our bug.

    A device that is out of memory is recognised by type, never by the text of a message.
    """
    if isinstance(error, TuneError):
        return error
    torch = sys.modules.get("torch")  # never imported here: where it was not imported, it raised nothing
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        first_sentence = str(error).strip().split(". ")[0].rstrip(".") or "out of device memory"
        mapped = OutOfMemoryError(f"{first_sentence}; {_OUT_OF_MEMORY_ADVICE}")
        mapped.__cause__ = error
        return mapped
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees all of it or the file as it was before."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _end(ending: Ending, group: _Group | None, environ: Mapping[str, str]) -> None:
    """Print and record an ending, unless another rank of the group has spoken already."""
    if group is not None and not group.claim(ending):
        return
    print(ending.line(), file=sys.stderr, flush=True)
    if wanted := environ.get(EXIT_FILE_VARIABLE):
        write_atomically(Path(wanted), json.dumps({"code": ending.code, "message": ending.message}))


def _follows_from_a_peer(error: Exception, group: _Group | None) -> bool:
    """Whether ``error`` is only the broken connection to a rank that has ended and said why.

    The communication back ends raise ``RuntimeError`` or a subclass for a peer that is gone.
    """
    return group is not None and isinstance(error, RuntimeError) and group.spoken()


class _Group:
    """The ranks that one launcher started on this machine, and the record of how they ended.

    One file for each try (torchrun restarts a group): the file appears complete or not at all. It stands beside the
    file that our launcher asks for, so that two launches by one process do not meet, else in the temporary directory.
    """

    def __init__(self, *, directory: Path, key: str, attempt: int) -> None:
        self._directory = directory
        self._key = key
        self._attempt = attempt

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _Group | None:
        """The group of this process, or None for a process that was started alone."""
        if "TORCHELASTIC_RUN_ID" not in environ and _number(environ, "WORLD_SIZE", 1) < 2:
            return None
        run = "".join(c if c.isalnum() else "_" for c in environ.get("TORCHELASTIC_RUN_ID", "mpi"))
        parent = os.getppid()
        # A process id comes back after some time; with the parent's start time the key never does.
        key = f"{PROGRAM}-{os.getuid()}-{run}-{parent}-{_start_time(parent)}"
        wanted = environ.get(EXIT_FILE_VARIABLE)
        directory = Path(wanted).parent if wanted else Path(tempfile.gettempdir())
        return cls(directory=directory, key=key, attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def claim(self, ending: Ending) -> bool:
        """Record ``ending`` as the group's; False when another rank of this try was first."""
        path = self._path(self._attempt)
        descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}-", dir=self._directory)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(ending), file)
            os.link(temporary, path)
        except FileExistsError:
            # A file of another user cannot be our group's: the line is rather printed twice than not at all.
            return not _is_ours(path)
        finally:
            os.unlink(temporary)
        return True

    def spoken(self) -> bool:
        """Whether a rank of this try has recorded its ending."""
        return _is_ours(self._path(self._attempt))

    def final_ending(self) -> Ending | None:
        """The ending of an earlier try after which there must be no other, or None."""
        for attempt in range(self._attempt):
            path = self._path(attempt)
            if _is_ours(path):
                ending = Ending(**json.loads(path.read_text(encoding="utf-8")))
                if ending.code in _REFUSED_CODES:
                    return ending
        return None

    def _path(self, attempt: int) -> Path:
        return self._directory / f"{self._key}-{attempt}.json"


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A number from the environment; what is none is refused by the entry point, in its own words."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot (``/proc/PID/stat`` field 22); "0" where that is not told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]
