"""``hf-rocm-tune merge``: an adapter into its base; the directory goes to standard output, all else beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.publish.merge_settings import DTYPES, MergeSettings, parse_size


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
        max_shard_bytes=parse_size(wanted.max_shard_size, "--max_shard_size"),
        trust_remote_code=wanted.trust_remote_code,
    )
    prepare()
    from hf_rocm_tune.publish.merge import merge
    from hf_rocm_tune.publish.merge_memory import give_back_freed_blocks

    give_back_freed_blocks()
    merged = merge(settings, say)
    print(merged.directory)
    if not wanted.push:
        return 0
    from hf_rocm_tune.publish.hub_command import main as push

    more = [str(merged.directory), wanted.push, *(["--private"] if wanted.private else [])]
    say(f"pushing it; if that fails, `hf-rocm-tune push {' '.join(more)}` goes on with it")
    return push(more)


def say(line: str) -> None:
    """A line about the work."""
    print(f"hf-rocm-tune: {line}", file=sys.stderr, flush=True)
