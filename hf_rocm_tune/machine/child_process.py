"""One child process in a session of its own: started, listened to, asked where it stands, and killed.

Not covered: a process that left the group by starting a session of its own; and one that the kernel does not let die
(state D), which is reported and left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from hf_rocm_tune.machine.child_main import DIRECTORY, FAILED, PARENT, RESULT, STEP, WHERE_SIGNAL
from hf_rocm_tune.machine.child_record import Outcome, Status, Task
from hf_rocm_tune.machine.decide import MARK_SET
from hf_rocm_tune.machine.visible import MARK

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL, and one way of ending a process
_KILL_SECONDS = 5.0
_LISTEN_SECONDS = 1.0
_TAIL_CHARACTERS = 4000
_STEP_CHARACTERS = 200
_RESULT_BYTES = 8 << 20
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "HF_ROCM_TUNE_")
"""What a launcher or a parent process of ours tells a rank; a child that measures is no rank of that job."""
_OURS = {"HF_ROCM_TUNE_QUIET": "1", "HF_ROCM_TUNE_SPLIT": "1"}
"""A child says nothing about the environment, and sees every discrete card."""


class Child:
    """A running child, with the directory in which it leaves its result.

    Args:
        task: what it is to do; it starts at once.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, task: Task) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hf-rocm-tune-child-", ignore_cleanup_errors=True)
        self._folder = Path(self._directory.name)
        self._began, self._ended = time.monotonic(), 0.0
        self._state = ""
        self._held = False
        try:
            self._process = self._start(task)
        except OSError:
            self._directory.cleanup()
            raise
        assert self._process.stdout is not None
        self._output = _Output(self._process.stdout)

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        request = self._folder / "request.json"
        request.write_text(json.dumps(dict(task.request)), encoding="utf-8")
        with request.open("rb") as stdin:
            return subprocess.Popen(
                # -P: no folder of the user's (datasets/, random.py) shadows a library, as none does here.
                [sys.executable, "-P", "-m", task.module, *task.arguments],
                env=_environ(task, self._folder),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()  # also when Ctrl-C has ended the waiting
        self._directory.cleanup()

    def runs(self) -> bool:
        """Whether it has not ended. Once it has, nothing of its group is left."""
        if self._process.returncode is None and self._has_ended():
            # Before it is reaped: until then nobody else can have its number.
            self._signal(_KILL)
            self._process.wait()
            self._ended = time.monotonic()
        return self._process.returncode is None

    def failed(self) -> bool:
        """Whether it has ended and no result is there to be read."""
        return not self.runs() and self._result()[0] != "done"

    def ask_where(self) -> None:
        """Let it print the Python stacks of its threads, where it got so far as to know how."""
        self._state = _state(self._process.pid)
        if self._step() and WHERE_SIGNAL is not None:
            self._signal(WHERE_SIGNAL)

    def kill(self) -> None:
        """End its whole process group; a process that the kernel holds is waited for, but not for ever."""
        self.kill_all([self])

    @staticmethod
    def kill_all(children: Sequence[Child]) -> None:
        """End several, which together are waited for no longer than one."""
        running = [child for child in children if child.runs()]
        for child in running:
            child._signal(_KILL)
        patience = time.monotonic() + _KILL_SECONDS
        for child in running:
            try:
                child._process.wait(0.01 if child._held else max(patience - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                child._held = True  # by the kernel: it is not waited for a second time
            child._ended = time.monotonic()

    def outcome(self, *, late: bool) -> Outcome:
        """What became of it.

        Args:
            late: it was killed, because it had not ended in time.
        """
        status, result, error = self._result()
        if late:
            status, result, error = "timeout", None, ""
        return Outcome(
            status=status,
            result=result,
            error=error,
            code=self._process.returncode,
            seconds=self._ended - self._began,
            step=self._step(),
            state=self._state if late else "",
            tail=self._output.tail(),
        )

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.kill()

    def _result(self) -> tuple[Status, dict[str, Any] | None, str]:
        """Status, result and error, as its file has them."""
        try:
            with (self._folder / RESULT).open("rb") as file:
                raw = file.read(_RESULT_BYTES + 1)
        except FileNotFoundError:
            return "died", None, ""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if self._process.returncode != 0:
            error = str(found.get(FAILED, "")) if isinstance(found, dict) else ""
            return "died", None, " ".join(error.split())
        if not isinstance(found, dict) or len(raw) > _RESULT_BYTES:
            return "garbage", None, ""
        return "done", found, ""

    def _step(self) -> str:
        try:
            text = (self._folder / STEP).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return text[:_STEP_CHARACTERS]


class _Output:
    """Keeps the end of what comes out of a pipe, however much that is."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._tail = b""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The end, without control characters. To be asked for when the process has ended."""
        # A process that left the group may hold the other end for ever.
        self._thread.join(_LISTEN_SECONDS)
        text = self._tail.decode("utf-8", errors="replace")
        return "".join(c for c in text if c.isprintable() or c == "\n").strip()[-_TAIL_CHARACTERS:]

    def _listen(self) -> None:
        with self._pipe:
            while data := self._pipe.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader has it
                self._tail = (self._tail + data)[-4 * _TAIL_CHARACTERS :]


def _environ(task: Task, folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    # What this process has set itself has to reach the child as such: it decides anew, for all cards.
    kept.update({name: os.environ[name] for name in (MARK, MARK_SET) if name in os.environ})
    kept |= _OURS | {DIRECTORY: str(folder), PARENT: str(os.getpid())}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)  # it imports what this process would
    for name, value in task.environ.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
    return kept


def _state(pid: int) -> str:
    """The kernel's word on a process, and where in the kernel it waits; empty where it is not told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        state = next(line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State:"))
        waits = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, StopIteration):
        return ""
    return f"{state}, in {waits}" if waits not in ("", "0") else state
