"""Checks between the gradients and the new weights: false alarms over clean updates, faults found by seed, and cost.

``clean``: so many element updates of each optimizer, dtype and setting, all of them judged, and as many clippings;
``units``: each fault in torch's clipping or AdamW's step, once or always, with several seeds; ``faults``: the same in
whole trainings of a tiny LoRA model; ``cost``: what the checks launch and copy in a step with an 8B model's adapters.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from common import Figures, main, print_table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.errors import CorruptionError, MemoryFaultError
from hf_rocm_tune.train.arithmetic import StepVerdict
from hf_rocm_tune.train.update import UpdateChecks
from hf_rocm_tune.transfer import TransferReport

# ---- clean ----------------------------------------------------------------------------------------------------------

_ELEMENTS = 4096  # of a sample, here
SHAPES = [(256, 64), (4096,), (129, 77), (5000,)]
ADAM: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True, "weight_decay": 0.1},
    {"fused": True, "maximize": True, "betas": (0.5, 0.9), "eps": 1e-4},
]
CASES: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "AdamW": (torch.optim.AdamW, ADAM),
    "Adam": (torch.optim.Adam, ADAM),
    "SGD": (torch.optim.SGD, [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"weight_decay": 0.1}]),
    "AdamW, 8 bit": (bitsandbytes.optim.AdamW8bit, [{"weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-4}]),
    "AdamW, bitsandbytes' 32 bit": (bitsandbytes.optim.AdamW32bit, [{"weight_decay": 0.1}]),
}


def clean(wanted: int, seed: int) -> list[dict[str, Any]]:
    """Rows of optimizer, dtype, element updates, clippings and false alarms."""
    rows = []
    for name, (kind, options) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            row = {"optimizer": name, "dtype": str(dtype).removeprefix("torch."), "updates": 0, "clipped": 0}
            alarms = 0
            for given in options:
                made, clipped, wrong = _clean(kind, given, dtype, wanted // len(options), seed)
                row["updates"] += made
                row["clipped"] += clipped
                alarms += wrong
            rows.append({**row, "false alarms": alarms})
    return rows


def _clean(
    kind: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype, wanted: int, seed: int
) -> tuple[int, int, int]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in SHAPES]
    optimizer = kind(parameters, lr=1e-3, **options)
    checks = UpdateChecks(TransferReport(), on=True, elements=_ELEMENTS)
    checks.watch(optimizer, {})
    clip = checks.clipping(torch.nn.utils.clip_grad_norm_, lambda: None)
    judged = clipped = alarms = 0
    for step in itertools.count():
        size = 10.0 ** (step % 13 - 8)
        for each in parameters:
            each.grad = (torch.randn(each.shape) * size).to(dtype)
        clip(parameters, 1.0)
        clipped += sum(part.numel() for part, _ in checks._clipped) // 2
        alarms += checks.judge([each.tolist() for each in checks.pending()], can_repeat=True) != StepVerdict.GO_ON
        optimizer.step()
        judged += sum(min(_elements_of(kind), each.numel()) for each in parameters)
        alarms += checks.judge([each.tolist() for each in checks.pending()], can_repeat=True) != StepVerdict.GO_ON
        if judged >= wanted:
            return judged, clipped, alarms
    raise AssertionError


def _elements_of(kind: Any) -> int:
    return 256 if kind is bitsandbytes.optim.AdamW8bit else _ELEMENTS


# ---- faults in whole trainings --------------------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


ADAM_MODULE: Any = importlib.import_module("torch.optim.adam")


def _in_adam(change: Callable[..., None]) -> Callable[..., Any]:
    """The fault within torch's own step, in the calls of a step."""

    def harm(when: Callable[[int], bool]) -> Any:
        stock, calls = ADAM_MODULE.adam, itertools.count()

        def wrong(
            new: list[Any], grads: list[Any], first: list[Any], second: list[Any], *rest: Any, **more: Any
        ) -> None:
            old = [each.clone() for each in new]
            stock(new, grads, first, second, *rest, **more)
            if new and when(next(calls)):
                for each, before, one, two in zip(new, old, first, second, strict=True):
                    change(each, before, one, two)

        return replaced(ADAM_MODULE, "adam", wrong)

    return harm


