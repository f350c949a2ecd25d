"""Measured arithmetic, compared with the CPU: a product repeated and timed, a small model, attention, NF4.

A product is compared with float64 by the bound of its float32 sums (Higham 2002, lemma 3.1; matrix units truncate:
Fasi and others 2021, PeerJ CS 7:e330), all else by the error of the same formula in the same dtype on the CPU, of which
it may have `FACTOR` times as much (flash-attention's tests allow 2 to 3). A wrong result is read back again: if the two
readbacks differ, the transfer is at fault, not arithmetic.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from hf_rocm_tune.doctor.findings import Finding, fail, ok, one_line, skipped, warn
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.models import products
from hf_rocm_tune.transfer import Mover
from hf_rocm_tune.transfer.damage import wait_for

FACTOR = 8.0
SMALLEST = 2.0**-6
"""Smallest magnitude of inputs: products of two are normal numbers in float16, so it does not matter whether a device
flushes subnormal numbers to zero."""
_SHOWN = 3
_ONE_CHANGE = (
    "do not train on this card until this is fixed. One change at a time, then this check again (--only): unset "
    "HSA_OVERRIDE_GFX_VERSION; stock clocks, voltages and power limit; TORCH_BLAS_PREFER_HIPBLASLT=0, then =1; another "
    "ROCm build of torch; another power supply; report it with `doctor --json`"
)


def spread(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normally distributed values of ``dtype`` with magnitudes of at least ``SMALLEST`` times the scale."""
    values = torch.randn(tuple(shape), generator=generator)
    values = torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST).copysign(values), values)
    return (values * scale).to(dtype)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The product of two matrices on the CPU in float64, and its bound with float32 sums, rounded to ``dtype``.

    With the unit roundoff u, n rounded operations err by at most ``n u / (1 - n u)`` of the sum of absolute values;
    matrix units that truncate addends by four times that.
    """
    left = left.double()
    right = right.double()
    exact = left @ right
    sizes = left.abs() @ right.abs()
    u = 4 * left.shape[-1] * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(dtype)
    error = u / (1 - u) * sizes
    # Values below the smallest normal number may be flushed to zero.
    return exact, error + info.eps / 2 * (exact.abs() + error) + info.tiny


class Comparison:
    """Moves inputs to one device, compares the results, and collects the wrong ones in ``problems``."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.name = request["device"]
        self.device = device_of(request)
        self.generator = torch.Generator().manual_seed(request.get("seed", 0))
        self.cases = 0
        self.problems: list[str] = []
        self.unsteady = False
        self._mover = Mover(self.device)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()

    def move(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, verified."""
        return self._mover.move(tensor.contiguous(), name="input")

    def place(self, batch: Batch) -> Batch:
        mask = None if batch.mask is None else self.move(batch.mask)
        return Batch(self.move(batch.tokens), self.move(batch.labels), self.move(batch.positions), mask)

    def close(self, case: str, result: Tensor, expected: Tensor, bound: Tensor) -> bool:
        """Compare a result on the device with values on the CPU within a bound."""
        assert result.shape == expected.shape, (case, result.shape, expected.shape)
        step(f"comparing {case}")
        result = result.detach()
        read = result.cpu()
        self.cases += 1
        wrong = ~((read.double() - expected).abs() <= bound)  # true for NaN
        if not wrong.any():
            return True
        values = read[wrong].double()
        first = tuple(wrong.nonzero()[0].tolist())
        problem = (
            f"{case}: {len(values):,} of {read.numel():,} elements wrong, the first at {list(first)}: "
            f"{read[first].item():.7g} instead of {expected[first].item():.7g} (it may differ by "
            f"{bound[first].item():.3g})"
        )
        kinds = {"zero": int((values == 0).sum()), "NaN": int(values.isnan().sum())}
        for kind, count in kinds.items():
            if count:
                problem += f"; {100 * count / len(values):.0f} % of them {kind}"
        read_again = result.cpu()
        if not torch.equal(read.reshape(-1).view(torch.uint8), read_again.reshape(-1).view(torch.uint8)):
            self.unsteady = True
            problem += "; read back again, it was different"
        self.problems.append(problem)
        return False

    def by_formula(self, case: str, results: Mapping[str, Tensor], formula: Callable[[torch.dtype], Any]) -> None:
        """Compare named results with those of the same formula on the CPU, in float64 and in their own dtype."""
        info = torch.finfo(next(iter(results.values())).dtype)
        exact = formula(torch.float64)
        rounded = formula(getattr(torch, info.dtype))
        for part, result in results.items():
            worst = (rounded[part].double() - exact[part]).abs().max()
            bound = FACTOR * (worst + info.eps / 2 * exact[part].abs()) + info.tiny
            self.close(f"{case}: {part}", result, exact[part], bound)

    def verdict(self, row: str, right: Sequence[str], wrong: Sequence[str], read: Sequence[str] = ()) -> Finding:
        """The finding on all results, of the row ``row_right`` or ``row_wrong``; ``right``: title, text and source
        where all are right, ``wrong``: title, text, fix and source where some are wrong."""
        if not self.problems:
            title, text, source = right
            seen = [f"{self.cases:,} results compared", *read]
            return ok(f"{row}_right", title, f"on {self.name}, {text}", source, subject=self.name, read=seen)
        row = f"{row}_wrong"
        title, text, fix, source = wrong
        if self.unsteady:
            row = "arithmetic_read_back"
            title = "Two readbacks of a result differ"
            text = "were different when read back again: the transfer to the host is at fault, not arithmetic"
            fix = "fix the findings on transfers first, then run this check again"
            source = "rocm-systems#5815"
        lines = self.problems[:_SHOWN]
        more = len(self.problems) - _SHOWN
        if more > 0:
            lines.append(f"and {more:,} more results")
        lines += read
        text = f"on {self.name}, {len(self.problems):,} of {self.cases:,} results {text}"
        return fail(row, title, text, fix, source, subject=self.name, read=lines)


# ---- a matrix product: repeated, and timed -----------------------------------------------------------------------

REPEATED_SHAPES = {"cuda": (512, 4096, 1024), "cpu": (96, 128, 112)}
_LEAST_REPEATS = 40
_BUSY_BYTES = 96 << 20  # more than the Infinity Cache of an RX 7900 XT (80 MB), so that the traffic reaches its memory
_MUCH_FASTER = 1.5
_FAST_SECONDS = 0.01  # for a product of 1024 cubed: what takes longer is a processor that plays the card


def gemm(request: Mapping[str, Any]) -> list[Finding]:
    """Repeat a product for ``seconds`` in each dtype and compare every result with the first on the device bit by bit.

    The first is compared with float64. One that differs is copied to the CPU: if it is within the rounding bound, the
    library only changes the order of sums between calls; if not, it is wrong. On an accelerator a second stream keeps
    the memory busy, and bfloat16 with a float32 result is repeated, too: the product of the loss's gradient. Not
    covered: a device that is wrong in the same way every time after its first product.
    """
    lines = []
    with Comparison(request) as compare:
        accelerator = compare.device.type == "cuda"
        fast = accelerator and _seconds(compare, 1024) < _FAST_SECONDS
        shape = request.get("shape", REPEATED_SHAPES["cuda" if fast else "cpu"])
        names = ["float16", "bfloat16", "float32"]
        if accelerator:
            names.append("bfloat16 to float32")
        for name in names:
            repeats, varying = _repeat(compare, name, shape, request["seconds"])
            line = f"{name}: {repeats:,} times"
            if varying:  # two runs with the same seed are not equal bit for bit then
                line += f", the order of sums changed in {varying:,}"
            lines.append(line)
        right = ("products repeat", "under load, and are right", "rocm-libraries#12344")
        wrong = ("A repeated matrix product is wrong",
                 "of the same product are wrong, without an error of the driver. The only public report leaves open "
                 "whether software or the card is the cause", _ONE_CHANGE, "rocm-libraries#12344")  # fmt: skip
        findings = [compare.verdict("gemm", right, wrong, lines)]
        if accelerator:
            findings.append(_speed(compare, 8192 if fast else 256))
        return findings


def _repeat(compare: Comparison, name: str, shape: Sequence[int], seconds: float) -> tuple[int, int]:
    """The number of products of one dtype, and of results that differed from the first within the bound."""
    m, k, n = shape
    dtype, _, wide = name.partition(" to ")
    left = spread((m, k), getattr(torch, dtype), compare.generator)
    right = spread((k, n), getattr(torch, dtype), compare.generator)
    reference = product(left, right, getattr(torch, wide or dtype))
    multiply = partial(torch.mm, compare.move(left), compare.move(right))
    if wide:
        multiply = partial(multiply, out_dtype=torch.float32)
    step(f"computing {name}, the first")
    first = multiply()
    first_right = compare.close(f"{name}, the first", first, *reference)
    result = torch.empty_like(first)
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    add_load = _load(compare.device)
    number = 1
    varying = 0
    ends = time.monotonic() + seconds
    while number <= _LEAST_REPEATS or time.monotonic() < ends:
        number += 1
        step(f"computing {name}, repeat {number}")
        add_load()
        result.fill_(math.nan)  # else a product that wrote nothing would be taken for a correct one
        multiply(out=result)
        if torch.equal(result.view(bits), first.view(bits)):
            compare.cases += 1
        # If the first was wrong, a repeat that differs from it may be the correct one.
        elif compare.close(f"{name}, repeat {number}", result, *reference) and first_right:
            varying += 1
    return number, varying


def _load(device: torch.device) -> Callable[[], object]:
    """Adds memory traffic on a second stream of an accelerator; nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.Stream(device)
    busy = torch.ones(_BUSY_BYTES // 4, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    busy.record_stream(stream)  # else its memory could be reused for a result while it is still written

    def add() -> None:
        with torch.cuda.stream(stream):
            busy.neg_()

    return add


def _speed(compare: Comparison, size: int) -> Finding:
    """The rate of a large bfloat16 product by each library of ROCm, and of the loss's gradient with float32 sums."""
    libraries = products.each_library(compare.device) if torch.version.hip else ["the usual library"]
    rates = {name: 2e-12 * size**3 / _seconds(compare, size) for name in libraries}
    step("timing the products of the loss's gradient")
    choice = products.choose(compare.device)
    gradient = choice.describe() if choice else "no choice for the loss's gradient"
    return assess_speed(compare.name, rates, size, gradient)


def assess_speed(device: str, rates: Mapping[str, float], size: int, gradient: str) -> Finding:
    """The finding on the rates (10^12 operations a second) by library, torch's choice first; ``gradient``: what a run
    uses for the loss's gradient. No verdict on the rate itself: no figure of a 7900 XT under ROCm is public."""
    usual = next(iter(rates))
    best = max(rates, key=rates.__getitem__)
    read = [*(f"{name}: {rate:.1f} TFLOPS" for name, rate in rates.items()), gradient]
    title = f"bf16 {rates[usual]:.3g} TFLOPS"
    text = f"products of {size} cubed on {device}; a 7900 XTX measured 88 to 101; no figure of an XT is public"
    source = "torch-performance-test-data#103; ROCm/pytorch#2088; ROCm/pytorch#2742"
    if rates[best] <= _MUCH_FASTER * rates[usual]:
        return ok("gemm_speed", title, text, source, subject=device, read=read)
    return warn("gemm_slow", f"{best} multiplies {rates[best] / rates[usual]:.1f} times as fast as {usual}",
                f"{title}: {text}", f"`export TORCH_BLAS_PREFER_HIPBLASLT={int(best == 'hipBLASLt')}`, and compare a "
                "run's speed", source, device, read)  # fmt: skip


def _seconds(compare: Comparison, size: int) -> float:
    left, right = (torch.randn(size, size, device=compare.device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(4):
        step(f"timing products of {size} cubed")
        wait_for(left)
        began = time.perf_counter()
        torch.mm(left, right)
        wait_for(left)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one loads kernels


# ---- a small model ----------------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN = 128
HEADS = 4
KEY_HEADS = 2
HEAD = 32
WIDE = 384
VOCABULARY = 1003
SHAPES = {
    "embedding": (VOCABULARY, HIDDEN), "first norm": (HIDDEN,), "query": (HEADS * HEAD, HIDDEN),
    "key": (KEY_HEADS * HEAD, HIDDEN), "value": (KEY_HEADS * HEAD, HIDDEN), "output": (HIDDEN, HEADS * HEAD),
    "second norm": (HIDDEN,), "gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE),
    "last norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN),
}  # fmt: skip
FROZEN = ("query", "key", "value", "output", "gate", "up", "down")
"""The weights that a run quantises."""
KINDS = ("plain", "padded", "packed")
LONGER = 9
"""Times as many tokens in a second batch of the first dtype: 1,152 in a row, several tiles of every kernel."""
_PACKED = (41, 70, 17)
_PADDED = 37
"""Lengths of the examples in a packed row; tokens of padding of the second row. Rows have 128 tokens."""
Linear = Callable[[Tensor, str], Tensor]


class Batch(NamedTuple):
    """Tokens, labels and positions of two rows, and the mask of the keys that a query attends to; None: causal."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, kind: str, generator: torch.Generator, times: int = 1) -> Batch:
        lengths = [times * tokens for tokens in _PACKED]
        length = sum(lengths)
        tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        labels = tokens.roll(-1, 1)
        positions = torch.arange(length)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        if kind == "packed":
            example = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            positions = torch.cat([torch.arange(of_example) for of_example in lengths])
            mask &= example[:, None] == example
        if kind == "padded":
            labels[1, -_PADDED - 1 :] = -100
            mask = mask.repeat(2, 1, 1, 1)
            mask[1, ..., -_PADDED:] = False
        return cls(tokens, labels, positions.expand(2, length), None if kind == "plain" else mask)


def _loss(p: Mapping[str, Tensor], batch: Batch, linear: Linear) -> Tensor:
    """The loss of one layer as of Llama: the same operators as transformers and TRL call."""

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, HEAD).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        frequencies = 10_000.0 ** (-torch.arange(HEAD // 2, device=x.device) * 2 / HEAD)
        angle = batch.positions[:, None, :, None] * frequencies
        cos = torch.cos(angle).repeat(1, 1, 1, 2).to(x.dtype)
        sin = torch.sin(angle).repeat(1, 1, 1, 2).to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), p[name], 1e-5)

    mask = batch.mask
    x = functional.embedding(batch.tokens, p["embedding"])
    h = norm(x, "first norm")
    query = turned(heads(linear(h, "query"), HEADS))
    key = turned(heads(linear(h, "key"), KEY_HEADS))
    value = heads(linear(h, "value"), KEY_HEADS)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    x = x + linear(attended.transpose(1, 2).flatten(2), "output")
    h = norm(x, "second norm")
    x = x + linear(functional.silu(linear(h, "gate")) * linear(h, "up"), "down")
    logits = functional.linear(norm(x, "last norm"), p["head"])
    return functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def _both_ways(p: Mapping[str, Tensor], batch: Batch, dtype: torch.dtype, linear: Linear | None = None) -> Any:
    """Loss and gradients of all parameters, or of those that are not `FROZEN` where ``linear`` multiplies by those."""
    leaves = {}
    for name, parameter in p.items():
        if not linear or name not in FROZEN:
            leaves[name] = parameter.to(dtype).detach().requires_grad_()
    loss = _loss(leaves, batch, linear or (lambda x, name: functional.linear(x, leaves[name])))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {"loss": loss.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        results[f"gradient of {name}"] = gradient
    return results


def _parameters(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    def scale(name: str) -> float:
        if len(SHAPES[name]) < 2 or name == "embedding":
            return 1.0
        inputs: float = SHAPES[name][1] ** -0.5
        return inputs

    return {name: spread(shape, dtype, generator, scale=scale(name)) for name, shape in SHAPES.items()}


def model(request: Mapping[str, Any]) -> list[Finding]:
    """Loss and gradients of a small model on plain, padded and packed rows in each dtype, compared with float64."""
    with Comparison(request) as compare:
        for dtype, times in [*((dtype, 1) for dtype in DTYPES), (DTYPES[0], LONGER)]:
            parameters = _parameters(dtype, compare.generator)
            placed = {name: compare.move(tensor) for name, tensor in parameters.items()}
            for kind in KINDS:
                batch = Batch.of(kind, compare.generator, times)
                case = f"{dtype}, {kind}, {batch.tokens.shape[1]:,} tokens"
                step(f"computing {case}")
                results = _both_ways(placed, compare.place(batch), dtype)
                compare.by_formula(case, results, partial(_both_ways, parameters, batch))
        right = ("a model's layers", "loss and gradients, plain, padded and packed, differ from float64 by rounding in "
                 "their dtype only", "this project: hf_rocm_tune/doctor/arithmetic.py")  # fmt: skip
        wrong = ("A model's layers compute wrongly",
                 "differ from float64 by more than rounding: this is arithmetic, not a copy. If only gradients are "
                 "wrong, inference works and training does not; if only padded or packed rows are, attention with "
                 "a mask is wrong, and --attn_implementation eager avoids it", _ONE_CHANGE,
                 "rocm-libraries#12344; ROCm/ROCm#4391; TheRock#2662; pytorch#133671; pytorch#147460; "
                 "ROCm/pytorch#3230")  # fmt: skip
        return [compare.verdict("model", right, wrong)]


# ---- attention at length -----------------------------------------------------------------------------------------

_STRIDE = 197
_SHORTEST = 256
_PARTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


def attention(request: Mapping[str, Any]) -> list[Finding]:
    """Causal bfloat16 attention, plain and packed, and the backend that torch chooses: at lengths that double up to
    ``length`` tokens, as far as memory goes and the next one is expected to end within ``seconds``, and within half of
    ``total`` seconds for each kind.

    The output is compared in every `_STRIDE`-th row, and only these have a gradient, so all gradients are known from
    few rows of scores. Each query points at two keys that it may see, so that outputs and gradients are large in every
    row, and at one that it may not, later or of the example before.
    """
    most = request["length"]
    lengths = [most]
    while lengths[0] >= 2 * _SHORTEST:
        lengths.insert(0, lengths[0] // 2)
    reached: dict[str, int] = {}
    backends: dict[str, str] = {}
    why = ""
    with Comparison(request) as compare:
        for kind in ("plain", "packed"):
            ends = time.monotonic() + request.get("total", math.inf) / 2
            _long(compare, lengths[0], packed=kind == "packed")  # loads kernels, which the time is not to include
            for length in lengths:
                began = time.monotonic()
                try:
                    backends[kind] = _long(compare, length, packed=kind == "packed")
                except torch.OutOfMemoryError:
                    why += f"; {length:,} tokens {kind} do not fit into its memory"
                    break
                reached[kind] = length
                expected = 4 * (time.monotonic() - began)  # of twice the length
                if length < most and expected > min(request["seconds"], ends - time.monotonic()):
                    why += f"; {2 * length:,} tokens {kind} would take {expected:.0f} s"
                    break
        tried = " and ".join(f"{length:,} tokens {kind}" for kind, length in reached.items())
        right = (f"attention at {min(reached.values()):,} tokens",
                 f"output and gradients at {tried} differ from float64 by no more than rounding{why}",
                 "ROCm/ROCm#6416")  # fmt: skip
        wrong = ("Attention is wrong",
                 f"of scaled_dot_product_attention, up to {tried}, differ from float64 by more than rounding",
                 "train with --attn_implementation eager, or at a --max_length at which this check passes, until a "
                 "newer ROCm build of torch is correct",
                 "ROCm/ROCm#6416; aotriton#123; pytorch#133671; ROCm/pytorch#3230")  # fmt: skip
        return [compare.verdict("attention", right, wrong), assess_backends(compare.name, backends)]


def _long(compare: Comparison, length: int, *, packed: bool) -> str:
    """Compare one length; returns the backend that torch has chosen."""
    dtype = torch.bfloat16
    generator = compare.generator
    positions = torch.arange(length)
    case = f"attention at {length:,} tokens"
    first = torch.zeros_like(positions)  # of the example of a position
    if packed:
        case += ", packed"
        first = torch.where(positions < length // 3, 0, length // 3)
    rows = positions.flip(0)[::_STRIDE].flip(0)
    key = spread((1, 1, length, 128), dtype, generator)
    value = spread((1, 1, length, 128), dtype, generator)
    seen = (first + torch.rand(2, 2, length, generator=generator) * (positions + 1 - first)).long()
    others = first + length - 1 - positions
    unseen = (torch.rand(2, length, generator=generator) * others).long()
    unseen = torch.where(unseen < first, unseen, unseen - first + positions + 1).clamp(max=length - 1)
    targets = key[0, 0][seen].float().sum(0) + key[0, 0][unseen].float() * (others > 0)[:, None]
    query = (1.5 * targets).to(dtype)[None]  # (1, 2, length, 128)
    upstream = torch.zeros_like(query)
    upstream[:, :, rows] = spread((1, 2, len(rows), 128), dtype, generator)
    step(f"computing {case}")
    here = compare.move(positions)
    begins = compare.move(first)
    shown = compare.move(rows)
    q, k, v = leaves = [compare.move(tensor).requires_grad_() for tensor in (query, key, value)]
    if packed:  # as transformers does: with a mask, keys and values are repeated for their queries
        mask = (here <= here[:, None]) & (here >= begins[:, None])
        output = scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=mask)
    else:
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(output, leaves, compare.move(upstream))
    results = [output[:, :, shown], gradients[0][:, :, shown], *gradients[1:]]
    hidden = (positions > rows[:, None]) | (positions < first[rows][:, None])

    def by_rows(kind: torch.dtype) -> dict[str, Tensor]:
        """Output and gradients by the formula on the CPU, from these rows alone."""
        inputs = [tensor.to(kind).requires_grad_() for tensor in (query[:, :, rows], key, value)]
        scores = (inputs[0] @ inputs[1].mT) / math.sqrt(query.shape[-1])
        attended = scores.masked_fill(hidden, -math.inf).softmax(-1) @ inputs[2]
        backward = torch.autograd.grad(attended, inputs, upstream[:, :, rows].to(kind))
        return dict(zip(_PARTS, (attended.detach(), *backward), strict=True))

    compare.by_formula(case, dict(zip(_PARTS, results, strict=True)), by_rows)
    return _backend_of(output)


def _backend_of(output: Tensor) -> str:
    """The backend of an attention: the node of a fused one is in the graph; the math path has no node of its own."""
    names = ""
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names += node.name().lower()
            waiting += [following for following, _ in node.next_functions]
    for name in ("flash", "efficient", "cudnn"):
        if f"scaleddotproduct{name}attention" in names:
            return name
    return "math"


def assess_backends(device: str, backends: Mapping[str, str]) -> Finding:
    """The finding on the backends by batch, ``plain`` or ``packed``; padding has a mask as packing has."""
    read = [f"bfloat16, {kind}: {backend}" for kind, backend in backends.items()]
    slow = " and ".join(kind for kind, backend in backends.items() if backend == "math")
    source = "aotriton util.cc; pytorch#134498; unsloth#8821"
    if not slow:
        return ok("attention_fused", f"fused attention ({backends['plain']})", f"on {device}, also with a mask", source,
                  subject=device, read=read)  # fmt: skip
    return warn("attention_unfused", "Attention uses the math path",
                f"on {device}, {slow} batches take the math path, whose memory grows with the square of the length",
                "a torch release with AOTriton for this card (2.10 and newer for gfx1100), or a shorter --max_length; "
                "`--per_device_train_batch_size 1` without --packing needs no mask", source, device, read)  # fmt: skip


# ---- 4-bit weights -----------------------------------------------------------------------------------------------
# NF4: a tensor is split into blocks in memory order; each is divided by its largest magnitude (absmax), and every
# quotient replaced by the index of the nearest of 16 values (QLoRA, arXiv:2305.14314, appendix E).

LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=torch.float64)  # fmt: skip
_BLOCK = 64
ROWS = (1, 8, 9)
"""Rows of a product without a gradient: bitsandbytes 0.50 has a separate kernel for up to 8 of them on RDNA3."""


def nf4(request: Mapping[str, Any]) -> list[Finding]:
    """The small model with its products in NF4 by bitsandbytes, whose weights are levels of NF4, so that quantising
    them changes nothing; and a product without a gradient, as in generation."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return [skipped("bitsandbytes is not installed")]
    step("importing bitsandbytes")
    quantize = importlib.import_module("bitsandbytes.functional").quantize_4bit
    native = getattr(importlib.import_module("bitsandbytes.cextension"), "lib", None)
    loaded = str(getattr(getattr(native, "_lib", None), "_name", "no native library")).rpartition("/")[2]
    with Comparison(request) as compare:
        try:
            for dtype in DTYPES:
                _nf4(compare, quantize, dtype)
        except (RuntimeError, NotImplementedError) as error:
            if compare.cases or isinstance(error, torch.AcceleratorError):
                raise
            return [warn("nf4_refused", "bitsandbytes does not work",
                         f"on {compare.name}, it refused to quantise a weight: {one_line(error)}",
                         "see the findings on software: it may have no library for this build of torch; until then "
                         "train without --load_in_4bit and --load_in_8bit", "bitsandbytes cextension.py",
                         subject=compare.name)]  # fmt: skip
        right = ("4-bit weights", "bitsandbytes quantises, dequantises and multiplies NF4 by its definition",
                 "QLoRA, appendix E")  # fmt: skip
        wrong = ("4-bit weights are wrong",
                 "of a model with NF4 weights of bitsandbytes differ from the format's definition: a model loaded with "
                 "--load_in_4bit is wrong",
                 "a torch build for ROCm 7.2 with bitsandbytes 0.50.2 or newer: the library for ROCm 6.4 is wrong on "
                 "gfx1100; else train without --load_in_4bit, and report it with `doctor --json`",
                 "bitsandbytes#2087; bitsandbytes#1885; bitsandbytes#1979; bitsandbytes#2012")  # fmt: skip
        return [compare.verdict("nf4", right, wrong, [f"bitsandbytes has loaded {loaded}"])]


def _nf4(compare: Comparison, quantize: Callable[..., Any], dtype: torch.dtype) -> None:
    multiply = importlib.import_module("bitsandbytes").matmul_4bit
    generator = compare.generator
    parameters = _parameters(dtype, generator)
    for name in FROZEN:
        indices = torch.randint(0, 16, (parameters[name].numel(),), generator=generator)
        indices[::_BLOCK] = 15  # every block holds its absmax
        scales = (0.5 + torch.rand(indices.numel() // _BLOCK, generator=generator)).to(dtype).double() / 8
        parameters[name] = (LEVELS[indices] * scales.repeat_interleave(_BLOCK)).view(SHAPES[name])
    placed = {name: compare.move(tensor.to(dtype)) for name, tensor in parameters.items()}
    case = f"{dtype} NF4"
    batch = Batch.of("plain", generator)
    step(f"computing {case}")
    packed = {name: quantize(placed[name], quant_type="nf4", blocksize=_BLOCK) for name in FROZEN}

    def linear(x: Tensor, name: str) -> Tensor:
        weight, state = packed[name]
        return multiply(x, weight.t(), quant_state=state)  # transposed, as in the library's own layers

    def plain(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, parameters[name].to(x.dtype))

    results = _both_ways(placed, compare.place(batch), dtype, linear)
    compare.by_formula(case, results, partial(_both_ways, parameters, batch, linear=plain))
    for rows in ROWS:
        x = spread((rows, HIDDEN), dtype, generator)
        with torch.no_grad():
            results = {"output": linear(compare.move(x), "gate")}
        by_definition = lambda kind: {"output": plain(x.to(kind), "gate")}  # noqa: B023, E731
        compare.by_formula(f"{case}, {rows} rows without a gradient", results, by_definition)
