"""Where libraries keep what they fetch, convert and compile, and whether that can be written. Nothing is created."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Cache(NamedTuple):
    """A cache of a library: its own variable, those that move it with others, and its place in these."""

    variable: str
    homes: tuple[str, ...]
    below: str  # the first home that is set
    default: str


_HUB = ("HF_HOME",)
CACHES: Mapping[str, Cache] = {
    "datasets": Cache("HF_DATASETS_CACHE", _HUB, "datasets", "~/.cache/huggingface"),
    "hub": Cache("HF_HUB_CACHE", _HUB, "hub", "~/.cache/huggingface"),
    "pictures": Cache("", _HUB, "hf_rocm_tune/pictures", "~/.cache/huggingface"),
    "triton": Cache("TRITON_CACHE_DIR", ("TRITON_HOME",), ".triton/cache", "~"),
}


def directory_of(name: str) -> Path:
    """The directory of one of `CACHES`, as its library finds it; it may not exist."""
    cache = CACHES[name]
    if cache.variable:
        own = os.environ.get(cache.variable)
        if own:
            return Path(own).expanduser()
    return Path(_home_of(cache) or cache.default).expanduser() / cache.below


def _home_of(cache: Cache) -> str | None:
    """The directory above a cache, as the variables name it."""
    for variable in cache.homes:
        home = os.environ.get(variable)
        if home:
            return home
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches and cache.homes == _HUB:
        return os.path.join(caches, "huggingface")
    return None


def unwritable(name: str) -> str:
    """Why nothing can be written into one of `CACHES`, and the variables that move it; empty if it can be written."""
    cache = CACHES[name]
    directory = directory_of(name)
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        variables = [*cache.homes]
        if cache.variable:
            variables.append(cache.variable)
        fix = f"set {' or '.join(variables)} to a directory that can be"
        return f"{directory} cannot be written ({error.strerror}): {fix}"
