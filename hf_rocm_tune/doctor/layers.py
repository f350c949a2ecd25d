"""Layers compared with float64: attention and the backend that runs it (``attention``), other layers (``norm``), and
4-bit weights of bitsandbytes (``nf4``).

The backend of attention is not asked from torch but recorded: from the operators that are dispatched in a forward and a
backward pass, and the autograd nodes of the output, once as torch chooses by default and once for each backend alone.

NF4 by its definition: a tensor is split into blocks in memory order; each is divided by its largest magnitude (absmax),
and every quotient replaced by the index of the nearest of 16 values, two indices per byte, the first in the upper half.
The values are those of Dettmers and others 2023 (QLoRA, arXiv:2305.14314, appendix E). With double quantisation, the
mean is subtracted from the absmax, and the rest is quantised to 8 bits in blocks of 256.

Injected faults: those of `arithmetic`, with ``where=flash``, ``where=padded``, ``where=packed``, ``where=RMSNorm`` or
``where=product``; ``math`` selects the math path of attention (``where=packed``); ``absmax`` doubles one scale of NF4.
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

from hf_rocm_tune.doctor.arithmetic import DTYPES, Comparison, both_ways, name_of, product, signs, spread
from hf_rocm_tune.doctor.findings import Again, Finding, from_row, skipped, unknown, with_evidence
from hf_rocm_tune.machine.child import step

FLAG = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
TRAINING_DTYPES = ("bfloat16", "float16")
"""The dtypes that have fused kernels; on most cards float32 has none."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
LABELS = ("the queries", "the keys", "the values")
_OPERATORS = {name: f"scaleddotproduct{name}attention" for name in ("flash", "efficient", "cudnn")}

Backends = Mapping[str, Mapping[str, Mapping[str, str]]]
"""By dtype and requested backend (or ``default``): the backends of ``forward`` and ``backward``, or why ``refused``."""

SIZES = ((33, 1000), (7, 4096), (1, 63))
FULL_SIZES = ((512, 4096), (129, 11008))
CLASSES = 32_003
FULL_CLASSES = 128_256
_EPS = 1e-5

NF4_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NF4_SHAPES = ((192, 512),)
NF4_FULL_SHAPES = ((1024, 4096), (4096, 1024))
ROWS = (1, 2, 4, 8, 9, 33)
"""Rows of the other factor: bitsandbytes 0.50 has a separate kernel for up to 8 of them on RDNA3."""
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
"""Consecutive elements with the same absmax, so that the indices are the same for any usual block size."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One call of attention.

    Attributes:
        name: for messages.
        sizes: batch, heads, heads of keys and values, length, size of a head.
        causal: a query does not attend to later keys.
        padding: masked keys at the beginning of the first example; the first queries attend only to themselves.
        packed: lengths of the examples in each row, which do not attend to each other.
        heads_last: on the device, the tensors are views of ``(batch, length, heads, dim)``, as in models.
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
        """Whether attention gets a mask, as for padded and packed batches."""
        return bool(self.padding or self.packed)

    def hidden(self) -> Tensor:
        """The keys that a query does not attend to: bool, ``(batch, 1, length, length)`` or broadcastable."""
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
    # Reported as wrong: V that is not contiguous (ROCm/pytorch#3230), and a mask (pytorch#147460).
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
"""The batches of training whose backend is recorded: without a mask, and those for which transformers makes one
(masking_utils.py: none if a batch is causal and has neither padding nor packed positions)."""


def formula(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query / math.sqrt(query.shape[-1])) @ key.mT
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def attention(request: Mapping[str, Any]) -> list[Finding] | Again:
    """Findings on the results of all backends, on the backends that run with a mask, and on those that run without.

    If no fused backend runs on ROCm, another process tries AOTriton's flag; its request has the findings of the first
    process (``first``) and the dtypes without a fused backend (``slow``). ``full``: longer sequences, other head sizes.
    """
    with Comparison(request) as compare:
        backends = {name_of(dtype): _backends(compare, dtype) for dtype in DTYPES}
        if request["first"]:
            return with_flag(request["first"], backends, request["slow"])
        with_mask = {case.name: {dtype: _ran(compare, dtype, case) for dtype in TRAINING_DTYPES} for case in MASKED}
        for dtype in DTYPES:
            for case in CASES + FULL_CASES if request.get("full") else CASES:
                _compare(compare, dtype, case, backends[name_of(dtype)])
        gradients = all("gradient" in problem.case for problem in compare.problems)
        right = compare.verdict("attention_right", "attention_gradient_wrong" if gradients else "attention_wrong")
    slow = unfused(backends)
    masked = [] if slow else [masked_backends(request["device"], with_mask)]  # slow without a mask has the same cause
    findings = [right, *masked, default_backends(request["device"], backends)]
    if slow and request.get("hip") and os.environ.get(FLAG) != "1":
        return Again(findings=findings, environ={FLAG: "1"}, words=f"with {FLAG}=1", request={"slow": slow})
    return findings


def masked_backends(device: str, ran: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Finding:
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


def default_backends(device: str, backends: Backends) -> Finding:
    """The finding on the backends that ran without a mask, by torch's choice."""
    for dtype in TRAINING_DTYPES:
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
    """The findings of a process without AOTriton's flag, with the result of this one, which has it."""
    *others, runs = first
    if unfused(backends):
        return [*others, *with_evidence([runs], f"with {FLAG}=1: the same")]
    lines = [*runs.evidence, *(f"with {FLAG}=1: {line}" for line in _lines(backends))]
    values = {"flag": FLAG, "dtypes": " and ".join(slow)}
    return [*others, from_row("attention_needs_flag", subject=runs.subject, evidence=lines, **values)]


