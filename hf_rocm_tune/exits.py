"""How one of our processes ends: one line and an exit code for every error that we raise on purpose.

``run_guarded`` is the only place that turns an exception into an exit code. A group of ranks prints one line, not one
a rank: the first rank to record its ending in the temporary directory speaks for the group. The same record makes a
worker that torchrun restarts after wrong input (2) or corruption (3) refuse at once, because it would fail again, and
so after an interruption (130), because nobody asked for it to go on.

SIGTERM and SIGHUP end a run like Ctrl-C does, with 130: one code says that the run was asked to end and that the same
command goes on from where it is. (A shell would say 143 for a process that SIGTERM killed; nothing was killed here.)
But torch's agent sends SIGTERM as well, to the ranks that are left when one has died, before it starts the group
again. A rank that hears it before it trains cannot tell by the signal; our launcher leaves a file when it was asked
itself. Without that file the rank ends with 143, and neither speaks for the group nor keeps it from going on.

A signal that comes when the job is complete changes nothing any more, see `complete`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hf_rocm_tune import redaction
from hf_rocm_tune.endings import EXIT_FILE_VARIABLE, INTERRUPTED, Ending, Group, number
from hf_rocm_tune.errors import OutOfMemoryError, TuneError, device_shortage
from hf_rocm_tune.training.supervised import leave_terminal

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
    group = Group.of(environ)
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
        known = as_tune_error(error)
        follows = getattr(known, "follows", False)
        if (known is None or follows) and _follows_from_a_peer(error, group):
            return 1
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


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether torch's agent has started this group before."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def last_ending(environ: Mapping[str, str]) -> str | None:
    """What the last try of this group said when it ended, where it could; see `is_restart`."""
    group = Group.of(environ)
    return group.last_message() if group else None


def speak(error: TuneError, *, environ: Mapping[str, str] | None = None) -> None:
    """Print and record an error as the ending of this process, which the caller ends itself: see the watchdog."""
    environ = os.environ if environ is None else environ
    ending = Ending(code=error.exit_code, message=str(error), rank=number(environ, "RANK"))
    _end(ending, Group.of(environ), environ)


def meeting_place(environ: Mapping[str, str] | None = None) -> Path | None:
    """A directory, not made yet, that this try's ranks of one machine have in common and nobody else; None for a
    process that was started alone."""
    group = Group.of(os.environ if environ is None else environ)
    return group.meeting_place() if group else None


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


def as_tune_error(error: BaseException) -> TuneError | None:
    """The error of ours that ``error`` is or stands for, or None where it is nobody's but our bug."""
    if isinstance(error, TuneError):
        return error
    if (said := device_shortage(error)) is not None:
        mapped = OutOfMemoryError(f"{said}; {_OUT_OF_MEMORY_ADVICE}")
        mapped.__cause__ = error
        return mapped
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees all of it or the file as it was before."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def _end(ending: Ending, group: Group | None, environ: Mapping[str, str]) -> None:
    """Print and record an ending, unless another rank of the group has spoken already."""
    if group is not None and not group.claim(ending):
        return
    wanted = environ.get(EXIT_FILE_VARIABLE)
    if not (wanted and ending.follows):
        print(ending.line(), file=sys.stderr, flush=True)
    if wanted:
        told = {"code": ending.code, "message": redaction.one_line(ending.message)} | (
            {"follows": True} if ending.follows else {}
        )
        write_atomically(Path(wanted), json.dumps(told))


def _follows_from_a_peer(error: Exception, group: Group | None) -> bool:
    """Whether ``error`` is only the broken connection to a rank that has ended and said why.

    The communication back ends raise ``RuntimeError`` or a subclass for a peer that is gone.
    """
    if group is None or not isinstance(error, RuntimeError | TuneError):
        return False
    return group.spoken()


def _is_the_agents(environ: Mapping[str, str]) -> bool:
    """Whether a SIGTERM came from torch's agent: this process has one, and nobody asked the launcher above it."""
    asked = Path(environ.get(EXIT_FILE_VARIABLE, os.devnull)).with_name(ASKED_FILE)
    return "TORCHELASTIC_RESTART_COUNT" in environ and not asked.exists()
