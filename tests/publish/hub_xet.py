"""A storage of Xet on loopback, version 1 of its protocol: enough for hf_xet to upload to and to download from.

Formats and endpoints as https://huggingface.co/docs/xet describes them (api, shard, xorb). Version 2 of the uploads
(grants, /v2/shards) is answered with 404, upon which hf_xet 1.8 falls back to version 1. No deduplication: every query
for known chunks is answered with 404.
"""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.publish.hub_store import Refused, Store

if TYPE_CHECKING:
    from tests.publish.hub_routes import Answer

_HEADER, _ENTRY = 48, 48
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30
_END = b"\xff" * 32


class Cas:
    """Xorbs as they came, and for each file the pieces of them that make it up."""

    def __init__(self, store: Store, url: str) -> None:
        self.store, self.url = store, url
        self.xorbs: dict[str, bytes] = {}
        self.terms: dict[str, list[tuple[str, int, int, int]]] = {}

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """The answer to a request below ``/v1/``."""
        kind, *rest = path.removeprefix("/v1/").split("/")
        if method == "POST" and kind == "xorbs":
            self.xorbs[rest[-1]] = body
            return _json({"was_inserted": True})
        if method == "POST" and kind == "shards":
            with self.store.lock:
                self._read_shard(body)
            return _json({"result": 1})
        if method == "GET" and kind == "reconstructions":
            return self._reconstruction(rest[-1], headers)
        if method == "GET" and kind == "xorb-bytes":
            return _ranged(self.xorbs[rest[-1]], headers)
        raise Refused(404, f"not spoken: {method} {path}")

    def _read_shard(self, shard: bytes) -> None:
        """Keep what a shard says of files, and what they are."""
        at = _HEADER
        while shard[at : at + 32] != _END:
            name = _text(shard[at : at + 32])
            flags, count = struct.unpack_from("<II", shard, at + 32)
            at += _ENTRY
            terms = []
            for _ in range(count):
                xorb = _text(shard[at : at + 32])
                _, length, first, last = struct.unpack_from("<IIII", shard, at + 32)
                terms.append((xorb, length, first, last))
                at += _ENTRY
            if flags & _WITH_VERIFICATION:
                at += count * _ENTRY
            self.terms[name] = terms
            if flags & _WITH_METADATA:
                sha256 = _text(shard[at : at + 32])
                at += _ENTRY
                self.store.objects[sha256] = self.content(name)
                self.store.xet_hashes[sha256] = name

    def content(self, name: str) -> bytes:
        """A file, put together again."""
        return b"".join(
            chunk for xorb, _, first, last in self.terms[name] for chunk in _chunks(self.xorbs[xorb])[first:last]
        )

    def _reconstruction(self, name: str, headers: dict[str, str]) -> Answer:
        if name not in self.terms:
            raise Refused(404, "no such file")
        if headers.get("range", "bytes=0-").startswith("bytes=0-"):
            terms, fetch = [], {}
            for xorb, length, first, last in self.terms[name]:
                starts = _starts(self.xorbs[xorb])
                chunks = {"start": first, "end": last}
                span = {"start": starts[first], "end": starts[last] - 1}
                terms.append({"hash": xorb, "unpacked_length": length, "range": chunks})
                one = {"range": chunks, "url": f"{self.url}/v1/xorb-bytes/{xorb}", "url_range": span}
                fetch.setdefault(xorb, []).append(one)
            return _json({"offset_into_first_range": 0, "terms": terms, "fetch_info": fetch})
        raise Refused(416, "the whole file is asked for, and it was served")


def _json(value: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _ranged(content: bytes, headers: dict[str, str]) -> Answer:
    first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
    return 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first : last + 1]


def _text(digest: bytes) -> str:
    """A hash as text: four little-endian 64-bit numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))


def _starts(xorb: bytes) -> list[int]:
    """Where each chunk begins in a xorb, and where the last one ends."""
    at, starts = 0, [0]
    while at + 8 <= len(xorb) and xorb[at] == 0:
        at += 8 + int.from_bytes(xorb[at + 1 : at + 4], "little")
        starts.append(at)
    return starts


def _chunks(xorb: bytes) -> list[bytes]:
    starts = _starts(xorb)
    return [_chunk(xorb[first:last]) for first, last in pairwise(starts)]


def _chunk(piece: bytes) -> bytes:
    scheme, length = piece[4], int.from_bytes(piece[5:8], "little")
    if scheme == 0:
        return piece[8:]
    plain = _lz4_frame(piece[8:])
    if scheme == 2:  # the first bytes of all groups of four, then the second ones ...
        sizes = [(length + 3 - lane) // 4 for lane in range(4)]
        lanes, at = [], 0
        for size in sizes:
            lanes.append(plain[at : at + size])
            at += size
        mixed = bytearray(length)
        for lane, content in enumerate(lanes):
            mixed[lane::4] = content
        plain = bytes(mixed)
    assert len(plain) == length
    return plain


def _lz4_frame(frame: bytes) -> bytes:
    """Decompress one LZ4 frame (lz4/doc/lz4_Frame_format.md); its checksums are not looked at."""
    assert frame[:4] == b"\x04\x22\x4d\x18"
    flags = frame[4]
    at = 7 + (8 if flags & 8 else 0)
    out = bytearray()
    while size := int.from_bytes(frame[at : at + 4], "little"):
        at += 4
        block = frame[at : at + (size & 0x7FFFFFFF)]
        at += len(block) + (4 if flags & 16 else 0)
        if size & 0x80000000:
            out += block
        else:
            _lz4_block(block, out)
    return bytes(out)


def _lz4_block(block: bytes, out: bytearray) -> None:
    at = 0
    while at < len(block):
        token = block[at]
        at += 1
        literals, at = _length(token >> 4, block, at)
        out += block[at : at + literals]
        at += literals
        if at >= len(block):
            return
        offset = int.from_bytes(block[at : at + 2], "little")
        length, at = _length(token & 15, block, at + 2)
        start, length = len(out) - offset, length + 4
        if offset >= length:
            out += out[start : start + length]
        else:
            for number in range(length):
                out.append(out[start + number])


def _length(first: int, block: bytes, at: int) -> tuple[int, int]:
    if first == 15:
        while True:
            first, more = first + block[at], block[at]
            at += 1
            if more != 255:
                break
    return first, at
