"""What a rank that can answer says of itself: the Python stacks of its threads, and the collectives it waits in.

The collectives come from torch's flight recorders, which keep the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` (or
``TORCH_NCCL_TRACE_BUFFER_SIZE``) says otherwise: one for RCCL/NCCL, in builds that have it, and one for gloo
(torch 2.13, ``FlightRecorder.hpp``, ``ProcessGroupNCCL.hpp``). They are private names; what is missing is left out.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from types import FrameType
from typing import Any

_RECORDERS = (("nccl", "_dump_nccl_trace_json"), ("gloo", "_dump_fr_trace_json"))
_LAST = 10
"""Collectives of the past that are told."""
_KEPT = (
    "collective_seq_id", "profiling_name", "process_group", "input_sizes", "input_dtypes", "state", "time_created_ns",
)  # fmt: skip


def stacks() -> list[dict[str, Any]]:
    """The Python stack of every thread that has one, the main thread first.

    Returns:
        For each thread ``thread`` (its name), ``main``, and ``frames``, outermost first: ``file``, ``line``,
        ``function``, ``code``.
    """
    main, here = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        {"thread": names.get(number, f"thread {number}"), "main": number == main, "frames": _frames(frame)}
        for number, frame in sys._current_frames().items()
        if number != here
    ]
    return sorted(found, key=lambda each: (not each["main"], str(each["thread"])))


def collectives() -> dict[str, Any]:
    """Collectives that this process has begun, from the flight recorders. It may wait for the device.

    Returns:
        ``pending``: those that have not ended, oldest first; ``last``: those before; each with ``recorder``.
        ``missing``: why a recorder said nothing.
    """
    found: dict[str, Any] = {"pending": [], "last": [], "missing": []}
    c10d = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    for recorder, name in _RECORDERS:
        dump = getattr(c10d, name, None)
        if dump is None:
            found["missing"].append(f"{recorder}: this build of torch has no {name}")
            continue
        try:
            entries = json.loads(dump()).get("entries", [])  # absent where nothing was recorded
        except Exception as error:  # whatever a private function raises, the stacks are worth more than it
            found["missing"].append(f"{recorder}: {type(error).__name__}: {error}")
            continue
        for entry in entries:
            told = {"recorder": recorder, **{key: entry[key] for key in _KEPT if key in entry}}
            ended = entry.get("retired") or entry.get("state") == "completed"
            found["last" if ended else "pending"].append(told)
    found["last"] = found["last"][-_LAST:]
    return found


def _frames(frame: FrameType) -> list[dict[str, Any]]:
    return [
        {"file": each.filename, "line": each.lineno, "function": each.name, "code": each.line or ""}
        for each in traceback.extract_stack(frame)
    ]
