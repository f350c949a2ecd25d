"""Measurements in child processes: a hang, a crash or damaged output ends only the child.

Each is ``python -m MODULE`` in its own session, whose group is killed at a deadline. The request is JSON on stdin, the
result one JSON object in a file, which output of native libraries cannot damage; by hand it is printed. The module ends
in ``answer(measure)``. Not covered: a process that left the group, and one that the kernel does not end (state D).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from hf_rocm_tune.errors import TuneError
from hf_rocm_tune.machine.process import MARK, state_of

if TYPE_CHECKING:
    import torch

DIRECTORY = "HF_ROCM_TUNE_CHILD_DIRECTORY"
PARENT = "HF_ROCM_TUNE_CHILD_PARENT"
"""Variables: where the result goes, and the process id of the parent."""
RESULT = "result.json"
_STEP = "step"
_OUTPUT = "output"
ENDINGS = ("hang", "stop", "kill", "crash", "garbage", "silent")
"""Faults of the process itself, which can be injected into every child: it hangs, is stopped (SIGSTOP), is killed
(SIGKILL), crashes (SIGSEGV), writes an invalid result and invalid output, or writes no result."""

_FAILED = "failed"  # key of a result with only an exception
_POLL_SECONDS = 0.02
_KILL_SECONDS = 5.0
_TAIL_CHARACTERS = 4000
_RESULT_BYTES = 8 << 20
# Variables of a launcher or of our parent process for a rank; a measuring child is not a rank of that job.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "HF_ROCM_TUNE_")

Status = Literal["done", "timeout", "died", "garbage"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One child to start: ``python -m module`` with a request of plain JSON values."""

    module: str
    arguments: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)  # added at its start; None removes one


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended: ``done`` with a result; ``timeout``, killed at the deadline; ``died`` by a signal, by an
    exception or without a result; ``garbage``: its result is not a JSON object."""

    status: Status
    result: dict[str, Any] | None = None
    error: str = ""  # type and message of the exception that ended it
    code: int | None = None  # negative for a signal; None if it could not be killed
    seconds: float = 0.0  # from start to end, including imports
    step: str = ""  # the last one reported with `step`
    state: str = ""  # of a killed child, before, see `process.state_of`: D hangs in a driver
    tail: str = ""  # the end of its output

    @property
    def how(self) -> str:
        """How it ended without a result, in one clause: ``was ended by SIGSEGV while copying 64 MiB to cuda:0``."""
        how = f"ended with exit code {self.code} and no result"
        if self.status == "garbage":
            how = "left a result that cannot be read"
        elif self.status == "timeout":
            how = f"had not ended after {self.seconds:.0f} s"
        elif self.error:
            how = f"ended with {self.error}"
        elif self.code is not None and self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        if self.step:
            how += f" while {self.step}"
        if self.state:
            how += f", in state {self.state}"
        if self.status == "timeout" and self.code is None:
            how += "; it could not be killed"
        return how


def run_together(tasks: Sequence[Task], *, deadline_s: float, grace_s: float = 5.0) -> list[Outcome]:
    """Run children, which may wait for each other as ranks do: once one has failed, the others have ``grace_s`` left.
    ``deadline_s`` includes starting Python and the imports."""
    children: list[_Child] = []
    with contextlib.ExitStack() as stack:
        try:
            files = tempfile.TemporaryDirectory(prefix="hf-rocm-tune-child-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(files))
            for task in tasks:
                children.append(_Child(task, folder / str(len(children))))
                stack.callback(children[-1].stop)  # Ctrl-C ends the waiting, too
        except OSError as error:
            why = f"{type(error).__name__}: it could not be started: {error.strerror or error}"
            return [Outcome(status="died", error=why) for _ in tasks]
        ends_at = time.monotonic() + deadline_s
        graced = False
        while any(child.runs() for child in children) and time.monotonic() < ends_at:
            if not graced and any(child.has_failed() for child in children):
                graced = True
                ends_at = min(ends_at, time.monotonic() + grace_s)
            time.sleep(_POLL_SECONDS)
        return [child.outcome() for child in children]


class _Child:
    """A running child with the directory of its result; it starts at once, or raises OSError."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._began = self._ended = time.monotonic()
        request = folder / "request.json"
        request.write_text(json.dumps(dict(task.request)), encoding="utf-8")
        with request.open("rb") as stdin, (folder / _OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                # -P: no folder of the user's (datasets/, random.py) shadows a library.
                [sys.executable, "-P", "-m", task.module, *task.arguments],
                env=_environ(task, folder),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def runs(self) -> bool:
        """Whether it is running. When it has ended, the rest of its group is killed."""
        if self._process.returncode is None:
            # Before it is reaped: until then its pid is not reused.
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
            self._kill(None)
        return False

    def stop(self) -> str:
        """Kill it if it is running; returns the state that it was in, or an empty text."""
        state = state_of(self._process.pid) if self.runs() else ""
        if state:
            self._kill(_KILL_SECONDS)
        return state

    def _kill(self, seconds: float | None) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._ended = time.monotonic()

    def outcome(self) -> Outcome:
        """How it ended; one that is still running is killed."""
        state = self.stop()
        status, result, error = ("timeout", None, "") if state else self.result()
        with (self._folder / _OUTPUT).open("rb") as output:
            output.seek(-min(4 * _TAIL_CHARACTERS, output.seek(0, os.SEEK_END)), os.SEEK_END)
            text = output.read().decode("utf-8", errors="replace")
        step = ""
        step_file = self._folder / _STEP
        if step_file.exists():
            step = step_file.read_text(encoding="utf-8", errors="replace")
        printable = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
        return Outcome(
            status=status,
            result=result,
            error=error,
            code=self._process.returncode,
            seconds=self._ended - self._began,
            step=step,
            state=state,
            tail=printable.strip()[-_TAIL_CHARACTERS:],
        )

    def has_failed(self) -> bool:
        """Whether it has ended without a result."""
        return not self.runs() and self.result()[0] != "done"

    def result(self) -> tuple[Status, dict[str, Any] | None, str]:
        """Of one that has ended: the status, the result, and the exception that ended it."""
        file = self._folder / RESULT
        if not file.exists():
            return "died", None, ""
        content = None
        with contextlib.suppress(ValueError, RecursionError):
            if file.stat().st_size <= _RESULT_BYTES:
                content = json.loads(file.read_bytes())
        result = content if isinstance(content, dict) else None
        if self._process.returncode != 0:
            error = str(result.get(_FAILED, "")) if result is not None else ""
            return "died", None, " ".join(error.split())
        if result is None:
            return "garbage", None, ""
        return "done", result, ""


def _environ(task: Task, folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS) or name == MARK}
    # No messages about the environment; every discrete card is visible.
    kept |= {"HF_ROCM_TUNE_QUIET": "1", "HF_ROCM_TUNE_SPLIT": "1", DIRECTORY: str(folder), PARENT: str(os.getpid())}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)  # the same import path as here
    return {name: value for name, value in {**kept, **task.environ}.items() if value is not None}


