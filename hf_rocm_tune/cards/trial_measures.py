"""The measurements of a trial's child process: copies between two cards, or sums over all ranks, compared by value.

Peer copies over PCIe can return zeros while every call reports success (exllamav3#333, accelerate#4036, pytorch#84803),
some only until a first copy through the host (pytorch#87363). Copies of one dtype between contiguous tensors use
memcpy, others a kernel; above 1 MiB HIP uses another engine. RCCL can spin for ever (rccl#1129), and a collective can
give wrong sums: each rank contributes small whole numbers, whose sums are exact in every dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer.damage import (
    PIECE_WORDS,
    POISON,
    Copies,
    Damage,
    examine,
    fill_with_pattern,
    pattern,
    wait_for,
)
from hf_rocm_tune.transfer.raw_bytes import as_bytes

SIZES = (4 << 10, 512 << 10, (1 << 20) - 4, (1 << 20) + 4, 64 << 20, 1 << 30)
"""Bytes of copies: a page, both sides of the threshold, and sizes of weights."""
_KERNEL_BYTES = (1 << 20) + 4
_READ_BYTES = 64 << 20
_KEPT = 8


def measure_pair(request: Mapping[str, Any]) -> dict[str, Any]:
    """Copy from one device to another in all ways, and check what arrived.

    ``request``: ``source`` and ``destination`` for ``device_of``, ``largest`` in bytes, ``repeats``.
    ``staged_wrong`` of the result: wrong elements after a copy through the host.
    """
    step("waking both devices")
    destination = device_of(request["destination"])
    source = device_of(request["source"])
    copying = f"copying from {source} to {destination}"
    pair = _Pair(source, destination)
    problems: list[dict[str, Any] | None] = []
    for number, (words, nbytes, shape, non_blocking) in enumerate(_copies(request["largest"], request["repeats"])):
        step(f"{copying}: {words}")
        problems.append(pair.try_case(words, nbytes, shape, number, non_blocking=non_blocking))
    step(f"{copying} and back at the same time")
    problems += pair.both_ways(min(64 << 20, request["largest"]))
    step(f"{copying} through the host")
    sent, target = pair.buffers(_KERNEL_BYTES, 3)
    host = sent.cpu()
    pair.copies.copy(target, host, what=f"{source} to {destination}, through the host")
    wait_for(target)
    wrong = [problem for problem in problems if problem is not None]
    access = None
    if source.type == "cuda":
        access = bool(torch.cuda.can_device_access_peer(source, destination))
    return {
        "peer_access": access,
        "cases": len(problems),
        "wrong": len(wrong),
        "problems": wrong[:_KEPT],
        "staged_wrong": _count(target, 3),
    }


def _copies(largest: int, repeats: int) -> Iterator[tuple[str, int, str, bool]]:
    """Description, bytes, ``contiguous``, ``strided source``, ``strided destination`` or ``cast``, non-blocking."""
    sizes = [size for size in SIZES if size <= largest]
    kernel = min(_KERNEL_BYTES, sizes[-1])
    cases = [("cold", min(64 << 20, sizes[-1]), "contiguous", False)]
    for size in sizes:
        for non_blocking in (False, True):
            cases.append(("warm", size, "contiguous", non_blocking))
    for shape in ("strided source", "strided destination", "cast"):
        for size in (sizes[0], kernel):
            for non_blocking in (False, True):
                cases.append(("warm", size, shape, non_blocking))
    for number in range(repeats):
        cases.append((f"repeat {number + 1}", kernel, "contiguous", number % 2 == 1))
    for label, nbytes, shape, non_blocking in cases:
        words = f"{label}, {nbytes:,} bytes, {shape}"
        if non_blocking:
            words += ", non_blocking"
        yield words, nbytes, shape, non_blocking


class _Pair:
    """Copies between two devices; keeps what was sent before, to recognise stale bytes."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self._source = source
        self._destination = destination
        self.copies = Copies()
        self._earlier: Tensor | None = None

    def buffers(self, nbytes: int, number: int, *, back: bool = False, cast: bool = False) -> tuple[Tensor, Tensor]:
        """A pattern on one device, float32[nbytes / 4], and poisoned memory on the other."""
        source, destination = self._source, self._destination
        if back:
            source, destination = destination, source
        sent = _words(nbytes, number, source)
        dtype = torch.bfloat16 if cast else torch.float32
        target = _poisoned(sent.numel(), dtype, destination)
        wait_for(sent, target)
        return sent, target

    def try_case(self, case: str, nbytes: int, shape: str, number: int, *, non_blocking: bool) -> dict[str, Any] | None:
        """Copy once. None if the destination is right; else what is wrong there, and the damage as read back, None if
        that was right, because the bytes came late."""
        sent, target = self.buffers(nbytes, number, cast=shape == "cast")
        arrives = target
        if shape == "strided source":
            spread = torch.zeros(sent.numel(), 2, device=self._source)
            spread[:, 0] = sent
            sent = spread[:, 0]
        elif shape == "strided destination":
            arrives = _poisoned(2 * sent.numel(), torch.float32, self._destination).view(-1, 2)[:, 0]
        wait_for(sent, arrives)
        what = f"{self._source} to {self._destination}: {case}"
        self.copies.copy(arrives, sent, what=what, non_blocking=non_blocking)
        wait_for(sent, arrives)
        if arrives is not target:
            target[:] = arrives  # on the card itself
            wait_for(target)
        return self._examine(case, target, nbytes, number)

    def both_ways(self, nbytes: int) -> Iterator[dict[str, Any] | None]:
        """Copy in both directions at the same time. Yields for each the same as `try_case`."""
        directions = [self.buffers(nbytes, 1), self.buffers(nbytes, 2, back=True)]
        for sent, target in directions:
            words = f"{sent.device} to {target.device}: both directions at once"
            with contextlib.ExitStack() as stack:  # a copy waits for the current streams of both: new ones for each
                for device in (sent.device, target.device):
                    if device.type == "cuda":
                        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
                self.copies.copy(target, sent, what=words, non_blocking=True)
        wait_for(*(sent for sent, _ in directions))
        for number, (sent, target) in enumerate(directions, 1):
            words = f"both directions at once, {nbytes:,} bytes, {sent.device} to {target.device}"
            yield self._examine(words, target, nbytes, number)

    def _examine(self, words: str, target: Tensor, nbytes: int, number: int) -> dict[str, Any] | None:
        """Compare on the receiving card; unless the copy is right and huge, read it back and compare on the host too
        (bytes that only the host finds wrong count if two reads agree).
        """
        wrong = _count(target, number)
        if not wrong and nbytes > _READ_BYTES:
            return None
        right = as_bytes(_words(nbytes, number, torch.device("cpu")).to(target.dtype))
        read = as_bytes(target.cpu())
        damage = examine(read, right, earlier=self._earlier)
        self._earlier = right
        if not wrong and (damage is None or not torch.equal(read, as_bytes(target.cpu()))):
            return None
        return {"case": words, "wrong_on_card": wrong, "damage": _damage_row(damage)}


