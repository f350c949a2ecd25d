"""``attention``: scaled_dot_product_attention forward and backward by dtype, and which backend really runs.

Which backend runs is not taken from what torch says it would choose: recorded are the operators that are dispatched in
a forward and a backward pass, and the nodes that the forward pass left for the backward one, once without a wish and
once for each backend alone. The full check names the kernels that ran on an accelerator, too.

Faults: see `arithmetic`; ``where=flash`` or ``where=padded`` chooses.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.doctor.arithmetic import DTYPES, Bench, name_of, spread
from hf_rocm_tune.doctor.findings import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured import Again, with_evidence
from hf_rocm_tune.machine.child import step

FLAG = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
TRAINED = ("bfloat16", "float16")
"""The dtypes that have fused kernels; float32 has none on most cards, and nobody trains in it here."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
LABELS = ("the queries", "the keys", "the values")
_OPERATORS = {name: f"scaleddotproduct{name}attention" for name in ("flash", "efficient", "cudnn")}
_KERNEL_PARTS = ("attn", "attention", "fmha", "flash", "bwd", "softmax")

Backends = Mapping[str, Mapping[str, Mapping[str, str]]]
"""dtype to wish (``default`` for none) to ``forward`` and ``backward`` (the backend that ran) or ``refused`` (why)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention.

    Attributes:
        name: what is special about it.
        sizes: batch, heads, heads of keys and values, length, size of a head.
        causal: a query sees no later key.
        padding: keys at the beginning of the first example that are hidden; its first rows see only themselves.
        heads_last: on the device, the tensors are views of ``(batch, length, heads, dim)``, as models have them.
    """

    name: str
    sizes: tuple[int, int, int, int, int]
    causal: bool = False
    padding: int = 0
    heads_last: bool = False

    def inputs(self, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Query, key, value and the gradient of the output, on the CPU."""
        batch, heads, key_heads, length, dim = self.sizes
        return [
            spread((batch, number, length, dim), dtype, generator) for number in (heads, key_heads, key_heads, heads)
        ]

    def hidden(self) -> Tensor:
        """What a query does not see: bool, ``(batch, 1, length, length)`` or broadcastable."""
        batch, _, _, length, _ = self.sizes
        hidden = torch.zeros(length, length, dtype=torch.bool)
        if self.causal or self.padding:
            hidden = torch.ones_like(hidden).triu(1)
        if self.padding:
            hidden = hidden.expand(batch, 1, -1, -1).clone()
            hidden[0, :, :, : self.padding] = True
            hidden[0, :, range(self.padding), range(self.padding)] = False
        return hidden


CASES = (
    # Wrong where V is not contiguous (ROCm/pytorch#3230), and with a mask (pytorch#147460).
    Case(name="causal, length 62, heads last", sizes=(2, 3, 3, 62, 128), causal=True, heads_last=True),
    Case(name="padded, length 77", sizes=(2, 2, 2, 77, 64), padding=13),
    Case(name="causal, grouped heads", sizes=(1, 4, 2, 64, 64), causal=True),
)
FULL_CASES = (
    Case(name="causal, length 1024", sizes=(1, 2, 2, 1024, 128), causal=True, heads_last=True),
    Case(name="causal, length 333, dim 80", sizes=(1, 2, 2, 333, 80), causal=True),
    Case(name="length 512, dim 256", sizes=(1, 1, 1, 512, 256)),
)
PLAIN = Case(name="causal", sizes=(1, 2, 2, 128, 64), causal=True, heads_last=True)
"""What training runs, for finding out which backend takes it."""


def formula(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """Attention, step by step."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def attention(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Run attention every way: one finding on the results, one on what runs.

    Where no fused backend runs on ROCm, another process finds out whether one does with AOTriton's flag.

    Args:
        request: ``device``, ``address``, ``hip``; ``full``: longer sequences and other head sizes; ``seed``; ``fault``;
            ``first`` and ``slow``: of the first process, whose results are not looked at again.
    """
    with Bench(request) as bench:
        backends = {name_of(dtype): _backends(bench, dtype) for dtype in DTYPES}
        if request["first"]:
            return with_flag(request["first"], backends, request["slow"])
        for dtype in DTYPES:
            for case in CASES + FULL_CASES if request.get("full") else CASES:
                _compare(bench, dtype, case, backends[name_of(dtype)])
        kernels = []
        for dtype in DTYPES if request.get("full") and bench.device.type == "cuda" else ():
            step(f"profiling {name_of(dtype)} attention")
            kernels.append(f"kernels in {name_of(dtype)}: {', '.join(_kernels(bench, dtype))}")
        gradients = all("gradient" in problem["case"] for problem in bench.problems)
        right = bench.verdict("attention_right", "attention_gradient_wrong" if gradients else "attention_wrong")
    findings = [right, what_runs(request["device"], backends, kernels)]
    slow = unfused(backends)
    if slow and request.get("hip") and os.environ.get(FLAG) != "1":
        return Again(findings=findings, environ={FLAG: "1"}, words=f"with {FLAG}=1", request={"slow": slow})
    return findings


def what_runs(device: str, backends: Backends, kernels: Sequence[str] = ()) -> Finding:
    """The finding on the backends that ran without a wish."""
    for dtype in TRAINED:
        if "refused" in backends[dtype]["default"]:
            why = backends[dtype]["default"]["refused"]
            return unknown(f"no backend runs {dtype} attention: {why}", subject=device)
    lines, slow = [*_lines(backends), *kernels], unfused(backends)
    if not slow:
        return from_row("attention_fused", subject=device, evidence=lines)
    for name, way in backends[slow[0]].items():
        if name in ("flash", "efficient") and "refused" in way:
            lines.append(f"{slow[0]}, {name} refused: {way['refused'][:300]}")
    return from_row("attention_unfused", subject=device, evidence=lines, dtypes=" and ".join(slow))


def with_flag(first: list[Finding], backends: Backends, slow: Sequence[str]) -> list[Finding]:
    """The findings of a process without AOTriton's flag, and what one with it has found out."""
    *others, runs = first
    if unfused(backends):
        return [*others, *with_evidence([runs], f"with {FLAG}=1: the same")]
    lines = [*runs.evidence, *(f"with {FLAG}=1: {line}" for line in _lines(backends))]
    told = {"flag": FLAG, "dtypes": " and ".join(slow)}
    return [*others, from_row("attention_needs_flag", subject=runs.subject, evidence=lines, **told)]


def unfused(backends: Backends) -> list[str]:
    """The training dtypes in which a pass without a wish goes through the math path."""
    return [dtype for dtype in TRAINED if "math" in backends[dtype]["default"].values()]


def _lines(backends: Backends) -> Iterator[str]:
    for dtype, ways in backends.items():
        default = ways["default"]
        if "refused" in default:
            yield f"{dtype}: none"
            continue
        able = [name for name, way in ways.items() if name != "default" and "refused" not in way]
        said = f"{dtype}: {default['forward']} forward, {default['backward']} backward; possible are {', '.join(able)}"
        odd = [name for name in able if name not in (ways[name]["forward"], "math")]
        yield f"{said}; asked for {', '.join(odd)}, another one ran" if odd else said


class _Recorder(TorchDispatchMode):
    """Notes the names of all operators, also of those that the autograd engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _run(bench: Bench, case: Case, tensors: Sequence[Tensor], wish: str) -> tuple[list[Tensor], dict[str, str]]:
    """Output and gradients, and which backend ran each way."""
    *inputs, upstream = [_place(bench, tensor, case.heads_last) for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    mask = bench.move(~case.hidden()) if case.padding else None
    grouped = case.sizes[1] != case.sizes[2]
    recorder, backward = _Recorder(), _Recorder()
    with sdpa_kernel(BACKENDS[wish]) if wish in BACKENDS else nullcontext(), recorder:
        query, key, value = inputs
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=case.causal, enable_gqa=grouped
        )
    nodes = _nodes(output)
    with backward:
        gradients = torch.autograd.grad(output, inputs, upstream)
    back = {name for name in backward.names | nodes if "ackward" in name}
    return [output, *gradients], {"forward": backend_of(recorder.names), "backward": backend_of(back)}


def _backends(bench: Bench, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """What runs for each wish."""
    found: dict[str, dict[str, str]] = {}
    tensors = PLAIN.inputs(dtype, bench.generator)
    for wish in ("default", *BACKENDS):
        step(f"computing {name_of(dtype)} attention by {wish}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found[wish] = _run(bench, PLAIN, tensors, wish)[1]
            except RuntimeError as error:
                # torch warns of the reasons before it raises.
                texts = [*(str(one.message) for one in said), str(error)]
                lines = [" ".join(text.partition("(Triggered internally")[0].split()) for text in texts]
                found[wish] = {"refused": "; ".join(dict.fromkeys(filter(None, lines)))[:600]}
    return found


def _compare(bench: Bench, dtype: torch.dtype, case: Case, ways: Mapping[str, Mapping[str, str]]) -> None:
    """One case by every backend that runs at all."""
    tensors, hidden = case.inputs(dtype, bench.generator), case.hidden()
    right, rounded = (_differentiated([cast(one) for one in tensors], hidden) for cast in (Tensor.double, Tensor.clone))
    for wish in ("default", *(name for name in BACKENDS if "refused" not in ways[name])):
        label = f"{name_of(dtype)} attention by {wish}, {case.name}"
        step(f"computing {label}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reasons against a backend were taken down before
            try:
                found, _ = _run(bench, case, tensors, wish)
            except RuntimeError as error:
                # A backend may refuse a mask or a head size; torch itself, without a wish, has to find one that does
                # not.
                if wish in ("default", "math"):
                    bench.refused(label, error)
                continue
        bench.results(label, found, right, rounded, LABELS)


def _differentiated(tensors: Sequence[Tensor], hidden: Tensor) -> list[Tensor]:
    *inputs, upstream = tensors
    leaves = [tensor.requires_grad_() for tensor in inputs]
    output = formula(leaves[0], leaves[1], leaves[2], hidden)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


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


def backend_of(names: set[str]) -> str:
    """The backend whose operator is among these. ``math`` has none of its own in the backward pass."""
    plain = [name.replace("_", "").lower() for name in names]
    return next((backend for backend, part in _OPERATORS.items() if any(part in name for name in plain)), "math")


def _kernels(bench: Bench, dtype: torch.dtype) -> list[str]:
    """Names of the kernels that a forward and a backward pass run on an accelerator, without plain elementwise ones."""
    tensors = PLAIN.inputs(dtype, bench.generator)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _run(bench, PLAIN, tensors, "default")
        torch.cuda.synchronize(bench.device)
    names = {event.key for event in profile.key_averages()}
    return sorted(name[:120] for name in names if any(part in name.lower() for part in _KERNEL_PARTS))


def _place(bench: Bench, tensor: Tensor, heads_last: bool) -> Tensor:
    moved = bench.move(tensor.detach().transpose(1, 2).contiguous() if heads_last else tensor.detach())
    return moved.transpose(1, 2) if heads_last else moved
