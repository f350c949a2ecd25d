"""Crashes on request, for trying out survival on a real run; the report says that they were on.

``HF_ROCM_TUNE_CRASH="step=4,kind=kill"``; several are joined by ";". How often each has struck is counted in the
output directory, across restarts, so a run gets past a crash that strikes once and never past one that always does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic

VARIABLE = "HF_ROCM_TUNE_CRASH"
# The underscore keeps it out of transformers' uploads, which ignore "_*".
COUNT_FILE = "_crashes.json"
KINDS = ("kill", "segv", "exit", "hang", "spin", "stop")
PLACES = ("start", "step", "save")


@dataclass(frozen=True, kw_only=True)
class CrashSpec:
    """One crash: where it strikes, how, and how often.

    Attributes:
        kind: ``kill`` the process (SIGKILL), ``segv`` (SIGSEGV), ``exit`` with code 1, ``hang`` for ever: it no longer
            reacts to SIGTERM, ``spin``: the same in a loop that computes, ``stop`` (SIGSTOP, until SIGCONT).
        at: ``step``: when its batch is about to be used, so that a step that is left out does not crash; ``save``:
            when its checkpoint is about to be written; ``start``: before the first step, whatever ``step`` says.
        step: number of the step, from 1 on.
        times: how often, over all starts of a run.
        rank: the rank that it strikes.
    """

    kind: str
    at: str = "step"
    step: int = 1
    times: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        _check("kind", self.kind, self.kind in KINDS, "one of " + " ".join(KINDS))
        _check("at", self.at, self.at in PLACES, "one of " + " ".join(PLACES))
        _check("step", self.step, self.step >= 1, "a whole number from 1 on")
        _check("times", self.times, self.times >= 1, "a whole number from 1 on")
        _check("rank", self.rank, self.rank >= 0, "a whole number from 0 on")

    @classmethod
    def parse(cls, text: str) -> CrashSpec:
        """Read ``key=value`` pairs joined by commas.

        Raises:
            UsageError: names the key that is unknown, given twice, missing or has a wrong value, and what is valid.
        """
        values: dict[str, Any] = {}
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            key, separator, value = (piece.strip() for piece in item.partition("="))
            if not separator or key not in _READERS:
                raise UsageError(f"{VARIABLE}: '{item}' is not understood; valid keys: {' '.join(_READERS)}")
            if key in values:
                raise UsageError(f"{VARIABLE}: '{key}' is given twice; give it once, or join two crashes by ';'")
            try:
                values[key] = _READERS[key](value)
            except ValueError:
                raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected a whole number") from None
        if "kind" not in values:
            raise UsageError(f"{VARIABLE}: 'kind' is missing; give kind= one of {' '.join(KINDS)}")
        return cls(**values)


class Crashes:
    """The crashes that `HF_ROCM_TUNE_CRASH` asks of this process.

    Raises:
        UsageError: see `CrashSpec.parse`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.text = environ.get(VARIABLE, "").strip() or None
        self._specs = [CrashSpec.parse(part) for part in (self.text or "").split(";") if part.strip()]
        rank = environ.get("RANK", "0")
        self._rank = int(rank) if rank.isdecimal() else 0

    def strike(self, at: str, step: int, *, directory: Path, run_id: str) -> None:
        """Crash if a crash is due here; it is counted before it strikes.

        Args:
            at: see `CrashSpec`.
            step: number of the step that is under way or was saved.
            directory: the run's output directory.
            run_id: another run starts counting again.
        """
        for number, spec in enumerate(self._specs):
            if spec.at != at or spec.rank != self._rank or (at != "start" and spec.step != step):
                continue
            key = f"{number}: {spec}"
            done = _counts(directory, run_id)
            if done.get(key, 0) < spec.times:
                counts = done | {key: done.get(key, 0) + 1}
                write_text_atomic(directory / COUNT_FILE, json.dumps({"run_id": run_id, "done": counts}))
                _KINDS[spec.kind]()


def _counts(directory: Path, run_id: str) -> dict[str, int]:
    try:
        body = json.loads((directory / COUNT_FILE).read_text(encoding="utf-8"))
        return dict(body["done"]) if body["run_id"] == run_id else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _hang() -> None:
    while True:
        time.sleep(3600)


def _spin() -> None:
    while True:
        pass


_KINDS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(1),
    "hang": _hang,
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
assert set(_KINDS) == set(KINDS)

_READERS: dict[str, Callable[[str], Any]] = {"kind": str, "at": str, "step": int, "times": int, "rank": int}


def _check(key: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected {expected}")
