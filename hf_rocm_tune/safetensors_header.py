"""The header of a safetensors file: which tensors are in it, and where (https://github.com/huggingface/safetensors#format).

For what the library's own reader cannot do: telling a mapped address's tensor, and reading a file's bytes once.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

LARGEST_BYTES = 100 << 20
"""Of a header: the library's own limit."""


class HeaderEntry(NamedTuple):
    """A tensor of a file."""

    begin: int  # of its bytes in the file
    end: int
    name: str
    dtype: str  # as the file has it, such as "BF16"
    shape: tuple[int, ...]


def read_header(file: str | os.PathLike[str]) -> list[HeaderEntry]:
    """The tensors of a file, by place.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_BYTES:
            raise ValueError(f"a header of {length:,} bytes")
        return parse_header(stream.read(length))


def parse_header(header: bytes | bytearray) -> list[HeaderEntry]:
    """The tensors of a file by place, of its header without the eight bytes of its length.

    Raises:
        ValueError: it is no such header.
    """
    data = 8 + len(header)
    try:
        return sorted(
            HeaderEntry(
                data + int(row["data_offsets"][0]),
                data + int(row["data_offsets"][1]),
                name,
                str(row["dtype"]),
                tuple(map(int, row["shape"])),
            )
            for name, row in json.loads(header).items()
            if name != "__metadata__"
        )
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no header of a safetensors file: {error}") from error
