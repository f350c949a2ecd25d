"""The diagnosis of a stall: the state of each rank of a machine, the likely cause, and the report.

The ranks exchange small files in a private directory, independent of any process group. Ranks on other machines, and in
containers that do not share a process table, are not covered.

A rank that can answer reports the Python stacks of its threads, and its open collectives from torch's flight recorders
(one for RCCL/NCCL, in builds that have it, and one for gloo: torch 2.13, ``FlightRecorder.hpp``; private names, so what
is missing is left out). For a rank that cannot, ``/proc`` has the state, the kernel function in which it waits, and, if
permitted, the kernel stack. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.process import start_ticks


def make_place(directory: Path) -> None:
    """Create the directory, or check that an existing one is private to this user.

    Raises:
        UsageError: it belongs to another user, or others can access it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{directory}, which the ranks of this job share, is not a directory that only you can access: remove it, "
            "or set TMPDIR to a directory of your own"
        )


def write_note(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: a reader sees the old or the new content."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)


def read_note(file: Path) -> dict[str, Any] | None:
    """The content of a file of `write_note`; None if it does not exist."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_alive(pid: int, since: int) -> bool:
    """Whether the process that started at ``since``, see `start_ticks`, is still running (a zombie is not)."""
    found = process_state(pid)
    return found is not None and found.state not in "ZX" and start_ticks(pid) == since


Frame = Mapping[str, Any]

_RECORDERS = (("nccl", "_dump_nccl_trace_json"), ("gloo", "_dump_fr_trace_json"))
_KEPT = (
    "collective_seq_id", "profiling_name", "process_group", "input_sizes", "input_dtypes", "state", "time_created_ns",
)  # fmt: skip
_LAST = 10
"""The number of past collectives that are reported."""

_BACKWARD = ("torch/autograd/", "_engine_run_backward")
_COLLECTIVES = "torch/distributed/"
_OURS = "/hf_rocm_tune/"

# Only the text distinguishes gloo's failures from bugs: they are plain RuntimeError (torch 2.13), and the messages of
# its transport begin with the source file. RCCL/NCCL and the store raise types of their own.
_GLOO = re.compile(r"gloo/transport/|connection (closed|reset) by peer|timed out waiting \d+ms", re.IGNORECASE)
_NCCL = re.compile(r"remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted|timeout", re.I)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """A process, seen from outside. ``state`` is its main thread's: R runs, S sleeps, D sleeps in a driver and cannot
    be interrupted, T stopped, t held by a debugger, Z ended."""

    pid: int
    state: str
    waits_in: str = ""  # function of the kernel; "" if the main thread does not wait or it is unknown
    kernel_stack: tuple[str, ...] = ()  # innermost function first; empty if it cannot be read
    tracer: int = 0  # process id of its debugger; 0 for none


def process_state(pid: int, root: Path = Path("/proc")) -> ProcessState | None:
    """The state of a process from the kernel's files in ``root``; None if there is no such process."""
    folder = root / str(pid)
    status = dict(line.split(":", 1) for line in _lines(folder / "status") if ":" in line)
    if not (state := status.get("State", "").strip()[:1]):
        return None
    waits_in = "".join(_lines(folder / "wchan"))
    return ProcessState(
        pid=pid,
        state=state,
        waits_in="" if waits_in == "0" else waits_in,
        kernel_stack=tuple(line.rpartition(" ")[2] for line in _lines(folder / "stack")),
        tracer=int(status.get("TracerPid", "0")),
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:  # the process has ended, or the file may not be read
        return []


def stacks() -> list[dict[str, Any]]:
    """The Python stacks of all other threads, the main thread first.

    Returns:
        For each thread ``thread`` (its name), ``main``, and ``frames``, outermost first: ``file``, ``line``,
        ``function``, ``code``.
    """
    main, here = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for number, frame in sys._current_frames().items():
        if number != here:
            frames = [
                {"file": each.filename, "line": each.lineno, "function": each.name, "code": each.line or ""}
                for each in traceback.extract_stack(frame)
            ]
            found.append({"thread": names.get(number, f"thread {number}"), "main": number == main, "frames": frames})
    return sorted(found, key=lambda each: (not each["main"], str(each["thread"])))


def collectives() -> dict[str, Any]:
    """The collectives that this process has started, from the flight recorders. May wait for the device.

    Returns:
        ``pending``: those that have not ended, oldest first; ``last``: those that have; each with ``recorder``.
        ``missing``: why a recorder has no data.
    """
    found: dict[str, Any] = {"pending": [], "last": [], "missing": []}
    c10d = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    for recorder, name in _RECORDERS:
        dump = getattr(c10d, name, None)
        if dump is None:
            found["missing"].append(f"{recorder}: this build of torch has no {name}")
            continue
        try:
            entries = json.loads(dump()).get("entries", [])  # absent if nothing was recorded
        except Exception as error:  # a private function: its error must not cost the stacks
            found["missing"].append(f"{recorder}: {type(error).__name__}: {error}")
            continue
        for entry in entries:
            row = {"recorder": recorder, **{key: entry[key] for key in _KEPT if key in entry}}
            ended = entry.get("retired") or entry.get("state") == "completed"
            found["last" if ended else "pending"].append(row)
    found["last"] = found["last"][-_LAST:]
    return found


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What is known of one rank."""

    rank: int
    pid: int
    where: str  # its phase: "in step 12"
    silent_s: float  # seconds without progress, by its own clock
    statement: Mapping[str, Any] | None  # ``stacks`` and ``collectives``; None for a rank that did not answer
    process: ProcessState | None  # None if it has ended
    children: Sequence[ProcessState] = field(default=())

    @property
    def frames(self) -> Sequence[Frame]:
        """The main thread's Python stack, outermost first; empty if unknown."""
        threads = self.statement["stacks"] if self.statement else ()
        return next((thread["frames"] for thread in threads if thread["main"]), ())

    @property
    def pending(self) -> Sequence[Mapping[str, Any]]:
        """The collectives that are known not to have ended."""
        pending: Sequence[Mapping[str, Any]] = (self.statement or {}).get("collectives", {}).get("pending", ())
        return pending

    @property
    def name(self) -> str:
        """ "rank 1 (pid 4242)"."""
        return f"rank {self.rank} (pid {self.pid})"


def explain(ranks: Sequence[Rank], *, elsewhere: int) -> str:
    """The cause of a stall, in one line.

    A rank in a collective waits for the others, so the cause is looked for in ranks that are not in one; if all are,
    they are in different collectives, or their connection does not deliver.

    Args:
        ranks: those of this machine.
        elsewhere: number of ranks on other machines, whose state is unknown.
    """
    if len(ranks) == 1 and not elsewhere:
        return f"the process (pid {ranks[0].pid}) {_what(ranks[0])}"
    waiting = [rank for rank in ranks if _waits_in(rank) is not None]
    causes = [rank for rank in ranks if rank not in waiting]
    at = {rank.rank: "" if len({each.where for each in ranks}) == 1 else f", {rank.where}," for rank in ranks}
    parts = [f"{rank.name}{at[rank.rank]} {_what(rank)}" for rank in causes]
    what = "waits" if not causes else "waits for it" if len(causes) == 1 else "waits for them"
    parts += [f"{rank.name}{at[rank.rank]} {what} in {_waits_in(rank)}" for rank in waiting]
    keys = ("recorder", "process_group", "collective_seq_id", "profiling_name", "input_sizes")
    if (
        not causes
        and len({tuple(str(each.pending[0].get(key)) for key in keys) for each in waiting if each.pending}) > 1
    ):
        parts.append("these are different collectives, so each waits for ever")
    elif elsewhere:
        others = "the rank" if elsewhere == 1 else f"the {elsewhere} ranks"
        parts.append(f"the state of {others} on other machines is unknown here: see their own messages")
    elif not causes:
        parts.append("it is the same collective, so the connection between them does not deliver")
    return "; ".join(parts)


def _waits_in(rank: Rank) -> str | None:
    """The collective in which a rank waits, for people; None if it does not wait in one, or that is unknown."""
    if not rank.frames or (rank.process is not None and rank.process.state in "DTt"):
        return None
    innermost = rank.frames[-1]
    pending = rank.pending[0] if rank.pending else None
    operation = str(pending["profiling_name"]).rpartition(":")[2] if pending else ""
    if _BACKWARD[0] in innermost["file"] and innermost["function"] == _BACKWARD[1]:
        return f"{operation} of gradients" if pending else None
    if _COLLECTIVES in innermost["file"]:
        called = next(frame["function"] for frame in reversed(rank.frames) if frame["function"] != "wrapper")
        return f"{operation or called}{_called_from(rank.frames)}"
    if pending and pending["recorder"] == "nccl":  # the host waits for the device, and the device for the others
        return f"{operation}{_called_from(rank.frames)}"
    return None


def _what(rank: Rank) -> str:
    """The state of a rank that does not wait in a collective."""
    process = rank.process
    if process is None or process.state in "ZX":
        return "has ended: it was killed, or it crashed"
    inside = f" in {process.waits_in}" if process.waits_in else ""
    if process.state == "T":
        return "is stopped (state T)"
    if process.state == "t":
        return f"is held by a debugger (state t, pid {process.tracer})"
    place = f" in {_place(rank.frames[-1])}{_called_from(rank.frames)}" if rank.frames else ""
    if process.state == "D":
        return f"hangs in the kernel (state D{inside}){place}"
    if rank.statement is None:
        does = "computes" if process.state == "R" else f"sleeps{inside}"
        return f"{does} in a call that does not let Python answer (state {process.state})"
    stuck = [child for child in rank.children if child.state in "DTt"]
    also = "".join(f"; its child process {child.pid} is in state {child.state}" for child in stuck)
    return f"is{place or ' at an unknown place'}{also}"


def _place(frame: Frame) -> str:
    file = frame["file"]
    for mark in ("site-packages/", "dist-packages/"):
        if mark in file:
            file = file.rpartition(mark)[2]
    if (ours := file.rfind(_OURS)) >= 0:
        file = file[ours + 1 :]
    return f"{frame['function']}() in {file}:{frame['line']}"


def _called_from(frames: Sequence[Frame]) -> str:
    """The innermost frame of our own code, if that is not the innermost of all."""
    if _OURS in frames[-1]["file"]:
        return ""
    ours = next((frame for frame in reversed(frames) if _OURS in frame["file"]), None)
    return f" (called by {_place(ours)})" if ours else ""


def render(report: Mapping[str, Any]) -> str:
    """A stall's report as text: the kernel's view of each rank, and its stacks as Python prints them.

    Args:
        report: see `watchdog.Stall`.
    """
    lines = [f"no progress for {report['silent_seconds']:.0f} s {report['where']}", report["cause"]]
    for rank in report["ranks"]:
        lines += ["", f"==== rank {rank['rank']}, pid {rank['pid']}, {rank['where']}"]
        process, statement = rank["process"], rank["statement"]
        lines.append(f"main thread: {_seen(process)}" if process else "the process has ended")
        if process and process["kernel_stack"]:
            lines.append(f"kernel stack: {' < '.join(process['kernel_stack'])}")
        lines += [f"child process {child['pid']}: {_seen(child)}" for child in rank["children"]]
        if statement is None:
            lines.append("it did not answer, so its Python stacks are unknown")
            continue
        for each in statement.get("collectives", {}).get("pending", ()):
            lines.append(f"open collective: {', '.join(f'{key} {value}' for key, value in each.items())}")
        for thread in statement["stacks"]:
            lines += ["", f"{thread['thread']} (most recent call last):"]
            for frame in thread["frames"]:
                lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}')
                lines += [f"    {frame['code']}"] if frame["code"] else []
    if report["ranks_on_other_machines"]:
        lines += ["", f"{report['ranks_on_other_machines']} ranks on other machines: their state is unknown here"]
    return "\n".join(lines) + "\n"


def _seen(task: Mapping[str, Any]) -> str:
    return f"state {task['state']}" + (f" in {task['waits_in']}" if task["waits_in"] else "")


class PeerLostError(StallError):
    """The connection to another rank, which ended for another reason, broke.

    Attributes:
        follows: this error is reported only if that reason is unknown.
    """

    follows = True


class _Peer(Protocol):
    """Another rank of this machine, see `watchdog.Standing`."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    import torch.distributed as dist

    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def lost_peer(error: BaseException, ranks: Sequence[_Peer], *, elsewhere: int, where: str) -> PeerLostError:
    """The error for a broken connection.

    Args:
        error: see `is_lost_peer`.
        ranks: the other ranks of this machine, alive until now.
        elsewhere: number of ranks on other machines.
        where: this rank's phase: "in step 12".
    """
    deadline = time.monotonic() + _WAIT_SECONDS  # a connection breaks before its process has ended
    while ranks and all(each.alive for each in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = [f"rank {each.rank} (pid {each.pid})" for each in ranks if not each.alive]
    if gone:
        cause = f"{', '.join(gone)} ended without a message: killed (see `dmesg` for lack of memory), or crashed"
    elif _LATE.search(str(error)):
        cause = "another rank did not join a collective within --ddp_timeout"
    else:
        which = "a rank on another machine" if elsewhere else "another rank"
        cause = f"{which} has ended or cannot be reached; see its own message"
    return PeerLostError(
        f"the connection to another rank broke {where}: {cause}. The checkpoints already written are intact: start "
        "the same command again to continue from the newest one"
    )
