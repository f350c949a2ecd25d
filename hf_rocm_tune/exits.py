"""How one of our processes ends: one line and an exit code for every error that we raise on purpose.

``run_guarded`` is the only place that turns an exception into an exit code. A group of ranks prints one line, not one
a rank: the first rank to record its ending in the temporary directory speaks for the group. The same record makes a
worker that torchrun restarts after wrong input (2) or corruption (3) refuse at once, because it would fail again, and
so after an interruption (130), because nobody asked for it to go on. Ranks on other machines hear of such an ending
through the store at which the machines meet (`machines_word`), and print the line there once.

SIGTERM ends a run like Ctrl-C does, with 130: one code says that the run was asked to end and that the same command
goes on from where it is. (A shell would say 143 for a process that SIGTERM killed; nothing was killed here.) But
torch's agent sends SIGTERM as well, to the ranks that are left when one has died, before it starts the group again.
A rank that hears it before it trains cannot tell by the signal; our launcher leaves a file when it was asked itself.
Without that file the rank ends with 143, and neither speaks for the group nor keeps it from going on.
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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hf_rocm_tune.distributed import machines_word
from hf_rocm_tune.endings import EXIT_FILE_VARIABLE, INTERRUPTED, REFUSED_CODES, Ending, Group, number
from hf_rocm_tune.errors import OutOfMemoryError, TuneError

#: Beside the launcher's exit file: a signal asked the launcher for the end.
ASKED_FILE = "asked"
_TERMINATED = 128 + signal.SIGTERM
_SECONDS_TO_END = 10.0
_SECONDS_TO_SAVE = 300.0
"""How long a rank may go on by itself after another machine has ended the job, and after it was asked to end: then this
rank saves and uploads."""

_OUT_OF_MEMORY_ADVICE = (
    "lower --per_device_train_batch_size (and raise --gradient_accumulation_steps by as much), lower --max_length, "
    "or add --load_in_4bit"
)


def run_guarded(main: Callable[[], int], *, environ: Mapping[str, str] | None = None) -> int:
    """Run an entry point and turn what it raises into an exit code.

    Args:
        main: the entry point; what it returns is the exit code.
        environ: the environment that torchrun and the launcher filled; ``os.environ`` unless given.

    Returns:
        The code of ``main``; a ``TuneError``'s own code, after one line on stderr; 130 for Ctrl-C and, within
        `sigterm_as_interrupt`, SIGTERM; 143 for a SIGTERM of torch's agent; 1 for any other exception, whose traceback
        is printed because it is our bug.
    """
    environ = os.environ if environ is None else environ
    group = Group.of(environ)
    if group is not None:
        group.arrive()
        if (earlier := group.final_ending()) is not None:
            return earlier.code  # its line was printed then
        if group.is_again() and (told := machines_word.heard(environ)) is not None:
            return _adopt(told, environ).code
    rank = number(environ, "RANK")
    try:
        return main()
    except KeyboardInterrupt as stop:
        if isinstance(stop, _Terminated) and _is_the_agents(environ):
            return _TERMINATED
        ending = Ending(code=INTERRUPTED, message=str(stop) or "stopped by Ctrl-C", rank=rank)
    except Exception as error:
        known = as_tune_error(error)
        follows = getattr(known, "follows", False)
        if (known is None or follows) and _follows_from_a_peer(error, group, environ):
            return 1
        if known is None:
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        ending = Ending(code=known.exit_code, message=str(known), rank=rank, follows=follows)
    _end(ending, group, environ)
    if ending.code in REFUSED_CODES:
        machines_word.tell(asdict(ending), environ)
    return ending.code


def listen_to_other_machines(environ: Mapping[str, str]) -> None:
    """End this process soon after a rank on another machine has ended the job for good. Returns at once.

    The main thread has some seconds to end by itself, as it does where a collective breaks. Where it hangs in one, the
    process is ended from here. Imports torch on several machines.
    """

    def hear(told: dict[str, Any]) -> None:
        ending = _adopt(told, environ)
        threading.Event().wait(_SECONDS_TO_SAVE if ending.code == INTERRUPTED else _SECONDS_TO_END)
        os._exit(ending.code)

    machines_word.listen(hear, environ)


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether torch's agent has started this group before.

    Its own count does not tell: an agent that starts its ranks again because of another machine does not count that.
    """
    group = Group.of(environ)
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0") or (group is not None and group.is_again())


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
        if signal.getsignal(signal.SIGTERM) is _interrupt:  # not ignored since, see `training.stall`
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated(f"stopped by {signal.Signals(number).name}")


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


def _end(ending: Ending, group: Group | None, environ: Mapping[str, str]) -> None:
    """Print and record an ending, unless another rank of the group has spoken already."""
    if group is not None and not group.claim(ending):
        return
    wanted = environ.get(EXIT_FILE_VARIABLE)
    if not (wanted and ending.follows):
        print(ending.line(), file=sys.stderr, flush=True)
    if wanted:
        told = {"code": ending.code, "message": ending.message} | ({"follows": True} if ending.follows else {})
        write_atomically(Path(wanted), json.dumps(told))


def _follows_from_a_peer(error: Exception, group: Group | None, environ: Mapping[str, str]) -> bool:
    """Whether ``error`` is only the broken connection to a rank that has ended and said why.

    The communication back ends raise ``RuntimeError`` or a subclass for a peer that is gone.
    """
    if group is None or not isinstance(error, RuntimeError | TuneError):
        return False
    if group.spoken():
        return True
    told = machines_word.heard(environ)
    if told is not None:
        _adopt(told, environ)
    return told is not None


def _adopt(told: Mapping[str, Any], environ: Mapping[str, str]) -> Ending:
    """Make the ending of a rank on another machine that of the group here."""
    where = f"rank {told['rank']} on {told['host']}"
    ending = Ending(code=int(told["code"]), message=f"{where} ended the job: {told['message']}")
    _end(ending, Group.of(environ), environ)
    return ending


def _is_the_agents(environ: Mapping[str, str]) -> bool:
    """Whether a SIGTERM came from torch's agent: this process has one, and nobody asked the launcher above it."""
    asked = Path(environ.get(EXIT_FILE_VARIABLE, os.devnull)).with_name(ASKED_FILE)
    return "TORCHELASTIC_RESTART_COUNT" in environ and not asked.exists()
