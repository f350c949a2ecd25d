"""Communication of a supervised job with its supervisor, through files in a directory that the supervisor names.

The job writes ``begun.json`` once, when the run is committed to its output directory, and ``pulse`` at every
micro-step, so that the supervisor sees a stall. The pulse is rewritten in place: its disk block is allocated at the
start, so a full disk does not make a healthy job look dead, and a heartbeat costs microseconds. Nothing here imports
torch.

On several machines the first local rank of each reports to the supervisor there; the one with rank 0 leads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import sys
import termios
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from hf_rocm_tune.redaction import redact_json
from hf_rocm_tune.survive.atomic import open_in_place, read_plain, write_text_atomic

if TYPE_CHECKING:
    from typing_extensions import Buffer

VARIABLE = "HF_ROCM_TUNE_SUPERVISED"
"""Environment variable with the directory's path, inherited by every process of a supervised job."""

PULSE_FILE = "pulse"
BEGUN_FILE = "begun.json"
EARLIER_FILE = "earlier.json"
"""``begun.json`` of the previous start: if it is the same run, its files must not be overwritten."""
PATIENCE_FILE = "patience.json"

Phase = Literal["start", "step", "between", "evaluate", "save", "end", "publish"]
"""Before the first step, in a step (its number is one more than the completed steps), between steps (log, next batch),
in an evaluation or a save after a step, in the final save, in an upload."""

_PULSE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A job that has started."""

    run_id: str
    output_dir: str  # absolute
    resumed_from: str | None  # name of the checkpoint; None when the run starts from the beginning
    leads: bool = True  # this machine has rank 0: its supervisor writes the journal and decides which steps to skip


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """The last heartbeat: the number of completed optimizer steps, and the phase."""

    step: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits for a heartbeat, in seconds; 0 for ever."""

    start_seconds: float  # before the first
    stall_seconds: float  # after it


def tell_patience(directory: Path, patience: Patience) -> None:
    """Called by the supervisor: the job's own watchdog must act first, since only it knows the cause of a stall."""
    write_text_atomic(directory / PATIENCE_FILE, json.dumps(asdict(patience)))


def patience(environ: Mapping[str, str] = os.environ) -> Patience | None:
    """How long this process's supervisor waits; None without a supervisor."""
    try:
        directory = _directory(environ)
        return Patience(**json.loads((directory / PATIENCE_FILE).read_text(encoding="utf-8"))) if directory else None
    except (OSError, ValueError, TypeError):
        return None


def touch_pulse(environ: Mapping[str, str] = os.environ) -> None:
    """Renew the last heartbeat's time stamp while the watchdog determines the cause of a stall."""
    if directory := _directory(environ):
        file = directory / PULSE_FILE
        with contextlib.suppress(OSError):
            if read_pulse(file)[0] is None:
                file.write_text("0 start", encoding="ascii")
            os.utime(file)


def tell_begun(*, run_id: str, output_dir: Path, resumed_from: str | None, leads: bool = True) -> None:
    """Tell the supervisor, if there is one, which run this is."""
    if directory := _directory(os.environ):
        begun = Begun(
            run_id=run_id,
            output_dir=str(output_dir.absolute()),
            resumed_from=resumed_from,
            leads=leads,
        )
        write_text_atomic(directory / BEGUN_FILE, json.dumps(asdict(begun)))


