"""Communication of a supervised job with its supervisor, through files in a directory that the supervisor names.

The job writes ``begun.json`` once, when the run is committed to its output directory, and ``pulse`` in each micro-step,
in place, so that a full disk does not make a healthy job look dead. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from hf_rocm_tune.foreign import parse_json, read_bytes
from hf_rocm_tune.redaction import redact_json
from hf_rocm_tune.survive.atomic import open_in_place, write_text_atomic

if TYPE_CHECKING:
    from typing_extensions import Buffer

VARIABLE = "HF_ROCM_TUNE_SUPERVISED"
"""Environment variable of every process of a supervised job: a `Supervised` as JSON."""
PULSE_FILE = "pulse"
BEGUN_FILE = "begun.json"
JOURNAL_FILE = "survival.jsonl"
_PULSE_BYTES = 64

Phase = Literal["start", "step", "between", "evaluate", "save", "end", "publish"]
"""Before the first step, in a step (its number is one more than the completed steps), between steps (log, next batch),
in an evaluation or a save after a step, in the final save, in an upload."""


def phase_name(phase: Phase | None, step: int) -> str:
    """A phase, for people; ``step``: completed steps."""
    between = f"between steps {step} and {step + 1}" if step else "before step 1"
    names = {
        "step": f"in step {step + 1}",
        "between": between,
        "evaluate": f"in the evaluation after step {step}",
        "save": f"in the checkpoint of step {step}",
        "end": "in the save of the result",
        "publish": "in the upload of the result",
    }
    return names.get(str(phase), "before the first step")


class Supervised(NamedTuple):
    """What a supervisor tells its job: where to write, and how long it waits for a heartbeat, in seconds (0 for ever),
    because the job's own watchdog must act first: only it knows the cause of a stall."""

    directory: str
    start_seconds: float  # before the first heartbeat
    stall_seconds: float  # after it
    restart_of: str | None = None  # id of the run that an earlier start began, whose files must not be overwritten

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Supervised | None:
        """From this process's environment; None without a supervisor, or if it no longer exists."""
        with suppress(ValueError, TypeError):
            supervised = cls(**json.loads(environ.get(VARIABLE, "")))
            if Path(supervised.directory).is_dir():
                return supervised
        return None

    def to_json(self) -> str:
        return json.dumps(self._asdict())


class Begun(NamedTuple):
    """A job that has started."""

    run_id: str
    output_dir: str  # absolute
    resumed_from: str | None  # name of the checkpoint; None when the run starts from the beginning


class Pulse(NamedTuple):
    """The last heartbeat."""

    step: int  # completed optimizer steps
    phase: Phase
    stamp: int  # nanoseconds


def touch_pulse() -> None:
    """Renew the last heartbeat's time stamp while the watchdog determines the cause of a stall."""
    supervised = Supervised.of()
    if supervised is not None:
        with suppress(OSError):
            os.utime(Path(supervised.directory) / PULSE_FILE)


def report_begun(*, run_id: str, output_dir: Path, resumed_from: str | None) -> None:
    """Let the supervisor know, if there is one, which run this is."""
    supervised = Supervised.of()
    if supervised is not None:
        begun = Begun(run_id, str(output_dir.absolute()), resumed_from)
        write_text_atomic(Path(supervised.directory) / BEGUN_FILE, json.dumps(begun._asdict()))


class Heartbeat:
    """Writes the pulse file on the first local rank of a supervised job; ``listener`` gets each beat on every rank."""

    def __init__(self, environ: Mapping[str, str] = os.environ, listener: Callable[..., None] | None = None) -> None:
        self._listener = listener
        self._file: int | None = None
        supervised = Supervised.of(environ)
        if supervised is not None and environ.get("LOCAL_RANK", "0") == "0":
            file = Path(supervised.directory) / PULSE_FILE
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, *, step: int, phase: Phase) -> None:
        """Send one heartbeat; ``step``: completed steps."""
        if self._listener is not None:
            self._listener(step=step, phase=phase)
        if self._file is not None:
            os.pwrite(self._file, f"{step} {phase}".ljust(_PULSE_BYTES).encode("ascii"), 0)


def read_pulse(directory: Path) -> Pulse | None:
    """The last heartbeat; None before the first."""
    with suppress(OSError, ValueError):
        file = directory / PULSE_FILE
        stamp = file.stat().st_mtime_ns
        step, phase = file.read_text(encoding="ascii").split()
        if phase in get_args(Phase):
            return Pulse(int(step), phase, stamp)  # type: ignore[arg-type]  # it is one of them
    return None


def read_begun(directory: Path) -> Begun | None:
    with suppress(OSError, ValueError, TypeError):
        return Begun(**json.loads((directory / BEGUN_FILE).read_text(encoding="utf-8")))
    return None


class _Output(io.FileIO):
    """A terminal or pipe whose output is discarded once it has closed: a line printed must not end a job."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            return memoryview(data).nbytes


def outlive_reader() -> None:
    """Let this process survive the end of its terminal, or of the program that its output is piped into. Call before
    libraries keep ``sys.stderr`` for their logs."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(AttributeError, OSError):  # a program that calls us has put another object there
            descriptor = stream.fileno()
            if stream.isatty() or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                stream.flush()
                buffered = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True))


# ---- the journal, ``survival.jsonl``: starts of a run, how each ended and what was decided, one object per line ------


def enter(directory: Path, entry: Mapping[str, Any]) -> None:
    with open(open_in_place(directory / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file:
        file.write(json.dumps(redact_json(dict(entry))).encode() + b"\n")


def journal_of(directory: Path, run_id: str) -> list[dict[str, Any]]:
    """The entries of one run, oldest first; none without a journal."""
    entries = []
    with suppress(OSError):
        for line in read_bytes(directory / JOURNAL_FILE).decode("utf-8", "replace").splitlines():
            with suppress(ValueError):
                entry = parse_json(line)
                if isinstance(entry, dict) and entry.get("run_id") == run_id:
                    entries.append(entry)
    return entries


def survival(directory: Path, run_id: str, *, skipped_steps: list[int], crash_injection: str | None) -> dict[str, Any]:
    """The report's section ``survival``: starts and ends of this run as recorded by the supervisor."""
    entries = journal_of(directory, run_id)
    keys = ("time", "how", "code", "phase", "step", "message", "evidence", "decision")
    starts = 0
    ends = []
    for entry in entries:
        if entry.get("event") == "start":
            starts += 1
        elif entry.get("event") == "end":
            ends.append({key: entry[key] for key in keys if key in entry})
    return {
        "supervised": Supervised.of() is not None,
        "starts": starts,
        "ends": ends,
        "skipped_steps": skipped_steps,
        "crash_injection": crash_injection,
    }
