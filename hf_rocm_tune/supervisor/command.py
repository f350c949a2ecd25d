"""Which command lines can be supervised, and what is really started for them.

A job has to tell of its progress and its end, so it has to be one of ours. ``accelerate launch`` is started through
`accelerate_launch`: accelerate's launcher of a single process passes no signal on and dies before its job.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise

from hf_rocm_tune.errors import UsageError

ENTRIES = frozenset({"sft"})
"""Modules of this package that train, which are verbs of the command line as well."""

_PACKAGE = "hf_rocm_tune"
_FORMS = (
    "`accelerate launch ... -m hf_rocm_tune.sft ...`, `hf-rocm-tune sft ...`, `torchrun ... -m hf_rocm_tune.sft ...` "
    "or `python -m hf_rocm_tune.sft ...`"
)
_LAUNCHER = [sys.executable, "-m", f"{_PACKAGE}.supervisor.accelerate_launch"]


def to_start(words: Sequence[str]) -> list[str]:
    """The command line to start for the one that the user gave.

    Raises:
        UsageError: it is not one that can be supervised.
    """
    program, rest = os.path.basename(words[0]) if words else "", list(words[1:])
    found: list[str] | None = None
    if program == "hf-rocm-tune" and rest[:1] and rest[0] in ENTRIES:
        found = [sys.executable, "-m", _PACKAGE, *rest]
    elif program == "accelerate-launch" and _runs_ours(rest):
        found = [*_LAUNCHER, *rest]
    elif program == "accelerate" and rest[:1] == ["launch"] and _runs_ours(rest):
        found = [*_LAUNCHER, *rest[1:]]
    elif program == "torchrun" and _runs_ours(rest):
        found = list(words)
    elif program.startswith("python"):
        found = _python(list(words))
    if found is None:
        given = shown(words) if words else "nothing"
        raise UsageError(f"run supervises {_FORMS}; got: {given[:200]}")
    return found


def shown(words: Sequence[str]) -> str:
    """The command line as it may be printed: a token in it is left out."""
    plain: list[str] = []
    for word in words:
        flag, given, _ = word.partition("=")
        if given and _is_token_flag(flag):
            word = f"{flag}=***"
        elif plain and _is_token_flag(plain[-1]):
            word = "***"
        plain.append(word)
    return " ".join(word if "***" in word else shlex.quote(word) for word in plain)


def _is_token_flag(word: str) -> bool:
    return word.startswith("--") and word.replace("-", "_").endswith("_token")


def _python(words: list[str]) -> list[str] | None:
    """``python [options] -m MODULE ...``."""
    if "-m" not in words[:-1]:
        return None
    place = words.index("-m") + 1
    module, rest = words[place], words[place + 1 :]
    if module == _PACKAGE:
        return words if rest[:1] and rest[0] in ENTRIES else None
    if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        return to_start(["accelerate", *(["launch"] if module.endswith("launch") else []), *rest])
    if module == "torch.distributed.run":
        return words if _runs_ours(rest) else None
    return words if _is_ours(module) else None


def _runs_ours(words: Sequence[str]) -> bool:
    return any(flag in ("-m", "--module") and _is_ours(module) for flag, module in pairwise(words))


def _is_ours(module: str) -> bool:
    package, _, entry = module.partition(".")
    return package == _PACKAGE and entry in ENTRIES