def _damage_row(damage: Damage | None) -> dict[str, Any] | None:
    return None if damage is None else {**asdict(damage), "kind": damage.kind}


def _words(nbytes: int, number: int, device: torch.device) -> Tensor:
    """float32[nbytes / 4] of a pattern, computed on the device."""
    return fill_with_pattern(torch.empty(nbytes, dtype=torch.uint8, device=device), number).view(torch.float32)


def _poisoned(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(count, dtype=dtype, device=device)
    as_bytes(tensor).fill_(POISON)
    return tensor


def _count(target: Tensor, number: int) -> int:
    """The number of elements that differ from the pattern, compared as integers on their device."""
    integers = torch.int32 if target.dtype == torch.float32 else torch.int16
    wrong = torch.zeros((), dtype=torch.int64, device=target.device)
    for start in range(0, target.numel(), PIECE_WORDS):
        piece = target[start : start + PIECE_WORDS]
        right = pattern(number, start, piece.numel(), target.device).view(torch.float32).to(target.dtype)
        wrong += (piece.view(integers) != right.view(integers)).sum()
    return int(wrong)


# ---- sums -------------------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EXACT = 256
"""Whole numbers up to this are exact in bfloat16, which has 8 bits of precision."""


def measure_sums(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other ranks, sum, compare. A ``fault`` of the request that is no ending: a wrong element in each sum."""
    rank = request["rank"]
    world = request["world"]
    backend = request["backend"]
    device = device_of(request)
    step(f"joining a process group of {world} over {backend}")
    store = dist.FileStore(request["store"], world)  # type: ignore[attr-defined]  # not in torch's annotations
    limit = timedelta(seconds=request["timeout_s"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    problems: list[dict[str, Any]] = []
    cases = 0
    for cases, (case, count, dtype) in enumerate(_sums_to_try(request["largest"], request["repeats"]), 1):
        words = f"{case} over {backend}"
        step(f"summing {words}")
        summed = _numbers(cases, rank, count, dtype, world, device)
        wait_for(summed)
        dist.all_reduce(summed)
        wait_for(summed)
        if request.get("fault"):
            summed[summed.numel() // 2] += 1
        right = torch.zeros_like(summed)
        for other in range(world):
            right += _numbers(cases, other, count, dtype, world, device)
        damage = examine(as_bytes(summed.cpu()), as_bytes(right.cpu()))
        if damage is not None:
            problems.append({"case": words, "damage": _damage_row(damage)})
    step(f"leaving the process group over {backend}")
    dist.barrier()
    dist.destroy_process_group()
    return {"cases": cases, "wrong": len(problems), "problems": problems[:_KEPT]}


def _sums_to_try(largest: int, repeats: int) -> Iterator[tuple[str, int, torch.dtype]]:
    sizes = [size for size in (4, 4 << 10, (1 << 20) + 4, 25 << 20, 64 << 20) if size <= largest]
    yield f"cold, {sizes[-1]:,} bytes of float32", sizes[-1] // 4, torch.float32
    for size in sizes:
        for dtype in _DTYPES:
            yield f"{size:,} bytes of {str(dtype).removeprefix('torch.')}", max(size // dtype.itemsize, 1), dtype
    for number in range(repeats):
        size = min(25 << 20, sizes[-1])  # a bucket of DistributedDataParallel
        yield f"repeat {number + 1}, {size:,} bytes of bfloat16", size // 2, torch.bfloat16


def _numbers(number: int, rank: int, count: int, dtype: torch.dtype, world: int, device: torch.device) -> Tensor:
    """A rank's contribution: [count] whole numbers of at least 1; those of `world` ranks add up to at most `_EXACT`."""
    values = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, PIECE_WORDS):
        piece = values[start : start + PIECE_WORDS]
        piece[:] = (pattern(97 * number + rank, start, piece.numel(), device) >> 7) % (_EXACT // world) + 1
    return values