def unfused(backends: Backends) -> list[str]:
    """The training dtypes in which torch chooses the math path."""
    return [dtype for dtype in TRAINING_DTYPES if "math" in backends[dtype]["default"].values()]


def _lines(backends: Backends) -> Iterator[str]:
    for dtype, ways in backends.items():
        default = ways["default"]
        if "refused" in default:
            yield f"{dtype}: none"
            continue
        able = [name for name, way in ways.items() if name != "default" and "refused" not in way]
        line = f"{dtype}: {default['forward']} forward, {default['backward']} backward; available: {', '.join(able)}"
        others = [name for name in able if name not in (ways[name]["forward"], "math")]
        yield f"{line}; {', '.join(others)} requested, another one ran" if others else line


class _Recorder(TorchDispatchMode):
    """Records the names of all operators, including those that the autograd engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _run(
    compare: Comparison, case: AttentionCase, tensors: Sequence[Tensor], requested: str
) -> tuple[list[Tensor], dict[str, str]]:
    *inputs, upstream = [_place(compare, tensor, case.heads_last) for tensor in tensors]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    mask = compare.move(~case.hidden()) if case.masked else None
    grouped = case.sizes[1] != case.sizes[2]
    recorder, backward = _Recorder(), _Recorder()
    with sdpa_kernel(BACKENDS[requested]) if requested in BACKENDS else nullcontext(), recorder:
        query, key, value = inputs
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=case.causal, enable_gqa=grouped
        )
    nodes = _nodes(output)
    with backward:
        gradients = torch.autograd.grad(output, inputs, upstream)
    back = {name for name in backward.names | nodes if "ackward" in name}
    return [output, *gradients], {"forward": backend_of(recorder.names), "backward": backend_of(back)}


def _backends(compare: Comparison, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    return {requested: _ran(compare, name_of(dtype), PLAIN, requested) for requested in ("default", *BACKENDS)}


def _ran(compare: Comparison, dtype: str, case: AttentionCase, requested: str = "default") -> dict[str, str]:
    """The backend of each direction, or why none runs."""
    label = f"{dtype} attention by {requested}, {case.name}"
    step(f"computing {label}")
    if requested == "default" and compare.falls_back(label):
        requested = "math"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return _run(compare, case, case.inputs(getattr(torch, dtype), compare.generator), requested)[1]
        except RuntimeError as error:
            # torch gives the reasons as warnings before it raises.
            texts = [*(str(one.message) for one in caught), str(error)]
            lines = [" ".join(text.partition("(Triggered internally")[0].split()) for text in texts]
            return {"refused": "; ".join(dict.fromkeys(filter(None, lines)))[:600]}


def _compare(
    compare: Comparison, dtype: torch.dtype, case: AttentionCase, ways: Mapping[str, Mapping[str, str]]
) -> None:
    tensors, hidden = case.inputs(dtype, compare.generator), case.hidden()
    *inputs, upstream = tensors
    reference = partial(formula, hidden=hidden)
    expected = both_ways(reference, [tensor.double() for tensor in inputs], upstream.double())
    rounded = both_ways(reference, inputs, upstream)
    for requested in ("default", *(name for name in BACKENDS if "refused" not in ways[name])):
        label = f"{name_of(dtype)} attention by {requested}, {case.name}"
        step(f"computing {label}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reasons against a backend have been recorded by `_ran`
            try:
                found, _ = _run(compare, case, tensors, requested)
            except RuntimeError as error:
                # A single backend may refuse a mask or a head size; torch's own choice and the math path may not.
                if requested in ("default", "math"):
                    compare.refused(label, error)
                continue
        compare.results(label, found, expected, rounded, LABELS)


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
    """The backend whose operator is among these; ``math`` if none is, as it has no operator of its own in backward."""
    plain = [name.replace("_", "").lower() for name in names]
    return next((backend for backend, part in _OPERATORS.items() if any(part in name for name in plain)), "math")


def _place(compare: Comparison, tensor: Tensor, heads_last: bool) -> Tensor:
    moved = compare.move(tensor.detach().transpose(1, 2).contiguous() if heads_last else tensor.detach())
    return moved.transpose(1, 2) if heads_last else moved


def norm(request: Mapping[str, Any]) -> list[Finding]:
    """Normalisation, embedding, softmax and cross entropy, forward and backward; ``full``: larger sizes, too."""
    full = bool(request.get("full"))
    with Comparison(request) as compare:
        # A CPU sums the gradients of weight and bias in the dtype itself, whose error has no bound for many rows.
        sizes = SIZES + FULL_SIZES if full and compare.device.type == "cuda" else SIZES
        for dtype in DTYPES:
            for size in sizes:
                _norms(compare, dtype, size)
            x, upstream = (spread((33, 1001), dtype, compare.generator) for _ in range(2))
            compare.layer(f"{name_of(dtype)} softmax", lambda x: x.softmax(-1), _softmax, [x], upstream, ["input"])
            _embedding(compare, dtype)
            _cross_entropy(compare, dtype, FULL_CLASSES if full else CLASSES)
        return [compare.verdict("norm_right", "norm_wrong")]


def _norms(compare: Comparison, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, upstream = (spread(size, dtype, compare.generator) for _ in range(2))
    weight, bias = (spread(size[1:], dtype, compare.generator) for _ in range(2))
    labels, which = ("input", "weight", "bias"), f"of {size[0]} rows of {size[1]}"

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, size[1:], weight, bias, eps=_EPS)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, size[1:], weight, eps=_EPS)

    name = name_of(dtype)
    compare.layer(f"{name} LayerNorm {which}", layer_norm, normalised, [x, weight, bias], upstream, labels)
    compare.layer(f"{name} RMSNorm {which}", rms_norm, normalised, [x, weight], upstream, labels[:2])


def normalised(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """LayerNorm, or without a bias RMSNorm, over the last axis."""
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x * ((x * x).mean(-1, keepdim=True) + _EPS).rsqrt() * weight
    return y if bias is None else y + bias


def _softmax(x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True).detach()).exp()
    return powers / powers.sum(-1, keepdim=True)


def _cross_entropy(compare: Comparison, dtype: torch.dtype, classes: int) -> None:
    """Mean cross entropy over a vocabulary; torch stores the logarithms of the probabilities in the dtype."""
    x = spread((17, classes), dtype, compare.generator)
    target = torch.randint(0, classes, (17,), generator=compare.generator)
    placed = compare.move(target)

    def formula(x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, keepdim=True).detach()
        return -(shifted - shifted.exp().sum(-1, keepdim=True).log()).gather(1, target[:, None]).mean()

    name, upstream = f"{name_of(dtype)} cross entropy of {classes} classes", torch.ones((), dtype=dtype)
    compare.layer(name, lambda x: functional.cross_entropy(x, placed), formula, [x], upstream, ["input"])


def _embedding(compare: Comparison, dtype: torch.dtype) -> None:
    """A lookup, and the sum of gradients by row: fewer than 256 ones and minus ones each, so exact in any order."""
    rows, width, tokens = 211, 96, torch.randint(0, 211, (300,), generator=compare.generator)
    table, upstream = spread((rows, width), dtype, compare.generator), signs((300, width), compare.generator).to(dtype)
    expected = torch.zeros(rows, width).index_add(0, tokens, upstream.float()).to(dtype)
    name = f"{name_of(dtype)} embedding"
    step(f"computing {name}")
    weight = compare.move(table).requires_grad_()
    output = functional.embedding(compare.move(tokens), weight)
    (gradient,) = torch.autograd.grad(output, weight, compare.move(upstream))
    compare.exact(f"{name}: output", output, table[tokens])
    compare.exact(f"{name}: gradient of the table", gradient, expected, gradient=True)


def nf4(request: Mapping[str, Any]) -> list[Finding]:
    """Quantisation, dequantisation and products of bitsandbytes in NF4; ``full``: larger weights, too.

    Each step gets correct inputs, whatever the step before it returned. Products with few rows, as in decoding, have
    kernels of their own.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return [skipped("bitsandbytes is not installed", subject=request["device"])]
    step("importing bitsandbytes")
    importlib.import_module("bitsandbytes")
    double_absmax = (request.get("fault") or {}).get("kind") == "absmax"
    with Comparison(request) as compare:
        try:
            shapes = NF4_SHAPES + NF4_FULL_SHAPES if request.get("full") else NF4_SHAPES
            for dtype, shape in itertools.product(NF4_DTYPES, shapes):
                weight = _Weight(compare, dtype, shape)
                weight.quantisation(_BLOCK)
                weight.quantisation(None)
                weight.dequantisation(double_absmax)
                weight.double_quantisation()
                for rows in ROWS:
                    weight.products(rows)
        except (RuntimeError, NotImplementedError) as error:
            if compare.cases or isinstance(error, torch.AcceleratorError):
                raise
            reason = " ".join(str(error).split())[:300]
            return [from_row("nf4_refused", subject=request["device"], reason=reason)]
        return [compare.verdict("nf4_right", "nf4_wrong")]


