"""Layers against float64: attention and which of its backends really runs (``attention``), the layers around it
(``norm``), and 4-bit weights of bitsandbytes (``nf4``).

Which backend of attention runs is not taken from what torch says it would choose: recorded are the operators that are
dispatched in a forward and a backward pass, and the nodes that the forward pass left for the backward one, once without
a wish and once for each backend alone.

NF4 by its definition: a tensor is cut into blocks in memory order; each is divided by its largest magnitude (absmax)
and every quotient replaced by the number of the nearest of 16 values, two numbers a byte, the first in the upper half.
The values are those of Dettmers and others 2023 (QLoRA, arXiv:2305.14314, appendix E). With double quantisation, the
mean is taken off the absmax, and what is left is quantised in blocks of 256 to 8 bits.

Faults: see `arithmetic`; ``where=flash``, ``where=padded``, ``where=packed``, ``where=RMSNorm`` or ``where=product``
chooses; ``math`` lets attention fall back to the math path (``where=packed``); ``absmax`` doubles one scale of NF4.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rocm_tune.doctor.arithmetic import DTYPES, Bench, both_ways, name_of, product, signs, spread
from hf_rocm_tune.doctor.findings import Again, Finding, from_row, skipped, unknown, with_evidence
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

Backends = Mapping[str, Mapping[str, Mapping[str, str]]]
"""dtype to wish (``default`` for none) to ``forward`` and ``backward`` (the backend that ran) or ``refused`` (why)."""

SIZES = ((33, 1000), (7, 4096), (1, 63))
FULL_SIZES = ((512, 4096), (129, 11008))
CLASSES = 32_003
FULL_CLASSES = 128_256
_EPS = 1e-5

NF4_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NF4_SHAPES = ((192, 512),)
NF4_FULL_SHAPES = ((1024, 4096), (4096, 1024))
ROWS = (1, 2, 4, 8, 9, 33)
"""Rows of the other factor: bitsandbytes 0.50 has a kernel of its own for up to 8 of them on RDNA3."""
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float64,
)
_BLOCK = 64
_SAME_SCALE = 256
"""Elements in a row that have the same absmax, so that the numbers are the same for any usual size of blocks."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One call of attention.

    Attributes:
        name: what is special about it.
        sizes: batch, heads, heads of keys and values, length, size of a head.
        causal: a query sees no later key.
        padding: keys at the beginning of the first example that are hidden; its first rows see only themselves.
        packed: lengths of the examples that share each row; none sees another.
        heads_last: on the device, the tensors are views of ``(batch, length, heads, dim)``, as models have them.
    """

    name: str
    sizes: tuple[int, int, int, int, int]
    causal: bool = False
    padding: int = 0
    packed: tuple[int, ...] = ()
    heads_last: bool = False

    def inputs(self, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Query, key, value and the gradient of the output, on the CPU."""
        batch, heads, key_heads, length, dim = self.sizes
        return [
            spread((batch, number, length, dim), dtype, generator) for number in (heads, key_heads, key_heads, heads)
        ]

    @property
    def masked(self) -> bool:
        """Whether what is hidden is told by a mask, as it is of padded and of packed batches."""
        return bool(self.padding or self.packed)

    def hidden(self) -> Tensor:
        """What a query does not see: bool, ``(batch, 1, length, length)`` or broadcastable."""
        batch, _, _, length, _ = self.sizes
        hidden = torch.zeros(length, length, dtype=torch.bool)
        if self.causal or self.masked:
            hidden = torch.ones_like(hidden).triu(1)
        if self.packed:
            example = torch.arange(len(self.packed)).repeat_interleave(torch.tensor(self.packed))
            hidden = hidden | (example[:, None] != example)
        if self.padding:
            hidden = hidden.expand(batch, 1, -1, -1).clone()
            hidden[0, :, :, : self.padding] = True
            hidden[0, :, range(self.padding), range(self.padding)] = False
        return hidden


