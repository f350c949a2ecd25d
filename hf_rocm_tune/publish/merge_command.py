"""``hf-rocm-tune merge``: its flags; the merged directory goes to standard output, all else to standard error.

No torch here: a wrong flag is refused at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish import say

DTYPES = ("float32", "float16", "bfloat16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """What to merge into what, see `add_flags`. Without a dtype each weight keeps the base's.

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("adapter", help="directory or Hub id of an adapter")
    parser.add_argument("out", type=Path, help="directory to be made")
    parser.add_argument("--base", help="directory or Hub id of the base model (default: the one the adapter names)")
    parser.add_argument("--dtype", help=f"store the weights as {', '.join(DTYPES)} (default: as the base does)")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of a weight file (default: 5GB)")
    parser.add_argument("--push", metavar="REPO", help="push the merged model to this repository on the Hub")
    parser.add_argument("--private", action="store_true", help="make that repository private")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the base brings along")


def run(wanted: argparse.Namespace, prepare: Callable[[], None]) -> int:
    """Merge as the flags say, and push where they say so."""
    if wanted.private and not wanted.push:
        raise UsageError("--private is about the repository of --push: give that too, or leave it out")
    settings = MergeSettings(
        adapter=wanted.adapter,
        out=wanted.out,
        base=wanted.base,
        dtype=wanted.dtype,
        max_shard_bytes=_parse_size(wanted.max_shard_size),
        trust_remote_code=wanted.trust_remote_code,
    )
    prepare()
    from hf_rocm_tune.publish.merge import merge

    directory = merge(settings, say)
    print(directory)
    if not wanted.push:
        return 0
    from hf_rocm_tune.publish.hub import main as push

    more = [str(directory), wanted.push, *(["--private"] if wanted.private else [])]
    say(f"pushing it; if that fails, `hf-rocm-tune push {' '.join(more)}` continues it")
    return push(more)


def _parse_size(text: str) -> int:
    """Bytes from "5GB", "800MiB" or a number; K, M and G of 1000, Ki, Mi and Gi of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise UsageError(f"--max_shard_size {text!r}: give a size such as 5GB, 800MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[unit])
