"""``bench transfer``: copies by size, each way in turn, until the bytes may be used at the other end.

What arrived is digested once in every repeat, outside the time, and compared with the source: a fast copy of wrong
bytes is counted as wrong.

Not covered: overlap with computation, which `bench step` shows; verified transfers to the host, which saves make.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import psutil
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import Figures, Spread, in_turns, ratios, show_bytes, table
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Mover, TransferSettings, digest, gb_per_s

SMALLEST = 4 << 10
#: Small copies are repeated within one timing up to about this many bytes: the clock is not fine enough for one.
_PER_TIMING, _MOST_PER_TIMING = 4 << 20, 50
#: Buffers of one size that exist at once: source, page-locked source, raw target, fresh target.
_BUFFERS = 4
#: Names of raw copies, best first: the other ways of a direction are compared with the first of these that it has.
_REFERENCES = ("raw pinned", "raw pageable", "raw peer")
HOST = torch.device("cpu")

Send = Callable[[], Tensor]
"""Copies a source once and returns what has arrived; its bytes may be used when the device has been waited for."""


def run(wanted: Namespace) -> None:
    """Measures, prints, writes. A largest copy that does not fit in memory is a `UsageError`."""
    device = report.choose_device(wanted.device)
    largest = wanted.max_size or (1 << 30 if device.type == "cuda" else 64 << 20)
    _check_room(largest, device)
    found, missing = directions(device)
    machine = report.describe(device)
    rows: list[Figures] = []
    for direction in found:
        missing |= missing_ways(direction)
        for nbytes in report.sizes(SMALLEST, largest):
            rows += measure(direction, nbytes, wanted.repeats)
    settings = {"device": str(device), "max_size": largest}
    left_out = [{"what": what, "reason": reason} for what, reason in missing.items()]
    report.publish(wanted, machine, settings, rows, _table(rows), _notes(device, rows), left_out)


class Direction(NamedTuple):
    """From where to where; on a machine without an accelerator both are the CPU."""

    name: str  # ``host to device``, ``device to host`` or ``device to device``
    source: torch.device
    target: torch.device

    @property
    def on_host(self) -> bool:
        return self.source.type == self.target.type == "cpu"


def directions(device: torch.device) -> tuple[list[Direction], dict[str, str]]:
    """The directions that this machine has for `device`, and the reason for each that it does not have."""
    there, back, across = "host to device", "device to host", "device to device"
    if device.type == "cpu":
        reason = "without an accelerator both ends are host memory, so one direction is enough"
        return [Direction(there, HOST, HOST)], {back: reason, across: reason}
    found = [Direction(there, HOST, device), Direction(back, device, HOST)]
    count = torch.cuda.device_count()
    if count < 2:
        return found, {across: "torch sees one accelerator"}
    other = torch.device("cuda", (int(device.index or 0) + 1) % count)
    return [*found, Direction(across, device, other)], {}


def missing_ways(direction: Direction) -> dict[str, str]:
    """The reason for each way that a direction does not have."""
    missing = {}
    if direction.on_host:
        missing = {
            "raw pinned": "page-locked memory needs an accelerator",
            "send_to_device": "Accelerate copies nothing if the tensor is on its device already",
        }
    elif direction.source.type != "cpu":
        missing = {"ours": "this benchmark measures the mover towards the device only"}
    return {f"{direction.name}, {name}": reason for name, reason in missing.items()}


def prepare(direction: Direction, source: Tensor, movers: Mapping[str, Mover]) -> dict[str, Send]:
    """The ways of a direction for one source (uint8[n] in pageable memory of the source device), by name.

    Buffers that a user would keep are allocated here.
    """
    target = direction.target
    there = torch.empty_like(source, device=target)

    def copy(into: Tensor, given: Tensor) -> Send:
        return lambda: into.copy_(given, non_blocking=True)  # device: the raw copy that ours is compared with

    ways: dict[str, Send] = {}
    if direction.source.type == target.type == "cuda":
        ways["raw peer"] = copy(there, source)
    else:
        if not direction.on_host:
            locked = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
            locked[:] = source
            ways["raw pinned"] = copy(there, locked) if direction.source.type == "cpu" else copy(locked, source)
        ways["raw pageable"] = copy(there, source)
    # On the host `.to` returns the tensor itself unless it is told to copy.
    ways["tensor.to"] = lambda: source.to(target, copy=True)  # device: it is what is measured
    if not direction.on_host:
        ways["send_to_device"] = lambda: send_to_device(source, target)
    if direction.source.type == "cpu":
        ways |= {name: partial(mover.move, source, name="bytes") for name, mover in movers.items()}
    return ways


def _wait_for(direction: Direction) -> None:
    for device in direction[1:]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def measure(direction: Direction, nbytes: int, repeats: int) -> list[Figures]:
    """All ways of a direction with copies of one size, interleaved: one row for each way."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=direction.source)
    expected = digest(source)
    movers: dict[str, Mover] = {}
    if direction.source.type == "cpu":
        for name, verify in (("ours, unverified", "off"), ("ours, verified", "full")):
            movers[name] = Mover(direction.target, settings=TransferSettings(verify=verify))
    times = max(1, min(_MOST_PER_TIMING, _PER_TIMING // nbytes))
    try:
        ways = prepare(direction, source, movers)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        wrong = dict.fromkeys(ways, 0)
        for repeat, name in in_turns(ways, repeats):
            _wait_for(direction)
            started = time.perf_counter()
            for _ in range(times):
                arrived = ways[name]()
                _wait_for(direction)
            elapsed = (time.perf_counter() - started) / times
            if repeat:
                seconds[name].append(elapsed)
                wrong[name] += digest(arrived) != expected
    finally:
        for mover in movers.values():
            mover.close()
    reference = next(name for name in _REFERENCES if name in ways)
    return [
        {
            "direction": direction.name,
            "bytes": nbytes,
            "way": name,
            "seconds": Spread.of(seconds[name]),
            "gb_per_s": Spread.of([gb_per_s(nbytes, each) for each in seconds[name]]),
            "speed_to_reference": ratios(seconds[reference], seconds[name]),
            "reference": reference,
            "wrong": wrong[name],
        }
        for name in ways
    ]


def _check_room(largest: int, device: torch.device) -> None:
    need, there = _BUFFERS * largest, psutil.virtual_memory().available
    if need > there:
        raise UsageError(
            f"--max_size {show_bytes(largest)} needs {show_bytes(need)} of host memory, {show_bytes(there)} are free; "
            "give a smaller one"
        )
    if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0]:
        raise UsageError(f"--max_size {show_bytes(largest)} needs {show_bytes(need)} on {device}; give a smaller one")


def _notes(device: torch.device, rows: list[Figures]) -> list[str]:
    notes = [
        "time of one copy, from the call until its bytes may be used; raw copies write to memory that is allocated "
        "once, the other ways allocate what they return; speed is relative to the reference of the direction, in pairs "
        "of the same turn"
    ]
    if device.type == "cpu":
        notes.append(
            "no accelerator: the device is other host memory, and a worker thread stands in for its copy engine"
        )
    else:
        notes += [_goal(row) for row in rows if row["way"] == "ours, verified" and row["bytes"] >= 64 << 20]
    if wrong := sum(row["wrong"] for row in rows):
        notes.append(f"{wrong} copies ARRIVED WRONG, see the column of that name: run `hf-rocm-tune doctor --drill`")
    return notes


def _goal(row: Figures) -> str:
    seen = row["speed_to_reference"].median
    verdict = "reached" if seen >= 0.95 else "not reached"
    return f"goal 95 % of {row['reference']} at {show_bytes(row['bytes'])}: {100 * seen:.1f} % measured, {verdict}"


def _table(rows: list[Figures]) -> str:
    columns = {
        "direction": lambda row: row["direction"],
        "size": lambda row: show_bytes(row["bytes"]),
        "way": lambda row: row["way"],
        "GB/s (min .. max)": lambda row: row["gb_per_s"].show(2),
        "microseconds": lambda row: f"{row['seconds'].median * 1e6:.1f}",
        "speed to reference": lambda row: (
            "reference" if row["way"] == row["reference"] else row["speed_to_reference"].show(2)
        ),
        "wrong": lambda row: row["wrong"],
    }
    return table(columns, rows)
