"""Injected crashes, out-of-memory errors and NaN, to try how a run handles them; the report says that they were used.

``HF_ROCM_TUNE_CRASH="step=4,kind=kill"``; several are joined by ";" and counted in the output directory over all
restarts. ``HF_ROCM_TUNE_STEP_FAULT="kind=oom,rate=0.1,seed=3,rows=2,rank=1"`` is raised inside one of the model's
layers, so an aborted backward leaves some gradients behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.machine.variables import read_spec
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.transfer import TransferReport, tree_tensors

CRASH_VARIABLE = "HF_ROCM_TUNE_CRASH"
STEP_VARIABLE = "HF_ROCM_TUNE_STEP_FAULT"
# The underscore keeps it out of transformers' uploads, which ignore "_*".
COUNT_FILE = "_crashes.json"


@dataclass(frozen=True, kw_only=True)
class CrashSpec:
    """One crash: where it happens, how, and how often."""

    # ``kill`` (SIGKILL), ``segv`` (SIGSEGV), ``exit`` (with code 1), ``hang`` (sleeps for ever, without a reaction to
    # SIGTERM), ``spin`` (the same in a busy loop), ``stop`` (SIGSTOP, until SIGCONT)
    kind: str
    step: int = 1  # just before this step's batch is used, from 1, so a skipped step does not crash
    times: int = 1  # how often, over all starts of a run
    rank: int = 0  # the rank that crashes

    @classmethod
    def parse(cls, text: str) -> CrashSpec:
        """Read ``key=value`` pairs joined by commas."""
        kinds, least = {"kind": tuple(_CRASHES)}, {"step": 1, "times": 1, "rank": 0}
        return read_spec(cls, CRASH_VARIABLE, text, allowed=kinds, least=least)


@dataclass(frozen=True, kw_only=True)
class StepFaultSpec:
    """Which micro-steps get a fault, and which fault."""

    kind: str  # ``oom``: ``torch.OutOfMemoryError`` is raised; ``nan``: the gradient of a layer's output becomes NaN.
    rate: float = 1.0  # share of the micro-steps that get the fault, 0 to 1
    seed: int = 0  # the same seed selects the same micro-steps of a process, counted from its start
    rows: int = 0  # only micro-batches of more rows than this (packed: more sequences)
    rank: int | None = None  # only this rank; None for all
    # ``forward`` or ``backward``; None: drawn from the seed. NaN is always injected in backward.
    where: str | None = None
    first: int = 1  # the first optimizer step (from 1) that may get a fault
    count: int | None = None  # stop after this many

    @classmethod
    def parse(cls, text: str) -> StepFaultSpec:
        """Read ``key=value`` pairs joined by commas; raises as `CrashSpec.parse`."""
        kinds = {"kind": ("oom", "nan"), "where": ("forward", "backward")}
        least = {"rows": 0, "rank": 0, "first": 1, "count": 1}
        return read_spec(cls, STEP_VARIABLE, text, allowed=kinds, least=least)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> StepFaultSpec | None:
        """The specification in `HF_ROCM_TUNE_STEP_FAULT`; None when it is unset or empty. Raises as `parse`."""
        text = environ.get(STEP_VARIABLE, "").strip()
        return cls.parse(text) if text else None


# ---- crashes ------------------------------------------------------------------------------------------------


class Crashes:
    """The crashes that `HF_ROCM_TUNE_CRASH` requests of this process; raises as `CrashSpec.parse`.

    Attributes:
        text: the value of the variable; None when it is unset or empty.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.text = environ.get(CRASH_VARIABLE, "").strip() or None
        self._specs = [CrashSpec.parse(part) for part in (self.text or "").split(";") if part.strip()]
        self._rank = int(environ.get("RANK", "0"))

    def crash_if_due(self, step: int, *, directory: Path, run_id: str) -> None:
        """Crash if a crash is due here. It is counted in ``directory`` first, separately for each run."""
        for number, spec in enumerate(self._specs):
            if (spec.rank, spec.step) != (self._rank, step):
                continue
            key, done = f"{run_id} {number}: {spec}", {}
            with suppress(FileNotFoundError):
                done = json.loads((directory / COUNT_FILE).read_text(encoding="utf-8"))
            if done.get(key, 0) < spec.times:
                write_text_atomic(directory / COUNT_FILE, json.dumps(done | {key: done.get(key, 0) + 1}))
                _CRASHES[spec.kind]()


def _hang() -> None:
    time.sleep(1e9)


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


# ---- faults in micro-steps ----------------------------------------------------------------------------------


class StepFaults:
    """Injects faults into the micro-steps of one process; ``report`` counts them."""

    def __init__(self, spec: StepFaultSpec | None, *, rank: int, report: TransferReport) -> None:
        self._spec, self._rank, self._report = spec, rank, report
        self._injected = self._seen = 0

    @property
    def wanted(self) -> bool:
        """Whether faults were asked for, on any rank."""
        return self._spec is not None

    def describe(self, counted: Mapping[str, int]) -> dict[str, Any] | None:
        """The specification and the counts of all ranks; None when no rank was asked to inject faults."""
        if self._spec is not None:
            return {**dataclasses.asdict(self._spec), **counted}
        if any(counted.values()):
            return dict(counted)
        return None

    @contextmanager
    def during(self, model: nn.Module, *, step: int, rows: int) -> Iterator[None]:
        """A context around one micro-step of optimizer step ``step`` with ``rows`` rows (or sequences)."""
        spec = self._spec
        if spec is None or spec.rank not in (None, self._rank) or step < spec.first or rows <= spec.rows:
            yield
            return
        self._seen += 1
        chooser = random.Random(f"{spec.seed} {self._seen}")
        chance = chooser.random()
        half = chooser.random()
        where = chooser.random()
        if chance >= spec.rate or (spec.count is not None and self._injected >= spec.count):
            yield
            return
        drawn_pass = "forward" if half < 0.5 else "backward"
        forward = spec.kind == "oom" and (spec.where or drawn_pass) == "forward"
        layers: list[nn.Module] = [model]
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module):
                layers = list(module)
                break
        handle = layers[int(where * len(layers))].register_forward_hook(partial(self._in_layer, spec.kind, forward))
        try:
            yield
        finally:
            handle.remove()

    def _in_layer(self, kind: str, forward: bool, _module: nn.Module, _inputs: Any, output: Any) -> None:
        def harm(gradient: Tensor | None = None) -> Tensor:
            self._injected += 1
            self._report.count("step_faults", injected=1)
            if kind == "nan" and gradient is not None:
                return torch.full_like(gradient, torch.nan)
            raise torch.OutOfMemoryError(f"out of memory, because {STEP_VARIABLE} asks for it")

        if forward:
            harm()
        produced = next((tensor for tensor in tree_tensors(output) if tensor.requires_grad), None)
        if produced is not None:
            produced.register_hook(harm)
