"""Crashes, shortages of memory and NaN on request, for trying out what a real run does then; the report says so.

``HF_ROCM_TUNE_CRASH="step=4,kind=kill"``; several are joined by ";". How often each has struck is counted in the output
directory, across restarts, so a run gets past a crash that strikes once and never past one that always does.

``HF_ROCM_TUNE_STEP_FAULT="kind=oom,rate=0.1,seed=3,rows=2,rank=1"`` strikes inside the model, in one of its layers, so
a backward that it ends has left some gradients behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.machine.variables import read_spec
from hf_rocm_tune.transfer import TransferReport, tree_tensors

CRASH_VARIABLE = "HF_ROCM_TUNE_CRASH"
STEP_VARIABLE = "HF_ROCM_TUNE_STEP_FAULT"
# The underscore keeps it out of transformers' uploads, which ignore "_*".
COUNT_FILE = "_crashes.json"


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

    @classmethod
    def parse(cls, text: str) -> CrashSpec:
        """Read ``key=value`` pairs joined by commas.

        Raises:
            UsageError: names the key that is unknown, given twice, missing or has a wrong value, and what is valid.
        """
        kinds = {"kind": tuple(_CRASHES), "at": ("start", "step", "save")}
        return read_spec(cls, CRASH_VARIABLE, text, allowed=kinds, least={"step": 1, "times": 1, "rank": 0})


@dataclass(frozen=True, kw_only=True)
class StepFaultSpec:
    """Which micro-steps to harm, and how.

    Attributes:
        kind: ``oom``: ``torch.OutOfMemoryError`` is raised; ``nan``: the gradient of a layer's output becomes NaN.
        rate: share of the micro-steps that is hit, 0 to 1.
        seed: the same seed hits the same micro-steps of a process, counted from its start.
        rows: only micro-batches of more rows than this (of a packed batch: more sequences).
        tokens: only micro-batches of more tokens than this.
        rank: only this rank; None for all.
        where: ``forward`` or ``backward``; None: drawn by the seed. NaN comes in backward always.
        first: optimizer steps before this one (counted from 1) are left alone.
        count: stop after this many.
    """

    kind: str
    rate: float = 1.0
    seed: int = 0
    rows: int = 0
    tokens: int = 0
    rank: int | None = None
    where: str | None = None
    first: int = 1
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> StepFaultSpec:
        """Read ``key=value`` pairs joined by commas; raises as `CrashSpec.parse`."""
        kinds = {"kind": ("oom", "nan"), "where": ("forward", "backward")}
        least = {"rows": 0, "tokens": 0, "rank": 0, "first": 1, "count": 1}
        return read_spec(cls, STEP_VARIABLE, text, allowed=kinds, least=least)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> StepFaultSpec | None:
        """What `HF_ROCM_TUNE_STEP_FAULT` asks for; None when it is unset or empty. Raises as `parse`."""
        text = environ.get(STEP_VARIABLE, "").strip()
        return cls.parse(text) if text else None


# ---- crashes ------------------------------------------------------------------------------------------------


class Crashes:
    """The crashes that `HF_ROCM_TUNE_CRASH` asks of this process; raises as `CrashSpec.parse`.

    Attributes:
        text: what was asked for, as it was written; None for nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.text = environ.get(CRASH_VARIABLE, "").strip() or None
        self._specs = [CrashSpec.parse(part) for part in (self.text or "").split(";") if part.strip()]
        rank = environ.get("RANK", "0")
        self._rank = int(rank) if rank.isdecimal() else 0

    def strike(self, at: str, step: int, *, directory: Path, run_id: str) -> None:
        """Crash if a crash is due here; it is counted before it strikes, anew for another run."""
        for number, spec in enumerate(self._specs):
            if spec.at != at or spec.rank != self._rank or (at != "start" and spec.step != step):
                continue
            key, done = f"{number}: {spec}", _counts(directory, run_id)
            if done.get(key, 0) < spec.times:
                counts = done | {key: done.get(key, 0) + 1}
                write_text_atomic(directory / COUNT_FILE, json.dumps({"run_id": run_id, "done": counts}))
                _CRASHES[spec.kind]()


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


_CRASHES: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(1),
    "hang": _hang,
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


# ---- harmed micro-steps -------------------------------------------------------------------------------------


class StepFaults:
    """Harms the micro-steps of one process; ``report`` counts them."""

    def __init__(self, spec: StepFaultSpec | None, *, rank: int, report: TransferReport) -> None:
        self._asked = spec
        self._spec = spec if spec is not None and spec.rank in (None, rank) else None
        self._report = report
        self._injected = 0
        self._seen = 0

    def describe(self, counted: Mapping[str, int]) -> dict[str, Any] | None:
        """The specification beside what all ranks have counted; None when no faults were asked of any."""
        asked = {} if self._asked is None else dataclasses.asdict(self._asked)
        return {**asked, **counted} if asked or any(counted.values()) else None

    @contextmanager
    def during(self, model: nn.Module, *, step: int, rows: int, tokens: int) -> Iterator[None]:
        """One micro-step of optimizer step ``step``, with so many rows (or sequences) and tokens, in the block."""
        strike = self._strike(step=step, rows=rows, tokens=tokens)
        if strike is None:
            yield
            return
        place, layer = strike
        layers = next((list(one) for one in model.modules() if isinstance(one, nn.ModuleList) and len(one)), [model])
        handle = layers[int(layer * len(layers))].register_forward_hook(partial(self._in_layer, place))
        try:
            yield
        finally:
            handle.remove()

    def _strike(self, *, step: int, rows: int, tokens: int) -> tuple[str, float] | None:
        """Where this micro-step is struck, and in which layer (as a share of all); None where it is left alone."""
        spec = self._spec
        if spec is None or step < spec.first or (spec.count is not None and self._injected >= spec.count):
            return None
        if rows <= spec.rows or tokens <= spec.tokens:
            return None
        self._seen += 1
        chooser = random.Random(f"{spec.seed} {self._seen}")
        chance, half, layer = chooser.random(), chooser.random(), chooser.random()
        if chance >= spec.rate:
            return None
        drawn = "forward" if half < 0.5 else "backward"
        return ("backward" if spec.kind == "nan" else spec.where or drawn), layer

    def _in_layer(self, place: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if place == "forward":
            self._run_out_of_memory()
        produced = next((tensor for tensor in tree_tensors(output) if tensor.requires_grad), None)
        if produced is not None:
            assert self._spec is not None
            produced.register_hook(self._to_nan if self._spec.kind == "nan" else self._run_out_of_memory)

    def _run_out_of_memory(self, _gradient: Tensor | None = None) -> None:
        self._count()
        raise torch.OutOfMemoryError(f"out of memory, because {STEP_VARIABLE} asks for it")

    def _to_nan(self, gradient: Tensor) -> Tensor:
        self._count()
        return torch.full_like(gradient, torch.nan)

    def _count(self) -> None:
        self._injected += 1
        self._report.count("step_faults", injected=1)
