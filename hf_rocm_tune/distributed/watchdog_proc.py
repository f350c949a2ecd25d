"""What the kernel says of a process that does not answer, and how to end it. Linux; elsewhere nothing is known.

A stopped process (state T) and one that hangs in a driver (state D) can say nothing for themselves and do not see
SIGTERM. ``/proc`` tells their state, the function of the kernel in which they wait, and, to those who may read it, the
system call and the kernel's stack.

Source: proc(5). Not covered: threads beyond the first `_MOST_THREADS` of a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_MOST_THREADS = 64
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has one way of ending a process


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread of a process, as the kernel names it.

    Args:
        name: as the thread is called.
        state: a letter; see `ProcessState`.
        waits_in: function of the kernel, or "".
    """

    name: str
    state: str
    waits_in: str


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """A process, seen from outside.

    Args:
        pid: its number.
        state: of its main thread: R runs, S sleeps, D sleeps in a driver and cannot be interrupted, T stopped, t held
            by a debugger, Z ended.
        waits_in: function of the kernel in which the main thread waits; "" where it does not or it is not told.
        syscall: number and arguments of its system call, or ""; readable by root, mostly.
        kernel_stack: innermost function first; empty where it may not be read.
        tracer: process id of its debugger; 0 for none.
        threads: all of it.
    """

    pid: int
    state: str
    waits_in: str = ""
    syscall: str = ""
    kernel_stack: tuple[str, ...] = ()
    tracer: int = 0
    threads: tuple[Thread, ...] = field(default=())


def process_state(pid: int, root: Path = _PROC) -> ProcessState | None:
    """What is known of a process; None when there is none of this number.

    Args:
        pid: its number.
        root: where the kernel tells it.
    """
    folder = root / str(pid)
    state = _state(folder)
    if not state:
        return None
    tracer = next((line.split()[1] for line in _lines(folder / "status") if line.startswith("TracerPid:")), "0")
    return ProcessState(
        pid=pid,
        state=state,
        waits_in=_waits_in(folder),
        syscall=" ".join(_lines(folder / "syscall")),
        kernel_stack=tuple(line.rpartition(" ")[2] for line in _lines(folder / "stack")),
        tracer=int(tracer) if tracer.isdecimal() else 0,
        threads=tuple(_threads(folder / "task")),
    )


def born(pid: int, root: Path = _PROC) -> str:
    """When a process started, in clock ticks since boot; "" when there is none. With it a number is not taken twice."""
    after_name = _after_name(root / str(pid))
    return after_name[19] if len(after_name) > 19 else ""


def is_alive(pid: int, since: str, root: Path = _PROC) -> bool:
    """Whether the very process that started at ``since`` still runs; one that has ended and waits to be reaped does
    not."""
    return born(pid, root) == since and _state(root / str(pid)) not in ("", "Z", "X")


def descendants(pid: int, root: Path = _PROC) -> list[int]:
    """Numbers of a process's children, and of theirs, nearest first; those that began a session of their own, as the
    service of a logger does to outlive its parent, are left out."""
    _, own_session = _parent_and_session(root / str(pid))
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            parent, session = _parent_and_session(folder) if folder.name.isdecimal() else (0, 0)
            if parent and session == own_session:
                children.setdefault(parent, []).append(int(folder.name))
    result: list[int] = []
    todo = [pid]
    while todo:
        nearest = children.pop(todo.pop(0), [])
        result += nearest
        todo += nearest
    return result


def kill(pids: Iterable[int]) -> None:
    """SIGKILL: a stopped process does not see SIGTERM."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, _KILL)


def wait_until_gone(processes: Iterable[tuple[int, str]], seconds: float) -> list[int]:
    """Wait for processes to end.

    Args:
        processes: number, and what `born` said of it.
        seconds: how long at most.

    Returns:
        Those that have not ended.
    """
    processes = list(processes)
    deadline = time.monotonic() + seconds
    while left := [pid for pid, since in processes if is_alive(pid, since)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _threads(folder: Path) -> list[Thread]:
    try:
        tasks = sorted(int(task.name) for task in folder.iterdir())[:_MOST_THREADS]
    except OSError:
        return []
    found = []
    for task in tasks:
        name = "".join(_lines(folder / str(task) / "comm"))
        if state := _state(folder / str(task)):
            found.append(Thread(name=name, state=state, waits_in=_waits_in(folder / str(task))))
    return found


def _state(folder: Path) -> str:
    state = next(iter(_after_name(folder)), "")
    return state if len(state) == 1 else ""


def _parent_and_session(folder: Path) -> tuple[int, int]:
    found = _after_name(folder)
    return (int(found[1]), int(found[3])) if len(found) > 3 else (0, 0)


def _waits_in(folder: Path) -> str:
    text = "".join(_lines(folder / "wchan"))
    return "" if text == "0" else text


def _after_name(folder: Path) -> list[str]:
    """The fields of ``stat`` behind the name, which may hold blanks and brackets: state, parent, ..."""
    return " ".join(_lines(folder / "stat")).rpartition(") ")[2].split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:  # it has ended, or may not be read
        return []
