"""A 128-bit, position-dependent digest of raw bytes, bit-identical on the host and on any torch device.

The bytes are read as little-endian unsigned 32-bit words ``w[i]``, the tail padded with zeros, and

    s1 = sum(w[i])            mod 2^64
    s2 = sum(w[i] * h(i))     mod 2^64

together with the byte length. With ``lo = i mod 2^16`` and ``b = i div 2^16`` (the block),

    h(i) = A(lo) * m(b) + c(b)    mod 2^64
    A(lo) = mix(lo + 1) << 32 | (mix(lo + 2^16) with its low 16 bits replaced by lo)
    m(b) = 1 + (mix(b + 1) << 32)
    c(b) = (b << 16) + (mix(b + 2^31) << 32)

where ``mix`` is a 32-bit finaliser (Wellons, "lowbias32"). The product form lets a block be reduced with one constant
table: ``s2 = sum over blocks of m(b) * dot(w, A) + c(b) * sum(w)``.

Certain, for tensors below 16 GiB (2^32 words):

* *Zeroing any set of non-zero words is caught.* ``s1`` of the original cannot wrap, and it shrinks.
* *Any swap of two different words is caught*, and so is any change confined to two words. If ``s1`` is unchanged, the
  two differences are ``d`` and ``-d`` with ``0 < |d| < 2^32``, and ``s2`` changes by ``d * (h(i) - h(j))``. The low 32
  bits of ``h`` are a bijection of ``i`` (the low 16 give ``lo``, then the next 16 give ``b``), so the second factor has
  at most 31 trailing zero bits, as has the first: their product is never 0 modulo 2^64.

Not certain: a change of three words or more must keep ``s1`` *and* hit one value of 64 bits in ``s2``. For changes that
do not know ``h`` the odds are about 2^-64; structured ones that fool a Fletcher sum (equal and opposite differences at
regular distances) have no better odds here, because ``h`` is not linear. Nothing here resists an attacker.

It is additive: the digest of a range taken with its `word_offset` adds up with its neighbours'. The sums come out the
same however the range is split, as long as every piece but the last is a multiple of 4 bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather

BLOCK_WORDS = 1 << 16
"""Words per block of the definition; also the host's working set: 256 KiB of input, 1 MiB of int64."""
DEVICE_CHUNK_BLOCKS = 64
"""Blocks that a device digests in one go: 16 MiB of input, two temporaries of 32 MiB."""

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Digest:
    """Two sums modulo 2^64 and the number of bytes. Equal digests mean equal bytes, see the module's docstring."""

    s1: int
    s2: int
    nbytes: int

    def hex(self) -> str:
        """``s1`` and ``s2`` as 16 hexadecimal digits each, then the length in hexadecimal, joined by dashes."""
        return f"{self.s1:016x}-{self.s2:016x}-{self.nbytes:x}"

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """The inverse of `hex`.

        Raises:
            UsageError: the text is not what `hex` writes.
        """
        try:
            s1, s2, nbytes = (int(part, 16) for part in text.split("-"))
        except ValueError:
            raise UsageError(f"'{text}' is not a digest; expected three hexadecimal numbers joined by '-'") from None
        return cls(s1, s2, nbytes)

    def same_words(self, other: Digest) -> bool:
        """Whether the sums agree, whatever the lengths: for data that is followed by zeros on one side."""
        return (self.s1, self.s2) == (other.s1, other.s2)


def combine(parts: Iterable[Digest]) -> Digest:
    """The digest of ranges that were each digested at their own `word_offset`. No part: the digest of 0 bytes."""
    s1 = s2 = nbytes = 0
    for part in parts:
        s1, s2, nbytes = s1 + part.s1, s2 + part.s2, nbytes + part.nbytes
    return Digest(s1 & _M64, s2 & _M64, nbytes)


def digest(tensor: Tensor, *, word_offset: int = 0) -> Digest:
    """Digest the bytes of `tensor` in logical order, as if it were contiguous.

    Args:
        tensor: any dense dtype, shape, strides and device. On an accelerator the reading is done there, on the current
            stream, and this waits for the 16 bytes of the result.
        word_offset: index of the first word, for a part of something larger.

    Covers the elements only: dtype and shape are not part of the digest.
    """
    if tensor.device.type == "cpu":
        return digest_range(tensor, 0, byte_count(tensor), word_offset=word_offset)
    return from_sums(digest_on_device(tensor, word_offset), byte_count(tensor))


def from_sums(sums: Tensor, nbytes: int) -> Digest:
    """The digest from the int64[2] tensor of `digest_on_device`; waits for the device when it is there."""
    s1, s2 = sums.tolist()
    return Digest(s1 & _M64, s2 & _M64, nbytes)


