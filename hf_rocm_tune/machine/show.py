"""Shows decisions: on stderr once per process tree, as a table, as JSON, as shell lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import TextIO

from hf_rocm_tune.machine.decide import Decision
from hf_rocm_tune.machine.facts import MachineFacts
from hf_rocm_tune.machine.rules import Action

# Inherited by child processes: what has been printed.
MARK_TOLD = "HF_ROCM_TUNE_TOLD"
QUIET = "HF_ROCM_TUNE_QUIET"

_ORDER: dict[Action, int] = {"error": 0, "warn": 1, "set": 2, "info": 3, "keep": 4}
_LABEL: dict[Action, str] = {"error": "error", "warn": "warning", "info": "note"}


def _line(decision: Decision) -> str:
    cure = f"; {decision.cure}" if decision.cure else ""
    return f"{_LABEL[decision.action]}: {_assignment(decision)}: {decision.reason}{cure} ({decision.source})"


def _assignment(decision: Decision) -> str:
    # A value may hold anything, and what is shown has to stay one line of printable text.
    text = "" if decision.value is None else "=" + decision.value
    plain = "".join(letter if letter.isprintable() else " " for letter in decision.variable + text)
    return plain if len(plain) <= 200 else plain[:200] + "..."


def announce(
    decisions: Iterable[Decision], environ: MutableMapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Print info, warnings and errors on stderr, one line each, once per process tree and by local rank 0 only.

    HF_ROCM_TUNE_QUIET=1 leaves info out, and where the process is ``hf-rocm-tune env`` its table says it all. What has
    been printed is noted in HF_ROCM_TUNE_TOLD, which child processes (ranks of a launcher, loader workers) inherit; a
    line that is new there is still printed.
    """
    environ = os.environ if environ is None else environ
    if stream is None:
        stream = None if _is_shown_anyway(sys.orig_argv) else sys.stderr
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


def _is_shown_anyway(command_line: Sequence[str]) -> bool:
    """Whether a command line asks for the table of all decisions; JSON and shell lines go to programs."""
    words = " ".join(PurePath(word).stem for word in command_line)
    return re.search(r"(?:^| )(?:hf-rocm-tune|-m hf_rocm_tune) env(?: --strict)*$", words) is not None


def explain(decisions: Sequence[Decision], facts: MachineFacts | None = None) -> str:
    """A readable table, the gravest first: action, variable and value, then reason, cure and source below.

    Args:
        decisions: what was decided.
        facts: on what ground; shown above the table, with the reason for each thing that is not known.
    """
    head = [] if facts is None else [_ground(facts)]
    if not decisions:
        return "\n".join([*head, "No variable was set, and none that is present needs a word."])
    return "\n".join([*head, *(_entry(one) for one in sorted(decisions, key=lambda one: _ORDER[one.action]))])


def _entry(decision: Decision) -> str:
    lines = [decision.reason]
    lines += [f"cure: {decision.cure}"] if decision.cure else []
    lines += [f"source: {decision.source}", *decision.links]
    return "\n      ".join([f"{decision.action:<6}{_assignment(decision)}", *lines])


def _ground(facts: MachineFacts) -> str:
    """What the decisions rest on, in one line for torch and one for the GPUs."""
    build = {True: f"a ROCm {facts.hip_version} build", False: "not a ROCm build", None: "build not known"}
    torch = f"torch {facts.torch_version or 'not known'}, {build[facts.is_rocm]}"
    seen = "not known" if facts.archs is None else ", ".join(facts.archs) or "none"
    unknown = "; ".join(dict.fromkeys(facts.reasons.values()))
    why = f"not known: {unknown}; what hangs on it is marked as not certain, and nothing is set by it\n"
    return f"{torch}; visible AMD GPUs: {seen}\n{why if unknown else ''}"


def to_json(decisions: Sequence[Decision]) -> str:
    """The decisions as a JSON array of objects with the fields of ``Decision`` and its links."""
    return json.dumps([asdict(decision) | {"links": list(decision.links)} for decision in decisions], indent=2)


def exports(decisions: Iterable[Decision]) -> str:
    """Shell lines that set what the policy sets, for use before a launcher."""
    return "".join(
        f"export {decision.variable}={shlex.quote(decision.value)}\n"
        for decision in decisions
        if decision.action == "set" and decision.value is not None
    )
