"""What ``merge`` is asked to do. No torch here: a wrong flag is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError

DTYPES = ("float32", "float16", "bfloat16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """What to merge into what.

    Args:
        adapter: directory or Hub id of an adapter.
        out: directory to be made; it may exist if it is empty.
        base: directory or Hub id of the base, where it is not the one that the adapter names.
        dtype: of the weights that are written: one of `DTYPES`; None keeps the base's.
        max_shard_bytes: of a weight file.
        trust_remote_code: passed to transformers.

    Raises:
        UsageError: a value that is not valid, naming it.
    """

    adapter: str
    out: Path
    base: str | None = None
    dtype: str | None = None
    max_shard_bytes: int = 5_000_000_000
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")
        if self.max_shard_bytes < 1:
            raise UsageError(f"--max_shard_size: {self.max_shard_bytes} bytes; give at least 1")


def parse_size(text: str, flag: str) -> int:
    """Bytes from "5GB", "800MiB" or a number; K, M and G of 1000, Ki, Mi and Gi of 1024.

    Raises:
        UsageError: it is no such text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise UsageError(f"{flag} {text!r}: give a size such as 5GB, 800MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[unit])
