"""``bench transfer``: copies by size, each way in turn, until the bytes may be used at the other end.

What arrives is digested once in every repeat, outside of the time, and compared with the source: a fast copy of wrong
bytes is counted as wrong.

Not covered: overlap with computing. A training run hides the transfer of the next batch behind the present one, which
`bench step` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_rocm_tune.bench import machine, plots
from hf_rocm_tune.bench.figures import Spread, ratios, show_bytes, table
from hf_rocm_tune.bench.result import Result, publish
from hf_rocm_tune.bench.ways import (
    REFERENCES,
    Direction,
    Movers,
    Way,
    directions,
    missing_ways,
    prepare,
    wait_for,
)
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import Digest, Mover, TransferSettings, digest, gb_per_s

SMALLEST = 4 << 10
_PER_TIMING = 4 << 20
"""Small copies are repeated within one timing until about this many bytes have crossed: a clock is not that fine."""
_MOST_PER_TIMING = 50
_BUFFERS = 4
"""Buffers of one size that exist at once: source, page-locked source, raw target, fresh target."""


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """Settings of ``bench transfer``.

    Args:
        device: cpu, cuda, cuda:1; None for the first accelerator, else the CPU.
        max_size: largest copy in bytes; None for 1 GiB on an accelerator and 64 MiB on the CPU.
        repeats: timings of each way and size.
    """

    device: str | None = None
    max_size: int | None = None
    repeats: int = 7

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}; give a whole number from 1 on")
        if self.max_size is not None and self.max_size < SMALLEST:
            raise UsageError(f"--max_size is {self.max_size} bytes; give at least {show_bytes(SMALLEST)}")


def run(bench: TransferBench, command: str, *, json_file: Path | None, plot: Path | None) -> None:
    """Measures, prints, writes.

    Raises:
        UsageError: the device is not there, or the largest copy does not fit in memory.
    """
    device = machine.choose_device(bench.device)
    largest = bench.max_size or (1 << 30 if device.type == "cuda" else 64 << 20)
    _check_room(largest, device)
    found, left_out = directions(device)
    about = machine.describe(device)
    rows: list[dict[str, Any]] = []
    for direction in found:
        left_out += missing_ways(direction)
        for nbytes in sizes(largest):
            rows += measure(direction, nbytes, bench.repeats)
    result = Result(
        bench="transfer",
        command=command,
        machine=about,
        settings={**asdict(bench), "device": str(device), "max_size": largest},
        rows=rows,
        notes=_notes(device, rows),
        left_out=left_out,
    )
    if plot is not None:
        plots.transfers(result, plot)
    publish(result, _table(rows), json_file)


def sizes(largest: int) -> list[int]:
    """4 KiB, 16 KiB, 64 KiB ... up to `largest`, which is the last whatever it is."""
    found = []
    nbytes = SMALLEST
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= 4
    return [*found, largest]


def measure(direction: Direction, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """All ways of a direction with copies of one size, interleaved: one row for each way."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=direction.source)
    expected = digest(source)
    movers: Movers = {}
    if direction.source.type == "cpu":
        for name, verify in (("ours, unverified", "off"), ("ours, verified", "full")):
            movers[name] = Mover(direction.target, settings=TransferSettings(verify=verify))
    try:
        ways = prepare(direction, source, movers)
        taken = _interleave(direction, ways, nbytes, repeats, expected)
    finally:
        for mover in movers.values():
            mover.close()
    reference = next(name for name in REFERENCES if name in taken)
    base = [seconds for seconds, _ in taken[reference]]
    return [
        {
            "direction": direction.name,
            "bytes": nbytes,
            "way": name,
            "seconds": Spread.of([seconds for seconds, _ in timings]).to_dict(),
            "gb_per_s": Spread.of([gb_per_s(nbytes, seconds) for seconds, _ in timings]).to_dict(),
            "speed_to_reference": ratios(base, [seconds for seconds, _ in timings]).to_dict(),
            "reference": reference,
            "wrong": sum(not right for _, right in timings),
        }
        for name, timings in taken.items()
    ]


def _interleave(
    direction: Direction, ways: list[Way], nbytes: int, repeats: int, expected: Digest
) -> dict[str, list[tuple[float, bool]]]:
    """Seconds of one copy, and whether it arrived right, by way; the first repeat of all is thrown away."""
    times = max(1, min(_MOST_PER_TIMING, _PER_TIMING // nbytes))
    taken: dict[str, list[tuple[float, bool]]] = {way.name: [] for way in ways}
    for repeat in range(repeats + 1):
        turn = repeat % len(ways)
        for way in ways[turn:] + ways[:turn]:  # nobody is always the one after another
            seconds, arrived = _time(direction, way.send, times)
            if repeat:
                taken[way.name].append((seconds, digest(arrived) == expected))
    return taken


def _time(direction: Direction, send: Callable[[], Tensor], times: int) -> tuple[float, Tensor]:
    wait_for(direction)
    started = time.perf_counter()
    for _ in range(times):
        arrived = send()
        wait_for(direction)
    return (time.perf_counter() - started) / times, arrived


def _check_room(largest: int, device: torch.device) -> None:
    need, there = _BUFFERS * largest, psutil.virtual_memory().available
    if need > there:
        raise UsageError(
            f"--max_size {show_bytes(largest)} needs {show_bytes(need)} of host memory, {show_bytes(there)} are free; "
            "give a smaller one"
        )
    if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0]:
        raise UsageError(f"--max_size {show_bytes(largest)} needs {show_bytes(need)} on {device}; give a smaller one")


def _notes(device: torch.device, rows: list[dict[str, Any]]) -> list[str]:
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


def _goal(row: dict[str, Any]) -> str:
    seen = row["speed_to_reference"]["median"]
    verdict = "reached" if seen >= 0.95 else "not reached"
    return f"goal 95 % of {row['reference']} at {show_bytes(row['bytes'])}: {100 * seen:.1f} % seen, {verdict}"


def _table(rows: list[dict[str, Any]]) -> str:
    header = ["direction", "size", "way", "GB/s (min .. max)", "microseconds", "speed to reference", "wrong"]
    lines = []
    for row in rows:
        speed, ratio = Spread(**row["gb_per_s"]), Spread(**row["speed_to_reference"])
        microseconds = f"{row['seconds']['median'] * 1e6:.1f}"
        ratio_text = ratio.show(2) if row["way"] != row["reference"] else "reference"
        figures = [speed.show(2), microseconds, ratio_text, str(row["wrong"])]
        lines.append([row["direction"], show_bytes(row["bytes"]), row["way"], *figures])
    return table(header, lines)
