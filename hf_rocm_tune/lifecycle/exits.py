"""Exit codes: one line and a code for every error that we raise on purpose.

Of the ranks that one agent started on a machine, the first one that records its exit prints the line, and a worker that
torchrun restarts after wrong input (2), corruption (3) or an interruption (130) ends at once. SIGTERM and SIGHUP end a
run like Ctrl-C, with 130; but torch's agent sends SIGTERM, too, to the ranks that are left after one has died. Our
launcher writes a file if it got the signal itself: without that, a rank before its training ends with 143, silently.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from hf_rocm_tune import redaction
from hf_rocm_tune.errors import Interrupted, OutOfMemoryError, TuneError, UsageError, device_shortage, tokenizer_fault
from hf_rocm_tune.machine.process import start_ticks
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.upstream import failed_import

PROGRAM = "hf-rocm-tune"
INTERRUPTED = 130
#: Names the file for a launcher, ``{"code": int, "message": str}``; with ``"follows": true`` the message was not
#: printed, see `Ending`.
EXIT_FILE_VARIABLE = "HF_ROCM_TUNE_EXIT_FILE"
#: Exit codes that a restart cannot change: wrong input, unrecovered corruption.
FINAL_CODES = frozenset({2, 3})
#: Exit codes after which a restarted worker ends at once: those, and an interruption.
REFUSED_CODES = FINAL_CODES | {INTERRUPTED}
#: In the directory of the exit file: the launcher got a signal to end.
ASKED_FILE = "asked"
#: Beside it, empty files of the attempts that torch's agent has started after the first, see `read_exit_record`.
_ATTEMPT = "attempt-"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_TERMINATED = 128 + signal.SIGTERM
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_process_ends = False
"""Whether the process ends after the entry point of `run_guarded`."""

_OUT_OF_MEMORY_ADVICE = (
    "lower --per_device_train_batch_size (and raise --gradient_accumulation_steps by as much), lower --max_length, "
    "or add --load_in_4bit"
)


def run_guarded(
    main: Callable[[], int],
    *,
    argv: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    process_ends: bool = False,
) -> int:
    """Run an entry point and turn what it raises into an exit code.

    A ``TuneError``'s own code, after one line on stderr; 130 for Ctrl-C and, within `sigterm_as_interrupt`, SIGTERM and
    SIGHUP; 128 + n for signal n of torch's agent; 1 for any other exception, with its traceback: it is our bug.
    ``process_ends``: the caller ends the process with the code; see `complete`.
    """
    global _process_ends
    _process_ends = process_ends
    redaction.remember({name: value for name, value in environ.items() if not value.startswith("/")})
    redaction.remember_arguments(argv)
    group = RankGroup.of(environ)
    if group is not None:
        for earlier in group.earlier():
            if earlier.code in REFUSED_CODES:
                return earlier.code  # its line has been printed
    _mark_attempt(environ)
    try:
        code = main()
        if code == 0:
            _ignore_signals()
        return code
    except KeyboardInterrupt as stop:
        if isinstance(stop, _Terminated) and _is_the_agents(environ):
            return _TERMINATED
        ended: TuneError = Interrupted(str(stop) or "stopped by Ctrl-C")
    except BaseException as error:
        if not isinstance(error, Exception) and tokenizer_fault(error) is None:
            raise
        if type(error).__module__.startswith("torch.distributed.elastic") and hasattr(error, "sigval"):
            return 128 + int(error.sigval)  # `SignalException`: in a notebook the agent's handler raises it
        known = _in_a_line(error)
        # The communication backends raise RuntimeError for a lost peer.
        from_a_peer = isinstance(error, RuntimeError) if known is None else known.follows
        if from_a_peer and group is not None:
            first = group.ending()
            if first is not None:
                return first.code  # only the lost connection to a rank that has reported its error
        if known is None:
            lines = "".join(traceback.format_exception(error))
            print(redaction.redact(lines), file=sys.stderr, end="", flush=True)
            return 1
        ended = known
    speak(ended, environ=environ)
    return ended.exit_code


def _in_a_line(error: BaseException) -> TuneError | None:
    """What an exception is reported as in one line; None for a bug of ours."""
    if isinstance(error, TuneError):
        return error
    known = failed_import(error)
    if known is not None:
        return known
    shortage = device_shortage(error)
    if shortage is not None:
        return OutOfMemoryError(f"{shortage}; {_OUT_OF_MEMORY_ADVICE}")
    fault = tokenizer_fault(error)
    if fault is not None:
        return UsageError(fault)
    return None


def complete(environ: Mapping[str, str] = os.environ) -> None:
    """The job's result is complete: a later signal does not interrupt it.

    The launcher reads this from the record, and the process ignores signals until its end.
    """
    _ignore_signals()
    file = environ.get(EXIT_FILE_VARIABLE)
    if file and number(environ, "RANK") == 0:
        with suppress(OSError):  # no room: the job is done all the same
            _record(file, {"code": 0, "message": "done"}, environ)


def _record(file: str, recorded: dict[str, object], environ: Mapping[str, str]) -> None:
    write_text_atomic(Path(file), json.dumps({**recorded, "attempt": number(environ, _RESTARTS)}))


def _mark_attempt(environ: Mapping[str, str]) -> None:
    """Leave a file for `read_exit_record`: what an earlier attempt recorded is not how this one ends."""
    attempt = number(environ, _RESTARTS)
    file = environ.get(EXIT_FILE_VARIABLE)
    if attempt and file:
        with suppress(OSError):
            Path(file).with_name(f"{_ATTEMPT}{attempt}").touch()


def read_exit_record(file: Path) -> dict[str, Any] | None:
    """What a job's processes recorded at ``file`` of how they ended; None if those of its last attempt did not."""
    if not file.exists():
        return None
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    attempts = [int(mark.name.removeprefix(_ATTEMPT)) for mark in file.parent.glob(f"{_ATTEMPT}*")]
    last = max(attempts, default=0)
    return None if recorded.pop("attempt", 0) < last else recorded


