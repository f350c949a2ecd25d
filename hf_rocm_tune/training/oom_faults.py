"""Steps that run out of memory, or whose gradients are NaN, on request: for trying out what a run does then.

``HF_ROCM_TUNE_STEP_FAULT="kind=oom,rate=0.1,seed=3,rows=2,rank=1"`` turns it on for a real run; the report then says
so. The fault strikes inside the model, in one of its layers, so a backward that it ends has left some gradients behind.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.transfer import TransferReport, tree_tensors

VARIABLE = "HF_ROCM_TUNE_STEP_FAULT"
KINDS = ("oom", "nan")
PLACES = ("forward", "backward")


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

    def __post_init__(self) -> None:
        _check("kind", self.kind, self.kind in KINDS, "one of " + " ".join(KINDS))
        _check("rate", self.rate, 0 <= self.rate <= 1, "a number from 0 to 1")
        for key in ("rows", "tokens", "rank"):
            value = getattr(self, key)
            _check(key, value, value is None or value >= 0, "a number from 0 on")
        _check("where", self.where, self.where is None or self.where in PLACES, "one of " + " ".join(PLACES))
        _check("first", self.first, self.first >= 1, "a number from 1 on")
        _check("count", self.count, self.count is None or self.count >= 1, "a number from 1 on")

    @classmethod
    def parse(cls, text: str) -> StepFaultSpec:
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
                raise UsageError(f"{VARIABLE}: '{key}' is given twice; give it once")
            try:
                values[key] = _READERS[key](value)
            except ValueError:
                raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected a number") from None
        if "kind" not in values:
            raise UsageError(f"{VARIABLE}: 'kind' is missing; give kind= one of {' '.join(KINDS)}")
        return cls(**values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> StepFaultSpec | None:
        """What `HF_ROCM_TUNE_STEP_FAULT` asks for; None when it is unset or empty.

        Raises:
            UsageError: see `parse`.
        """
        text = environ.get(VARIABLE, "").strip()
        return cls.parse(text) if text else None


class StepFaults:
    """Harms the micro-steps of one process.

    Args:
        spec: which and how; None for none.
        rank: of this process.
        report: counts those that were harmed.
    """

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
        drawn = PLACES[int(half * len(PLACES))]
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
        raise torch.OutOfMemoryError(f"out of memory, because {VARIABLE} asks for it")

    def _to_nan(self, gradient: Tensor) -> Tensor:
        self._count()
        return torch.full_like(gradient, torch.nan)

    def _count(self) -> None:
        self._injected += 1
        self._report.count("step_faults", injected=1)


def _check(key: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{VARIABLE}: {key}={value} is not valid; expected {expected}")


_READERS: dict[str, Callable[[str], Any]] = {
    "kind": str,
    "rate": float,
    "seed": int,
    "rows": int,
    "tokens": int,
    "rank": int,
    "where": str,
    "first": int,
    "count": int,
}
