"""The watchdog: a thread that ends a job without progress, names the rank that hangs, and exits with code 4.

Time counts only while this thread itself runs, so a suspended machine does not count as stalled. The ranks of one
machine share small files: a rank declares a stall when it and every other rank that can answer have exceeded their
limits; the others are ended with SIGKILL. Not covered: a call that hangs while it holds the interpreter's lock, in a
job of one process (the supervisor detects that).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

from hf_rocm_tune.errors import StallError
from hf_rocm_tune.machine.process import is_alive, make_private, start_ticks, state_of

TICK_SECONDS = 3.0
"""A rank whose tick has not changed for this long is stopped, dead, or held by a call: it is not waited for."""
_VERDICT_SECONDS = 40.0
"""How long the other ranks wait for the one that declares a stall."""
LAST_SECONDS = 60.0
"""The process ends after this time even if the diagnosis hangs."""


class Rank(NamedTuple):
    """The published state of a rank; ``tick`` changes while its watchdog runs, ``stacks``: it has exceeded its limit
    and writes them there."""

    rank: int
    pid: int
    born: int
    tick: int = 0
    stacks: Path | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def answer(self) -> dict[str, str]:
        """Its `stacks`; empty if there are none, or if they cannot be read."""
        if self.stacks is None:
            return {}
        with suppress(OSError, ValueError):
            return dict(json.loads(self.stacks.read_text()))
        return {}

    @property
    def alive(self) -> bool:
        return is_alive(self.pid, self.born)


class RankStatus:
    """One rank's access to the directory of the watchdogs of one machine; the last rank to leave deletes it."""

    def __init__(self, directory: Path, rank: int) -> None:
        make_private(directory)
        self.directory = directory
        self.me = Rank(rank, os.getpid(), start_ticks(os.getpid()))
        self._file, self._stacks = directory / f"rank-{rank}", directory / f"stacks-{rank}"
        self._file.write_text(f"{self.me.pid} {self.me.born}")

    def tick(self, *, overdue: bool) -> list[Rank]:
        """Show that this rank's watchdog runs, and whether it has exceeded its limit. Returns the other ranks."""
        os.utime(self._file)
        if not overdue:
            self._stacks.unlink(missing_ok=True)
        elif not self._stacks.exists():
            with suppress(OSError):  # on a full disk the others do not get them
                self._stacks.write_text(json.dumps(stacks()))
        return self.others()

    def others(self) -> list[Rank]:
        """The other ranks that have joined and not left, alive or not."""
        others: list[Rank] = []
        try:
            files = sorted(self.directory.glob("rank-*"))
        except FileNotFoundError:  # another rank, which saw nobody left, has deleted the directory
            return others
        for file in files:
            if file == self._file:
                continue
            with suppress(OSError, ValueError):  # gone, or being written
                number = int(file.name.removeprefix("rank-"))
                pid, born = map(int, file.read_text().split())
                stacks = file.with_name(f"stacks-{number}")
                tick = file.stat().st_mtime_ns
                others.append(Rank(number, pid, born, tick, stacks if stacks.exists() else None))
        return others

    def claim(self, name: str) -> bool:
        """Create a file of this name; False if it exists."""
        with suppress(FileExistsError):
            (self.directory / name).touch(0o600, exist_ok=False)
            return True
        return False

    def leave(self) -> None:
        """Remove this rank; if no other living rank is left, delete the directory."""
        self._file.unlink(missing_ok=True)
        if not any(other.alive for other in self.others()):
            shutil.rmtree(self.directory, ignore_errors=True)


