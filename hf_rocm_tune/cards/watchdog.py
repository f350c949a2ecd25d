"""The watchdog: ends a job that makes no progress, with the cause and exit code 4.

A daemon thread in each rank watches its main thread. Time counts only while this thread itself runs, so a suspended
machine, or a job that was stopped as a whole, does not count as stalled. A rank declares a stall when it and every
other rank of its machine that can answer have exceeded their limits. Then those that can answer report the Python
stacks of their threads and their open collectives; the state of the others is read from the kernel, and SIGKILL ends
them, because a stopped process handles no other signal. `stall_report` derives the cause and the report.

The thread wakes once a second unless the limits are short, and the main thread rewrites a line in a file at each
heartbeat (microseconds). Not covered: a call that hangs while it holds the interpreter's lock, in a job of one process
(the supervisor detects that); ranks on other machines.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hf_rocm_tune.cards import stall_report
from hf_rocm_tune.cards.stall_report import Rank, is_alive, make_place, process_state, read_note, write_note
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.machine.process import start_ticks

_TICK_SECONDS = 3.0
"""A rank whose tick has not changed for this long is not waited for."""
_ANSWER_SECONDS = 5.0
_VERDICT_SECONDS = 40.0
"""How long a rank that has answered waits for the one that declared the stall."""
_LAST_SECONDS = 60.0
"""The process ends after this time even if the diagnosis hangs."""
_FLUSH_SECONDS, _GONE_SECONDS = 1.0, 3.0
_BLOCK_BYTES, _WHERE_BYTES = 512, 128
_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Look:
    """The main thread's progress: the number of heartbeats, its phase ("in step 12"), and the seconds that may pass
    until the next heartbeat (None: no limit)."""

    beats: int
    where: str
    limit_s: float | None


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stall: its cause, for people; seconds without progress and the phase of the rank that reports it; and the full
    report as JSON values."""

    cause: str
    silent_s: float
    where: str
    report: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The published state of one rank. ``tick`` grows while its watchdog runs, so not in a stopped process;
    ``overdue``: it has exceeded its limit."""

    rank: int
    pid: int
    born: int
    tick: int
    where: str
    silent_s: float
    overdue: bool

    @property
    def alive(self) -> bool:
        """Whether its process is still running."""
        return is_alive(self.pid, self.born)

    @property
    def can_answer(self) -> bool:
        """Not if it is stopped or held by a debugger; if the main thread hangs in a driver (D), the watchdog can."""
        state = process_state(self.pid)
        return self.alive and state is not None and state.state not in "Tt"


class Board:
    """One rank's access to the directory through which the watchdogs of one machine communicate, until `leave`.

    Every rank rewrites its file in place, so that a full disk does not matter, and reads those of the others. A rank
    that declares a stall creates a file; the others then write their statements. The last rank to leave deletes the
    directory, with the files of killed ranks.

    Args:
        directory: shared by all ranks of one job on one machine, and used by no other job.
        rank: of this process.

    Raises:
        UsageError: the directory belongs to another user, or others can access it.
        OSError: it cannot be created.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self.rank = directory, rank
        self._born = start_ticks(os.getpid())
        self._file = self._open()
        self.show(tick=0, silent_s=0.0, overdue=False)
        self.mark("at the start")

    def _open(self) -> int:
        for attempt in range(_TRIES):
            try:
                make_place(self._directory)
                return os.open(self._of(self.rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last rank to leave has just deleted the directory
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def show(self, *, tick: int, silent_s: float, overdue: bool) -> None:
        """Publish this rank's state."""
        mine: dict[str, Any] = {"rank": self.rank, "pid": os.getpid(), "born": self._born}
        mine |= {"tick": tick, "silent_s": round(silent_s, 3), "overdue": overdue}
        os.pwrite(self._file, json.dumps(mine).encode("ascii").ljust(_BLOCK_BYTES), 0)

    def mark(self, where: str) -> None:
        """Publish this rank's phase; called by the main thread, so that it stays right when the process is stopped."""
        os.pwrite(self._file, where.encode("ascii").ljust(_WHERE_BYTES)[:_WHERE_BYTES], _BLOCK_BYTES)

    def others(self) -> list[Standing]:
        """The other ranks that have joined and not left, alive or not."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:  # the last rank to leave has deleted it
            names = []
        found = [_read_standing(self._directory / name) for name in names if name.startswith("rank-")]
        return sorted((each for each in found if each and each.rank != self.rank), key=lambda each: each.rank)

    def declare(self) -> bool:
        """Declare a stall; False if another rank was first."""
        return self._first("declared")

    def succeed(self) -> bool:
        """Report in the place of a rank that declared a stall and ended; False if another rank was first."""
        return self._first("succeeded")

    def _first(self, name: str) -> bool:
        try:
            descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(str(self.rank))
        return True

    def is_declared(self) -> bool:
        """Whether a rank has declared a stall."""
        return (self._directory / "declared").exists()

    def declared_by(self) -> Standing | None:
        """The rank that declared it; None if that is not known (yet, or any more)."""
        with contextlib.suppress(OSError, ValueError):
            return _read_standing(self._of(int((self._directory / "declared").read_text(encoding="utf-8"))))
        return None

    def state(self, statement: Mapping[str, Any]) -> None:
        """Write this rank's statement, replacing an earlier one."""
        write_note(self._directory / f"statement-{self.rank}", statement)

    def statement(self, rank: int) -> dict[str, Any] | None:
        """The statement of a rank; None without one."""
        return read_note(self._directory / f"statement-{rank}")

    def finish(self) -> None:
        """Let the ranks that have answered end."""
        (self._directory / "finished").touch(mode=0o600)

    def is_finished(self) -> bool:
        """Whether ranks that have answered may end."""
        return (self._directory / "finished").exists() or not self._directory.exists()

    def leave(self) -> None:
        """Remove this rank; if no other living rank is left, delete the directory."""
        self.withdraw()
        os.close(self._file)

    def withdraw(self, *, without: Collection[int] = ()) -> None:
        """`leave` while the main thread may still mark its phase.

        Args:
            without: processes that are about to be killed, and do not count as living.
        """
        with contextlib.suppress(FileNotFoundError):
            self._of(self.rank).unlink()
        if not any(each.alive for each in self.others() if each.pid not in without):
            shutil.rmtree(self._directory, ignore_errors=True)

    def _of(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"


class Watchdog:
    """Watches this process from `start` to `stop`.

    Args:
        look: returns the progress of the main thread; called in another thread, so it must not wait.
        on_suspicion: called when a stall is suspected, before the diagnosis.
        on_stall: called with the stall before the job is ended; it must return.
        board: shared by the ranks of this machine; None for a single process.
        elsewhere: number of ranks on other machines.
        tick_s: seconds between two checks.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        look: Callable[[], Look],
        on_suspicion: Callable[[], None],
        on_stall: Callable[[Stall], None],
        board: Board | None,
        elsewhere: int = 0,
        tick_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._on_suspicion, self._on_stall = look, on_suspicion, on_stall
        self._board, self._elsewhere = board, elsewhere
        self._tick_s, self._clock = tick_s, clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watchdog", daemon=True)
        self._silence = _Silence()
        self._seen: dict[int, _Silence] = {}

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()  # if it has declared a stall, it ends the process

    def _watch(self) -> None:
        before, tick = self._clock(), 0
        while not self._stopped.wait(self._tick_s):
            now = self._clock()
            # Time beyond two ticks is time in which this process was suspended.
            passed, before, tick = min(now - before, 2 * self._tick_s), now, tick + 1
            look = self._look()
            self._silence.see(look.beats, passed)
            overdue = look.limit_s is not None and self._silence.seconds > look.limit_s
            others = self._others()
            for each in others:
                self._seen.setdefault(each.rank, _Silence()).see(each.tick, passed)
            if self._board is not None:
                self._board.show(tick=tick, silent_s=self._silence.seconds, overdue=overdue)
                if self._board.is_declared():
                    self._answer(look)
            if overdue and not any(self._may_progress(each) for each in others):
                if self._board is not None and not self._board.declare():
                    self._answer(look)
                self._conclude(look)

    def _may_progress(self, other: Standing) -> bool:
        """Whether another rank may still make progress, so that this one may rightly wait for it."""
        ticks = self._seen[other.rank].seconds < max(_TICK_SECONDS, 4 * self._tick_s)
        return ticks and not other.overdue and other.can_answer

    def _others(self) -> list[Standing]:
        return self._board.others() if self._board is not None else []

    def _answer(self, look: Look) -> NoReturn:
        """After another rank has declared a stall: write a statement, and end when that rank has reported."""
        _end_in_any_case()
        assert self._board is not None
        self._statement(look)
        deadline = self._clock() + _VERDICT_SECONDS
        while not self._board.is_finished():
            declarer = self._board.declared_by()
            gone = declarer is not None and not declarer.alive
            late = self._clock() > deadline
            # One that has reported ends too, perhaps since the loop's condition was tested.
            if (gone or late) and not self._board.is_finished() and (self._board.succeed() or late):
                self._conclude(look)
            time.sleep(0.05)
        self._end([])

    def _conclude(self, look: Look) -> NoReturn:
        """Collect the statements, find the cause, report, and end the job."""
        _end_in_any_case()
        mute: list[Rank] = []
        try:
            self._on_suspicion()
            ranks = self._collect(look)
            mute = [rank for rank in ranks if rank.statement is None or not rank.statement["complete"]]
            cause = stall_report.explain(ranks, elsewhere=self._elsewhere)
            silent_s = round(self._silence.seconds, 1)
            report = {
                "cause": cause,
                "where": look.where,
                "silent_seconds": silent_s,
                "told_by_rank": self._board.rank if self._board else ranks[0].rank,
                "ranks_on_other_machines": self._elsewhere,
                "ranks": [asdict(rank) for rank in ranks],
            }
            self._on_stall(Stall(cause=cause, silent_s=silent_s, where=look.where, report=report))
        except Exception:
            traceback.print_exc()  # a bug of ours must not keep the job running
        finally:
            self._end(mute)

    def _collect(self, look: Look) -> list[Rank]:
        """The ranks of this machine, by their own statements or the kernel's."""
        statement = self._statement(look)
        others = self._others()
        deadline = self._clock() + _ANSWER_SECONDS
        while self._clock() < deadline:
            said = [self._said(each) for each in others if each.can_answer]
            if all(each is not None and each["complete"] for each in said):
                break
            time.sleep(0.05)
        mine = self._board.rank if self._board is not None else 0
        found = [_rank(mine, os.getpid(), look.where, self._silence.seconds, statement, alive=True)]
        for each in others:
            found.append(_rank(each.rank, each.pid, each.where, each.silent_s, self._said(each), alive=each.alive))
        return sorted(found, key=lambda rank: rank.rank)

    def _said(self, standing: Standing) -> dict[str, Any] | None:
        return self._board.statement(standing.rank) if self._board is not None else None

    def _statement(self, look: Look) -> dict[str, Any]:
        """Write the stacks first: reading the flight recorders may hang if the device does."""
        mine: dict[str, Any] = {"where": look.where, "stacks": stall_report.stacks(), "complete": False}
        if self._board is not None:
            self._board.state(mine)
        briefly(lambda: mine.update(collectives=stall_report.collectives()), _ANSWER_SECONDS)
        mine["complete"] = True
        if self._board is not None:
            self._board.state(mine)
        return mine

    def _end(self, mute: list[Rank]) -> NoReturn:
        """End this process, its children, and the ranks that cannot end themselves."""
        briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()), _FLUSH_SECONDS)
        alive = {each.pid: each.born for each in self._others() if each.alive}
        ended = [rank.pid for rank in mute if rank.pid in alive]
        below = [child for pid in [*ended, os.getpid()] for child in descendants(pid)]
        stuck = [pid for pid in [*ended, *below] if (state := process_state(pid)) is not None and state.state == "D"]
        processes = [(pid, alive.get(pid) or start_ticks(pid)) for pid in stuck]
        if self._board is not None:
            self._board.finish()
            self._board.withdraw(without=ended)
        _kill([*ended, *below])
        # From here on the main thread may see a broken connection; the process ends before it can report that.
        if processes and (left := _wait_until_gone(processes, _GONE_SECONDS)):
            text = f"hf-rocm-tune: processes {left} do not end even by SIGKILL: they hang in a driver and hold the GPU"
            os.write(2, f"{text}; restart the machine\n".encode())
        os._exit(StallError.exit_code)


class _Silence:
    """Measures how long a number has not changed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: int | None = None

    def see(self, number: int, passed: float) -> None:
        """Record the number, ``passed`` seconds after the last call."""
        self.seconds = self.seconds + passed if number == self._last else 0.0
        self._last = number


def briefly(work: Callable[[], object], seconds: float) -> bool:
    """Call something that may hang, such as a call into a device, in a thread. Returns whether it returned in time."""
    thread = threading.Thread(target=work, name="stall watchdog's work", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def descendants(pid: int) -> list[int]:
    """The pids of a process's descendants, except those in a session of their own (such as a logging service that is to
    outlive its parent) and their descendants."""
    found, todo = list[int](), [pid]
    while todo:
        with contextlib.suppress(psutil.Error, OSError):
            parent = todo.pop(0)
            own = [child.pid for child in psutil.Process(parent).children() if _session(child.pid) == _session(pid)]
            found += own
            todo += own
    return found


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _wait_until_gone(processes: list[tuple[int, int]], seconds: float) -> list[int]:
    """Wait for processes to end. Returns those that have not ended in time."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid, since in processes if is_alive(pid, since)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _read_standing(file: Path) -> Standing | None:
    """The state of a rank; None if its file is gone, or being written."""
    try:
        raw = file.read_bytes()
        where = raw[_BLOCK_BYTES:].decode("ascii").strip()
        return Standing(**json.loads(raw[:_BLOCK_BYTES]), where=where)
    except (OSError, ValueError, TypeError):
        return None


def _rank(number: int, pid: int, where: str, silent_s: float, statement: dict[str, Any] | None, *, alive: bool) -> Rank:
    children = [state for child in descendants(pid) if (state := process_state(child)) is not None] if alive else []
    return Rank(
        rank=number,
        pid=pid,
        where=where,
        silent_s=round(silent_s, 1),
        statement=statement,
        process=process_state(pid) if alive else None,
        children=children,
    )


def _end_in_any_case() -> None:
    """Start a timer in C: it does not need the interpreter's lock, which a hanging call may hold."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - it must stay open
    faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=nowhere)
