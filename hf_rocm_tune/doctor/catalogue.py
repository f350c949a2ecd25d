"""What the drill sends: tensors of all usual dtypes, of sizes from one byte, and the catalogue of faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hf_rocm_tune.transfer import STAGES
from hf_rocm_tune.transfer.faults import KINDS
from hf_rocm_tune.transfer.raw_bytes import typed_view

SLOT_BYTES = 16 << 10
"""Bytes of a staging slot while drilling: small, so that tensors of a few chunks are quick to send."""
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 255, 256, 257, 1023, 4095, 4096, 4097),
    *(SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES + 1, 5 * SLOT_BYTES + 3),
)
"""Bytes: one, words and their tails, the alignment in a batch, and the borders of slots."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)

_POOL_BYTES = 1 << 20

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of the catalogue: a kind of fault, whether retries are hit as well, and the stage that is hit."""

    kind: str
    persist: bool
    stage: str


def cells() -> list[Cell]:
    """All entries. ``after`` harms memory that was right: what is watched for that are weights."""
    on_the_way = [kind for kind in KINDS if kind != "after"]
    table = [
        Cell(kind=kind, persist=persist, stage=stage)
        for kind in on_the_way
        for persist in (False, True)
        for stage in STAGES
    ]
    return [*table, Cell(kind="after", persist=False, stage="weights")]


class Samples:
    """Seeded host tensors: random bytes, token ids, and masks of ones, contiguous or strided, at any address.

    Args:
        seed: the same seed gives the same tensors in the same order.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, 32_000, (_POOL_BYTES // 8,), generator=generator)
        mask = torch.ones(_POOL_BYTES // 8, dtype=torch.int64)
        self._pools = [noise, noise, ids.view(torch.uint8), mask.view(torch.uint8)]
        self._truths = torch.randint(0, 2, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)
        self._dtypes = self._endlessly(DTYPES)
        self._sizes = self._endlessly(SIZES)

    def tensor(self, *, largest: int = SIZES[-1]) -> Tensor:
        """The next tensor: each dtype and each size comes as often as any other, at most `largest` bytes or so."""
        dtype, nbytes = next(self._dtypes), next(self._sizes)
        if self._rng.random() < 0.5:
            nbytes = int(2 ** self._rng.uniform(0, nbytes.bit_length()))
        size = torch.empty(0, dtype=dtype).element_size()
        count = max(min(nbytes, largest) // size, 1)
        strided = self._rng.random() < 0.25
        pool = self._truths if dtype is torch.bool else self._rng.choice(self._pools)
        offset = self._rng.randrange((_POOL_BYTES - 2 * count * size) // size) * size
        if strided:
            return typed_view(pool, offset, dtype, (count, 2))[:, 0]
        return typed_view(pool, offset, dtype, (count,))

    def batch(self, target: Tensor, name: str) -> dict[str, Tensor]:
        """A batch in which `target`, called `name`, stands between two small neighbours."""
        return {"before": self.tensor(largest=300), name: target, "behind": self.tensor(largest=300)}

    def _endlessly(self, values: tuple[Value, ...]) -> Iterator[Value]:
        while True:
            yield from self._rng.sample(values, len(values))