class Watchdog:
    """Watches this process from `start` to `stop`.

    The thread that makes progress counts ``beats``, and sets ``where`` (for people) and ``limit_s``: the seconds that
    may pass until the next one, None for no limit.
    """

    def __init__(self, rank_status: RankStatus | None, *, tick_s: float = 1.0) -> None:
        self.rank_status, self._tick_s = rank_status, tick_s
        self.beats, self.where = 0, ""
        self.limit_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watchdog", daemon=True)
        self.start = self._thread.start

    def leave_evidence(self, cause: str, silent_s: float, page: str) -> None:
        """Tell the cause and keep a page of stacks, in a time; the process ends after it."""
        raise NotImplementedError

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()  # if it has declared a stall, it ends the process

    def _watch(self) -> None:
        """Every tick: is this rank overdue, and is there another one that may still make progress?"""
        before, beats, silent_s = time.monotonic(), -1, 0.0
        ticks = _Ticks(patience_s=max(TICK_SECONDS, 4 * self._tick_s))
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            passed = min(now - before, 2 * self._tick_s)  # in the time beyond two ticks this process was suspended
            before = now
            if self.beats == beats:
                silent_s += passed
            else:
                beats, silent_s = self.beats, 0.0
            limit_s = self.limit_s
            overdue = limit_s is not None and silent_s > limit_s
            others: list[Rank] = []
            declared = False
            if self.rank_status is not None:
                others = self.rank_status.tick(overdue=overdue)
                declared = (self.rank_status.directory / "declared").exists()
            answering = ticks.answering(others, passed)
            # Another rank that may still make progress is rightly waited for.
            is_stall = overdue and all(other.stacks for other in answering)
            if is_stall or declared:
                mute = [other for other in others if other not in answering]
                self._conclude(others, mute, silent_s)

    def _conclude(self, others: Sequence[Rank], mute: Sequence[Rank], silent_s: float) -> NoReturn:
        """Name the cause, or wait until the rank that was first has done so, and end the job."""
        _end_in_any_case(LAST_SECONDS)
        rank_status = self.rank_status
        if rank_status is not None and not rank_status.claim("declared"):
            _wait((rank_status.directory / "finished").exists, _VERDICT_SECONDS)
            self._end([])
        try:
            me = Rank(0, os.getpid(), 0) if rank_status is None else rank_status.me
            answers = {me: stacks()}
            for other in others:
                answers[other] = {} if other in mute else other.answer
            cause = explain(answers)
            page = f"no progress for {silent_s:.0f} s {self.where}\n{cause}\n"
            for rank, answer in sorted(answers.items()):
                page += f"\n==== {rank.name} {_what(rank, answer)}\n{answer.get('text', '')}"
            self.leave_evidence(cause, round(silent_s, 1), page)
        except Exception:
            traceback.print_exc()  # a bug of ours must not keep the job running
        finally:
            self._end(mute)

    def _end(self, mute: Sequence[Rank]) -> NoReturn:
        """End this process, its children, and the ranks that cannot end themselves."""
        doomed = _children(os.getpid())
        for rank in mute:
            doomed += [*_children(rank.pid), rank.pid]
        for pid in doomed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self.rank_status is not None:
            with suppress(OSError):
                self.rank_status.claim("finished")
            _wait(lambda: not any(rank.alive for rank in mute), 1.0)
            self.rank_status.leave()
        briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()), 1.0)
        os._exit(StallError.exit_code)


class _Ticks:
    """Which other ranks answer: their tick has changed within ``patience_s`` seconds in which this thread ran."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: its last tick, and the seconds since it changed

    def answering(self, others: Sequence[Rank], passed_s: float) -> list[Rank]:
        """Those of ``others`` that answer, after so many seconds more."""
        answering = []
        for other in others:
            last, unchanged_s = self._seen.get(other.rank, (-1, 0.0))
            unchanged_s = unchanged_s + passed_s if other.tick == last else 0.0
            self._seen[other.rank] = other.tick, unchanged_s
            if unchanged_s < self._patience_s:
                answering.append(other)
        return answering


def briefly(work: Callable[[], object], seconds: float) -> None:
    """Call something that may hang, such as a call into a device, in a thread, and wait for a time."""
    thread = threading.Thread(target=work, name="stall watchdog's work", daemon=True)
    thread.start()
    thread.join(seconds)


def _wait(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)


def _end_in_any_case(seconds: float) -> None:
    """End this process with code 4 after that time, without the interpreter's lock, which a hanging call may hold.

    ``faulthandler.dump_traceback_later(exit=True)`` would end it with 1. The kernel's timer sends this thread signal 4,
    whose handler is the C function ``_exit``: it gets the signal's number as its argument, and that is the exit code.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(StallError.exit_code, ctypes.cast(libc._exit, ctypes.c_void_p))
    # ``struct sigevent`` of 64 bytes: value, signal, SIGEV_THREAD_ID, thread; ``struct itimerspec``: interval, first
    event = (ctypes.c_int * 16)(0, 0, StallError.exit_code, 4, threading.get_native_id())
    timer, once = ctypes.c_void_p(), (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
    libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))  # CLOCK_MONOTONIC
    libc.timer_settime(timer, 0, once, None)


