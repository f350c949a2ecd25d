"""Runs the Triton kernel of the digest on the host: cases as JSON on stdin, sums as JSON on stdout.

A process of its own, because TRITON_INTERPRET must be set before Triton is imported, and then for everything in it. A
case is [bytes, start, word offset, tile]: `random_bytes` of that length lie at an address that is a multiple of 64, and
what follows `start` is digested.
"""

from __future__ import annotations

import json
import sys

import torch

from hf_rocm_tune.transfer import digest_triton
from tests.transfer.digest_reference import random_bytes


def sums_of(length: int, start: int, word_offset: int, tile: int) -> list[int]:
    digest_triton.TILE = tile
    room = torch.full((length + 64,), 0xA5, dtype=torch.uint8)  # what lies around the data must not count
    data = room[-room.data_ptr() % 64 :][:length]
    memoryview(data.numpy())[:] = random_bytes(length)
    sums = torch.zeros(2, dtype=torch.int64)
    digest_triton.triton_sums(data[start:], word_offset, sums)
    return [value % 2**64 for value in sums.tolist()]


if __name__ == "__main__":
    print(json.dumps([sums_of(*case) for case in json.load(sys.stdin)]))