# ---- in the child

_fault: Mapping[str, str] | None = None  # the ending that the request injects, and at which step


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Read the request, measure, and write the result (JSON values); ends the process."""
    global _fault
    _follow_parent()
    faulthandler.enable()  # a crash in native code prints the Python stack
    try:
        request = json.loads(sys.stdin.read() or "{}")
        fault = request.get("fault") or {}
        _fault = fault if fault.get("kind") in ENDINGS else None
        step("reading the request")
        result = measure(request)
        code = 0
    except Exception as error:  # any error of a device is a result for the parent
        result = {_FAILED: f"{type(error).__name__}: {error}"}
        code = 1
        if isinstance(error, TuneError):
            code = error.exit_code
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
    _leave(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written: libraries may crash or hang in their cleanup


def step(what: str) -> None:
    """Note the next step ("copying 64 MiB to cuda:0"), which the parent names in case of a hang."""
    directory = os.environ.get(DIRECTORY)
    if directory:
        Path(directory, _STEP).write_text(what, encoding="utf-8")
    if _fault is not None and _fault.get("where", "") in what:
        _end(_fault["kind"])


def device_of(wanted: Mapping[str, Any]) -> torch.device:
    """Start a device, found by its PCI ``address`` if given, and make it the current one. Imports torch."""
    import torch

    device = torch.device(wanted["device"])
    address = wanted.get("address")
    if device.type == "cpu":
        return device
    torch.cuda.init()
    if address is not None:
        indices = [index for index in range(torch.cuda.device_count()) if pci_address(index) == address]
        if indices:
            device = torch.device("cuda", indices[0])
        elif device.index is None or pci_address(device.index) is not None:
            raise RuntimeError(f"torch sees no device at {address} in this process")
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    return device


def pci_address(index: int) -> str | None:
    """``domain:bus:device.function`` of torch's device as the kernel writes it; None if torch does not report it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    # GPUs are function 0 of their slot; the runtime does not report the function.
    return None if None in (domain, bus, slot) else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _leave(text: str) -> None:
    """Write the result for the parent, or print it without one."""
    directory = os.environ.get(DIRECTORY)
    if directory:
        Path(directory, RESULT).write_text(text, encoding="utf-8")
    else:
        print(text)


def _follow_parent() -> None:
    """End with the parent, and write no core dump: that of a GPU process has gigabytes."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)  # the parent ended before the prctl call


def _end(kind: str) -> None:
    if kind == "hang":
        signal.pause()
    if kind in ("stop", "kill", "crash"):
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "crash": signal.SIGSEGV}[kind])
    if kind == "garbage":
        sys.stdout.write("\x00\x1b[2J{]}\n" * 1000)
        _leave("\x00{]")
    sys.stdout.flush()
    os._exit(0)
