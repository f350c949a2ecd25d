"""How one of our processes ends: one line and an exit code for every error that we raise on purpose.

``run_guarded`` is the only place that turns an exception into an exit code. Of the ranks that were started together on
one machine the first to record its ending, in the temporary directory, prints the line. The same record makes a worker
that torchrun restarts after wrong input (2), corruption (3) or an interruption (130) refuse at once. A rank that no
agent started (mpirun, srun, a shell) is never started again by anybody, and a shell may start one job after another as
the same parent: there a record counts only when it is newer than the process.

SIGTERM and SIGHUP end a run like Ctrl-C does, with 130. But torch's agent sends SIGTERM as well, to the ranks that are
left when one has died, before it starts the group again. A rank that hears it before it trains cannot tell by the
signal; our launcher leaves a file when it was asked itself. Without that file the rank ends with 143, and neither
speaks for the group nor keeps it from going on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hf_rocm_tune import redaction
from hf_rocm_tune.errors import OutOfMemoryError, TuneError, device_shortage
from hf_rocm_tune.training.supervised import leave_terminal

PROGRAM = "hf-rocm-tune"
INTERRUPTED = 130
#: Names the file in which a launcher wants to find ``{"code": int, "message": str}``; with ``"follows": true`` it was
#: not printed, because the launcher may know better, see `Ending`.
EXIT_FILE_VARIABLE = "HF_ROCM_TUNE_EXIT_FILE"
#: Endings that a restart cannot change: wrong input, and corruption that could not be recovered.
FINAL_CODES = frozenset({2, 3})
#: Endings after which a worker that torchrun restarts refuses at once: those, and being asked to end.
REFUSED_CODES = FINAL_CODES | {INTERRUPTED}
#: Beside the launcher's exit file: a signal asked the launcher for the end.
ASKED_FILE = "asked"
_TERMINATED = 128 + signal.SIGTERM
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_process_ends = False
"""Whether this process does nothing after the entry point that `run_guarded` runs."""

_OUT_OF_MEMORY_ADVICE = (
    "lower --per_device_train_batch_size (and raise --gradient_accumulation_steps by as much), lower --max_length, "
    "or add --load_in_4bit"
)


def run_guarded(
    main: Callable[[], int],
    *,
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    process_ends: bool = False,
) -> int:
    """Run an entry point and turn what it raises into an exit code.

    Args:
        main: the entry point; what it returns is the exit code.
        argv: its command line, whose secrets are not to be printed.
        environ: the environment that torchrun and the launcher filled; ``os.environ`` unless given.
        process_ends: the caller ends the process with the code; see `complete`.

    Returns:
        The code of ``main``; a ``TuneError``'s own code, after one line on stderr; 130 for Ctrl-C and, within
        `sigterm_as_interrupt`, SIGTERM and SIGHUP; 143 for a SIGTERM of torch's agent; 1 for any other exception, whose
        traceback is printed because it is our bug.
    """
    global _process_ends
    _process_ends = process_ends
    environ = os.environ if environ is None else environ
    redaction.remember({name: value for name, value in environ.items() if not value.startswith("/")})
    redaction.remember_arguments(argv)
    group = RankGroup.of(environ)
    if group is not None and (earlier := group.final_ending()) is not None:
        return earlier.code  # its line was printed then
    rank = number(environ, "RANK")
    try:
        code = main()
        if code == 0:
            _ignore_signals()
        return code
    except KeyboardInterrupt as stop:
        if isinstance(stop, _Terminated) and _is_the_agents(environ):
            return _TERMINATED
        ending = Ending(code=INTERRUPTED, message=str(stop) or "stopped by Ctrl-C", rank=rank)
    except Exception as error:
        known = error if isinstance(error, TuneError) else None
        if known is None and (said := device_shortage(error)) is not None:
            known = OutOfMemoryError(f"{said}; {_OUT_OF_MEMORY_ADVICE}")
        follows = getattr(known, "follows", False)
        # The communication back ends raise RuntimeError or a subclass for a peer that is gone.
        from_a_peer = (known is None or follows) and isinstance(error, RuntimeError | TuneError)
        if from_a_peer and group is not None and group.spoken():
            return 1  # only the broken connection to a rank that has ended and said why
        if known is None:
            lines = "".join(traceback.format_exception(error))
            print(redaction.redact(lines), file=sys.stderr, end="", flush=True)
            return 1
        ending = Ending(code=known.exit_code, message=str(known), rank=rank, follows=follows)
    _end(ending, group, environ)
    return ending.code


def complete(environ: Mapping[str, str] | None = None) -> None:
    """All that the job was to leave is in place: a signal that comes now does not make it an interrupted one.

    Who launched this process learns it from the record, and the process ignores the signals until it has ended.
    """
    environ = os.environ if environ is None else environ
    _ignore_signals()
    if (wanted := environ.get(EXIT_FILE_VARIABLE)) and number(environ, "RANK") == 0:
        write_atomically(Path(wanted), json.dumps({"code": 0, "message": "done"}))


def _ignore_signals() -> None:
    if _process_ends and threading.current_thread() is threading.main_thread():
        for ending in _ENDING_SIGNALS:
            signal.signal(ending, signal.SIG_IGN)


def speak(error: TuneError, *, environ: Mapping[str, str] | None = None) -> None:
    """Print and record an error as the ending of this process, which the caller ends itself: see the watchdog."""
    environ = os.environ if environ is None else environ
    ending = Ending(code=error.exit_code, message=str(error), rank=number(environ, "RANK"))
    _end(ending, RankGroup.of(environ), environ)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise ``KeyboardInterrupt``, where they would have killed the process.

    The trainer replaces this while it trains, so that a checkpoint is written. It does nothing outside the main thread
    and to a signal that somebody else handles or ignores (``nohup``).
    """
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, _interrupt)
    try:
        yield
    finally:
        for one in taken:
            if signal.getsignal(one) is _interrupt:  # not ignored since, see `complete` and `training.stall`
                signal.signal(one, signal.SIG_DFL)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which torch's agent sends too."""


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    said = f"stopped by {signal.Signals(number).name}"
    if number == signal.SIGHUP:
        leave_terminal()
        raise KeyboardInterrupt(said)
    raise _Terminated(said)


