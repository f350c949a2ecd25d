"""An independent reference of the digest: the definition in `hf_rocm_tune.transfer.digest`, in plain integers."""

from __future__ import annotations

import random

from hf_rocm_tune.transfer import Digest

BLOCK = 1 << 16


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def weight(i: int) -> int:
    block, low = divmod(i, BLOCK)
    a = mix(low + 1) * 2**32 + mix(low + 2**16) // 2**16 * 2**16 + low
    return (a * (1 + mix((block + 1) % 2**32) * 2**32) + block * 2**16 + mix((block + 2**31) % 2**32) * 2**32) % 2**64


def reference(data: bytes, word_offset: int = 0) -> Digest:
    """The definition of the module's docstring, in plain integers."""
    padded = data + bytes(-len(data) % 4)
    s1 = s2 = 0
    for k in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * k : 4 * k + 4], "little")
        s1 += word
        s2 += word * weight(k + word_offset)
    return Digest(s1 % 2**64, s2 % 2**64, len(data))


def random_bytes(length: int) -> bytes:
    """The same bytes for the same length, in every process."""
    return random.Random(length).randbytes(length)