def is_restart_of(run_id: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process's supervisor has started this run before."""
    directory = _directory(environ)
    earlier = read_begun(directory / EARLIER_FILE) if directory else None
    return earlier is not None and earlier.run_id == run_id


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    return _directory(environ) is not None


class PulseListener(Protocol):
    """Receives the heartbeats of a trainer; see `Heartbeat.beat`."""

    def __call__(self, *, step: int, phase: Phase, fresh: bool) -> None: ...


class Heartbeat:
    """Writes the pulse file on the first local rank of a supervised job.

    ``listener`` receives each heartbeat, in every process: see `train.stall`, whose watchdog is in the process.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, listener: PulseListener | None = None) -> None:
        self._listener = listener
        directory = _directory(environ)
        self._file: int | None = None
        if directory is not None and environ.get("LOCAL_RANK", "0") == "0":
            self._file = os.open(directory / PULSE_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, *, step: int, phase: Phase, fresh: bool = False) -> None:
        """Send one heartbeat; ``step``: completed steps.

        ``fresh``: a phase begins whose duration is not known yet, such as an epoch, so it gets more time.
        """
        if self._listener is not None:
            self._listener(step=step, phase=phase, fresh=fresh)
        if self._file is not None:
            os.pwrite(self._file, f"{step} {phase}".ljust(_PULSE_BYTES).encode("ascii"), 0)


def read_pulse(file: Path) -> tuple[Pulse | None, int]:
    """The last heartbeat and its time stamp (nanoseconds); (None, 0) before the first."""
    try:
        stamp = file.stat().st_mtime_ns
        step, phase = file.read_text(encoding="ascii").split()
        if phase not in get_args(Phase):
            return None, 0
        return Pulse(step=int(step), phase=phase), stamp  # type: ignore[arg-type]  # it is one of them
    except (OSError, ValueError):
        return None, 0


def read_begun(file: Path) -> Begun | None:
    try:
        return Begun(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def leave_terminal() -> None:
    """After the terminal has closed (SIGHUP), redirect output to /dev/null: writing to it would end the process."""
    for stream in (1, 2):
        try:
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                _discard(stream)
        except OSError:
            pass  # closed


def _discard(stream: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


class _Output(io.FileIO):
    """A terminal or pipe whose output is discarded once it has closed: a line printed must not end a job.

    A supervised job gets no signal from its terminal, only one from its supervisor a moment later; and Ctrl-C ends the
    ``tee`` behind a job before the job has written its checkpoint.
    """

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            _discard(self.fileno())
            return super().write(data) or 0


def outlive_reader() -> None:
    """Let this process survive the end of its terminal, or of the program that its output is piped into. Call before
    libraries keep ``sys.stderr`` for their logs."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and (
            stream.isatty() or stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
        ):
            stream.flush()
            raw = _Output(stream.fileno(), "w", closefd=False)
            buffered = io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True))


def _directory(environ: Mapping[str, str]) -> Path | None:
    """The supervisor's directory; None without one, or if it no longer exists."""
    path = Path(environ.get(VARIABLE, ""))
    return path if environ.get(VARIABLE) and path.is_dir() else None


# ---- the journal --------------------------------------------------------------------------------------------

JOURNAL_FILE = "survival.jsonl"
"""The starts of a run, how each ended and what the supervisor decided, one JSON object per line."""


def enter(directory: Path, entry: Mapping[str, Any]) -> None:
    descriptor = open_in_place(directory / JOURNAL_FILE, os.O_RDWR | os.O_APPEND)
    with open(descriptor, "rb+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        # A line cut short by a power failure must not swallow this one.
        torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        file.write(("\n" if torn else "").encode() + json.dumps(redact_json(dict(entry))).encode() + b"\n")


def journal_of(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """The entries of one run, oldest first; none without a journal."""
    try:
        lines = read_plain(directory / JOURNAL_FILE).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("run_id") == run_id:
            found.append(entry)
    return found


def survival(
    directory: Path, run_id: str, *, skipped_steps: list[int], supervised: bool, crash_injection: str | None
) -> dict[str, Any]:
    """The report's section ``survival``: starts and ends of this run as recorded by the supervisor."""
    entries = journal_of(directory, run_id)
    ends = [entry for entry in entries if entry.get("event") == "end"]
    keys = ("time", "how", "code", "phase", "step", "message", "evidence", "decision")
    return {
        "supervised": supervised,
        "starts": sum(entry.get("event") == "start" for entry in entries),
        "ends": [{key: entry[key] for key in keys if key in entry} for entry in ends],
        "skipped_steps": skipped_steps,
        "crash_injection": crash_injection,
    }
