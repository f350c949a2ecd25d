"""One start of the supervised command: its processes, and how to end every one of them.

The command runs in a session of its own, so a Ctrl-C in the terminal reaches the supervisor alone, which passes it on
once. Every process of it inherits `supervised.VARIABLE`, whose value nobody else has: what is left of a start is found
by that, wherever it hangs in the process tree, because a rank or a loader's worker that outlives its launcher would
hold the card's memory and the output directory.

Not covered: a process in an uninterruptible sleep in the driver, which no signal ends; it is named. A supervisor that
is killed itself leaves the command running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.training.supervised import VARIABLE

_POLL_SECONDS = 0.05
_KILL_SECONDS = 30.0
"""How long SIGKILL may take: the kernel takes back what the process held first."""


class Child:
    """A started command.

    Args:
        argv: the command.
        environ: its environment; `VARIABLE` is added.
        directory: the supervisor's own, which is the mark of every process.

    Raises:
        UsageError: there is no such program.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], directory: Path) -> None:
        self._mark = str(directory)
        try:
            self._process = subprocess.Popen(
                list(argv), env={**environ, VARIABLE: self._mark}, start_new_session=True, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error

    def poll(self) -> int | None:
        """Its status when it has ended: the exit code, or minus the signal's number."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """A signal to the command itself; launchers pass it on."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self, grace_seconds: float) -> list[int]:
        """SIGTERM, then SIGKILL to all that is left of it.

        Returns:
            Process ids that even SIGKILL did not end.
        """
        self.send(signal.SIGTERM)
        _wait(lambda: self.poll() is not None, grace_seconds)
        left = self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait(lambda: self.poll() is not None and not self._left(), _KILL_SECONDS if left else 0.0)
        return self._left()

    def _left(self) -> list[int]:
        """Processes that carry the mark and run still."""
        import psutil  # a dependency of accelerate

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(VARIABLE) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


def _wait(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