def _children(pid: int) -> list[int]:
    """The pids of a process's descendants in its own session: a logging service leaves it to outlive its parent."""
    with suppress(psutil.Error, OSError):
        children = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in children if os.getsid(child.pid) == os.getsid(pid)]
    return []


# ---- the cause ----------------------------------------------------------------------------------------------


def stacks() -> dict[str, str]:
    """Of this process: ``text``: the stacks of all other threads, the main thread first; ``waits``: the collective in
    which the main thread waits, for people, empty if it does not wait in one; ``at``: where it is."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main_first = sorted(sys._current_frames().items(), key=lambda thread: thread[0] != main)
    pages = []
    for number, frame in main_first:
        if number != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            pages.append(f"{names.get(number, number)} (most recent call last):\n{lines}")

    inner_first = traceback.extract_stack(main_first[0][1])[::-1]
    last = inner_first[0]
    ours = next((frame for frame in inner_first if "/hf_rocm_tune/" in frame.filename), None)
    called = ""
    if ours is not None and ours is not last:
        called = f" (called by {_position(ours)})"
    waits = ""
    if last.name == "_engine_run_backward":
        waits = "the backward pass"
    if "torch/distributed/" in last.filename:
        waits = next(frame.name for frame in inner_first if frame.name != "wrapper") + called
    return {"text": "\n".join(pages), "waits": waits, "at": f"{_position(last)}{called}"}


def _position(frame: traceback.FrameSummary) -> str:
    file = re.sub(r".*/(?:(?:site|dist)-packages/|(?=hf_rocm_tune/))", "", frame.filename)
    return f"{frame.name}() in {file}:{frame.lineno}"


def explain(answers: Mapping[Rank, Mapping[str, str]]) -> str:
    """The cause of a stall, in one line: the ranks of this machine that do not wait for others, and those that do."""
    if len(answers) == 1:
        ((alone, answer),) = answers.items()
        return f"the process (pid {alone.pid}) {_what(alone, answer)}"
    causes, waiting = [], []
    for rank, answer in sorted(answers.items()):
        if answer.get("waits"):
            waiting.append((rank, answer["waits"]))
        else:
            causes.append(f"{rank.name} {_what(rank, answer)}")
    if not causes:
        causes = ["all wait, in different collectives, for another machine, or their connection does not deliver"]
    how = "waits for it in" if len(waiting) == len(answers) - 1 else "waits in"
    return "; ".join([*causes, *(f"{rank.name} {how} {collective}" for rank, collective in waiting)])


def _what(rank: Rank, answer: Mapping[str, str]) -> str:
    """The state of a rank that does not wait in a collective."""
    state, at = state_of(rank.pid), answer.get("at", "")
    if state in ("", "Z", "X"):
        return "has ended: it was killed, or it crashed"
    if state in "Tt":
        return f"is stopped (state {state})"
    if state == "D":
        return f"hangs in the kernel (state D), in {at or 'a driver'}: if it does not end, restart the machine"
    return f"is in {at}" if at else f"is in a call that does not let Python answer (state {state})"