def _clips(change: Callable[[list[Any], Any], Any]) -> Callable[..., Any]:
    """The fault within torch's clipping, which Accelerate calls."""

    def harm(when: Callable[[int], bool]) -> Any:
        stock, calls = torch.nn.utils.clip_grads_with_norm_, itertools.count()

        def wrong(parameters: Any, max_norm: float, total: Any, *rest: Any, **more: Any) -> None:
            parameters = list(parameters)
            stock(parameters, max_norm, total, *rest, **more)
            if when(next(calls)):
                change([each.grad for each in parameters if each.grad is not None], total)

        return replaced(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", wrong)

    return harm


def _norms(when: Callable[[int], bool]) -> Any:
    stock, calls = torch.nn.utils.clip_grad._get_total_norm, itertools.count()

    def wrong(*given: Any, **more: Any) -> Any:
        found = stock(*given, **more)
        return found * 3 if when(next(calls)) else found

    return replaced(torch.nn.utils.clip_grad, "_get_total_norm", wrong)


FAULTS: dict[str, Callable[[Callable[[int], bool]], Any]] = {
    "update: against the gradient": _in_adam(lambda new, old, one, two: new.copy_(2 * old - new)),
    "update: lost": _in_adam(lambda new, old, one, two: new.copy_(old)),
    "update: twice as far": _in_adam(lambda new, old, one, two: new.copy_(2 * new - old)),
    "first moment: wrong sign": _in_adam(lambda new, old, one, two: one.neg_()),
    "second moment: too large": _in_adam(lambda new, old, one, two: two.mul_(1.5)),
    "second moment: zero": _in_adam(lambda new, old, one, two: two.zero_()),
    "clipping: left out": _clips(lambda grads, total: [each.mul_(total.item()) for each in grads]),
    "clipping: half": _clips(lambda grads, total: [each.mul_(0.5) for each in grads]),
    "clipping: wrong sign": _clips(lambda grads, total: [each.neg_() for each in grads]),
    "norm: three times": _norms,
}
STEPS = 6


def faults(kinds: list[str], seeds: int, directory: Path) -> list[dict[str, Any]]:
    """Rows of fault, when, runs, how many were recovered (adapter equal to the clean one), ended, and silent."""
    from datasets import Dataset

    from tests import tiny
    from tests.train.trainers import VerifiedPlain, build

    model = tiny.build("llama3", directory / "models")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 500, (46, 16), generator=generator).tolist()
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])

    def run(seed: int) -> dict[str, Any]:
        sizes = {"max_steps": STEPS, "seed": seed, "max_grad_norm": 0.05, "learning_rate": 1e-3}
        trainer = build(VerifiedPlain, model, data, directory / "out", ours={}, save_strategy="no", **sizes)
        trainer.train()
        return copy.deepcopy(
            {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
        )

    rows = []
    right = {seed: run(seed) for seed in range(seeds)}
    for kind in kinds:
        for when in ("once", "always"):
            row = {"fault": kind, "when": when, "runs": seeds, "recovered": 0, "ended": 0, "silent": 0}
            for seed in range(seeds):
                at = seed % STEPS
                due = (lambda call, at=at: call == at) if when == "once" else (lambda call: True)
                try:
                    with FAULTS[kind](due):
                        found = run(seed)
                except (CorruptionError, MemoryFaultError):
                    row["ended"] += 1
                    continue
                same = all(torch.equal(found[name], right[seed][name]) for name in found)
                row["recovered" if same else "silent"] += 1
            rows.append(row)
            print(row, flush=True)
    return rows


def units(seeds: int) -> list[dict[str, Any]]:
    """As `faults`, of clipping and AdamW's step over a few tensors, without a model: seconds for all."""
    rows = []
    for kind, harm in FAULTS.items():
        for when in ("once", "always"):
            row = {"fault": kind, "when": when, "runs": seeds, "recovered": 0, "ended": 0, "silent": 0}
            for seed in range(seeds):
                at = seed % STEPS
                due = (lambda call, at=at: call == at) if when == "once" else (lambda call: True)
                with harm(due):
                    row[_unit(seed)] += 1
            rows.append(row)
    return rows


def _unit(seed: int) -> str:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=bool(seed % 2))
    checks = UpdateChecks(TransferReport(), on=True)
    checks.watch(optimizer, {})
    clip, outcome = checks.clipping(torch.nn.utils.clip_grad_norm_, lambda: None), "silent"
    for _ in range(STEPS):
        gradients = [torch.randn(each.shape) for each in parameters]
        for _attempt in range(3):
            for each, grad in zip(parameters, gradients, strict=True):
                each.grad = grad.clone()
            clip(parameters, 0.05)
            verdict = checks.judge([each.tolist() for each in checks.pending()], can_repeat=True)
            if verdict != StepVerdict.REPEAT:
                break
            outcome = "recovered"
        if verdict == StepVerdict.END:
            return "ended"
        optimizer.step()
        try:
            checks.check_now()
        except CorruptionError:
            return "ended"
    return outcome


