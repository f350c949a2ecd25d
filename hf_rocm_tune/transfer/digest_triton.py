"""The digest as one Triton kernel, for HIP and CUDA; definition and selection are in `digest`.

A program handles ``TILE`` consecutive word positions of a block (256 KiB), for up to `MAX_BLOCKS` blocks, and
accumulates for each, over the blocks ``b``,

    plain = sum(w)    factor = sum(w * mix(b + 1)) mod 2^32    term = sum(w * c(b))

so that the weight ``A`` of the position, the expensive part, is computed once: ``s2 = A * (plain + factor << 32) +
term``. Integer addition is associative: the atomic sums of the programs are the same in any order. One launch digests
one tensor: several would need a table of addresses, sent over the link that is being checked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = tl.constexpr(1 << 16)
TILE = 1024
"""Words per program and block: with 4 warps of 32 lanes, two 128-bit loads in flight in each lane."""
WARPS = 4
MAX_BLOCKS = 64
"""The most blocks per program: one pair of atomics and one ``A`` per 64 words of each position."""
MIN_GROUPS = 8
"""The least number of block groups of a large tensor: 8 groups of 64 tiles are 512 programs."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _block_factor(block):  # type: ignore[no-untyped-def]
    """The upper half of the block's factor; its lower half is 1."""
    return _mix((block + 1).to(tl.uint32))


@triton.jit
def _block_term(block):  # type: ignore[no-untyped-def]
    high = _mix((block + (1 << 31)).to(tl.uint32)).to(tl.uint64) << 32
    return high + (block.to(tl.uint64) << 16)


@triton.jit
def _place_weight(low):  # type: ignore[no-untyped-def]
    lower = (_mix(low + (1 << 16)) & 0xFFFF0000) | low
    return (_mix(low + 1).to(tl.uint64) << 32) | lower.to(tl.uint64)


@triton.jit
def _words_of_bytes(data, first, count, lanes):  # type: ignore[no-untyped-def]
    """Words `first + lanes`, assembled from bytes; bytes from `count` on are zero."""
    start = data + first * 4
    left = count - first * 4
    at = lanes * 4
    word = tl.load(start + at, mask=at < left, other=0).to(tl.uint32)
    word |= tl.load(start + at + 1, mask=at + 1 < left, other=0).to(tl.uint32) << 8
    word |= tl.load(start + at + 2, mask=at + 2 < left, other=0).to(tl.uint32) << 16
    word |= tl.load(start + at + 3, mask=at + 3 < left, other=0).to(tl.uint32) << 24
    return word


@triton.jit
def _add(sums, plain, weighted):  # type: ignore[no-untyped-def]
    tl.atomic_add(sums, tl.sum(plain.to(tl.int64)), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(weighted.to(tl.int64)), sem="relaxed")


@triton.jit
def _add_tail(data, sums, nbytes, first_block, skew):  # type: ignore[no-untyped-def]
    """Add the 0 to 15 bytes after the last granule, in at most 4 words, the last one padded with zeros."""
    position = nbytes // 16 * 4
    rest = tl.arange(0, 4)
    word = _words_of_bytes(data, position, nbytes, rest)
    index = skew + position + rest
    block = first_block + (index >> 16)
    weight = _place_weight((index & 0xFFFF).to(tl.uint32))
    weight *= (_block_factor(block).to(tl.uint64) << 32) + 1
    _add(sums, word, word.to(tl.uint64) * (weight + _block_term(block)))


@triton.jit(do_not_specialize=["nbytes", "first_block", "skew", "per_program"])
def digest_kernel(  # type: ignore[no-untyped-def]
    data,
    sums,
    nbytes: tl.int64,
    first_block: tl.int64,
    skew: tl.int32,
    per_program: tl.int32,
    TILE: tl.constexpr,
    BY_BYTES: tl.constexpr,
    SKEWED: tl.constexpr,
):
    """Add ``s1`` and ``s2`` of `nbytes` bytes at `data` to ``sums``, int64[2].

    Data at a multiple of 16 is read in 128-bit loads, at a multiple of 4 in 32-bit loads; `BY_BYTES`: neither, which is
    slow. The 0 to 15 bytes after the last 16-byte granule are read one by one; nothing outside the tensor is read.
    `first_block` and `skew` are quotient and remainder of the index of the first word by 2^16; `SKEWED`: the last
    positions of a block belong to the definition's next one. Grid: (tiles in a block, groups of `per_program` blocks).
    """
    # The interpreter gives small integers 32 bits, whatever the annotation says.
    nbytes, first_block = nbytes.to(tl.int64), first_block.to(tl.int64)
    lanes = tl.arange(0, TILE)
    place = tl.program_id(0) * TILE + lanes
    group = tl.program_id(1).to(tl.int64) * per_program
    carried = place + skew >= BLOCK_WORDS
    low = ((place + skew) & 0xFFFF).to(tl.uint32)

    granule_words = nbytes // 16 * 4
    position = group * BLOCK_WORDS + tl.program_id(0) * TILE
    end = tl.minimum(position + per_program * BLOCK_WORDS, (nbytes + 3) // 4)
    block = first_block + group
    plain = tl.zeros([TILE], dtype=tl.uint64)
    term = tl.zeros([TILE], dtype=tl.uint64)
    factor = tl.zeros([TILE], dtype=tl.uint32)
    while position < end:
        if BY_BYTES:
            word = _words_of_bytes(data, position, nbytes, lanes)
        else:
            start = data.to(tl.pointer_type(tl.uint32)) + position
            word = tl.load(start + lanes, mask=lanes < granule_words - position, other=0)
        plain += word.to(tl.uint64)
        if SKEWED:
            factor += word * tl.where(carried, _block_factor(block + 1), _block_factor(block))
            term += word.to(tl.uint64) * tl.where(carried, _block_term(block + 1), _block_term(block))
        else:
            factor += word * _block_factor(block)
            term += word.to(tl.uint64) * _block_term(block)
        position += BLOCK_WORDS
        block += 1
    weighted = _place_weight(low) * (plain + (factor.to(tl.uint64) << 32)) + term
    _add(sums, plain, weighted)

    if not BY_BYTES and tl.program_id(0) + tl.program_id(1) == 0:
        _add_tail(data, sums, nbytes, first_block, skew)


def triton_sums(flat: Tensor, word_offset: int, sums: Tensor) -> None:
    """Add ``s1`` and ``s2`` of contiguous uint8[n] at a word offset to ``sums``, int64[2], as two's complement, on the
    tensor's device and its current stream, without a wait."""
    if not flat.numel():
        return
    words = triton.cdiv(flat.numel(), 4)
    blocks = triton.cdiv(words, BLOCK_WORDS.value)
    per_program = min(MAX_BLOCKS, triton.cdiv(blocks, MIN_GROUPS))
    first_block, skew = divmod(word_offset, BLOCK_WORDS.value)
    grid = (triton.cdiv(min(words, BLOCK_WORDS.value), TILE), triton.cdiv(blocks, per_program))
    with torch.cuda.device_of(flat):  # Triton launches on the current device, whatever the tensor's is
        digest_kernel[grid](
            flat,
            sums,
            flat.numel(),
            first_block,
            skew,
            per_program,
            TILE=TILE,
            BY_BYTES=flat.data_ptr() % 4 != 0,
            SKEWED=skew != 0,
            num_warps=WARPS,
        )
