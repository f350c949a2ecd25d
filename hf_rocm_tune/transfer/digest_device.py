"""The digest on a tensor's own device: the Triton kernel on an accelerator, else plain torch, bit-identical.

The kernel is used once it has given the same sums as plain torch on the device in question. What was chosen, and why,
is `device_method`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.transfer.digest_weights import BLOCK_WORDS, block_factor, block_term, place_weights
from hf_rocm_tune.transfer.raw_bytes import as_bytes

CHUNK_BLOCKS = 64
"""Blocks that plain torch digests in one go: 16 MiB of input, two temporaries of 32 MiB."""

Sums = Callable[[Tensor, int], Tensor]
"""uint8[n] and a word offset to int64[2]: ``s1`` and ``s2`` as two's complement."""


@dataclass(frozen=True, kw_only=True)
class DigestMethod:
    """How digests are computed, and the reason in words for a report."""

    name: str
    reason: str


def digest_on_device(tensor: Tensor, word_offset: int = 0) -> Tensor:
    """Digest on the tensor's own device and current stream; nothing is waited for, but once for the choice of a method.

    Returns:
        int64[2] on the tensor's device: ``s1`` and ``s2`` as two's complement.
    """
    flat = as_bytes(tensor if tensor.is_contiguous() else tensor.detach().contiguous())
    return _chosen(flat.device)[0](flat, word_offset)


def device_method(device: torch.device) -> DigestMethod:
    """Which method `digest_on_device` uses for tensors of `device`, and why; tries the kernel when it must."""
    return _chosen(device)[1]


_choices: dict[torch.device, tuple[Sums, DigestMethod]] = {}
_choices_lock = threading.Lock()


def _chosen(device: torch.device) -> tuple[Sums, DigestMethod]:
    choice = _choices.get(device)
    if choice is None:
        with _choices_lock:
            choice = _choices.get(device) or _choose(device)
            _choices[device] = choice
    return choice


def _choose(device: torch.device) -> tuple[Sums, DigestMethod]:
    if device.type != "cuda":
        return _plain(f"Triton has no kernels for {device.type}")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return _plain("TRITON_INTERPRET=1 would run the kernel on the host")
    try:
        from hf_rocm_tune.transfer.digest_triton import triton_sums
    except ImportError as error:
        return _plain(f"Triton cannot be imported: {error}")
    try:
        differs = _differs(triton_sums, device)
    # Whatever Triton raises (no C compiler, an architecture that it does not know, a driver that it does not find):
    # plain torch gives the same digest, and the reason is kept.
    except Exception as error:
        return _plain(f"Triton cannot run the kernel: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if differs:
        return _plain(f"the Triton kernel gave other sums than plain torch {differs}")
    return triton_sums, DigestMethod(name="triton", reason="gives the same sums as plain torch on this device")


def _plain(reason: str) -> tuple[Sums, DigestMethod]:
    return torch_sums, DigestMethod(name="torch", reason=reason)


def _differs(sums: Sums, device: torch.device) -> str:
    """Where `sums` and plain torch differ on `device`; empty when they agree. Waits for the device."""
    data = place_weights(device).view(torch.uint8)
    for start, stop, offset in ((0, data.numel() - 5, 0), (16, 4003, 70001), (3, 1000, 0)):
        piece = data[start:stop]
        if not torch.equal(sums(piece, offset), torch_sums(piece, offset)):
            return f"for {stop - start} bytes at word {offset}"
    return ""


def torch_sums(flat: Tensor, word_offset: int) -> Tensor:
    """The digest of uint8[n] in plain torch, for any device."""
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    table = place_weights(flat.device)
    position, index = 0, word_offset
    while position < flat.numel():
        low = index % BLOCK_WORDS
        room = BLOCK_WORDS - low if low else BLOCK_WORDS * CHUNK_BLOCKS
        piece = flat[position : position + 4 * room]
        words = _words(piece)
        whole = words.numel() // BLOCK_WORDS if low == 0 else 0
        if whole:
            body = words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS)
            sums += _reduce_rows(body, table, index // BLOCK_WORDS)
        rest = words[whole * BLOCK_WORDS :]
        if rest.numel():
            sums += _reduce_rows(rest[None], table[low : low + rest.numel()], index // BLOCK_WORDS + whole)
        position += 4 * room
        index += room
    return sums


def _words(piece: Tensor) -> Tensor:
    """uint8[n] to int64[ceil(n / 4)] in 0 .. 2^32 - 1."""
    padding = -piece.numel() % 4
    if padding:
        piece = torch.nn.functional.pad(piece, (0, padding))
    elif piece.storage_offset() % 4 or piece.data_ptr() % 4:
        piece = piece.clone()
    return piece.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)


def _reduce_rows(words: Tensor, table: Tensor, first_block: int) -> Tensor:
    """int64[2] of rows that are consecutive blocks, or parts that start at the same place in their block."""
    totals = words.sum(1)
    weighted = (words * table).sum(1)
    blocks = torch.arange(first_block, first_block + words.shape[0], dtype=torch.int64, device=words.device)
    return torch.stack((totals.sum(), (weighted * block_factor(blocks) + totals * block_term(blocks)).sum()))
