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

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.digest_device import digest_on_device
from hf_rocm_tune.transfer.digest_host import host_sums
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather

PIECE_BYTES = 256 << 10
"""Bytes of a strided tensor that are gathered and digested at a time."""

__all__ = ["Digest", "combine", "digest", "digest_on_device", "digest_range", "from_sums"]

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
    """Digest the logical bytes [start, stop) of a host tensor, in the calling thread; `digest_host` does the reading.

    `start` and `stop` are multiples of the element size when the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        return combine(_digest_gathered(tensor, start, stop, word_offset))
    return Digest(*host_sums(as_bytes(tensor)[start:stop], word_offset), stop - start)


def _digest_gathered(tensor: Tensor, start: int, stop: int, word_offset: int) -> Iterator[Digest]:
    """Digests of consecutive pieces of a strided tensor, each gathered into the thread's own memory."""
    for position in range(start, stop, PIECE_BYTES):
        end = min(stop, position + PIECE_BYTES)
        piece = _gathered.memory[: end - position]
        gather(tensor, position, end, piece)
        yield digest_range(piece, 0, end - position, word_offset=word_offset + (position - start) // 4)


class _Gathered(threading.local):
    """Memory of one thread, made once, when the thread first digests a strided tensor."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)


_gathered = _Gathered()