CASES = (
    # Wrong where V is not contiguous (ROCm/pytorch#3230), and with a mask (pytorch#147460).
    AttentionCase(name="causal, length 62, heads last", sizes=(2, 3, 3, 62, 128), causal=True, heads_last=True),
    AttentionCase(name="padded, length 77", sizes=(2, 2, 2, 77, 64), padding=13),
    AttentionCase(name="packed, lengths 30, 41 and 6", sizes=(1, 2, 2, 77, 64), packed=(30, 41, 6), heads_last=True),
    AttentionCase(name="causal, grouped heads", sizes=(1, 4, 2, 64, 64), causal=True),
)
FULL_CASES = (
    AttentionCase(name="causal, length 1024", sizes=(1, 2, 2, 1024, 128), causal=True, heads_last=True),
    AttentionCase(name="causal, length 333, dim 80", sizes=(1, 2, 2, 333, 80), causal=True),
    AttentionCase(name="length 512, dim 256", sizes=(1, 1, 1, 512, 256)),
)
PLAIN = AttentionCase(name="causal", sizes=(1, 2, 2, 128, 64), causal=True, heads_last=True)
MASKED = (
    AttentionCase(name="padded", sizes=(2, 2, 2, 128, 64), padding=32, heads_last=True),
    AttentionCase(name="packed", sizes=(1, 2, 2, 128, 64), packed=(40, 72, 16), heads_last=True),
)
"""What training runs, for finding out which backend takes it: whole batches, and those that transformers gives a mask
(masking_utils.py: none where a batch is causal and has neither padding nor packed positions)."""