def digest_range(tensor: Tensor, start: int, stop: int, *, word_offset: int = 0) -> Digest:
    """Digest the logical bytes [start, stop) of a host tensor.

    Plain torch on blocks that stay in the cache: ahead of NumPy at this block size, see benchmarks/digest_host.py. One
    thread: the callers (loading threads, the training loop) run beside each other already.
    """
    if not tensor.is_contiguous():
        return combine(_digest_gathered(tensor, start, stop, word_offset))
    flat = as_bytes(tensor)
    s1 = s2 = 0
    position, index = start, word_offset
    while position < stop:
        number, low = divmod(index, BLOCK_WORDS)
        end = min(stop, position + 4 * (BLOCK_WORDS - low))
        total, weighted = _host.reduce(flat[position:end], low)
        s1 += total
        s2 += weighted * _block_factor(number) + total * _block_term(number)
        position, index = end, index + BLOCK_WORDS - low
    return Digest(s1 & _M64, s2 & _M64, stop - start)


def _digest_gathered(tensor: Tensor, start: int, stop: int, word_offset: int) -> Iterator[Digest]:
    """Digests of consecutive pieces of a strided tensor, each gathered into the thread's scratch block."""
    for position in range(start, stop, 4 * BLOCK_WORDS):
        end = min(stop, position + 4 * BLOCK_WORDS)
        piece = _host.gathered[: end - position]
        gather(tensor, position, end, piece)
        yield digest_range(piece, 0, end - position, word_offset=word_offset + (position - start) // 4)


class _HostBuffers(threading.local):
    """Scratch memory of one thread: 1 MiB, made once, when the thread first digests."""

    def __init__(self) -> None:
        self.table = _table(torch.device("cpu"))
        with torch.inference_mode(False):
            self.words = torch.empty(BLOCK_WORDS, dtype=torch.int64)
            self.aligned = torch.empty(4 * BLOCK_WORDS, dtype=torch.uint8)
            self.gathered = torch.empty(4 * BLOCK_WORDS, dtype=torch.uint8)

    def reduce(self, block: Tensor, low: int) -> tuple[int, int]:
        """(sum of words, dot with the table from `low` on) of at most one block of bytes."""
        whole = block.numel() // 4
        total = weighted = 0
        if whole:
            words = self.words[:whole]
            body = block[: 4 * whole]
            if body.data_ptr() % 4 or body.storage_offset() % 4:
                body = self.aligned[: 4 * whole].copy_(body)
            words.copy_(body.view(torch.uint32))
            total, weighted = int(words.sum()), int(torch.dot(words, self.table[low : low + whole]))
        if block.numel() % 4:
            word = int.from_bytes(bytes(block[4 * whole :].tolist()), "little")
            total, weighted = total + word, weighted + word * int(self.table[low + whole])
        return total, weighted


def digest_on_device(tensor: Tensor, word_offset: int = 0) -> Tensor:
    """Digest on the tensor's own device and current stream; nothing is waited for.

    This is the place for a faster kernel (Triton): same arguments, same int64[2] result.

    Returns:
        int64[2] on the tensor's device: ``s1`` and ``s2`` as two's complement.
    """
    flat = as_bytes(tensor if tensor.is_contiguous() else tensor.detach().contiguous())
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    table = _table(flat.device)
    position, index = 0, word_offset
    while position < flat.numel():
        low = index % BLOCK_WORDS
        room = BLOCK_WORDS - low if low else BLOCK_WORDS * DEVICE_CHUNK_BLOCKS
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
    return piece.view(torch.int32).to(torch.int64).bitwise_and_(_M32)


def _reduce_rows(words: Tensor, table: Tensor, first_block: int) -> Tensor:
    """int64[2] of rows that are consecutive blocks, or parts that start at the same place in their block."""
    totals = words.sum(1)
    weighted = (words * table).sum(1)
    blocks = torch.arange(first_block, first_block + words.shape[0], dtype=torch.int64, device=words.device)
    return torch.stack((totals.sum(), (weighted * _block_factor(blocks) + totals * _block_term(blocks)).sum()))


T = TypeVar("T", int, Tensor)


def _mix(x: T) -> T:
    """Wellons' lowbias32 on a number below 2^32, or on an int64 tensor of such; the same bits in both."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _M32
    return x ^ (x >> 16)


def _block_factor(block: T) -> T:
    return (_mix((block + 1) & _M32) << 32) + 1


def _block_term(block: T) -> T:
    return (_mix((block + (1 << 31)) & _M32) << 32) + (block << 16)


_tables: dict[torch.device, Tensor] = {}
_tables_lock = threading.Lock()


def _table(device: torch.device) -> Tensor:
    """``A`` as int64[BLOCK_WORDS], computed on the device itself: no table crosses the link that is being checked."""
    with _tables_lock:
        if device not in _tables:
            with torch.inference_mode(False):
                low = torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device)
                lower = (_mix(low + BLOCK_WORDS) & 0xFFFF0000) | low
                _tables[device] = (_mix(low + 1) << 32) | lower
            if device.type == "cuda":
                # Once: other streams use the table too, and have nothing else that makes them wait for it.
                torch.cuda.current_stream(device).synchronize()
        return _tables[device]


_host = _HostBuffers()
