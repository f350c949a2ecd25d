"""One process under the stall watchdog, without torch: ``python -m tests.survive.watched_rank JSON``.

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

from hf_rocm_tune.survive import watchdog as watchdogs
from hf_rocm_tune.survive.watchdog import Board, Watchdog


class Progress:
    """What the watchdog looks at."""

    def __init__(self, limits: dict[str, float | None]) -> None:
        self.beats, self.phase, self._limits = 0, "step", limits

    def beat(self, phase: str) -> None:
        self.phase = phase
        self.beats += 1

    @property
    def where(self) -> str:
        return f"in {self.phase} {self.beats}"

    @property
    def limit_s(self) -> float | None:
        return self._limits[self.phase]


def stuck_here() -> None:
    while True:
        pass


def _leave_a_stopped_child(apart: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
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
    "child": lambda _, apart: _leave_a_stopped_child(apart),
}


def main() -> None:
    given = json.loads(sys.argv[1])
    report = Path(given["report"])

    def on_stall(cause: str, silent_s: float, page: str) -> None:
        if given.get("on_stall") == "raise":
            raise ValueError("a bug in what tells of a stall")
        if given.get("on_stall") == "hold":
            ctypes.PyDLL(None).sleep(600)  # it keeps the interpreter's lock
        report.write_text(json.dumps({"cause": cause, "page": page}))

    watchdogs.LAST_SECONDS = given.get("last_s", watchdogs.LAST_SECONDS)
    board = Board(Path(given["place"]), given["rank"]) if given["place"] else None
    progress = Progress(given["limits"])
    watchdog = Watchdog(progress=progress, on_stall=on_stall, board=board, tick_s=0.05)
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
