"""The watchdog: ends a job that makes no progress, names the rank that hangs, and exits with code 4.

A daemon thread in each rank watches its main thread. Time counts only while this thread itself runs, so a suspended
machine, or a job that was stopped as a whole, does not count as stalled. A rank declares a stall when it and every
other rank of its machine that can answer have exceeded their limits. Then those that can answer write the Python stacks
of their threads; the state of the others is read from the kernel, and SIGKILL ends them, because a stopped process
handles no other signal. The ranks exchange small files in a private directory, independent of any process group.

Not covered: a call that hangs while it holds the interpreter's lock, in a job of one process (the supervisor detects
that); ranks on other machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.process import start_ticks

_TICK_SECONDS = 3.0
"""A rank whose tick has not changed for this long is not waited for."""
_ANSWER_SECONDS, _VERDICT_SECONDS = 5.0, 40.0
"""How long the rank that declares a stall waits for stacks, and how long the others wait for it."""
LAST_SECONDS = 60.0
"""The process ends after this time even if the diagnosis hangs."""
_GONE_SECONDS = 3.0
_BLOCK_BYTES, _WHERE_BYTES = 512, 128
_TRIES = 20

# Only the text distinguishes gloo's failures from bugs: they are plain RuntimeError (torch 2.13), and the messages of
# its transport begin with the source file. RCCL/NCCL and the store raise types of their own.
_GLOO = re.compile(r"gloo/transport/|connection (closed|reset) by peer|timed out waiting \d+ms", re.IGNORECASE)
_NCCL = re.compile(r"remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted|timeout", re.I)


@dataclass(frozen=True, kw_only=True)
class Look:
    """The main thread's progress: the number of heartbeats, its phase ("in step 12"), and the seconds that may pass
    until the next heartbeat (None: no limit)."""

    beats: int
    where: str
    limit_s: float | None


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stall: its cause, for people; seconds without progress and the phase of the rank that reports it; the stacks
    and states of all ranks as text."""

    cause: str
    silent_s: float
    where: str
    page: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The published state of one rank. ``tick`` grows while its watchdog runs, so not in a stopped process;
    ``overdue``: it has exceeded its limit."""

    rank: int
    pid: int
    born: int
    tick: int
    silent_s: float
    overdue: bool
    where: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def alive(self) -> bool:
        """Whether its process is still running."""
        return is_alive(self.pid, self.born)

    @property
    def can_answer(self) -> bool:
        """Not if it is stopped or held by a debugger; if the main thread hangs in a driver (D), the watchdog can."""
        return self.alive and state_of(self.pid) not in "Tt"


class Board:
    """One rank's access to the directory through which the watchdogs of one machine communicate, until `leave`.

    Every rank rewrites its file in place, so that a full disk does not matter, and reads those of the others. The last
    rank to leave deletes the directory, with the files of killed ranks.
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
                make_private(self._directory)
                return os.open(self._directory / f"rank-{self.rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        found = [_read_standing(file) for file in self._directory.glob("rank-*")]
        return sorted((each for each in found if each and each.rank != self.rank), key=lambda each: each.rank)

    def declare(self) -> bool:
        """Declare a stall; False if another rank was first."""
        try:
            os.close(os.open(self._directory / "declared", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        self.write("declared", str(self.rank))
        return True

    def declared_by(self) -> int | None:
        """The rank that declared a stall; None without one, -1 if it is not known (yet)."""
        found = self.read("declared")
        return None if found is None else int(found) if found.isdecimal() else -1

    def write(self, name: str, text: str) -> None:
        """Write a file for the other ranks; on a full disk they do not get it."""
        with contextlib.suppress(OSError):
            (self._directory / f".{name}-{self.rank}").write_text(text, encoding="utf-8")
            (self._directory / f".{name}-{self.rank}").replace(self._directory / name)

    def read(self, name: str) -> str | None:
        """A file of `write`; None without one."""
        try:
            return (self._directory / name).read_text(encoding="utf-8")
        except OSError:
            return None

    def is_finished(self) -> bool:
        """Whether ranks that have written their stacks may end."""
        return not self._directory.exists() or (self._directory / "finished").exists()

    def leave(self) -> None:
        """Remove this rank; if no other living rank is left, delete the directory."""
        self.withdraw()
        os.close(self._file)

    def withdraw(self, *, without: Collection[int] = ()) -> None:
        """`leave` while the main thread may still mark its phase; ``without``: processes that are about to be killed,
        and do not count as living."""
        (self._directory / f"rank-{self.rank}").unlink(missing_ok=True)
        if not any(each.alive for each in self.others() if each.pid not in without):
            shutil.rmtree(self._directory, ignore_errors=True)


class Watchdog:
    """Watches this process from `start` to `stop`.

    Args:
        look: returns the progress of the main thread; called in another thread, so it must not wait.
        on_suspicion: called when a stall is suspected, before the diagnosis.
        on_stall: called with the stall before the job is ended; it must return.
        board: shared by the ranks of this machine; None for a single process.
        elsewhere: number of ranks on other machines.
        tick_s: seconds between two checks.
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
    ) -> None:
        self._look, self._on_suspicion, self._on_stall = look, on_suspicion, on_stall
        self._board, self._elsewhere, self._tick_s = board, elsewhere, tick_s
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
        before, tick = time.monotonic(), 0
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            # Time beyond two ticks is time in which this process was suspended.
            passed, before, tick = min(now - before, 2 * self._tick_s), now, tick + 1
            look = self._look()
            self._silence.see(look.beats, passed)
            overdue = look.limit_s is not None and self._silence.seconds > look.limit_s
            others = self._board.others() if self._board is not None else []
            for each in others:
                self._seen.setdefault(each.rank, _Silence()).see(each.tick, passed)
            if self._board is not None:
                self._board.show(tick=tick, silent_s=self._silence.seconds, overdue=overdue)
                if self._board.declared_by() is not None:
                    self._answer(look)
            if overdue and not any(self._may_progress(each) for each in others):
                if self._board is not None and not self._board.declare():
                    self._answer(look)
                self._conclude(look)

    def _may_progress(self, other: Standing) -> bool:
        """Whether another rank may still make progress, so that this one may rightly wait for it."""
        ticks = self._seen[other.rank].seconds < max(_TICK_SECONDS, 4 * self._tick_s)
        return ticks and not other.overdue and other.can_answer

    def _answer(self, look: Look) -> NoReturn:
        """After another rank has declared a stall: write this rank's stacks, and end when that rank has reported."""
        end_in_any_case(LAST_SECONDS)
        assert self._board is not None
        self._board.write(f"stacks-{self._board.rank}", stacks())
        deadline = time.monotonic() + _VERDICT_SECONDS
        while not self._board.is_finished():
            by = self._board.declared_by()
            gone = (
                by is not None and by >= 0 and not any(each.rank == by and each.alive for each in self._board.others())
            )
            if (gone or time.monotonic() > deadline) and not self._board.is_finished():
                self._conclude(look)
            time.sleep(0.05)
        self._end([])

    def _conclude(self, look: Look) -> NoReturn:
        """Collect the stacks, name the cause, and end the job."""
        end_in_any_case(LAST_SECONDS)
        mute: list[Standing] = []
        try:
            self._on_suspicion()
            others = self._board.others() if self._board is not None else []
            found = self._collect(others)
            mute = [each for each in others if found[each.rank] is None]
            mine = Standing(
                rank=self._board.rank if self._board is not None else 0,
                pid=os.getpid(),
                born=0,
                tick=0,
                where=look.where,
                silent_s=self._silence.seconds,
                overdue=True,
            )
            found[mine.rank] = stacks()
            ranks = sorted([mine, *others], key=lambda each: each.rank)
            cause = explain(ranks, found, elsewhere=self._elsewhere)
            silent_s = round(self._silence.seconds, 1)
            pages = [f"no progress for {silent_s:.0f} s {look.where}\n{cause}\n"]
            pages += [f"==== {each.name}, {each.where}: {_what(each, found[each.rank])}\n{found[each.rank] or ''}"
                      for each in ranks]  # fmt: skip
            self._on_stall(Stall(cause=cause, silent_s=silent_s, where=look.where, page="\n".join(pages)))
        except Exception:
            traceback.print_exc()  # a bug of ours must not keep the job running
        finally:
            self._end(mute)

    def _collect(self, others: Sequence[Standing]) -> dict[int, str | None]:
        """The stacks of the other ranks; None for those that do not answer."""
        assert self._board is not None or not others
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            found = {each.rank: self._board.read(f"stacks-{each.rank}") for each in others if self._board}
            late = time.monotonic() > deadline
            if late or all(found[each.rank] is not None for each in others if each.can_answer):
                return found
            time.sleep(0.05)

    def _end(self, mute: Sequence[Standing]) -> NoReturn:
        """End this process, its children, and the ranks that cannot end themselves."""
        briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()), 1.0)
        ended = [each.pid for each in mute if each.alive]
        doomed = [*ended, *(child for pid in [*ended, os.getpid()] for child in descendants(pid))]
        stuck = {pid: start_ticks(pid) for pid in doomed if state_of(pid) == "D"}
        if self._board is not None:
            self._board.write("finished", "")
            self._board.withdraw(without=ended)
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # From here on the main thread may see a broken connection; the process ends before it can report that.
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := [pid for pid in stuck if state_of(pid) == "D"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
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


def end_in_any_case(seconds: float) -> None:
    """End this process with code 4 after that time, without the interpreter's lock, which a hanging call may hold.

    The kernel's timer sends this thread signal 4, whose handler is the C function ``_exit``: it gets the number of the
    signal as its argument, and that becomes the exit code.
    """

    class Event(ctypes.Structure):  # ``struct sigevent``, 64 bytes
        _fields_ = (
            ("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("thread", ctypes.c_int),
            ("padding", ctypes.c_char * 44),
        )  # fmt: skip

    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(StallError.exit_code, ctypes.cast(libc._exit, ctypes.c_void_p))
    event = Event(signo=StallError.exit_code, notify=4, thread=threading.get_native_id())  # SIGEV_THREAD_ID
    timer = ctypes.c_void_p()
    whole, rest = divmod(seconds, 1)
    once = (ctypes.c_long * 4)(0, 0, int(whole), int(rest * 1e9))  # ``struct itimerspec``: interval, first
    libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))  # CLOCK_MONOTONIC
    libc.timer_settime(timer, 0, once, None)


def state_of(pid: int) -> str:
    """The state of a process's main thread: R runs, S sleeps, D hangs in a driver, T stopped, t held by a debugger, Z
    ended; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2][1:2]
    except OSError:
        return ""


def is_alive(pid: int, born: int) -> bool:
    """Whether the process that started at ``born``, see `start_ticks`, is still running (a zombie is not)."""
    return state_of(pid) not in ("", "Z", "X") and start_ticks(pid) == born


def descendants(pid: int) -> list[int]:
    """The pids of a process's descendants in its own session: a logging service leaves it to outlive its parent."""
    with contextlib.suppress(psutil.Error, OSError):
        return [
            each.pid for each in psutil.Process(pid).children(recursive=True) if _session(each.pid) == _session(pid)
        ]
    return []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def make_private(directory: Path) -> None:
    """Create a directory, or check that an existing one is private to this user."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{directory}, which the ranks of this job share, is not a directory that only you can access: remove it, "
            "or set TMPDIR to a directory of your own"
        )


def _read_standing(file: Path) -> Standing | None:
    """The state of a rank; None if its file is gone, or being written."""
    try:
        raw = file.read_bytes()
        where = raw[_BLOCK_BYTES:].decode("ascii").strip()
        return Standing(**json.loads(raw[:_BLOCK_BYTES]), where=where)
    except (OSError, ValueError, TypeError):
        return None


# ---- the cause ----------------------------------------------------------------------------------------------

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (\S+)$', re.MULTILINE)
_OURS = "/hf_rocm_tune/"


def stacks() -> str:
    """The Python stacks of all other threads as Python prints them, the main thread first."""
    main, names = threading.main_thread().ident, {each.ident: each.name for each in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    return "\n".join(
        f"{names.get(number, number)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames
        if number != threading.get_ident()
    )


def explain(ranks: Sequence[Standing], found: dict[int, str | None], *, elsewhere: int) -> str:
    """The cause of a stall, in one line: the ranks that do not wait for others, and those that do.

    Args:
        ranks: those of this machine.
        found: their stacks; None for those that did not answer.
        elsewhere: number of ranks on other machines, whose state is unknown.
    """
    if len(ranks) == 1 and not elsewhere:
        return f"the process (pid {ranks[0].pid}) {_what(ranks[0], found[ranks[0].rank])}"
    waits = {each.rank: _waits_in(found[each.rank]) if state_of(each.pid) not in "DTt" else None for each in ranks}
    causes = [each for each in ranks if waits[each.rank] is None]
    if not causes and not elsewhere:  # a backward pass may compute, or wait for gradients of the others
        causes = [each for each in ranks if waits[each.rank] == _BACKWARD and len(set(waits.values())) > 1]
    at = {each.rank: "" if len({one.where for one in ranks}) == 1 else f", {each.where}," for each in ranks}
    causes.sort(key=lambda each: found[each.rank] is not None)  # those that cannot answer first
    parts = [f"{each.name}{at[each.rank]} {_what(each, found[each.rank])}" for each in causes]
    what = "waits" if not causes else "waits for it" if len(causes) == 1 else "waits for them"
    parts += [f"{each.name}{at[each.rank]} {what} in {waits[each.rank]}" for each in ranks if each not in causes]
    if elsewhere:
        parts.append(f"the state of {elsewhere} ranks on other machines is unknown here: see their own messages")
    elif not causes and len(set(waits.values())) > 1:
        parts.append("these are different collectives, so each waits for ever")
    elif not causes:
        parts.append("it is the same collective, so the connection between them does not deliver")
    return "; ".join(parts)


_BACKWARD = "the backward pass"


def _main_frames(text: str) -> list[tuple[str, str, str]]:
    """File, line and function of the main thread, outermost first."""
    return _FRAME.findall(text.partition("\n\n")[0])


def _waits_in(text: str | None) -> str | None:
    """The collective in which a rank waits, for people; None if it does not wait in one, or that is unknown."""
    frames = _main_frames(text or "")
    if not frames:
        return None
    if frames[-1][2] == "_engine_run_backward":
        return _BACKWARD
    if "torch/distributed/" in frames[-1][0]:
        return f"{next(each[2] for each in reversed(frames) if each[2] != 'wrapper')}{_called_from(frames)}"
    return None


def _what(rank: Standing, text: str | None) -> str:
    """The state of a rank that does not wait in a collective."""
    state = state_of(rank.pid)
    if state in ("", "Z", "X"):
        return "has ended: it was killed, or it crashed"
    frames = _main_frames(text or "")
    inside = f" in {_place(frames[-1])}{_called_from(frames)}" if frames else ""
    if state in "Tt":
        return "is stopped (state T)" if state == "T" else "is held by a debugger (state t)"
    if state == "D":
        return f"hangs in the kernel (state D){inside}"
    if text is None:
        return f"is in a call that does not let Python answer (state {state})"
    stuck = [f"; its child process {pid} is in state {state_of(pid)}" for pid in _stuck(descendants(rank.pid))]
    return f"is{inside or ' at an unknown place'}{''.join(stuck)}"


def _stuck(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if state_of(pid) in ("D", "T", "t")]


def _place(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    file = re.sub(r".*/(?:site|dist)-packages/", "", file)
    file = file[file.rfind(_OURS) + 1 :] if _OURS in file else file
    return f"{function}() in {file}:{line}"


def _called_from(frames: Sequence[tuple[str, str, str]]) -> str:
    """The innermost frame of our own code, if that is not the innermost of all."""
    ours = next((each for each in reversed(frames) if _OURS in each[0]), None)
    return f" (called by {_place(ours)})" if ours and ours is not frames[-1] else ""


# ---- broken connections -------------------------------------------------------------------------------------


class PeerLostError(StallError):
    """The connection to another rank, which ended for another reason, broke.

    Attributes:
        follows: this error is reported only if that reason is unknown.
    """

    follows = True


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def lost_peer(error: BaseException, ranks: Sequence[Standing], *, elsewhere: int, where: str) -> PeerLostError:
    """The error for a broken connection; ``ranks``: the others of this machine, alive until now."""
    deadline = time.monotonic() + 1.0  # a connection breaks before its process has ended
    while ranks and all(each.alive for each in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = [each.name for each in ranks if not each.alive]
    if gone:
        cause = f"{', '.join(gone)} ended without a message: killed (see `dmesg` for lack of memory), or crashed"
    elif re.search(r"timed? ?out", str(error), re.IGNORECASE):
        cause = "another rank did not join a collective within --ddp_timeout"
    else:
        which = "a rank on another machine" if elsewhere else "another rank"
        cause = f"{which} has ended or cannot be reached; see its own message"
    return PeerLostError(
        f"the connection to another rank broke {where}: {cause}. The checkpoints already written are intact: start "
        "the same command again to continue from the newest one"
    )
