"""The weights ``h(i) = A(lo) * m(b) + c(b)`` of the digest, in plain integers and in torch; `digest` defines them."""

from __future__ import annotations

import threading
from typing import TypeVar

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 16
"""Words per block of the definition; also the host's working set: 256 KiB of input, 512 KiB of table."""

T = TypeVar("T", int, Tensor)


def mix(x: T) -> T:
    """Wellons' lowbias32 on a number below 2^32, or on an int64 tensor of such; the same bits in both."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def block_factor(block: T) -> T:
    """``m(b)``."""
    return (mix((block + 1) & 0xFFFFFFFF) << 32) + 1


def block_term(block: T) -> T:
    """``c(b)``."""
    return (mix((block + (1 << 31)) & 0xFFFFFFFF) << 32) + (block << 16)


_tables: dict[torch.device, Tensor] = {}
_tables_lock = threading.Lock()


def place_weights(device: torch.device) -> Tensor:
    """``A`` as int64[BLOCK_WORDS], computed on the device itself: no table crosses the link that is being checked."""
    with _tables_lock:
        if device not in _tables:
            with torch.inference_mode(False):
                low = torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device)
                lower = (mix(low + BLOCK_WORDS) & 0xFFFF0000) | low
                _tables[device] = (mix(low + 1) << 32) | lower
            if device.type == "cuda":
                # Once: other streams use the table too, and have nothing else that makes them wait for it.
                torch.cuda.current_stream(device).synchronize()
        return _tables[device]