_interrupt.ends_the_process = True  # type: ignore[attr-defined]  # so the trainer may take its place


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees all of it or the file as it was before."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _end(ending: Ending, group: RankGroup | None, environ: Mapping[str, str]) -> None:
    """Print and record an ending, unless another rank of the group has spoken already."""
    if group is not None and not group.claim(ending):
        return
    wanted = environ.get(EXIT_FILE_VARIABLE)
    if not (wanted and ending.follows):
        print(ending.line(), file=sys.stderr, flush=True)
    if wanted:
        told = {"code": ending.code, "message": redaction.one_line(ending.message)}
        write_atomically(Path(wanted), json.dumps(told | ({"follows": True} if ending.follows else {})))


def _is_the_agents(environ: Mapping[str, str]) -> bool:
    """Whether a SIGTERM came from torch's agent: this process has one, and nobody asked the launcher above it."""
    asked = Path(environ.get(EXIT_FILE_VARIABLE, os.devnull)).with_name(ASKED_FILE)
    return "TORCHELASTIC_RESTART_COUNT" in environ and not asked.exists()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended."""

    code: int
    message: str  # one line that says what is wrong, what was found and what to do
    rank: int = 0  # of the job
    follows: bool = False  # it only follows from another rank's end; a launcher that knows of that one tells it instead

    def line(self) -> str:
        """The line for the terminal; it names the rank where that is not the first."""
        who = f"[rank {self.rank}] " if self.rank else ""
        kind = "interrupted" if self.code == INTERRUPTED else "error"
        return f"{PROGRAM}: {who}{kind}: {redaction.one_line(self.message)}"


class RankGroup:
    """The ranks that one launcher started on this machine, and the record of how they ended (see `of`).

    One file for each try (torchrun restarts a group): the file appears complete or not at all. It stands beside the
    file that our launcher asks for, so that two launches by one process do not meet, else in the temporary directory.
    A try is known by the agent's count and the port of its ranks: either alone may stay what it was.
    """

    def __init__(self, directory: Path, key: str, attempt: str, newer_than_ns: int) -> None:
        self._directory, self._key, self._attempt, self._newer_than_ns = directory, key, attempt, newer_than_ns

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankGroup | None:
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
        newer_than_ns = 0 if "TORCHELASTIC_RUN_ID" in environ else _own_start_ns()
        return cls(directory, key, f"{count}.{number(environ, 'MASTER_PORT')}", newer_than_ns)

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
        """A directory, not made yet, that this try's ranks of one machine have in common and nobody else."""
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
