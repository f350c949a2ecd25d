"""Canaries: blocks of device memory that must not change while memory around them is allocated and freed.

Reported: live tensors that were right and later read as zeros, in whole segments, after other memory was mapped and
unmapped (ROCm/ROCm#6603 with an RX 7900 XT, rocm-systems#10943, rocm-systems#11693). A copy to the device and back does
not show that. Here several blocks hold a pattern that differs at every position, and are digested on the device after
each cycle of allocating and freeing blocks of all sizes.

Not covered: allocators other than torch's in this process, and corruption that disappears within one cycle.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import combine, digest
from hf_rocm_tune.transfer.damage import PIECE_WORDS, Damage, examine, pattern

CHURN = 0x5C
"""Fill byte of the blocks that are allocated and freed: in a canary it shows that two live blocks share memory."""

_SMALLEST_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Sizes of the test; `UsageError` for a value that is not valid."""

    canaries: int = 4  # blocks that are checked
    canary_bytes: int = 1 << 20  # of each, a multiple of 4
    churn_bytes: int = 64 << 20  # most bytes of the other blocks at one time
    cycles: int = 100  # rounds of allocating, freeing and checking
    seed: int = 0  # of the sizes

    def __post_init__(self) -> None:
        for name in ("canaries", "cycles"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give a whole number from 1 on")
        if self.canary_bytes < 4 or self.canary_bytes % 4:
            raise UsageError(f"canary_bytes is {self.canary_bytes}; give a multiple of 4")
        if self.churn_bytes < _SMALLEST_BLOCK:
            raise UsageError(f"churn_bytes is {self.churn_bytes}; give at least {_SMALLEST_BLOCK}")

    @classmethod
    def for_device(cls, device: torch.device, *, cycles: int, seed: int = 0, share: float = 0.9) -> CanarySettings:
        """64 MiB canaries and `share` of the free memory of an accelerator; small ones on the CPU."""
        if device.type != "cuda":
            return cls(cycles=cycles, seed=seed)
        free, _ = torch.cuda.mem_get_info(device)
        canary_bytes = min(64 << 20, free // 64 // 4 * 4)
        churn_bytes = max(int(share * free) - 4 * canary_bytes, _SMALLEST_BLOCK)
        return cls(canary_bytes=canary_bytes, churn_bytes=churn_bytes, cycles=cycles, seed=seed)


@dataclass(frozen=True, kw_only=True)
class CanaryFault:
    """The first canary that no longer holds its pattern.

    Attributes:
        cycle: the first bad cycle, from 1; 0: wrong right after it was written.
        canary: its number, from 0.
        first_offset: first wrong byte.
        length: bytes of the first wrong run; right bytes between wrong ones count when fewer than 64 stand together.
        alignment: as of `transfer.damage.Damage`.
        kind: what the bytes are instead: ``zeros``, ``churn`` (bytes of another block), ``canary`` (of another
            one, or its own from another place), ``bit_flip``, ``other``; ``gone`` if the second reading was right.
        stable: whether two readings gave the same bytes; if not, suspect the reading and not the memory.
    """

    cycle: int
    canary: int
    first_offset: int
    length: int
    alignment: int
    kind: str
    stable: bool


class Canaries:
    """The blocks that are checked, and the blocks that are allocated and freed beside them.

    Attributes:
        blocks: int32[canary_bytes / 4] each, written by the device itself, so that no copy is part of the test.
    """

    def __init__(self, device: torch.device, settings: CanarySettings) -> None:
        self._device, self._settings = device, settings
        self._rng = random.Random(settings.seed)
        self._churned: list[Tensor] = []
        words = settings.canary_bytes // 4
        self.blocks = [torch.empty(words, dtype=torch.int32, device=device) for _ in range(settings.canaries)]
        for number, block in enumerate(self.blocks):
            for start, piece in _pieces(block):
                piece[:] = pattern(number, start, piece.numel(), device)
        # expected digests come from the host, so a block that was never written is found too
        self._expected = [
            combine(digest(piece, word_offset=start) for start, piece in _patterns(number, words))
            for number in range(settings.canaries)
        ]

    @property
    def churned_bytes(self) -> int:
        return sum(block.numel() for block in self._churned)

    def churn(self) -> None:
        """One cycle: allocate and fill blocks of all sizes up to a random level, then free a random half of them."""
        level = self._rng.uniform(0.3, 1.0) * self._settings.churn_bytes
        while (room := int(level) - self.churned_bytes) >= _SMALLEST_BLOCK:
            size = min(int(_SMALLEST_BLOCK * math.exp(self._rng.uniform(0, math.log(room / _SMALLEST_BLOCK)))), room)
            if self._rng.random() < 0.5:
                size = max(size, room // 4)  # sizes are drawn by magnitude: large ones would be rare
            try:
                self._churned.append(torch.full((size,), CHURN, dtype=torch.uint8, device=self._device))
            except torch.OutOfMemoryError:
                break  # another process took memory: this cycle stays below its level
        self._rng.shuffle(self._churned)
        del self._churned[: len(self._churned) // 2]
        if self._device.type == "cuda" and self._rng.random() < 0.5:
            torch.cuda.empty_cache()  # so that the next cycle maps memory again

    def check(self, cycle: int) -> CanaryFault | None:
        for number, (block, expected) in enumerate(zip(self.blocks, self._expected, strict=True)):
            if digest(block) != expected:
                return self._locate(cycle, number, block)
        return None

    def _locate(self, cycle: int, number: int, block: Tensor) -> CanaryFault:
        reading, again = (block.cpu().view(torch.uint8) for _ in range(2))
        wanted = torch.cat([piece.view(torch.uint8) for _, piece in _patterns(number, block.numel())])
        found = examine(reading, wanted)
        if found is None:
            return CanaryFault(
                cycle=cycle, canary=number, first_offset=0, length=0, alignment=1, kind="gone", stable=False
            )
        bad = reading[found.first_offset : found.first_offset + found.length]
        return CanaryFault(
            cycle=cycle,
            canary=number,
            first_offset=found.first_offset,
            length=found.length,
            alignment=found.alignment,
            kind=self._kind(bad, found),
            stable=torch.equal(reading, again),
        )

    def _kind(self, bad: Tensor, found: Damage) -> str:
        if not bad.any():
            return "zeros"
        if bool((bad == CHURN).all()):
            return "churn"
        if found.kind == "bit_flip":
            return "bit_flip"
        head = bad[-found.first_offset % 4 :][: min(bad.numel(), 64) // 4 * 4]
        words = head[: head.numel() // 4 * 4].clone().view(torch.int32)
        size = self.blocks[0].numel()
        if words.numel() >= 2 and any(_stands_in(words, number, size) for number in range(len(self.blocks))):
            return "canary"
        return "other"


def watch(
    device: torch.device,
    settings: CanarySettings,
    *,
    on_cycle: Callable[[int, Canaries], None] | None = None,
    seconds: float = math.inf,
) -> CanaryFault | None:
    """The first fault, at which the test ends, or None after all cycles.

    Args:
        device: an accelerator or the CPU.
        settings: sizes and number of cycles.
        on_cycle: called after each cycle's churn, before the canaries are checked.
        seconds: no cycle begins later than this.

    Raises:
        torch.OutOfMemoryError: not even the canaries fit.
    """
    began = time.monotonic()
    canaries = Canaries(device, settings)
    fault = canaries.check(0)
    for cycle in range(1, settings.cycles + 1):
        if fault is not None or time.monotonic() - began > seconds:
            return fault
        canaries.churn()
        if on_cycle is not None:
            on_cycle(cycle, canaries)
        fault = canaries.check(cycle)
    return fault


def _pieces(block: Tensor) -> list[tuple[int, Tensor]]:
    """Consecutive views of a block, with the index of their first word: temporaries stay at a few MiB."""
    return [(start, block[start : start + PIECE_WORDS]) for start in range(0, block.numel(), PIECE_WORDS)]


def _patterns(number: int, words: int) -> Iterator[tuple[int, Tensor]]:
    """What a canary should hold, on the host, in pieces with the index of their first word."""
    for start in range(0, words, PIECE_WORDS):
        yield start, pattern(number, start, min(PIECE_WORDS, words - start), torch.device("cpu"))


def _stands_in(words: Tensor, number: int, count: int) -> bool:
    """Whether a few words stand, in this order, anywhere in the pattern of canary `number`."""
    for start in range(0, count, PIECE_WORDS):
        piece = pattern(number, start, min(PIECE_WORDS + words.numel(), count - start), torch.device("cpu"))
        for place in (piece == words[0]).nonzero().flatten().tolist():
            if torch.equal(piece[place : place + words.numel()], words):
                return True
    return False
