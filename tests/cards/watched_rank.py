"""One process under the stall watchdog, without torch: ``python -m tests.cards.watched_rank JSON``.

Keys of the JSON: ``rank``, ``place`` (null: alone), ``report`` (the file for a stall's report), ``limits`` (seconds by
phase), ``script`` (a list of steps, see `_STEPS`), ``on_stall`` ("write", "raise", "the first dies", "hold"). Ranks
with a place begin once ``all-joined`` stands beside the report: a busy machine starts them seconds apart.
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

from hf_rocm_tune.cards import watchdog as watchdogs
from hf_rocm_tune.cards.watchdog import Board, Look, Stall, Watchdog


class Progress:
    """What the watchdog looks at."""

    def __init__(self, limits: dict[str, float | None], board: Board | None) -> None:
        self.beats, self.phase = 0, "step"
        self._limits, self._board = limits, board

    def beat(self, phase: str) -> None:
        self.phase = phase
        self.beats += 1
        if self._board is not None:
            self._board.mark(f"in {phase} {self.beats}")

    def look(self) -> Look:
        return Look(beats=self.beats, where=f"in {self.phase} {self.beats}", limit_s=self._limits[self.phase])


def stuck_here() -> None:
    while True:
        pass


def _leave_a_stopped_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.send_signal(signal.SIGSTOP)


def _work(progress: Progress, seconds: float, phase: str = "step") -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        progress.beat(phase)
        time.sleep(0.02)


_STEPS: dict[str, Callable[..., Any]] = {
    "work": _work,
    "phase": lambda progress, name: progress.beat(name),
    "sleep": lambda _, seconds: time.sleep(seconds),
    "spin": lambda _: stuck_here(),
    "wait": lambda _: threading.Event().wait(),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "child": lambda _: _leave_a_stopped_child(),
}


def main() -> None:
    given = json.loads(sys.argv[1])
    report = Path(given["report"])

    def on_stall(stall: Stall) -> None:
        if given.get("on_stall") == "raise":
            raise ValueError("a bug in what tells of a stall")
        if given.get("on_stall") == "hold":
            ctypes.PyDLL(None).sleep(600)  # it keeps the interpreter's lock
        if given.get("on_stall") == "the first dies" and not report.with_name("dead").exists():
            report.with_name("dead").touch()
            os._exit(7)
        report.write_text(json.dumps({"cause": stall.cause, "page": stall.page}))

    watchdogs.LAST_SECONDS = given.get("last_s", watchdogs.LAST_SECONDS)
    board = Board(Path(given["place"]), given["rank"]) if given["place"] else None
    progress = Progress(given["limits"], board)
    watchdog = Watchdog(look=progress.look, on_suspicion=lambda: None, on_stall=on_stall, board=board, tick_s=0.05)
    while board is not None and not report.with_name("all-joined").exists():
        time.sleep(0.01)
    watchdog.start()
    for name, *arguments in given["script"]:
        _STEPS[name](progress, *arguments)
    watchdog.stop()
    if board is not None:
        board.leave()


if __name__ == "__main__":
    main()