# ---- cost -----------------------------------------------------------------------------------------------------------

LAYER = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024), "o": (4096, 4096)}
LAYER |= {"gate": (4096, 14336), "up": (4096, 14336), "down": (14336, 4096)}
LAYERS, RANK, TOKENS = 32, 16, 2048
_LAUNCH, _MEMORY, _LINK, _OPERATIONS = (
    5e-6,
    640e9,
    12e9,
    50e12,
)  # seconds; bytes a second; of an RX 7900 XT, as achieved


class Counted(TorchDispatchMode):
    """Counts operations that launch a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if any(part in name for part in ("view", "detach", "slice", "split", "alias", "_unsafe", "reshape", "expand")):
            return out
        self.launches += 1
        tensors = [each for each in [*torch.utils._pytree.tree_leaves((args, out))] if isinstance(each, torch.Tensor)]
        self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
        return out


def cost() -> dict[str, Any]:
    """Of one step with LoRA on all linear layers of an 8B model, rank 16, in float32."""
    shapes = [shape for into, out in LAYER.values() for shape in ((RANK, into), (out, RANK))] * LAYERS
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    checks = UpdateChecks(TransferReport(), on=True)
    checks.watch(optimizer, {})
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    spent = {True: [], False: []}
    counted: dict[bool, Counted] = {}
    read = 0
    for turn in range(6):
        on = turn % 2 == 0
        stock = torch.nn.utils.clip_grad_norm_
        clip = checks.clipping(stock, lambda: None) if on else stock
        checks.refusal = None if on else "off"
        begun = time.process_time()
        with Counted() as counts:
            clip(parameters, 1.0)
            optimizer.step()
        spent[on].append(time.process_time() - begun)
        counted[on] = counts
        if on:
            pending = checks.pending()
            read = sum(each.numel() * each.element_size() for each in pending)
            checks.judge([each.tolist() for each in pending], can_repeat=True)
    launches = counted[True].launches - counted[False].launches
    nbytes = counted[True].nbytes - counted[False].nbytes
    products = sum(into * out for into, out in LAYER.values()) * LAYERS
    step = 3 * 2 * products * TOKENS / _OPERATIONS
    added = launches * _LAUNCH + nbytes / _MEMORY + read / _LINK
    return {
        "tensors": len(shapes),
        "gradient_bytes": sum(each.numel() * 4 for each in parameters),
        "added_launches": launches,
        "added_bytes_on_card": nbytes,
        "bytes_read": read,
        "added_waits": 0,
        "seconds_by_count": added,
        "share_of_step": added / step,
        "cpu_seconds_on": sorted(spent[True])[1],
        "cpu_seconds_off": sorted(spent[False])[1],
    }


PARTS = ["clean", "cost", "units", "faults"]


def run(wanted: argparse.Namespace) -> Figures:
    logging.disable(logging.WARNING)
    found: Figures = {}
    if "clean" in wanted.parts:
        found["clean"] = rows = clean(wanted.updates, wanted.seed)
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    if "cost" in wanted.parts:
        found["cost"] = costs = cost()
        print_table(["what", "figure"], [[name, value] for name, value in costs.items()])
    if "units" in wanted.parts:
        found["units"] = rows = units(wanted.seeds)
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    if "faults" in wanted.parts:
        with tempfile.TemporaryDirectory() as directory:
            found["faults"] = faults(wanted.kinds or list(FAULTS), wanted.seeds, Path(directory))
    return found


if __name__ == "__main__":
    main(
        run,
        __doc__,
        {
            "parts": {"nargs": "+", "choices": PARTS, "default": PARTS},
            "updates": {"type": int, "default": 1_000_000, "help": "element updates of each optimizer and dtype"},
            "kinds": {"nargs": "+", "choices": list(FAULTS), "help": "default: all faults"},
            "seeds": {"type": int, "default": 10, "help": "runs of each fault"},
            "seed": {"type": int, "default": 0},
        },
    )
