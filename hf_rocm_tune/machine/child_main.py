"""The child's half of a measurement in a process of its own (`child` is the parent's).

A module that is run as a child ends in ``sys.exit(answer(measure))``. Where nobody asked through `child`, the request
is read from stdin all the same and the result printed, so that a measurement can be tried by hand::

    echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.measured round_trip
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import TuneError, UsageError

DIRECTORY, PARENT = "HF_ROCM_TUNE_CHILD_DIRECTORY", "HF_ROCM_TUNE_CHILD_PARENT"
"""Variables: where the result goes, and whose child this is."""
RESULT, STEP = "result.json", "step"
FAILED = "failed"
"""Key of a result that says only what exception there was."""
WHERE_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""Asks a child to print the Python stacks of its threads; Windows has no such signal."""
ENDINGS = ("hang", "stop", "kill", "crash", "garbage", "silent")
"""Faults of the process itself, which every child can be given: it waits for ever, is stopped (SIGSTOP), is killed
(SIGKILL), crashes (SIGSEGV), leaves nonsense as its result and on stdout, or leaves no result."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_ending: dict[str, str] | None = None


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Read the request, measure, and leave the result.

    Args:
        measure: gets the request; its result must be plain JSON values.

    Returns:
        The exit code, and only where nobody asked through `child`; otherwise it ends the process with it. 0; that of a
        ``TuneError``, with its message on stderr; 1 for any other exception, with its traceback on stderr.
    """
    _follow_parent()
    faulthandler.enable()  # a crash in native code says where it was called from
    if WHERE_SIGNAL is not None:
        faulthandler.register(WHERE_SIGNAL, all_threads=True)
    try:
        request = _request()
        _arm(request.get("fault"))
        step("reading the request")
        result, code = measure(request), 0
    except Exception as error:  # whatever a device makes of it is a result for the parent, which says what it was
        result, code = {FAILED: f"{type(error).__name__}: {error}"}, 1
        if isinstance(error, TuneError):
            code = error.exit_code
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
    if _leave(json.dumps(result)):
        # What is measured is measured: libraries that crash or wait while they are taken down cannot undo it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def step(what: str) -> None:
    """Note what is done next, for the parent to tell when this is the last that it hears.

    Args:
        what: goes on after "while": ``copying 64 MiB to cuda:0``.
    """
    directory = os.environ.get(DIRECTORY)
    if directory:
        Path(directory, STEP).write_text(what, encoding="utf-8")
    if _ending is not None and _ending.get("where", "") in what:
        _end(_ending["kind"])


def _request() -> dict[str, Any]:
    text = sys.stdin.read()
    try:
        request = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"the request on stdin is no JSON ({error}): give an object") from error
    if not isinstance(request, dict):
        raise UsageError(f"the request on stdin is {text[:40]!r}: give a JSON object")
    return request


def _leave(text: str) -> bool:
    """Whether somebody waits for it, else it is printed."""
    directory = os.environ.get(DIRECTORY)
    if directory:
        Path(directory, RESULT).write_text(text, encoding="utf-8")
    else:
        print(text)
    return bool(directory)


def _follow_parent() -> None:
    """End with the parent, however it ends, and leave no memory image behind: a GPU process has gigabytes of it."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)  # it ended before the kernel was asked


def _arm(fault: dict[str, str] | None) -> None:
    global _ending
    _ending = fault if fault is not None and fault.get("kind") in ENDINGS else None


def _end(kind: str) -> None:
    if kind == "hang":
        while True:
            time.sleep(3600)
    if kind in ("stop", "kill", "crash"):
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "crash": signal.SIGSEGV}[kind])
    if kind == "garbage":
        sys.stdout.write("\x00\x1b[2J{]}\n" * 1000)
        _leave("\x00{]")
    sys.stdout.flush()
    os._exit(0)
