"""One line that says why nothing goes on, from what is known of each rank: as exact as that, and no more.

A rank that waits in a collective waits for the others, so the cause is sought in those that do not; where all wait,
they wait in different collectives, or their connection does not deliver. Text only: nothing here looks at a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_rocm_tune.distributed.watchdog_proc import ProcessState

Frame = Mapping[str, Any]

_BACKWARD = ("torch/autograd/", "_engine_run_backward")
_COLLECTIVES = "torch/distributed/"
_WRAPPERS = frozenset({"wrapper"})
_OURS = "/hf_rocm_tune/"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What is known of one rank.

    Args:
        rank: its number in the job.
        pid: its process.
        where: what it was at: "in step 12".
        silent_s: seconds without progress, by its own count.
        statement: see `watchdog_statement`; None for a rank that did not answer.
        process: seen from outside; None when it is gone.
        children: its child processes, seen from outside.
    """

    rank: int
    pid: int
    where: str
    silent_s: float
    statement: Mapping[str, Any] | None
    process: ProcessState | None
    children: Sequence[ProcessState] = field(default=())

    @property
    def frames(self) -> Sequence[Frame]:
        """The main thread's Python stack, outermost first; empty where it is not known."""
        threads = self.statement["stacks"] if self.statement else ()
        return next((thread["frames"] for thread in threads if thread["main"]), ())

    @property
    def pending(self) -> Sequence[Mapping[str, Any]]:
        """The collectives in which it is known to wait."""
        told: Sequence[Mapping[str, Any]] = (self.statement or {}).get("collectives", {}).get("pending", ())
        return told

    @property
    def name(self) -> str:
        """ "rank 1 (pid 4242)"."""
        return f"rank {self.rank} (pid {self.pid})"


def explain(ranks: Sequence[Rank], *, elsewhere: int) -> str:
    """Why nothing goes on.

    Args:
        ranks: those of this machine.
        elsewhere: how many ranks run on other machines; nothing is known of them.
    """
    if len(ranks) == 1 and not elsewhere:
        return f"the process (pid {ranks[0].pid}) {_what(ranks[0])}"
    waiting = [rank for rank in ranks if waits_in(rank) is not None]
    causes = [rank for rank in ranks if rank not in waiting]
    at = {rank.rank: "" if len({each.where for each in ranks}) == 1 else f", {rank.where}," for rank in ranks}
    parts = [f"{rank.name}{at[rank.rank]} {_what(rank)}" for rank in causes]
    what = "waits" if not causes else "waits for it" if len(causes) == 1 else "waits for them"
    parts += [f"{rank.name}{at[rank.rank]} {what} in {waits_in(rank)}" for rank in waiting]
    if not causes and _parted(waiting):
        parts.append("these are different collectives, so each waits for ever")
    elif elsewhere:
        others = "the rank" if elsewhere == 1 else f"the {elsewhere} ranks"
        parts.append(f"of {others} on other machines nothing is known here: their own line says it")
    elif not causes:
        parts.append("it is the same collective, so the connection between them does not deliver")
    return "; ".join(parts)


def waits_in(rank: Rank) -> str | None:
    """The collective in which a rank waits, for people; None when it does not, or that is not known."""
    if not rank.frames or (rank.process is not None and rank.process.state in "DTt"):
        return None
    innermost = rank.frames[-1]
    pending = rank.pending[0] if rank.pending else None
    if _BACKWARD[0] in innermost["file"] and innermost["function"] == _BACKWARD[1]:
        return f"{_operation(pending)} of gradients" if pending else None
    if _COLLECTIVES in innermost["file"]:
        called = next(frame["function"] for frame in reversed(rank.frames) if frame["function"] not in _WRAPPERS)
        return f"{_operation(pending) if pending else called}{_called_from(rank.frames)}"
    if pending and pending["recorder"] == "nccl":  # the host waits for the device, and the device for the others
        return f"{_operation(pending)}{_called_from(rank.frames)}"
    return None


def _parted(waiting: Sequence[Rank]) -> bool:
    """Whether ranks that all wait are known to wait in different collectives."""
    keys = ("recorder", "process_group", "collective_seq_id", "profiling_name", "input_sizes")
    first = {tuple(str(rank.pending[0].get(key)) for key in keys) for rank in waiting if rank.pending}
    return len(first) > 1


def _what(rank: Rank) -> str:
    """What a rank that waits in no collective does instead."""
    process = rank.process
    if process is None or process.state in "ZX":
        return "is gone: it was killed, or it crashed"
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


def _operation(pending: Mapping[str, Any]) -> str:
    return str(pending["profiling_name"]).rpartition(":")[2]


def _place(frame: Frame) -> str:
    return f"{frame['function']}() in {_short(frame['file'])}:{frame['line']}"


def _called_from(frames: Sequence[Frame]) -> str:
    """The nearest place in our own code, where the innermost is not."""
    if _OURS in frames[-1]["file"]:
        return ""
    ours = next((frame for frame in reversed(frames) if _OURS in frame["file"]), None)
    return f" (called by {_place(ours)})" if ours else ""


def _short(file: str) -> str:
    """A file without what comes before the package it is in."""
    for mark in ("site-packages/", "dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    place = file.rfind(_OURS)
    return file[place + 1 :] if place >= 0 else file
