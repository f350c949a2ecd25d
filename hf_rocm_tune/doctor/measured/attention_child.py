"""The child's half of ``attention``: scaled_dot_product_attention, forward and backward, by dtype and backend.

Which backend runs is not taken from what torch says it would choose: recorded are the operators that are dispatched in
a forward and a backward pass, and the nodes that the forward pass left for the backward one, once without a wish and
once for each backend alone. The full check names the kernels that ran on an accelerator, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.doctor.measured.attention_bounds import NAMES
from hf_rocm_tune.doctor.measured.attention_cases import Case, cases, plain_case
from hf_rocm_tune.doctor.measured.rounding import name_of
from hf_rocm_tune.doctor.measured.tally import Tally
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPERATORS = {name: f"scaleddotproduct{name}attention" for name in ("flash", "efficient", "cudnn")}
_KERNEL_PARTS = ("attn", "attention", "fmha", "flash", "bwd", "softmax")


@dataclass(frozen=True)
class _Passes:
    """What one call gave: results by name, and which backend ran each way."""

    results: dict[str, Tensor]
    forward: str
    backward: str


class _Recorder(TorchDispatchMode):
    """Notes the names of all operators, also of those that the autograd engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run attention every way.

    Args:
        request: ``device``, ``address``; ``full``: longer sequences and other head sizes; ``only_backends``: do not
            compare, only find out which backend runs; ``seed``; ``fault``, see `tally`.

    Returns:
        See `Tally.result`; ``backends``: dtype to name to ``forward`` and ``backward`` (the backend that ran) or
        ``refused`` (why none did), with the name ``default`` for no wish; ``apart``: largest difference between the
        outputs of flash and math by dtype; ``kernels``: names by dtype.
    """
    device = device_of(request)
    tally = Tally(request)
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    backends: dict[str, Any] = {}
    apart: dict[str, float] = {}
    kernels: dict[str, list[str]] = {}
    plains: dict[str, Case] = {}
    with Mover(device) as mover:
        for dtype in DTYPES:
            name = name_of(dtype)
            plains[name] = plain_case(dtype, generator)
            backends[name], outputs = _backends(mover, name, plains[name])
            if {"flash", "math"} <= outputs.keys():
                apart[name] = float((outputs["flash"].double() - outputs["math"].double()).abs().max())
            if request.get("only_backends"):
                continue
            for case in cases(dtype, generator, full=bool(request.get("full"))):
                for wish in ("default", *(one for one in BACKENDS if "refused" not in backends[name][one])):
                    _compare(mover, tally, name, case, wish)
        for name, plain in plains.items() if request.get("full") and device.type == "cuda" else ():
            step(f"profiling {name} attention")
            kernels[name] = _kernels(mover, plain)
    return tally.result(backends=backends, apart=apart, kernels=kernels)


def _backends(mover: Mover, dtype: str, case: Case) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What runs for each wish, and the outputs on the CPU."""
    found: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    for wish in ("default", *BACKENDS):
        step(f"computing {dtype} attention by {wish}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                passes = _run(mover, case, wish)
            except RuntimeError as error:
                found[wish] = {"refused": _reason(error, [str(one.message) for one in said])}
                continue
        found[wish] = {"forward": passes.forward, "backward": passes.backward}
        outputs[wish] = passes.results[NAMES[0]].detach().cpu()
    return found, outputs


def _reason(error: Exception, warned: list[str]) -> str:
    """Why a backend refused: torch warns of the reasons before it raises."""
    lines = [text.partition("(Triggered internally")[0].strip() for text in [*warned, str(error)]]
    return "; ".join(dict.fromkeys(" ".join(line.split()) for line in lines if line))[:600]


def _compare(mover: Mover, tally: Tally, dtype: str, case: Case, wish: str) -> None:
    label = f"{dtype} attention by {wish}, {case.name}"
    step(f"computing {label}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reasons against a backend were taken down before
        try:
            passes = _run(mover, case, wish)
        except RuntimeError as error:
            # A backend may refuse a mask or a head size; torch itself, without a wish, has to find one that does not.
            if wish in ("default", "math"):
                tally.refused(label, error)
            return
    for name in NAMES:
        tally.close(f"{label}: {name}", passes.results[name], case.right[name], gradient=name != NAMES[0])


def _run(mover: Mover, case: Case, wish: str) -> _Passes:
    inputs = [_place(mover, tensor, case.heads_last).requires_grad_() for tensor in case.inputs]
    upstream = _place(mover, case.upstream, case.heads_last)
    mask = None if case.mask is None else mover.move(case.mask, name="mask")
    recorder, backward = _Recorder(), _Recorder()
    with sdpa_kernel(BACKENDS[wish]) if wish in BACKENDS else nullcontext(), recorder:
        query, key, value = inputs
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, **case.options)
    backward.names |= _nodes(output)
    with backward:
        gradients = torch.autograd.grad(output, inputs, upstream)
    results = dict(zip(NAMES, (output, *gradients), strict=True))
    return _Passes(results, _ran(recorder.names), _ran({name for name in backward.names if "ackward" in name}))


def _nodes(output: Tensor) -> set[str]:
    """Names of the nodes of an output's graph."""
    found, seen, waiting = set(), set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return found


def _ran(names: set[str]) -> str:
    """The backend whose operator is among these. ``math`` has none of its own in the backward pass."""
    plain = [name.replace("_", "").lower() for name in names]
    return next((backend for backend, part in _OPERATORS.items() if any(part in name for name in plain)), "math")


def _kernels(mover: Mover, case: Case) -> list[str]:
    """Names of the kernels that a forward and a backward pass run on an accelerator, without plain elementwise ones."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        _run(mover, case, "default")
        torch.cuda.synchronize(mover.device)
    names = {event.key for event in profile.key_averages()}
    return sorted(name[:120] for name in names if any(part in name.lower() for part in _KERNEL_PARTS))


def _place(mover: Mover, tensor: Tensor, heads_last: bool) -> Tensor:
    moved = mover.move(tensor.transpose(1, 2).contiguous() if heads_last else tensor, name="attention")
    return moved.transpose(1, 2) if heads_last else moved