class _Weight:
    """A weight whose elements are levels of NF4, so that its indices are known; and bitsandbytes' operations on it."""

    def __init__(self, compare: Comparison, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        self._library = importlib.import_module("bitsandbytes.functional")
        self._compare, self._dtype, self._shape = compare, dtype, shape
        self._label = f"{name_of(dtype)} NF4 {shape[0]}x{shape[1]}"
        elements = shape[0] * shape[1]
        self._indices = torch.randint(0, 16, (elements,), generator=compare.generator)
        self._indices[::_BLOCK] = 15  # every block holds its absmax
        scales = (0.5 + torch.rand(elements // _SAME_SCALE, generator=compare.generator)).to(dtype).float()
        self._scales = scales.repeat_interleave(_SAME_SCALE)
        self._values = self._decoded(self._indices, self._scales)
        self._placed = compare.move(self._values.to(dtype))
        # The library's state for this shape, with the correct indices and scales.
        _, self._state = self._quantize()
        self._packed, self._state.absmax = self._place(self._indices, self._scales)

    def quantisation(self, blocksize: int | None) -> None:
        """Quantise with blocks of that size; None: of the library's default size."""
        label = f"{self._label}, {'default blocks' if blocksize is None else f'blocks of {blocksize}'}"
        step(f"quantising {label}")
        packed, state = self._quantize(blocksize=blocksize)
        self._compare.exact(f"{label}: absmax", state.absmax.view(-1), self._scales[:: state.blocksize])
        self._compare.exact(f"{label}: indices", packed.view(-1), pack(self._indices))

    def dequantisation(self, double_absmax: bool) -> None:
        """Dequantise the correct indices and scales; ``double_absmax``: a fault, one scale is doubled before."""
        label = f"{self._label}, dequantised"
        step(f"computing {label}")
        if double_absmax:
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
        # A near one is accepted: bitsandbytes' search does not always find the nearest (seen on the CPU).
        accepted = torch.where((code[found] - quotients).abs() <= code.diff().max(), found, nearest)
        self._compare.exact(f"{label}: scales", state.absmax.view(-1), accepted.to(torch.uint8))

        part = code[accepted] * scale
        values = self._decoded(self._indices, (part + offset).repeat_interleave(_BLOCK))
        sizes = self._decoded(self._indices, (part.abs() + abs(offset)).repeat_interleave(_BLOCK)).abs()
        self._close(f"{label}: dequantised", self._library.dequantize_4bit(self._packed, state), values, sizes)
        for rows in ROWS[::3]:
            x = spread((rows, self._shape[1]), self._dtype, self._compare.generator)
            expected = product(x, values.t(), self._dtype, roundings=4)
            self._compare.close(f"{label}, product with {rows} rows", self._multiply(x, self._packed, state), *expected)

    def products(self, rows: int) -> None:
        """``x W'``, without and with a gradient, and the gradient of x."""
        outputs, width = self._shape
        label = f"{self._label}, product with {rows} rows"
        step(f"computing {label}")
        x, upstream = (spread((rows, size), self._dtype, self._compare.generator) for size in (width, outputs))
        expected = product(x, self._values.t(), self._dtype, roundings=4)
        self._compare.close(label, self._multiply(x, self._packed, self._state), *expected)
        leaf = self._compare.move(x).requires_grad_()
        output = self._multiply(leaf, self._packed, self._state)
        self._compare.close(f"{label}, in training", output, *expected)
        (gradient,) = torch.autograd.grad(output, leaf, self._compare.move(upstream))
        back = product(upstream, self._values, self._dtype, roundings=4)
        self._compare.close(f"{label}: gradient", gradient, *back, gradient=True)

    def _quantize(self, **options: Any) -> tuple[Tensor, Any]:
        made: tuple[Tensor, Any] = self._library.quantize_4bit(
            self._placed, quant_type="nf4", **{"blocksize": _BLOCK, **options}
        )
        return made

    def _place(self, indices: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return self._compare.move(pack(indices).view(-1, 1)), self._compare.move(scales[::_BLOCK].float())

    def _multiply(self, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        x = self._compare.move(x) if not x.requires_grad else x
        # Transposed, as in the library's own layers: releases before 0.50 accept nothing else.
        result: Tensor = importlib.import_module("bitsandbytes").matmul_4bit(x, packed.t(), quant_state=state)
        return result

    def _decoded(self, indices: Tensor, scales: Tensor) -> Tensor:
        """The values of indices: float64 in the shape of the weight."""
        return (LEVELS[indices] * scales.double()).view(self._shape)

    def _close(self, label: str, found: Tensor, values: Tensor, sizes: Tensor) -> None:
        """Compare, with a bound of a few roundings in float32 of values of these sizes and one to the dtype."""
        info = torch.finfo(self._dtype)
        error = 2 * torch.finfo(torch.float32).eps * sizes
        self._compare.close(label, found, values, error + info.eps / 2 * (values.abs() + error) + info.tiny)


def pack(indices: Tensor) -> Tensor:
    """Two indices of 4 bits per byte, the first in the upper half."""
    pairs = indices.view(-1, 2).to(torch.uint8)
    return (pairs[:, 0] << 4) | pairs[:, 1]
