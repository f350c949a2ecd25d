"""One process under the stall watchdog, without torch: ``python -m tests.lifecycle.watched_rank JSON``.

Keys of the JSON: ``rank``, ``place`` (null: alone), ``report`` (the file for a stall's report), ``limits`` (seconds by
phase), ``script`` (a list of steps, see `_STEPS`), ``on_stall`` ("write", "raise", "hold"). Ranks with a place begin
once ``all-joined`` stands beside the report: a busy machine starts them seconds apart.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_rocm_tune.lifecycle import watchdog as watchdogs
from hf_rocm_tune.lifecycle.watchdog import RankStatus, Watchdog


class Rank(Watchdog):
    """A watchdog that keeps what it finds in a file."""

    def __init__(self, given: dict[str, Any], board: RankStatus | None) -> None:
        super().__init__(board, tick_s=0.05)
        self._given = given
        self.beat("step")

    def beat(self, phase: str) -> None:
        self.limit_s, self.where = self._given["limits"][phase], f"in {phase} {self.beats}"
        self.beats += 1

    def leave_evidence(self, cause: str, silent_s: float, page: str) -> None:
        if self._given.get("on_stall") == "raise":
            raise ValueError("a bug in what tells of a stall")
        if self._given.get("on_stall") == "hold":
            ctypes.PyDLL(None).sleep(600)  # it keeps the interpreter's lock
        Path(self._given["report"]).write_text(json.dumps({"cause": cause, "page": page}))


def stuck_here() -> None:
    while True:
        pass


def _leave_a_stopped_child(apart: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
    child.send_signal(signal.SIGSTOP)


def _work(rank: Rank, seconds: float, phase: str = "step") -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rank.beat(phase)
        time.sleep(0.02)


_STEPS: dict[str, Callable[..., Any]] = {
    "work": _work,
    "phase": lambda rank, name: rank.beat(name),
    "sleep": lambda _, seconds: time.sleep(seconds),
    "spin": lambda _: stuck_here(),
    "wait": lambda _: threading.Event().wait(),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "child": lambda _, apart: _leave_a_stopped_child(apart),
}


def main() -> None:
    given = json.loads(sys.argv[1])
    watchdogs.LAST_SECONDS = given.get("last_s", watchdogs.LAST_SECONDS)
    watchdogs.TICK_SECONDS = 1.5
    board = RankStatus(Path(given["place"]), given["rank"]) if given["place"] else None
    rank = Rank(given, board)
    while board is not None and not Path(given["report"]).with_name("all-joined").exists():
        time.sleep(0.01)
    rank.start()
    for name, *arguments in given["script"]:
        _STEPS[name](rank, *arguments)
    rank.stop()
    if board is not None:
        board.leave()


if __name__ == "__main__":
    main()