def _ignore_signals() -> None:
    if _process_ends and threading.current_thread() is threading.main_thread():
        for ending in ENDING_SIGNALS:
            signal.signal(ending, signal.SIG_IGN)


def speak(error: TuneError, *, environ: Mapping[str, str] = os.environ) -> None:
    """Print and record an error as the exit of this process, unless another rank of its group has done so; the caller
    ends it."""
    group = RankGroup.of(environ)
    file = environ.get(EXIT_FILE_VARIABLE)
    if group is not None and not group.claim(Ending(error.exit_code, str(error))):
        return
    if not (file and error.follows):
        rank = number(environ, "RANK")
        who = f"[rank {rank}] " if rank else ""
        kind = "interrupted" if error.exit_code == INTERRUPTED else "error"
        redaction.print_line(f"{PROGRAM}: {who}{kind}: {error}", sys.stderr)
    if file:
        recorded: dict[str, object] = {"code": error.exit_code, "message": redaction.one_line(str(error))}
        if error.follows:
            recorded["follows"] = True
        with suppress(OSError):  # no room: the line is printed, and the process ends with its code
            _record(file, recorded, environ)


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block ``handler`` gets these signals, SIGHUP only if it is not ignored (``nohup``). It has no effect
    outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers = [number for number in numbers if number != signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:  # not ignored since, see `complete` and `train.stall`
                signal.signal(number, earlier)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise ``KeyboardInterrupt`` instead of killing the process, as Ctrl-C does.

    The trainer replaces this during training, so that a checkpoint is written. It has no effect on a signal that is
    already handled or ignored.
    """
    stock = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    _asked.clear()
    untouched = [number for number, handler in stock.items() if signal.getsignal(number) is handler]
    with handling(untouched, _interrupt):
        yield


_asked: list[int] = []  # signals that `_interrupt` got


def interrupt_if_asked() -> None:
    """Raise what a signal has raised before: Python drops it in a weak reference's callback and in ``__del__``."""
    if _asked:
        _interrupt(_asked[0], None)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which torch's agent sends, too."""


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    _asked.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    kind = KeyboardInterrupt if number == signal.SIGHUP else _Terminated
    raise kind(f"stopped by {signal.Signals(number).name}")


_interrupt.ends_the_process = True  # type: ignore[attr-defined]  # so the trainer may replace it


def _is_the_agents(environ: Mapping[str, str]) -> bool:
    """Whether a SIGTERM came from torch's agent: this process has one, and the launcher got no signal."""
    asked = Path(environ.get(EXIT_FILE_VARIABLE, os.devnull)).with_name(ASKED_FILE)
    return "TORCHELASTIC_RESTART_COUNT" in environ and not asked.exists()


class Ending(NamedTuple):
    """How a process ended."""

    code: int
    message: str  # one line that says what is wrong, what was found and what to do


@dataclass(frozen=True)
class RankGroup:
    """The ranks that one launcher started on this machine, and the record of their exit.

    One file for each attempt (torchrun restarts a group), written atomically. It is in the directory of our launcher's
    exit file, so that two launches by one process differ, or in the temporary directory. An attempt is identified by
    the agent's count and the port of its ranks: either alone may repeat.
    """

    _record: Path  # of this attempt
    _records: str  # pattern of those of all attempts
    _has_agent: bool

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankGroup | None:
        """The group of this process, or None for a single process."""
        has_agent = "TORCHELASTIC_RUN_ID" in environ
        if not has_agent and number(environ, "WORLD_SIZE", 1) < 2:
            return None
        # DIRECTORY/RUN_RANDOM/attempt_N/RANK/error.json: a notebook launches several jobs from one process.
        job = environ.get("TORCHELASTIC_ERROR_FILE", "///").split("/")[-4]
        parent = os.getppid()  # Process ids are reused; with its start time the key is unique.
        key = f"{PROGRAM}-{os.getuid()}-{job}-{parent}-{start_ticks(parent)}"
        wanted = environ.get(EXIT_FILE_VARIABLE)
        directory = Path(wanted).parent if wanted else Path(tempfile.gettempdir())
        attempt = f"{number(environ, 'TORCHELASTIC_RESTART_COUNT')}.{number(environ, 'MASTER_PORT')}"
        return cls(directory / f"{key}-{attempt}.json", f"{key}-*.json", has_agent)

    def claim(self, ending: Ending) -> bool:
        """Record ``ending`` as the group's; False if another rank of this attempt was first."""
        if not self._has_agent:
            return True
        try:
            with tempfile.NamedTemporaryFile("w", prefix=f"{self._record.name}-", dir=self._record.parent) as file:
                json.dump(ending._asdict(), file)
                file.flush()
                os.link(file.name, self._record)
        except FileExistsError:
            return False
        except OSError:
            pass  # no room for the record, or no hard links: print the line rather twice than never
        return True

    def ending(self) -> Ending | None:
        """What a rank of this attempt has recorded as its exit."""
        return _read(self._record) if self._record.exists() else None

    def earlier(self) -> list[Ending]:
        """What earlier attempts have recorded, the newest first."""
        records = [*self._record.parent.glob(self._records)]
        records.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [_read(path) for path in records if path != self._record]

    def rendezvous(self) -> Path:
        """The path of a common directory of this attempt's ranks on this machine (not created)."""
        return self._record.with_name(f"{self._record.stem}-ranks")


def _read(path: Path) -> Ending:
    return Ending(**json.loads(path.read_text(encoding="utf-8")))


def number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """A number from the environment; the default for an invalid one, which the entry point refuses."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
