"""Measured arithmetic, compared with the CPU: a product repeated and timed (``gemm``), a small model forward and
backward (``model``), attention at the planned length (``attention``), 4-bit weights of bitsandbytes (``nf4``).

A matrix product is compared with float64 by the bound of its sums: with the unit roundoff u of float32, n rounded
operations err by at most ``n u / (1 - n u)`` of the sum of absolute values (Higham 2002, lemma 3.1); matrix units
truncate addends, which costs at most ``4 u n`` (Fasi and others 2021, PeerJ CS 7:e330). Everything else by the error
of the same formula in the same dtype on the CPU: an element may be `FACTOR` times as far from float64 as the worst of
those, as the authors of fused attention kernels test them (flash-attention, tests/test_flash_attn.py: 2 to 3 times).
A wrong result is read back again: if the two readbacks differ, the transfer is at fault, not arithmetic.

Injected faults: ``wrong`` negates one element and subtracts one, ``nan`` makes one NaN (``wrong`` for integers),
``zeros`` zeroes a whole result, ``gradient`` is ``wrong`` in a gradient only, in the first result whose case contains
``where``; ``math`` selects the math path of attention.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_rocm_tune.doctor.findings import Finding, fail, ok, skipped, unknown, warn
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.models import products
from hf_rocm_tune.transfer import Mover

FACTOR = 8.0
SMALLEST = 2.0**-6
"""Smallest magnitude of inputs: products of two are normal numbers in float16, so it does not matter whether a device
flushes subnormal numbers to zero."""
_SHOWN = 3
_ONE_CHANGE = (
    "do not train on this card until this is fixed. One change at a time, then this check again (--only): unset "
    "HSA_OVERRIDE_GFX_VERSION; stock clocks, voltages and power limit (no ppfeaturemask); "
    "TORCH_BLAS_PREFER_HIPBLASLT=0, then =1; another ROCm build of torch; another power cable or supply; report it "
    "with `doctor --json`"
)
_OURS = "this project: hf_rocm_tune/doctor/arithmetic.py"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normally distributed values of ``dtype`` with magnitudes of at least ``SMALLEST`` times the scale."""
    values = torch.randn(tuple(shape), generator=generator)
    values = torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST).copysign(values), values)
    return (values * scale).to(dtype)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The product of two matrices on the CPU in float64, and its bound with float32 sums, rounded to ``dtype``."""
    left, right = left.double(), right.double()
    exact, sizes = left @ right, left.abs() @ right.abs()
    u = 4 * left.shape[-1] * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(dtype)
    error = u / (1 - u) * sizes
    # Values below the smallest normal number may be flushed to zero.
    return exact, error + info.eps / 2 * (exact.abs() + error) + info.tiny


def formula_bound(expected: Tensor, rounded: Tensor) -> Tensor:
    """The error bound of a formula from its results in float64 and in the dtype of the result; see the module."""
    info = torch.finfo(rounded.dtype)
    return FACTOR * ((rounded.double() - expected).abs().max() + info.eps / 2 * expected.abs()) + info.tiny


class _Problem(NamedTuple):
    line: str
    refused: bool = False
    reads_agree: bool = True


class Comparison:
    """Moves inputs to one device, compares the results, and collects the wrong ones in ``problems``."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.name = request["device"]
        self.device = device_of(request)
        self.generator = torch.Generator().manual_seed(request.get("seed", 0))
        fault = request.get("fault") or {}
        self.fault, self.where = fault.get("kind", ""), fault.get("where", "")
        self.cases = self.elements = 0
        self.problems: list[_Problem] = []
        self._mover = Mover(self.device)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()

    def move(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, verified."""
        return self._mover.move(tensor, name="input")

    def close(
        self, case: str, result: Tensor, expected: Tensor, bound: Tensor | None, *, gradient: bool = False
    ) -> bool:
        """Compare a result on the device with values on the CPU within a bound; None: with exact values."""
        assert result.shape == expected.shape, (case, result.shape, expected.shape)
        step(f"comparing {case}")
        result = result.detach()
        faulty = self.fault in ("wrong", "nan", "zeros") or (self.fault == "gradient" and gradient)
        if faulty and self.where in case:
            result, self.fault = with_fault(result, self.fault), ""
        found = result.cpu()
        self.cases += 1
        self.elements += found.numel()
        # true for NaN
        wrong = found != expected if bound is None else ~((found.double() - expected).abs() <= bound)
        if not wrong.any():
            return True
        again = result.cpu()
        same = torch.equal(*(read.reshape(-1).view(torch.uint8) for read in (found, again)))
        line = _line(case, found, expected, bound, wrong) + ("" if same else "; read back again, it was different")
        self.problems.append(_Problem(line, reads_agree=same))
        return False

    def refused(self, case: str, error: Exception) -> None:
        """The device raised an error."""
        self.cases += 1
        self.problems.append(_Problem(f"{case}: refused with {one_line(error)}", refused=True))

    def verdict(
        self, row: str, right: tuple[str, str, str], wrong: tuple[str, str, str, str], read: Iterable[str] = ()
    ) -> Finding:
        """The finding on all results.

        Args:
            row: ``row_right`` or ``row_wrong`` of it.
            right: title, text and source where all results are right.
            wrong: title, text, fix and source where some are wrong.
        """
        if not self.problems:
            title, text, source = right
            seen = f"{self.elements:,} elements of {self.cases:,} results compared"
            return ok(f"{row}_right", title, text, source, subject=self.name, read=[seen, *read])
        more = len(self.problems) - _SHOWN
        lines = [problem.line for problem in self.problems[:_SHOWN]]
        lines += [*([f"and {more:,} more results"] if more > 0 else []), *read]
        share = f"on {self.name}, {len(self.problems):,} of {self.cases:,} results"
        if not all(problem.reads_agree for problem in self.problems):
            text = (
                f"{share} were wrong when read back, and different when read again: the transfer to the host is at "
                "fault, not arithmetic"
            )
            return fail(
                "arithmetic_read_back", "Two readbacks of a result differ", text,
                "fix the findings on transfers first, then run this check again", "rocm-systems#5815",
                subject=self.name, read=lines,
            )  # fmt: skip
        if all(problem.refused for problem in self.problems):
            fix = (
                "read the error, then the findings on software: possible causes are a wheel without this card's "
                "architecture and a library without its kernels"
            )
            return fail(
                "arithmetic_refused", "The device refused a computation", f"{share} are errors, and none was wrong",
                fix, "TheRock#5543; pytorch#194447", subject=self.name, read=lines,
            )  # fmt: skip
        title, text, fix, source = wrong
        return fail(f"{row}_wrong", title, f"{share} {text}", fix, source, subject=self.name, read=lines)


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def with_fault(result: Tensor, kind: str) -> Tensor:
    """A copy of a result with an injected fault; see the module."""
    broken = result.clone(memory_format=torch.contiguous_format)
    if kind == "zeros":
        return broken.zero_()
    flat = broken.view(-1)
    place = flat.numel() // 2
    flat[place] = float("nan") if kind == "nan" and flat.is_floating_point() else -flat[place] - 1
    return broken


def _line(case: str, found: Tensor, expected: Tensor, bound: Tensor | None, wrong: Tensor) -> str:
    places, values = wrong.nonzero(), found[wrong].double()
    count, at = places.shape[0], tuple(places[0].tolist())
    allowed = "it is exact" if bound is None else f"it may differ by {float(bound[at]):.3g}"
    # The smallest box with all wrong elements: its sides show an incomplete tile of a kernel.
    box = " x ".join(str(int(column.max() - column.min()) + 1) for column in places.t())
    kinds = {"zero": int((values == 0).sum()), "NaN": int(values.isnan().sum())}
    shares = "".join(f"; {100 * number / count:.0f} % of them {kind}" for kind, number in kinds.items() if number)
    return (
        f"{case}: {count:,} of {found.numel():,} elements wrong, the first at {list(at)}"
        f"{f', all within {box}' if count > 1 else ''}: "
        f"{found[at].item():.7g} instead of {expected[at].item():.7g} ({allowed}){shares}"
    )


# ---- a matrix product: repeated, and timed -----------------------------------------------------------------------

REPEATED = (torch.float16, torch.int8, torch.bfloat16, torch.float32)
"""float16 and int8 first: those of rocm-libraries#12344."""
REPEATED_SHAPES = {"cuda": (512, 4096, 1024), "cpu": (96, 128, 112)}
FAULTY_REPEAT, _LEAST_REPEATS, _RING = 37, 40, 4
_BUSY_BYTES = 96 << 20  # more than the Infinity Cache of an RX 7900 XT (80 MB), so that the traffic reaches its memory
_MUCH_FASTER = 1.5


def gemm(request: Mapping[str, Any]) -> list[Finding]:
    """Repeat a product for ``seconds`` in each dtype and compare every result with the first on the device bit by bit.

    The first is compared with float64. One that differs is copied to the CPU: if it is within the rounding bound, the
    library only changes the order of sums between calls; if not, it is wrong. On an accelerator a second stream keeps
    the memory busy. Not covered: a device that is wrong in the same way every time after its first product.
    """
    fault = dict(request.get("fault") or {})
    lines, varying = [], []
    with Comparison({**request, "fault": None}) as compare:
        for dtype in REPEATED:
            kind = fault.pop("kind", "") if fault.get("where", "") in name_of(dtype) else ""
            try:
                repeats, differing = _repeat(compare, dtype, request, kind)
            except (RuntimeError, NotImplementedError) as error:
                if dtype is not torch.int8 or isinstance(error, torch.AcceleratorError):
                    raise
                lines.append(
                    f"int8 was not compared: {one_line(error)}"
                )  # older cards and libraries have no such kernel
                continue
            lines.append(f"{name_of(dtype)}: {repeats:,} times")
            varying += [f"{differing:,} of {name_of(dtype)}"] if differing else []
        text = f"on {compare.name}, under load, and correct"
        if varying:
            text += (
                f"; {', '.join(varying)} repeats differ in bits within the rounding bound: the library changes the "
                "order of sums between calls, so two runs with the same seed will not be equal bit for bit"
            )
        wrong = (
            "A repeated matrix product is wrong",
            "of the same product are wrong, without an error of the driver. The only public report leaves open whether "
            "software or the card is the cause",
            _ONE_CHANGE,
            "rocm-libraries#12344",
        )
        findings = [compare.verdict("gemm", ("products repeat", text, "rocm-libraries#12344"), wrong, lines)]
        return [*findings, *_speed(compare, request.get("size"))]


def _repeat(compare: Comparison, dtype: torch.dtype, request: Mapping[str, Any], fault: str) -> tuple[int, int]:
    """The number of products of one dtype, and of results that differed from the first within the bound."""
    name, (m, k, n) = name_of(dtype), request.get("shape", REPEATED_SHAPES[compare.device.type])
    multiply = torch._int_mm if dtype is torch.int8 else torch.mm
    if dtype is torch.int8:
        left, right = (
            torch.randint(-128, 128, size, generator=compare.generator).to(dtype) for size in ((m, k), (k, n))
        )
        exact = left.double() @ right.double()
        reference = (exact, torch.zeros_like(exact))
    else:
        left, right = (spread(size, dtype, compare.generator) for size in ((m, k), (k, n)))
        reference = product(left, right, dtype)
    factors = [compare.move(left), compare.move(right)]
    step(f"computing {name}, the first")
    first = multiply(*factors)
    first_right = compare.close(f"{name}, the first", first, *reference)
    # Each call writes to another buffer, so that a product that wrote nothing is not taken for a correct one.
    ring = [torch.empty_like(first) for _ in range(_RING)]
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    add_load = _load(compare.device)
    number, varying, ends = 1, 0, time.monotonic() + request["seconds"]
    while number <= _LEAST_REPEATS or time.monotonic() < ends:
        step(f"computing {name}, repeats {number + 1} to {number + _RING}")
        add_load()
        for place in range(_RING):
            multiply(*factors, out=ring[place])
            if fault and number + 1 + place == FAULTY_REPEAT:
                ring[place] = with_fault(ring[place], fault)
        counts = torch.stack([(result.view(bits) != first.view(bits)).sum() for result in ring]).tolist()
        for place, count in enumerate(counts):
            # If the first was wrong, a repeat that differs from it may be the correct one.
            if not count:
                compare.cases += 1
            elif compare.close(f"{name}, repeat {number + 1 + place}", ring[place], *reference) and first_right:
                varying += 1
        number += _RING
    return number, varying


def _load(device: torch.device) -> Callable[[], object]:
    """Adds memory traffic on a second stream of an accelerator; nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    stream, busy = torch.cuda.Stream(device), torch.ones(_BUSY_BYTES // 4, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    busy.record_stream(stream)  # else its memory could be reused for a result while it is still written

    def add() -> None:
        with torch.cuda.stream(stream):
            busy.neg_()

    return add


def _speed(compare: Comparison, size: int | None) -> list[Finding]:
    """The rate of a large bfloat16 product by each library of ROCm, and of the loss's gradient with float32 sums."""
    if compare.device.type != "cuda":
        return []
    if size is None:
        size = 8192 if _seconds(compare, 1024) < 0.01 else 256  # a processor plays the card
    usual = torch.backends.cuda.preferred_blas_library()
    rates: dict[str, float] = {}
    for name, library in products.LIBRARIES.items() if torch.version.hip else [("the usual library", "default")]:
        try:
            torch.backends.cuda.preferred_blas_library(library)
            rates[name] = 2e-12 * size**3 / _seconds(compare, size)
        finally:
            torch.backends.cuda.preferred_blas_library(usual)
    step("timing the products of the loss's gradient")
    choice = products.choose(compare.device)
    default = "hipBLASLt" if "lt" in str(usual).lower() else "rocBLAS"
    return [judge_speed(compare.name, rates, size, default=default, gradient=choice.describe() if choice else "")]


def judge_speed(device: str, rates: Mapping[str, float], size: int, *, default: str, gradient: str) -> Finding:
    """The finding on the rates (10^12 operations a second) by library; ``default``: torch's choice; ``gradient``: what
    a run uses for the loss's gradient. No verdict on the rate itself: no figure of a 7900 XT under ROCm is public."""
    usual = rates.get(default, max(rates.values()))
    best = max(rates, key=rates.__getitem__)
    read = [*(f"{name}: {rate:.1f} TFLOPS" for name, rate in rates.items()), *([gradient] if gradient else [])]
    title = f"bf16 {usual:.0f} TFLOPS"
    text = f"products of {size} cubed on {device}; a 7900 XTX measured 88 to 101; no figure of an XT is public"
    source = "torch-performance-test-data#103; ROCm/pytorch#2088; ROCm/pytorch#2742"
    if rates[best] <= _MUCH_FASTER * usual:
        return ok("gemm_speed", title, text, source, subject=device, read=read)
    return warn(
        "gemm_slow", f"{best} multiplies {rates[best] / usual:.1f} times as fast as {default}", f"{title}: {text}",
        f"`export TORCH_BLAS_PREFER_HIPBLASLT={int(best == 'hipBLASLt')}`, and compare a run's speed; which library is "
        "faster has changed between versions of ROCm", source, subject=device, read=read,
    )  # fmt: skip


def _seconds(compare: Comparison, size: int) -> float:
    left, right = (torch.randn(size, size, device=compare.device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(4):
        step(f"timing products of {size} cubed")
        torch.cuda.synchronize(compare.device)
        began = time.perf_counter()
        torch.mm(left, right)
        torch.cuda.synchronize(compare.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one loads kernels


# ---- a small model ----------------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, HEADS, KEY_HEADS, HEAD, WIDE, VOCABULARY = 128, 4, 2, 32, 352, 1003
_PACKED, _PADDED = (41, 70, 17), 37
"""Lengths of the examples in a packed row; tokens of padding of the second row. Rows have 128 tokens."""


def _parameters(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    shapes = {
        "embedding": (VOCABULARY, HIDDEN), "first norm": (HIDDEN,), "query": (HEADS * HEAD, HIDDEN),
        "key": (KEY_HEADS * HEAD, HIDDEN), "value": (KEY_HEADS * HEAD, HIDDEN), "output": (HIDDEN, HEADS * HEAD),
        "second norm": (HIDDEN,), "gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE),
        "last norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN),
    }  # fmt: skip
    scales = {
        name: 1.0 if len(shape) < 2 or name == "embedding" else shape[1] ** -0.5 for name, shape in shapes.items()
    }
    return {name: spread(shape, dtype, generator, scale=scales[name]) for name, shape in shapes.items()}


def _batch(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens, labels and positions of two rows of 128 tokens, and the mask of the keys that a query attends to."""
    length = sum(_PACKED)
    tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    labels, positions = tokens.roll(-1, 1), torch.arange(length).expand(2, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "packed":
        example = torch.arange(len(_PACKED)).repeat_interleave(torch.tensor(_PACKED))
        positions = torch.cat([torch.arange(one) for one in _PACKED]).expand(2, length)
        return tokens, labels, positions, (causal & (example[:, None] == example))[None, None]
    if kind == "padded":
        labels[1, -_PADDED - 1 :] = -100
        there = torch.ones(2, length, dtype=torch.bool)
        there[1, -_PADDED:] = False
        return tokens, labels, positions, causal & there[:, None, None, :]
    return tokens, labels, positions, None


def _model(p: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """One layer as of Llama, and its loss: the same operators as transformers and TRL call."""

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, HEAD).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        angle = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(HEAD // 2, device=x.device) * 2 / HEAD)
        cos, sin = (function(angle).repeat(1, 1, 1, 2).to(x.dtype) for function in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = functional.embedding(tokens, p["embedding"])
    h = functional.rms_norm(x, (HIDDEN,), p["first norm"], 1e-5)
    query, key, value = (functional.linear(h, p[name]) for name in ("query", "key", "value"))
    query, key = turned(heads(query, HEADS)), turned(heads(key, KEY_HEADS))
    attended = scaled_dot_product_attention(
        query, key, heads(value, KEY_HEADS), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    x = x + functional.linear(attended.transpose(1, 2).flatten(2), p["output"])
    h = functional.rms_norm(x, (HIDDEN,), p["second norm"], 1e-5)
    x = x + functional.linear(
        functional.silu(functional.linear(h, p["gate"])) * functional.linear(h, p["up"]), p["down"]
    )
    logits = functional.linear(functional.rms_norm(x, (HIDDEN,), p["last norm"], 1e-5), p["head"])
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _both_ways(p: Mapping[str, Tensor], *batch: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in p.items()}
    loss = _model(leaves, *batch)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach()} | {f"gradient of {name}": one for name, one in zip(leaves, gradients, strict=True)}


def model(request: Mapping[str, Any]) -> list[Finding]:
    """Loss and gradients of a small model on plain, padded and packed rows in each dtype, compared with float64."""
    with Comparison(request) as compare:
        for dtype in DTYPES:
            parameters = _parameters(dtype, compare.generator)
            placed = {name: compare.move(tensor) for name, tensor in parameters.items()}
            for kind in ("plain", "padded", "packed"):
                case, batch = f"{name_of(dtype)}, {kind}", _batch(kind, compare.generator)
                step(f"computing {case}")
                try:
                    found = _both_ways(
                        placed, *(None if one is None else compare.move(one.contiguous()) for one in batch)
                    )
                except RuntimeError as error:
                    compare.refused(case, error)
                    continue
                expected = _both_ways({name: tensor.double() for name, tensor in parameters.items()}, *batch)
                rounded = _both_ways(parameters, *batch)
                for part, result in found.items():
                    bound = formula_bound(expected[part], rounded[part])
                    compare.close(f"{case}: {part}", result, expected[part], bound, gradient=part != "loss")
        right = (
            "a model's layers",
            f"on {compare.name}, loss and gradients of embedding, normalisation, attention (plain, padded, packed), "
            "products and cross entropy differ from float64 by no more than rounding in their dtype",
            _OURS,
        )
        wrong = (
            "A model's layers compute wrongly",
            "differ from float64 by more than rounding; copies may be right: this is arithmetic. If only gradients are "
            "wrong, inference works and training does not; if only padded or packed rows are, attention with a mask is "
            "wrong, and --attn_implementation eager avoids it",
            _ONE_CHANGE,
            "rocm-libraries#12344; ROCm/ROCm#4391; TheRock#2662; pytorch#133671; pytorch#147460; ROCm/pytorch#3230",
        )
        return [compare.verdict("model", right, wrong)]


# ---- attention at length -----------------------------------------------------------------------------------------

_BACKENDS = {name: f"scaleddotproduct{name}attention" for name in ("flash", "efficient", "cudnn")}
_STRIDE, _SHORTEST = 197, 256
_ON_CPU = 2048


def attention(request: Mapping[str, Any]) -> list[Finding]:
    """Causal bfloat16 attention at ``length`` tokens, or half as many as often as memory asks for it, and the backend
    that torch chooses with and without a mask.

    The output is compared in every `_STRIDE`-th row, and only these have a gradient, so all gradients are known from
    few rows of scores. Each query points at two keys before it, so that outputs and gradients are large in every row.
    """
    length = request["length"]
    with Comparison(request) as compare:
        length = min(length, _ON_CPU) if compare.device.type == "cpu" else length
        backends = {kind: _backend(compare, kind) for kind in ("plain", "padded", "packed")}
        while True:
            try:
                _long(compare, length)
                break
            except torch.OutOfMemoryError:
                if length <= _SHORTEST:
                    raise
            length //= 2
        right = (
            f"attention at {length:,} tokens",
            f"on {compare.name}, output and gradients differ from float64 by no more than rounding",
            "ROCm/ROCm#6416",
        )
        fix = (
            "train with --attn_implementation eager, or at a --max_length at which this check passes (`doctor --json` "
            "names the wrong rows), until a newer ROCm build of torch is correct"
        )
        wrong = (
            f"Attention is wrong at {length:,} tokens",
            "of scaled_dot_product_attention differ from float64 by more than rounding",
            fix,
            "ROCm/ROCm#6416; aotriton#123; pytorch#133671; ROCm/pytorch#3230",
        )
        return [compare.verdict("attention", right, wrong), judge_backends(compare.name, backends)]


def _long(compare: Comparison, length: int) -> None:
    case, dtype, generator = f"attention at {length:,} tokens", torch.bfloat16, compare.generator
    rows = torch.arange(length - 1, -1, -_STRIDE).flip(0)
    key, value = (spread((1, 1, length, 128), dtype, generator) for _ in range(2))
    targets = (torch.rand(2, 2, length, generator=generator) * torch.arange(1, length + 1)).long()
    query = (2 * key[0, 0][targets].float().sum(0)).to(dtype)[None]  # (1, 2, length, 128)
    upstream = torch.zeros_like(query)
    upstream[:, :, rows] = spread((1, 2, len(rows), 128), dtype, generator)
    step(f"computing {case}")
    leaves = [compare.move(tensor).requires_grad_() for tensor in (query, key, value)]
    output = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(output, leaves, compare.move(upstream))
    hidden = torch.arange(length) > rows[:, None]
    known = [_rows(query, key, value, upstream, rows, hidden, kind) for kind in (torch.float64, dtype)]
    placed = compare.move(rows)
    found = [output[:, :, placed], gradients[0][:, :, placed], *gradients[1:]]
    parts = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
    for part, result, exact, rounded in zip(parts, found, *known, strict=True):
        compare.close(f"{case}: {part}", result, exact, formula_bound(exact, rounded), gradient=part != "output")


def _rows(
    query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, rows: Tensor, hidden: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients by the formula on the CPU, from these rows alone."""
    leaves = [one.to(dtype).requires_grad_() for one in (query[:, :, rows], key, value)]
    scores = (leaves[0] @ leaves[1].mT) / math.sqrt(query.shape[-1])
    output = scores.masked_fill(hidden, -math.inf).softmax(-1) @ leaves[2]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream[:, :, rows].to(dtype))]


def _backend(compare: Comparison, kind: str) -> str:
    """The backend that torch chooses for a small causal batch, or why none runs."""
    mask = _batch(kind, compare.generator)[3]
    step(f"asking for the backend of attention, {kind}")
    shape = (2, 2, sum(_PACKED), 64)
    query, key, value = (
        compare.move(spread(shape, torch.bfloat16, compare.generator)).requires_grad_() for _ in range(3)
    )
    forced = compare.fault == "math" and compare.where in kind
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH) if forced else nullcontext():
        warnings.simplefilter("ignore")
        try:
            placed = None if mask is None else compare.move(mask.contiguous())
            output = scaled_dot_product_attention(query, key, value, attn_mask=placed, is_causal=mask is None)
            return backend_of(output)
        except RuntimeError as error:
            return f"none: {one_line(error)}"


def backend_of(output: Tensor) -> str:
    """The backend whose node is in the graph of an output; ``math`` if none is, as it has no node of its own."""
    names, seen, waiting = set(), set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().lower())
            waiting += [following for following, _ in node.next_functions]
    return next((backend for backend, part in _BACKENDS.items() if any(part in name for name in names)), "math")


def judge_backends(device: str, backends: Mapping[str, str]) -> Finding:
    """The finding on the backends by batch (``plain``, ``padded``, ``packed``)."""
    read = [f"bfloat16, {kind}: {backend}" for kind, backend in backends.items()]
    slow = [kind for kind, backend in backends.items() if backend == "math"]
    none = [backend for backend in backends.values() if backend.startswith("none")]
    source, grows = "aotriton util.cc; pytorch#134498; unsloth#8821", "whose memory grows with the square of the length"
    if none:
        return unknown(f"no backend runs bfloat16 attention: {none[0]}", subject=device, read=read)
    if "plain" in slow:
        fix = "a torch release with AOTriton for this card (2.10 and newer for gfx1100), or shorter sequences"
        return warn(
            "attention_unfused", "Attention uses the math path",
            f"on {device}, there is no fused backend: attention takes the math path, {grows}", fix, source,
            subject=device, read=read,
        )  # fmt: skip
    if slow:
        fix = (
            "give attention no mask: `--per_device_train_batch_size 1` with `--gradient_accumulation_steps`, without "
            "--packing; or shorten --max_length"
        )
        return warn(
            "attention_masked_unfused", "Attention with a mask uses the math path",
            f"on {device}, {' and '.join(slow)} batches take the math path, {grows}", fix, source, subject=device,
            read=read,
        )  # fmt: skip
    return ok(
        "attention_fused", f"fused attention ({backends['plain']})",
        f"on {device}, for plain, padded and packed batches", source, subject=device, read=read,
    )  # fmt: skip


# ---- 4-bit weights -----------------------------------------------------------------------------------------------
# NF4: a tensor is split into blocks in memory order; each is divided by its largest magnitude (absmax), and every
# quotient replaced by the index of the nearest of 16 values, two indices per byte, the first in the upper half. The
# values are those of QLoRA (arXiv:2305.14314, appendix E).

LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float64,
)
_BLOCK, _OUTPUTS, _INPUTS = 64, 192, 512
ROWS = (1, 8, 9, 33)
"""Rows of the other factor: bitsandbytes 0.50 has a separate kernel for up to 8 of them on RDNA3."""


def nf4(request: Mapping[str, Any]) -> list[Finding]:
    """Quantisation, dequantisation and products of bitsandbytes in NF4, each with correct inputs."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return [skipped("bitsandbytes is not installed")]
    step("importing bitsandbytes")
    library = importlib.import_module("bitsandbytes.functional")
    native = getattr(importlib.import_module("bitsandbytes.cextension"), "lib", None)
    loaded = str(getattr(getattr(native, "_lib", None), "_name", "no native library")).rpartition("/")[2]
    with Comparison(request) as compare:
        try:
            for dtype in DTYPES:
                _nf4(compare, library, dtype)
        except (RuntimeError, NotImplementedError) as error:
            if compare.cases or isinstance(error, torch.AcceleratorError):
                raise
            fix = (
                "see the findings on software: it may have no library for this build of torch; until then train "
                "without --load_in_4bit and --load_in_8bit"
            )
            return [warn(
                "nf4_refused", "bitsandbytes does not work",
                f"on {compare.name}, it refused to quantise a weight: {one_line(error)}", fix,
                "bitsandbytes cextension.py", subject=compare.name,
            )]  # fmt: skip
        fix = (
            '`pip install -U "bitsandbytes>=0.50.2"`: the fixes for RDNA3 are in 0.50.0 and newer, except for its '
            "library for ROCm 6.4 (rocm64), which a torch build with ROCm 7.2 does not load; if that version is "
            "installed, train without --load_in_4bit, and report it with `doctor --json`"
        )
        wrong = (
            "4-bit weights are wrong",
            "of bitsandbytes in NF4 differ from the format's definition: a model loaded with --load_in_4bit is wrong",
            fix,
            "bitsandbytes#2087; bitsandbytes#1885; bitsandbytes#1979; bitsandbytes#2012",
        )
        right = (
            "4-bit weights",
            f"on {compare.name}, bitsandbytes quantises, dequantises and multiplies NF4 by its definition, for "
            "decoding and for training",
            "QLoRA, appendix E",
        )
        return [compare.verdict("nf4", right, wrong, [f"bitsandbytes has loaded {loaded}"])]


def _nf4(compare: Comparison, library: Any, dtype: torch.dtype) -> None:
    """One weight whose elements are levels of NF4, so that its indices are known."""
    label, generator = f"{name_of(dtype)} NF4", compare.generator
    indices = torch.randint(0, 16, (_OUTPUTS * _INPUTS,), generator=generator)
    indices[::_BLOCK] = 15  # every block holds its absmax
    scales = (0.5 + torch.rand(indices.numel() // _BLOCK, generator=generator)).to(dtype).float()
    values = (LEVELS[indices] * scales.repeat_interleave(_BLOCK).double()).view(_OUTPUTS, _INPUTS)
    pairs = indices.view(-1, 2).to(torch.uint8)
    packed_right = (pairs[:, 0] << 4) | pairs[:, 1]
    step(f"quantising {label}")
    weight = compare.move(values.to(dtype))
    packed, state = library.quantize_4bit(weight, quant_type="nf4", blocksize=_BLOCK)
    compare.close(f"{label}: absmax", state.absmax.view(-1), scales, None)
    compare.close(f"{label}: indices", packed.view(-1), packed_right, None)
    packed, state.absmax = compare.move(packed_right.view(-1, 1)), compare.move(scales)
    info, sizes = torch.finfo(dtype), values.abs()
    bound = (2 * torch.finfo(torch.float32).eps + info.eps) * sizes + info.tiny
    step(f"computing {label}, dequantised")
    compare.close(f"{label}, dequantised", library.dequantize_4bit(packed, state), values, bound)
    _, double = library.quantize_4bit(weight, quant_type="nf4", blocksize=_BLOCK, compress_statistics=True)
    # An absmax of 0.5 to 1.5 less the mean is quantised to the nearest of the codes, between -1 and 1.
    coarse = 0.75 * float(double.state2.code.diff().max()) * LEVELS[indices].abs().view_as(values)
    compare.close(f"{label}, double quantisation", library.dequantize_4bit(packed, double), values, bound + coarse)
    multiply = importlib.import_module("bitsandbytes").matmul_4bit
    for rows in ROWS:
        step(f"computing {label}, product with {rows} rows")
        case = f"{label}, product with {rows} rows"
        x, upstream = (spread((rows, size), dtype, generator) for size in (_INPUTS, _OUTPUTS))
        expected, back = (_with_bound(one, weight) for one, weight in ((x, values.t()), (upstream, values)))
        # Transposed, as in the library's own layers.
        compare.close(case, multiply(compare.move(x), packed.t(), quant_state=state), *expected)
        leaf = compare.move(x).requires_grad_()
        output = multiply(leaf, packed.t(), quant_state=state)
        compare.close(f"{case}, in training", output, *expected)
        (gradient,) = torch.autograd.grad(output, leaf, compare.move(upstream))
        compare.close(f"{case}: gradient", gradient, *back, gradient=True)


def _with_bound(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """A product with a dequantised weight, and its bound; see the module."""
    expected = left.double() @ right
    return expected, formula_bound(expected, left @ right.to(left.dtype))
