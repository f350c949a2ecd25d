"""``bench transfer``: copies by size, each way in turn, until the bytes may be used at the other end.

What arrives is digested once in every repeat, outside of the time, and compared with the source: a fast copy of wrong
bytes is counted as wrong.

Not covered: overlap with computing, which `bench step` shows; a verified transfer back to the host, which no run makes.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import Figures, Spread, in_turns, ratios, show_bytes, table
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Digest, Mover, TransferSettings, digest, gb_per_s

SMALLEST = 4 << 10
#: Small copies are repeated within one timing until about this many bytes have crossed: a clock is not that fine.
_PER_TIMING, _MOST_PER_TIMING = 4 << 20, 50
#: Buffers of one size that exist at once: source, page-locked source, raw target, fresh target.
_BUFFERS = 4
#: Names of raw copies, best first: every direction is compared with the first of these that it has.
_REFERENCES = ("raw pinned", "raw pageable", "raw peer")
HOST = torch.device("cpu")

Send = Callable[[], Tensor]
"""Copies a source once and returns what has arrived; its bytes may be used when the device has been waited for."""


def run(wanted: Namespace) -> None:
    """Measures, prints, writes. A largest copy that does not fit in memory is a `UsageError`."""
    device = report.choose_device(wanted.device)
    largest = wanted.max_size or (1 << 30 if device.type == "cuda" else 64 << 20)
    _check_room(largest, device)
    found, left_out = directions(device)
    machine = report.describe(device)
    rows: list[Figures] = []
    for direction in found:
        left_out += missing_ways(direction)
        for nbytes in report.sizes(SMALLEST, largest):
            rows += measure(direction, nbytes, wanted.repeats)
    settings = {"device": str(device), "max_size": largest}
    report.publish(wanted, machine, settings, rows, _table(rows), _notes(device, rows), left_out)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """From where to where."""

    name: str  # ``host to device``, ``device to host`` or ``device to device``
    # source, target: the two devices; on a machine without an accelerator both are the CPU
    source: torch.device
    target: torch.device

    @property
    def on_host(self) -> bool:
        return self.source.type == self.target.type == "cpu"


def directions(device: torch.device) -> tuple[list[Direction], list[dict[str, str]]]:
    """The directions that this machine has for `device`, and those that it has not, with the reason."""
    if device.type == "cpu":
        reason = "without an accelerator both ends are host memory: one direction says it all"
        missing = [{"what": name, "reason": reason} for name in ("device to host", "device to device")]
        return [Direction(name="host to device", source=HOST, target=HOST)], missing
    found = [
        Direction(name="host to device", source=HOST, target=device),
        Direction(name="device to host", source=device, target=HOST),
    ]
    count = torch.cuda.device_count()
    if count < 2:
        return found, [{"what": "device to device", "reason": "torch sees one accelerator"}]
    other = torch.device("cuda", (int(device.index or 0) + 1) % count)
    return [*found, Direction(name="device to device", source=device, target=other)], []


def missing_ways(direction: Direction) -> list[dict[str, str]]:
    """The ways that a direction has not, with the reason."""
    if direction.on_host:
        missing = {
            "raw pinned": "page-locked memory needs an accelerator",
            "send_to_device": "Accelerate copies nothing when the tensor is on its device already",
        }
    elif direction.source.type == "cpu":
        missing = {}
    else:
        missing = {"ours": "the mover brings tensors to the device only"}
    return [{"what": f"{direction.name}, {name}", "reason": reason} for name, reason in missing.items()]


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
    for device in (direction.source, direction.target):
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
    try:
        ways = prepare(direction, source, movers)
        taken = _interleave(direction, ways, nbytes, repeats, expected)
    finally:
        for mover in movers.values():
            mover.close()
    reference = next(name for name in _REFERENCES if name in taken)
    base = [seconds for seconds, _ in taken[reference]]
    return [
        {
            "direction": direction.name,
            "bytes": nbytes,
            "way": name,
            "seconds": Spread.of([seconds for seconds, _ in timings]),
            "gb_per_s": Spread.of([gb_per_s(nbytes, seconds) for seconds, _ in timings]),
            "speed_to_reference": ratios(base, [seconds for seconds, _ in timings]),
            "reference": reference,
            "wrong": sum(not right for _, right in timings),
        }
        for name, timings in taken.items()
    ]


def _interleave(
    direction: Direction, ways: Mapping[str, Send], nbytes: int, repeats: int, expected: Digest
) -> dict[str, list[tuple[float, bool]]]:
    """Seconds of one copy, and whether it arrived right, by way; the first repeat of all is thrown away."""
    times = max(1, min(_MOST_PER_TIMING, _PER_TIMING // nbytes))
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in ways}
    for repeat, name in in_turns(ways, repeats):
        _wait_for(direction)
        started = time.perf_counter()
        for _ in range(times):
            arrived = ways[name]()
            _wait_for(direction)
        seconds = (time.perf_counter() - started) / times
        if repeat:
            taken[name].append((seconds, digest(arrived) == expected))
    return taken


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
        "seconds of one copy, from the call until its bytes may be used; raw copies write to memory that is allocated "
        "once, the other ways allocate what they return; speed is relative to the reference of the direction, pair by "
        "pair"
    ]
    if device.type == "cpu":
        notes.append("no accelerator: the device is other host memory, and a worker thread plays the copy engine")
    else:
        notes += [_goal(row) for row in rows if row["way"] == "ours, verified" and row["bytes"] >= 64 << 20]
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        notes.append(f"{wrong} copies ARRIVED WRONG, see the column of that name: run `hf-rocm-tune drill`")
    return notes


def _goal(row: Figures) -> str:
    seen = row["speed_to_reference"].median
    verdict = "reached" if seen >= 0.95 else "not reached"
    return f"goal 95 % of {row['reference']} at {show_bytes(row['bytes'])}: {100 * seen:.1f} % seen, {verdict}"


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
