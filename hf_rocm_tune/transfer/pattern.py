"""Bytes of which each tells where it belongs: what checks send, and what memory must go on holding.

A constant, or random bytes without a key, would not show that something came from the wrong place.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_WORDS = 1 << 20
"""Words that are worth making or comparing at a time: temporaries stay at a few tens of MiB."""


def pattern(number: int, start: int, count: int, device: torch.device) -> Tensor:
    """Words of one of many patterns.

    A bijective mixing of position and number (multiply, shift, multiply), without the top two bits, and odd: never
    zero, and never NaN when read as float32.

    Args:
        number: of the pattern; two of them have hardly a word in common at the same place.
        start: position of the first word.
        count: how many.
        device: where they are computed; no copy is involved.

    Returns:
        int32[count].
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = ((index + 1) * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 13)) & 0x3FFFFFFF | 1).to(torch.int32)


def fill_with_pattern(buffer: Tensor, number: int, *, keep: int = 0xFF) -> Tensor:
    """Write a pattern from its beginning over the bytes of a tensor, on its own device.

    Args:
        buffer: uint8[n] and contiguous, of any n.
        keep: bits of each byte that are kept, the others are 0: 1 for bytes that shall be bool.

    Returns:
        `buffer`.
    """
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        piece[:] = _bytes(number, start, piece, keep)
    return buffer


def count_wrong(buffer: Tensor, number: int, *, keep: int = 0xFF) -> int:
    """Bytes of a tensor that are not those of a pattern from its beginning on, counted on its own device.

    Args:
        buffer: as in `fill_with_pattern`, as `keep`.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, buffer.numel(), 4 * PIECE_WORDS):
        piece = buffer[start : start + 4 * PIECE_WORDS]
        wrong += (piece != _bytes(number, start, piece, keep)).sum()
    return int(wrong)


def _bytes(number: int, start: int, piece: Tensor, keep: int) -> Tensor:
    """What should stand in a piece that begins at byte `start`, a multiple of 4."""
    right = pattern(number, start // 4, -(-piece.numel() // 4), piece.device).view(torch.uint8)[: piece.numel()]
    return right if keep == 0xFF else right & keep
