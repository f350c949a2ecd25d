"""Shows decisions: on stderr once per process tree, as a table, as JSON, as shell lines."""

from __future__ import annotations

import json
import os
import shlex
import sys
import zlib
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict
from typing import TextIO

from hf_rocm_tune.environ.decide import Decision
from hf_rocm_tune.environ.rules import Action

# Inherited by child processes: what has been printed.
MARK_TOLD = "HF_ROCM_TUNE_TOLD"
QUIET = "HF_ROCM_TUNE_QUIET"

_LABEL: dict[Action, str] = {"error": "error", "warn": "warning", "info": "note"}


def _line(decision: Decision) -> str:
    return f"{_LABEL[decision.action]}: {_assignment(decision)}: {decision.reason} ({decision.source})"


def _assignment(decision: Decision) -> str:
    # A value may hold anything, and what is shown has to stay one line of printable text.
    text = "" if decision.value is None else "=" + decision.value
    plain = "".join(letter if letter.isprintable() else " " for letter in decision.variable + text)
    return plain if len(plain) <= 200 else plain[:200] + "..."


def announce(
    decisions: Iterable[Decision], environ: MutableMapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Print info, warnings and errors on stderr, one line each, once per process tree and by local rank 0 only.

    HF_ROCM_TUNE_QUIET=1 leaves info out. What has been printed is noted in HF_ROCM_TUNE_TOLD, which child processes
    (ranks of a launcher, loader workers) inherit; a line that is new there is still printed.
    """
    environ = os.environ if environ is None else environ
    stream = sys.stderr if stream is None else stream
    if stream is None or environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return
    quiet = environ.get(QUIET, "").strip() == "1"
    told = [mark for mark in environ.get(MARK_TOLD, "").split(",") if mark]
    for decision in decisions:
        if decision.action not in _LABEL or (quiet and decision.action == "info"):
            continue
        line = _line(decision)
        mark = f"{zlib.crc32(line.encode('utf-8', 'surrogateescape')):08x}"
        if mark not in told:
            told.append(mark)
            print(f"hf_rocm_tune: {line}", file=stream)
    if told:
        environ[MARK_TOLD] = ",".join(told)


def explain(decisions: Sequence[Decision]) -> str:
    """A readable table: action, variable and value, then reason and source on a line of their own."""
    if not decisions:
        return "No variable was set, and none that is present needs a word."
    return "\n".join(
        f"{decision.action:<6}{_assignment(decision)}\n      {decision.reason}\n      source: {decision.source}"
        for decision in decisions
    )


def to_json(decisions: Sequence[Decision]) -> str:
    """The decisions as a JSON array of objects with the fields of ``Decision``."""
    return json.dumps([asdict(decision) for decision in decisions], indent=2)


def exports(decisions: Iterable[Decision]) -> str:
    """Shell lines that set what the policy sets, for use before a launcher."""
    return "".join(
        f"export {decision.variable}={shlex.quote(decision.value)}\n"
        for decision in decisions
        if decision.action == "set" and decision.value is not None
    )
