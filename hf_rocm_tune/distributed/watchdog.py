"""Ends a job that no longer gets on, and says why: exit code 4, never an endless wait.

A daemon thread of each rank watches its own main thread. Time counts only while this thread itself runs, so a machine
that slept, or a job that was stopped as a whole, is not taken for one that hangs. A rank declares a stall when it and
every other rank of its machine that can answer have been silent for longer than they allow themselves. Then those that
can answer state the Python stacks of their threads and the collectives in which they wait; of the others the kernel
tells the state, and SIGKILL ends them, because a stopped process sees no other signal.

What it costs: the watching thread wakes once a second unless the limits are short, and the main thread, at each sign of
life, rewrites a line in a file (microseconds).

Not covered: a call that hangs while it holds the interpreter's lock, in a job of one process (in a job of several the
other ranks see it; the supervisor sees it from outside); a rank on another machine, of which nothing is known here.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from hf_rocm_tune.distributed import watchdog_statement
from hf_rocm_tune.distributed.watchdog_board import Board, Standing
from hf_rocm_tune.distributed.watchdog_cause import Rank, explain
from hf_rocm_tune.distributed.watchdog_proc import born, descendants, kill, process_state, wait_until_gone
from hf_rocm_tune.errors import StallError

_TICK_SECONDS = 3.0
"""A rank that has not ticked for so long is not waited for."""
_ANSWER_SECONDS = 5.0
_VERDICT_SECONDS = 40.0
"""How long a rank that has answered waits for the one that asked."""
_LAST_SECONDS = 60.0
"""However the diagnosis itself hangs, the process ends after this."""
_FLUSH_SECONDS, _GONE_SECONDS = 1.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at the main thread's progress.

    Args:
        beats: how many signs of life there were.
        where: what it is at, for people: "in step 12".
        limit_s: seconds that may pass until the next one; None: without end.
    """

    beats: int
    where: str
    limit_s: float | None


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stall, with its evidence.

    Args:
        cause: why nothing goes on, for people.
        silent_s: seconds without progress, by the count of the rank that tells it.
        where: what that rank is at.
        report: all that is known, as JSON has it.
    """

    cause: str
    silent_s: float
    where: str
    report: dict[str, Any]


class Watchdog:
    """Watches this process from `start` to `stop`.

    Args:
        look: tells the progress of the main thread; called in another thread, so it must not wait.
        on_suspicion: hears of a stall before its cause is sought.
        on_stall: tells of it before the job is ended; it must come back.
        board: where the ranks of this machine meet; None for a process alone.
        elsewhere: how many ranks run on other machines.
        tick_s: seconds between two looks.
        clock: seconds that only grow.
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
        self._thread.join()  # one that has declared a stall ends the process

    # ---- watching -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        before, tick = self._clock(), 0
        while not self._stopped.wait(self._tick_s):
            now = self._clock()
            # What is beyond two ticks is time in which this process did not run.
            passed, before, tick = min(now - before, 2 * self._tick_s), now, tick + 1
            look = self._look()
            self._silence.see(look.beats, passed)
            overdue = look.limit_s is not None and self._silence.seconds > look.limit_s
            others = self._see_others(passed)
            if self._board is not None:
                self._board.show(tick=tick, silent_s=self._silence.seconds, overdue=overdue)
                if self._board.is_declared():
                    self._answer(look)
            if overdue and not any(self._may_get_on(each) for each in others):
                self._declare(look)

    def _see_others(self, passed: float) -> list[Standing]:
        """The other ranks of this machine."""
        others = self._others()
        for each in others:
            self._seen.setdefault(each.rank, _Silence()).see(each.tick, passed)
        return others

    def _may_get_on(self, other: Standing) -> bool:
        """Whether another rank may still go on, so that this one waits for it with reason."""
        ticks = self._seen[other.rank].seconds < max(_TICK_SECONDS, 4 * self._tick_s)
        return ticks and not other.overdue and _can_answer(other)

    def _others(self) -> list[Standing]:
        return self._board.others() if self._board is not None else []

    # ---- a stall --------------------------------------------------------------------------------------------

    def _declare(self, look: Look) -> NoReturn:
        if self._board is not None and not self._board.declare():
            self._answer(look)
        _end_in_any_case()
        self._conclude(look)

    def _answer(self, look: Look) -> NoReturn:
        """Another rank has declared a stall: tell it what is known here, and end when it has told the user."""
        _end_in_any_case()
        assert self._board is not None
        self._statement(look)
        deadline = self._clock() + _VERDICT_SECONDS
        while not self._board.is_finished():
            declarer = self._board.declared_by()
            if self._clock() > deadline or (declarer is not None and not declarer.alive):
                self._conclude(look)
            time.sleep(0.05)
        self._end([])

    def _conclude(self, look: Look) -> NoReturn:
        """Collect, explain, tell, and end the job."""
        mute: list[Rank] = []
        try:
            self._on_suspicion()
            ranks = self._collect(look)
            mute = [rank for rank in ranks if rank.statement is None or not rank.statement["complete"]]
            cause = explain(ranks, elsewhere=self._elsewhere)
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
            traceback.print_exc()  # a bug of ours: the job has to end all the same
        finally:
            self._end(mute)

    def _collect(self, look: Look) -> list[Rank]:
        """This rank and the others of this machine, by their own word or the kernel's."""
        statement = self._statement(look)
        others = self._others()
        self._wait_for_answers(others)
        mine = self._board.rank if self._board is not None else 0
        own = _rank(mine, os.getpid(), look.where, self._silence.seconds, statement)
        asked = [
            _rank(each.rank, each.pid, each.where, each.silent_s, self._said(each), alive=each.alive) for each in others
        ]
        return sorted([own, *asked], key=lambda rank: rank.rank)

    def _statement(self, look: Look) -> dict[str, Any]:
        """The stacks first: to ask for the collectives may hang where the device does."""
        mine: dict[str, Any] = {"where": look.where, "stacks": watchdog_statement.stacks(), "complete": False}
        self._state(mine)
        briefly(lambda: mine.update(collectives=watchdog_statement.collectives()), _ANSWER_SECONDS)
        mine["complete"] = True
        self._state(mine)
        return mine

    def _state(self, statement: dict[str, Any]) -> None:
        if self._board is not None:
            self._board.state(statement)

    def _said(self, standing: Standing) -> dict[str, Any] | None:
        return self._board.statement(standing.rank) if self._board is not None else None

    def _wait_for_answers(self, others: list[Standing]) -> None:
        deadline = self._clock() + _ANSWER_SECONDS
        while self._clock() < deadline:
            said = [self._said(each) for each in others if _can_answer(each)]
            if all(each is not None and each["complete"] for each in said):
                return
            time.sleep(0.05)

    def _end(self, mute: list[Rank]) -> NoReturn:
        """This process, its children, and the ranks that cannot do it themselves; nothing may keep running."""
        briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()), _FLUSH_SECONDS)
        alive = {each.pid: each.born for each in self._others() if each.alive}
        ended = [rank.pid for rank in mute if rank.pid in alive]
        below = [child for pid in [*ended, os.getpid()] for child in descendants(pid)]
        stuck = [pid for pid in [*ended, *below] if (state := process_state(pid)) is not None and state.state == "D"]
        processes = [(pid, alive.get(pid) or born(pid)) for pid in stuck]
        if self._board is not None:
            self._board.finish()
            self._board.leave(without=ended)
        kill([*ended, *below])
        # From here on the main thread may see a broken connection: it is not given the time to tell of that.
        if processes and (left := wait_until_gone(processes, _GONE_SECONDS)):
            text = f"hf-rocm-tune: processes {left} do not end even by SIGKILL, so they hang in a driver and hold the "
            os.write(2, f"{text}GPU: restart the machine\n".encode())
        os._exit(StallError.exit_code)


class _Silence:
    """How long a number has not changed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: int | None = None

    def see(self, number: int, passed: float) -> None:
        """A look at it, ``passed`` seconds after the last one."""
        self.seconds = self.seconds + passed if number == self._last else 0.0
        self._last = number


def briefly(work: Callable[[], object], seconds: float) -> bool:
    """Do something that may never come back, such as a call into a device that hangs; whether it came back."""
    thread = threading.Thread(target=work, name="stall watchdog's work", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _can_answer(standing: Standing) -> bool:
    """Where only the main thread hangs in a driver (D), the watchdog's own may answer."""
    state = process_state(standing.pid)
    return standing.alive and state is not None and state.state not in "Tt"


def _rank(
    number: int, pid: int, where: str, silent_s: float, statement: dict[str, Any] | None, *, alive: bool = True
) -> Rank:
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
    """A timer in C: it needs no lock of the interpreter, which a hanging call may hold."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - it has to stay open
    faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=nowhere)
