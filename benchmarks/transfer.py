"""Copies to the device by size, each way in turn, until the bytes may be used: raw, torch, Accelerate and ours.

    python benchmarks/transfer.py [--max_mib 1024] [--repeats 7] [--device cpu] [--json FILE]

What arrived is digested after every copy, outside the time, and compared with the source. Raw copies write to memory
that is allocated once, the other ways allocate what they return. Not covered: overlap with computation.
"""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from typing import Any

import common
import torch
from accelerate.utils import send_to_device

from hf_rocm_tune.transfer import Mover, TransferSettings, digest, gb_per_s

SMALLEST = 4 << 10
PER_TIMING, MOST_PER_TIMING = 4 << 20, 50  # small copies are repeated within one timing: the clock is too coarse


def run(wanted: Namespace) -> common.Figures:
    device = wanted.device
    sizes, size = [], SMALLEST
    while size <= (wanted.max_mib or (1024 if device.type == "cuda" else 64)) << 20:
        sizes.append(size)
        size *= 4
    rows = [row for size in sizes for row in _measure(device, size, wanted.repeats)]
    titles = ("way", "KiB", "GB/s (min .. max)", "microseconds", "speed to raw", "wrong")
    common.print_table(
        titles,
        (
            (row["way"], row["bytes"] >> 10, common.show(row["gb_per_s"]), f"{row['seconds']['median'] * 1e6:.1f}",
             common.show(row["speed_to_raw"]), row["wrong"])
            for row in rows
        ),
    )  # fmt: skip
    if wrong := sum(row["wrong"] for row in rows):
        print(f"{wrong} copies ARRIVED WRONG: run `hf-rocm-tune doctor --drill`")
    return {"benchmark": "transfer", "rows": rows}


def _measure(device: torch.device, nbytes: int, repeats: int) -> list[common.Figures]:
    """All ways with copies of one size, interleaved; the first is what the others are compared with."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    expected, there = digest(source), torch.empty(nbytes, dtype=torch.uint8, device=device)
    movers = {
        name: Mover(device, settings=TransferSettings(verify=verify))
        for name, verify in (("ours, unverified", "off"), ("ours, verified", "full"))
    }
    ways: dict[str, Any] = {}
    if device.type == "cuda":
        ways["raw pinned"] = partial(there.copy_, source.pin_memory(), non_blocking=True)
        ways["send_to_device"] = partial(send_to_device, source, device)
    ways |= {"raw pageable": partial(there.copy_, source), "tensor.to": partial(source.to, device, copy=True)}
    ways |= {name: partial(mover.move, source, name="bytes") for name, mover in movers.items()}
    times = max(1, min(MOST_PER_TIMING, PER_TIMING // nbytes))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    wrong = dict.fromkeys(ways, 0)
    try:
        for repeat, name in common.in_turns(ways, repeats):
            _wait(device)
            begun = time.perf_counter()
            for _ in range(times):
                arrived = ways[name]()
                _wait(device)
            if repeat:
                seconds[name].append((time.perf_counter() - begun) / times)
                wrong[name] += digest(arrived) != expected
    finally:
        for mover in movers.values():
            mover.close()
    raw = seconds[next(iter(ways))]
    return [
        {
            "bytes": nbytes,
            "way": name,
            "seconds": common.spread(seconds[name]),
            "gb_per_s": common.spread([gb_per_s(nbytes, each) for each in seconds[name]]),
            "speed_to_raw": common.ratios(raw, seconds[name]),
            "wrong": wrong[name],
        }
        for name in ways
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    common.main(
        run,
        __doc__,
        {
            "max_mib": {"type": int, "help": "largest copy in MiB (default: 1024; 64 on the CPU)"},
            "repeats": {"type": int, "default": 7, "help": "timings of each way and size (default: 7)"},
        },
    )
