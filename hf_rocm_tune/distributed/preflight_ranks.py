"""All-reduce by value: what one rank measures, in a child of its own, for the preflight and for the doctor.

RCCL can spin for ever (rccl#1129, ROCm/vllm#390), and a collective can give wrong sums. Each rank contributes small
whole numbers that depend on position and rank, so the sums are exact in every dtype and are compared as integers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import gb_per_s
from hf_rocm_tune.transfer.damage import Damage, examine
from hf_rocm_tune.transfer.pattern import PIECE_WORDS, pattern
from hf_rocm_tune.transfer.raw_bytes import as_bytes
from hf_rocm_tune.transfer.raw_copies import wait_for

FAULTS = ("wrong", "zeros", "own", "absent")
"""What a rank can be given: one element of a sum is wrong, a sum is zeros, a sum is what the rank itself had, or it
never joins the process group."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_PROBLEMS = 6
_EXACT = 256
"""Whole numbers up to this are exact in bfloat16, which has 8 bits for them."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other ranks, sum, compare.

    Args:
        request: ``rank``, ``world``, ``backend`` (nccl or gloo), ``store``: a file that all ranks see, ``device`` with
            ``address``; ``timeout_s`` of the process group; ``largest``: bytes of the largest sum; ``repeats``;
            ``fault``: one of `FAULTS`, ``where``: only sums whose words contain this.

    Returns:
        ``cases`` and ``wrong``: how many sums, and how many of them were wrong; ``problems``: the first of these;
        ``repeated_bytes`` and ``gb_per_s``: bytes of the repeated sum, and of these over its seconds the median.
    """
    rank, world, backend = request["rank"], request["world"], request["backend"]
    fault = request.get("fault") or {}
    device = device_of(request)
    step(f"joining a process group of {world} over {backend}")
    if fault.get("kind") == "absent":
        time.sleep(request["timeout_s"])
    store = dist.FileStore(request["store"], world)  # type: ignore[attr-defined]  # not in torch's annotations
    limit = timedelta(seconds=request["timeout_s"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    problems: list[dict[str, Any]] = []
    rates: list[float] = []
    repeated_bytes = 0
    cases = wrong = 0
    for number, (case, count, dtype) in enumerate(_cases(request["largest"], request["repeats"])):
        words = f"{case} over {backend}"
        step(f"summing {words}")
        mine = _numbers(number, rank, count, dtype, world, device)
        summed = mine.clone()
        wait_for(summed)
        began = time.perf_counter()
        dist.all_reduce(summed)
        wait_for(summed)
        if words.startswith("repeat"):
            repeated_bytes = summed.nbytes
            rates.append(gb_per_s(summed.nbytes, time.perf_counter() - began))
        if fault.get("kind") in FAULTS and fault.get("where", "") in words:
            _harm(summed, mine, fault["kind"])
        damage, own = _look(summed, mine, number, world)
        cases, wrong = cases + 1, wrong + (damage is not None)
        if damage is not None and len(problems) < _KEPT_PROBLEMS:
            said = f"{words}: this rank's own numbers, nothing was added" if own else words
            problems.append({"case": said, "damage": {**asdict(damage), "kind": damage.kind}})
    step(f"leaving the process group over {backend}")
    dist.barrier()
    dist.destroy_process_group()
    return {
        "cases": cases,
        "wrong": wrong,
        "problems": problems,
        "repeated_bytes": repeated_bytes,
        "gb_per_s": sorted(rates)[len(rates) // 2] if rates else None,
    }


def _cases(largest: int, repeats: int) -> Iterator[tuple[str, int, torch.dtype]]:
    """Words, elements and dtype of each sum."""
    sizes = [size for size in (4, 4 << 10, (1 << 20) + 4, 25 << 20, 64 << 20) if size <= largest]
    yield f"cold, {sizes[-1]:,} bytes of float32", sizes[-1] // 4, torch.float32
    for size in sizes:
        for dtype in _DTYPES:
            count = max(size // dtype.itemsize, 1)
            yield f"{size:,} bytes of {str(dtype).removeprefix('torch.')}", count, dtype
    for number in range(repeats):
        size = min(25 << 20, sizes[-1])  # a bucket of DistributedDataParallel
        yield f"repeat {number + 1}, {size:,} bytes of bfloat16", size // 2, torch.bfloat16


def _numbers(number: int, rank: int, count: int, dtype: torch.dtype, world: int, device: torch.device) -> Tensor:
    """What a rank contributes: [count] whole numbers from 1 on, of which `world` add up to at most `_EXACT`."""
    values = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, PIECE_WORDS):
        piece = values[start : start + PIECE_WORDS]
        piece[:] = (pattern(97 * number + rank, start, piece.numel(), device) >> 7) % (_EXACT // world) + 1
    return values


def _look(summed: Tensor, mine: Tensor, number: int, world: int) -> tuple[Damage | None, bool]:
    """The damage, and whether what is there is what the rank itself had."""
    right = torch.zeros_like(summed)
    for rank in range(world):
        right += _numbers(number, rank, summed.numel(), summed.dtype, world, summed.device)
    damage = examine(as_bytes(summed.cpu()), as_bytes(right.cpu()))
    return damage, damage is not None and torch.equal(summed, mine)


def _harm(summed: Tensor, mine: Tensor, kind: str) -> None:
    if kind == "wrong":
        summed[summed.numel() // 2] += 1
    elif kind == "zeros":
        summed.zero_()
    elif kind == "own":
        summed[:] = mine
