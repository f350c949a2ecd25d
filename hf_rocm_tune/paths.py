"""Paths and addresses as a user gives them."""

from __future__ import annotations

import os
import socket
import stat
import urllib.parse
import urllib.request
from pathlib import Path

from hf_rocm_tune.errors import UsageError

HUB_FIX = "check the spelling, the network and HF_HUB_OFFLINE, or give a model directory"


def expand_user(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~name`` expanded, where somebody has that name (Path.expanduser raises)."""
    return Path(os.path.expanduser(path))


def is_local_model(name: str) -> bool:
    """Whether a model's name is a path: it exists, or is written as one."""
    return os.path.exists(expand_user(name)) or name.startswith((".", "/", "~"))


def require_model(name: str) -> None:
    """Refuse a model whose name is a path that does not exist."""
    if is_local_model(name) and not os.path.exists(expand_user(name)):
        raise UsageError(f"model: {name} does not exist: give a model directory or a Hub id")


def cache_directory() -> Path:
    """The directory of compiled libraries: ``hf_rocm_tune/native`` in ``XDG_CACHE_HOME`` (default ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_rocm_tune" / "native"


def kept_file(name: str) -> Path:
    """A file of what is known from start to start, in ``HF_HOME`` (default ``~/.cache/huggingface``)."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.path.expanduser(home)) / "hf_rocm_tune" / name


def can_be_file(path: Path) -> bool:
    """Whether a file can be written there: in a directory that exists, no directory itself, its name not too long."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return os.path.isdir(path.absolute().parent)
    except OSError:
        return False


def answers(address: str) -> bool:
    """Whether a server can be reached, as the Hub, whose client would retry for half a minute; True behind a proxy."""
    if urllib.request.getproxies():
        return True
    parts = urllib.parse.urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), timeout=3.0).close()
    except OSError:
        return False
    return True
