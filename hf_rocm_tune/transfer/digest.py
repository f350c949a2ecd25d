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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer.digest_device import digest_on_device
from hf_rocm_tune.transfer.digest_host import host_sums
from hf_rocm_tune.transfer.raw_bytes import as_bytes, byte_count, gather
from hf_rocm_tune.transfer.report import count_crossing

PIECE_BYTES = 256 << 10
"""Bytes of a strided tensor that are gathered and digested at a time."""

__all__ = ["Digest", "QueuedDigests", "combine", "digest", "digest_on_device", "digest_range", "from_sums"]

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
    if sums.is_cuda:
        count_crossing(to_host_bytes=sums.nbytes)
    with torch._C.DisableTorchFunction():  # `redirected` would take it for somebody else's reading
        s1, s2 = sums.tolist()
    return Digest(s1 & _M64, s2 & _M64, nbytes)


class QueuedDigests:
    """Digests of tensors as they are at this point of their device's current stream; nothing is waited for.

    Host tensors are digested at once. Those of an accelerator come back together, in one copy for each device.

    Args:
        tensors: as for `digest`. They need not be kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._found = {at: digest(each) for at, each in enumerate(tensors) if each.device.type == "cpu"}
        self._landing: list[tuple[list[tuple[int, int]], Tensor, torch.cuda.Event]] = []
        for device in {each.device for each in tensors if each.device.type != "cpu"}:
            mine = [(at, each) for at, each in enumerate(tensors) if each.device == device]
            with torch.cuda.device(device), torch.inference_mode(False), torch._C.DisableTorchFunction():
                sums = torch.stack([digest_on_device(each) for _, each in mine])
                landing = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
                count_crossing(to_host_bytes=sums.nbytes)
                landing.copy_(sums, non_blocking=True)
                event = torch.cuda.current_stream(device).record_event()
            self._landing.append(([(at, byte_count(each)) for at, each in mine], landing, event))

    def done(self) -> bool:
        """Whether `result` will not wait."""
        return all(event.query() for _, _, event in self._landing)

    def result(self) -> list[Digest]:
        """The digests, in the order of the tensors; waits for what the device has not done yet."""
        for places, landing, event in self._landing:
            if not event.query():
                event.synchronize()
            self._found.update((at, from_sums(row, size)) for (at, size), row in zip(places, landing, strict=True))
        self._landing = []
        return [self._found[at] for at in range(len(self._found))]


def digest_range(
    tensor: Tensor, start: int, stop: int, *, word_offset: int = 0, copy_to: Tensor | None = None
) -> Digest:
    """Digest the logical bytes [start, stop) of a host tensor, and copy them in the same pass where it is contiguous.

    Args:
        tensor: on the host, any dense dtype, shape and strides.
        start, stop: multiples of the element size when the tensor is not contiguous.
        word_offset: as for `digest`.
        copy_to: uint8[stop - start] on the host, aligned for the dtype; None for no copy.
    """
    if tensor.is_contiguous():
        return Digest(*host_sums(as_bytes(tensor)[start:stop], word_offset, copy_to), stop - start)
    found = combine(_digest_gathered(tensor, start, stop, word_offset))
    if copy_to is not None:
        gather(tensor, start, stop, copy_to)  # from the source again: the digest is not one of the copy
    return found


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