def formula(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def attention(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Run attention every way: one finding on the results, one on what runs with a mask, one on what runs without;
    ``full``: longer sequences, other head sizes.

    Where no fused backend runs on ROCm, another process finds out whether one does with AOTriton's flag; ``first`` and
    ``slow`` are of the first process, whose results are not looked at again.
    """
    with Bench(request) as bench:
        backends = {name_of(dtype): _backends(bench, dtype) for dtype in DTYPES}
        if request["first"]:
            return with_flag(request["first"], backends, request["slow"])
        with_mask = {case.name: {dtype: _ran(bench, dtype, case) for dtype in TRAINED} for case in MASKED}
        for dtype in DTYPES:
            for case in CASES + FULL_CASES if request.get("full") else CASES:
                _compare(bench, dtype, case, backends[name_of(dtype)])
        gradients = all("gradient" in problem.case for problem in bench.problems)
        right = bench.verdict("attention_right", "attention_gradient_wrong" if gradients else "attention_wrong")
    slow = unfused(backends)
    masked = [] if slow else [what_runs_masked(request["device"], with_mask)]  # else it has the same cause
    findings = [right, *masked, what_runs(request["device"], backends)]
    if slow and request.get("hip") and os.environ.get(FLAG) != "1":
        return Again(findings=findings, environ={FLAG: "1"}, words=f"with {FLAG}=1", request={"slow": slow})
    return findings


def what_runs_masked(device: str, ran: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Finding:
    """The finding on the backends that ran with a mask, by case and dtype."""
    lines, slow = [], []
    for name, ways in ran.items():
        for dtype, way in ways.items():
            if "refused" in way:
                return unknown(f"no backend runs {dtype} {name} attention: {way['refused']}", subject=device)
            lines.append(f"{dtype}, {name}: {way['forward']} forward, {way['backward']} backward")
        slow += [name] if any("math" in way.values() for way in ways.values()) else []
    if not slow:
        return from_row("attention_masked_fused", subject=device, evidence=lines)
    return from_row("attention_masked_unfused", subject=device, evidence=lines, cases=" and ".join(slow))


def what_runs(device: str, backends: Backends) -> Finding:
    """The finding on the backends that ran without a wish."""
    for dtype in TRAINED:
        if "refused" in backends[dtype]["default"]:
            why = backends[dtype]["default"]["refused"]
            return unknown(f"no backend runs {dtype} attention: {why}", subject=device)
    lines, slow = [*_lines(backends)], unfused(backends)
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


def _run(
    bench: Bench, case: AttentionCase, tensors: Sequence[Tensor], wish: str
) -> tuple[list[Tensor], dict[str, str]]:
    *inputs, upstream = [_place(bench, tensor, case.heads_last) for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    mask = bench.move(~case.hidden()) if case.masked else None
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
    return {wish: _ran(bench, name_of(dtype), PLAIN, wish) for wish in ("default", *BACKENDS)}


def _ran(bench: Bench, dtype: str, case: AttentionCase, wish: str = "default") -> dict[str, str]:
    """The backend that runs each way, or why none does."""
    label = f"{dtype} attention by {wish}, {case.name}"
    step(f"computing {label}")
    if wish == "default" and bench.falls_back(label):
        wish = "math"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return _run(bench, case, case.inputs(getattr(torch, dtype), bench.generator), wish)[1]
        except RuntimeError as error:
            # torch warns of the reasons before it raises.
            texts = [*(str(one.message) for one in said), str(error)]
            lines = [" ".join(text.partition("(Triggered internally")[0].split()) for text in texts]
            return {"refused": "; ".join(dict.fromkeys(filter(None, lines)))[:600]}


def _compare(bench: Bench, dtype: torch.dtype, case: AttentionCase, ways: Mapping[str, Mapping[str, str]]) -> None:
    tensors, hidden = case.inputs(dtype, bench.generator), case.hidden()
    *inputs, upstream = tensors
    step_by_step = partial(formula, hidden=hidden)
    right = both_ways(step_by_step, [tensor.double() for tensor in inputs], upstream.double())
    rounded = both_ways(step_by_step, inputs, upstream)
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


def _nodes(output: Tensor) -> set[str]:
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


def _place(bench: Bench, tensor: Tensor, heads_last: bool) -> Tensor:
    moved = bench.move(tensor.detach().transpose(1, 2).contiguous() if heads_last else tensor.detach())
    return moved.transpose(1, 2) if heads_last else moved


def norm(request: Mapping[str, Any]) -> list[Finding]:
    """Normalisation, embedding, softmax and cross entropy, forward and backward, by dtype; with ``full`` larger sizes
    too."""
    full = bool(request.get("full"))
    with Bench(request) as bench:
        # A CPU adds the gradients of weight and bias up in the dtype, which many rows make as wrong as one likes.
        sizes = SIZES + FULL_SIZES if full and bench.device.type == "cuda" else SIZES
        for dtype in DTYPES:
            for size in sizes:
                _norms(bench, dtype, size)
            x, upstream = (spread((33, 1001), dtype, bench.generator) for _ in range(2))
            bench.layer(f"{name_of(dtype)} softmax", lambda x: x.softmax(-1), _softmax, [x], upstream, ["input"])
            _embedding(bench, dtype)
            _cross_entropy(bench, dtype, FULL_CLASSES if full else CLASSES)
        return [bench.verdict("norm_right", "norm_wrong")]


def _norms(bench: Bench, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, upstream = (spread(size, dtype, bench.generator) for _ in range(2))
    weight, bias = (spread(size[1:], dtype, bench.generator) for _ in range(2))
    labels, words = ("input", "weight", "bias"), f"of {size[0]} rows of {size[1]}"

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, size[1:], weight, bias, eps=_EPS)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, size[1:], weight, eps=_EPS)

    name = name_of(dtype)
    bench.layer(f"{name} LayerNorm {words}", layer_norm, normalised, [x, weight, bias], upstream, labels)
    bench.layer(f"{name} RMSNorm {words}", rms_norm, normalised, [x, weight], upstream, labels[:2])


def normalised(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """LayerNorm, and without a bias RMSNorm, over the last axis, step by step."""
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x * ((x * x).mean(-1, keepdim=True) + _EPS).rsqrt() * weight
    return y if bias is None else y + bias


def _softmax(x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True).detach()).exp()
    return powers / powers.sum(-1, keepdim=True)


def _cross_entropy(bench: Bench, dtype: torch.dtype, classes: int) -> None:
    """Mean cross entropy over a vocabulary; torch stores the logarithms of the probabilities in the dtype."""
    x = spread((17, classes), dtype, bench.generator)
    target = torch.randint(0, classes, (17,), generator=bench.generator)
    placed = bench.move(target)

    def formula(x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, keepdim=True).detach()
        return -(shifted - shifted.exp().sum(-1, keepdim=True).log()).gather(1, target[:, None]).mean()

    name, upstream = f"{name_of(dtype)} cross entropy of {classes} classes", torch.ones((), dtype=dtype)
    bench.layer(name, lambda x: functional.cross_entropy(x, placed), formula, [x], upstream, ["input"])


def _embedding(bench: Bench, dtype: torch.dtype) -> None:
    """A look-up and the sum of gradients by row, exact in any order: fewer than 256 ones and minus ones each."""
    words, width, picks = 211, 96, torch.randint(0, 211, (300,), generator=bench.generator)
    table, upstream = spread((words, width), dtype, bench.generator), signs((300, width), bench.generator).to(dtype)
    right = torch.zeros(words, width).index_add(0, picks, upstream.float()).to(dtype)
    name = f"{name_of(dtype)} embedding"
    step(f"computing {name}")
    weight = bench.move(table).requires_grad_()
    output = functional.embedding(bench.move(picks), weight)
    (gradient,) = torch.autograd.grad(output, weight, bench.move(upstream))
    bench.exact(f"{name}: output", output, table[picks])
    bench.exact(f"{name}: gradient of the table", gradient, right, gradient=True)


def nf4(request: Mapping[str, Any]) -> list[Finding]:
    """What bitsandbytes quantises, dequantises and multiplies in NF4; with ``full`` larger weights too.

    Each step gets right inputs, whatever the step before it made. Products with few rows, as in decoding, run kernels
    of their own.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return [skipped("bitsandbytes is not installed", subject=request["device"])]
    step("importing bitsandbytes")
    importlib.import_module("bitsandbytes")
    spoilt = (request.get("fault") or {}).get("kind") == "absmax"
    with Bench(request) as bench:
        try:
            shapes = NF4_SHAPES + NF4_FULL_SHAPES if request.get("full") else NF4_SHAPES
            for dtype, shape in itertools.product(NF4_DTYPES, shapes):
                weight = _Weight(bench, dtype, shape)
                weight.quantisation(_BLOCK)
                weight.quantisation(None)
                weight.dequantisation(spoilt)
                weight.double_quantisation()
                for rows in ROWS:
                    weight.products(rows)
        except (RuntimeError, NotImplementedError) as error:
            if bench.cases or isinstance(error, torch.AcceleratorError):
                raise
            reason = " ".join(str(error).split())[:300]
            return [from_row("nf4_refused", subject=request["device"], reason=reason)]
        return [bench.verdict("nf4_right", "nf4_wrong")]


class _Weight:
    """A weight whose elements lie next to levels, so that its numbers are certain; and bitsandbytes on one device."""

    def __init__(self, bench: Bench, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        self._library = importlib.import_module("bitsandbytes.functional")
        self._bench, self._dtype, self._shape = bench, dtype, shape
        self._label = f"{name_of(dtype)} NF4 {shape[0]}x{shape[1]}"
        elements = shape[0] * shape[1]
        self._numbers = torch.randint(0, 16, (elements,), generator=bench.generator)
        self._numbers[::_BLOCK] = 15  # every block holds its absmax
        scales = (0.5 + torch.rand(elements // _SAME_SCALE, generator=bench.generator)).to(dtype).float()
        self._scales = scales.repeat_interleave(_SAME_SCALE)
        self._values = self._decoded(self._numbers, self._scales)
        self._placed = bench.move(self._values.to(dtype))
        # The library's state for this shape, with the right numbers and scales in it.
        _, self._state = self._quantize()
        self._packed, self._state.absmax = self._place(self._numbers, self._scales)

    def quantisation(self, blocksize: int | None) -> None:
        """Quantise with blocks of that size, or of the size that bitsandbytes takes by itself."""
        label = f"{self._label}, {'default blocks' if blocksize is None else f'blocks of {blocksize}'}"
        step(f"quantising {label}")
        packed, state = self._quantize(blocksize=blocksize)
        self._bench.exact(f"{label}: absmax", state.absmax.view(-1), self._scales[:: state.blocksize])
        self._bench.exact(f"{label}: numbers", packed.view(-1), pack(self._numbers))

    def dequantisation(self, spoilt: bool) -> None:
        """The right numbers and scales back to values; ``spoilt`` doubles a scale first."""
        label = f"{self._label}, dequantised"
        step(f"computing {label}")
        if spoilt:
            self._state.absmax[self._state.absmax.numel() // 2] *= 2
        self._close(label, self._library.dequantize_4bit(self._packed, self._state), self._values, self._values.abs())

    def double_quantisation(self) -> None:
        label = f"{self._label}, double quantisation"
        step(f"computing {label}")
        _, state = self._quantize(compress_statistics=True)
        absmax = self._scales[::_BLOCK].double()
        code, offset = state.state2.code.cpu().double(), float(state.offset)
        scale = state.state2.absmax.cpu().double().repeat_interleave(256)[: absmax.numel()]
        quotients = (absmax - offset) / scale
        nearest = torch.bucketize(quotients, (code[1:] + code[:-1]) / 2)
        found = state.absmax.cpu().view(-1).long()
        # Near enough is right: bitsandbytes' own search does not always find the nearest number (seen on the CPU).
        accepted = torch.where((code[found] - quotients).abs() <= code.diff().max(), found, nearest)
        self._bench.exact(f"{label}: scales", state.absmax.view(-1), accepted.to(torch.uint8))

        part = code[accepted] * scale
        values = self._decoded(self._numbers, (part + offset).repeat_interleave(_BLOCK))
        sizes = self._decoded(self._numbers, (part.abs() + abs(offset)).repeat_interleave(_BLOCK)).abs()
        self._close(f"{label}: dequantised", self._library.dequantize_4bit(self._packed, state), values, sizes)
        for rows in ROWS[::3]:
            x = spread((rows, self._shape[1]), self._dtype, self._bench.generator)
            right = product(x, values.t(), self._dtype, roundings=4)
            self._bench.close(f"{label}, product with {rows} rows", self._multiply(x, self._packed, state), *right)

    def products(self, rows: int) -> None:
        """``x W'``, without and with a gradient, and the gradient of x."""
        outputs, width = self._shape
        label = f"{self._label}, product with {rows} rows"
        step(f"computing {label}")
        x, upstream = (spread((rows, size), self._dtype, self._bench.generator) for size in (width, outputs))
        right = product(x, self._values.t(), self._dtype, roundings=4)
        self._bench.close(label, self._multiply(x, self._packed, self._state), *right)
        leaf = self._bench.move(x).requires_grad_()
        output = self._multiply(leaf, self._packed, self._state)
        self._bench.close(f"{label}, in training", output, *right)
        (gradient,) = torch.autograd.grad(output, leaf, self._bench.move(upstream))
        back = product(upstream, self._values, self._dtype, roundings=4)
        self._bench.close(f"{label}: gradient", gradient, *back, gradient=True)

    def _quantize(self, **options: Any) -> tuple[Tensor, Any]:
        made: tuple[Tensor, Any] = self._library.quantize_4bit(
            self._placed, quant_type="nf4", **{"blocksize": _BLOCK, **options}
        )
        return made

    def _place(self, numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return self._bench.move(pack(numbers).view(-1, 1)), self._bench.move(scales[::_BLOCK].float())

    def _multiply(self, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        x = self._bench.move(x) if not x.requires_grad else x
        # Transposed, as the library's own layers have it: releases before 0.50 take it in no other way.
        result: Tensor = importlib.import_module("bitsandbytes").matmul_4bit(x, packed.t(), quant_state=state)
        return result

    def _decoded(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """What numbers stand for: float64 in the shape of the weight."""
        return (LEVELS[numbers] * scales.double()).view(self._shape)

    def _close(self, label: str, found: Tensor, values: Tensor, sizes: Tensor) -> None:
        """A few roundings in float32 of something of that size, then one to the dtype."""
        info = torch.finfo(self._dtype)
        error = 2 * torch.finfo(torch.float32).eps * sizes
        self._bench.close(label, found, values, error + info.eps / 2 * (values.abs() + error) + info.tiny)


def pack(numbers: Tensor) -> Tensor:
    """Two numbers a byte, the first in the upper half."""
    pairs = numbers.view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] << 4) | pairs[:, 1]
