"""Matrix products by dtype, shape and layout (``gemm``), repeated (``gemm_repeat``) and timed (``gemm_rate``); and what
all checks of arithmetic share: inputs, error bounds against float64, and the count of wrong results.

With *exact* inputs every product and every partial sum, in any order, is an integer that the narrowest format in use
can hold, so each correct implementation gives the same bits. All other results are compared with float64 on the CPU:

- A matrix product by the bound of its sums. With the unit roundoff u of float32, the relative error of n rounded
  operations is at most ``gamma(n) = n u / (1 - n u)`` of the sum of absolute values (Higham, Accuracy and Stability of
  Numerical Algorithms, 2nd ed. 2002, lemma 3.1). Matrix units truncate addends instead of rounding them, which costs at
  most ``4 u n`` (measured on tensor cores: Fasi and others 2021, PeerJ CS 7:e330); `product` allows that much.
- A layer by the error of its own formula in the same dtype on the CPU: an element may be `FACTOR` times as far from
  float64 as the worst of those, as the authors of fused attention kernels test them (flash-attention,
  tests/test_flash_attn.py, with a factor of 2 to 3). The largest of 20 seeds on a correct CPU was 5.1 times.

A wrong result is read back again: if the two readbacks differ, the transfer is at fault, not arithmetic.

Injected faults: ``wrong`` negates one element and subtracts one, ``nan`` makes one NaN (``wrong`` for integers),
``zeros`` zeroes a whole result, ``gradient`` is ``wrong`` in a gradient only. The first result is changed whose case
contains the request's ``where``: ``where=bfloat16`` or ``where=127x257`` is one of those products, ``where=int8`` the
37th repeat of that dtype.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.findings import Finding, from_row, knowledge_data, skipped
from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.machine.survey import Card, identify
from hf_rocm_tune.transfer import Mover

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FACTOR = 8.0
SMALLEST = 2.0**-6
"""Smallest magnitude of inputs: products of two are normal numbers in float16, so it does not matter whether a device
flushes subnormal numbers to zero."""
_EXACT_FLOAT32 = 64
_SHOWN = 3
_BEYOND = 1e9
"""Replaces an infinite or NaN error."""

SHAPES = (
    *((1, 1, 1), (3, 5, 7), (17, 31, 63), (64, 64, 64), (127, 257, 129)),
    *((256, 512, 256), (1, 1024, 257), (513, 129, 1), (384, 1024, 16), (384, 16, 1024)),
)
"""m, k, n: odd sizes with incomplete tiles; one row or column, which has kernels of its own; the two of a LoRA pair."""
FULL_SHAPES = ((1023, 1025, 1027), (2048, 4096, 2048), (2048, 64, 4096), (1, 4096, 4096))
LAYOUTS = ((False, True), (True, False), (True, True))
"""Whether the left and the right factor are transposed views, as in the gradients of a linear layer."""
LAYOUT_SHAPES = ((64, 64, 64), (127, 257, 129))
INT8_SHAPES = ((32, 64, 48), (33, 1024, 128), (256, 512, 256))
"""Shapes that CUDA's kernel accepts: more than 16 rows, the others multiples of 8."""

REPEATED = (torch.float16, torch.int8, torch.bfloat16, torch.float32)
"""float16 and int8 first: those of rocm-libraries#12344."""
REPEATED_SHAPES = {"cuda": (512, 4096, 1024), "cpu": (96, 128, 112)}
FAULTY_REPEAT = 37
_RING = 4
_LEAST_REPEATS = 40
_BUSY_BYTES = 96 << 20
"""More than the Infinity Cache of an RX 7900 XT (80 MB), so that the traffic reaches its memory."""

RATED_SHAPE = (8192, 8192, 8192)
"""Of the product whose rate is compared with measurements of other cards of the model."""
_TIMINGS = 7

Result = TypeVar("Result")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normally distributed values of ``dtype`` with magnitudes of at least ``SMALLEST``."""
    values = torch.randn(tuple(shape), generator=generator) * scale
    return torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST).copysign(values), values).to(dtype)


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1


def exact_factors(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors ``(m, k)`` and ``(k, n)`` of small integers whose product is exact in ``dtype``, in any order of sums.

    float32: integers of at most 64 in magnitude, so that sums stay below 2^24 for k up to 4096. float16 and bfloat16:
    ones and minus ones, in each row of the left factor at most as many as the format has consecutive integers (2048 and
    256), zeros elsewhere. int8: all values, for int32 sums.
    """
    if dtype in (torch.int8, torch.float32):
        low, high = (-128, 128) if dtype is torch.int8 else (-_EXACT_FLOAT32, _EXACT_FLOAT32 + 1)
        left, right = (torch.randint(low, high, shape, generator=generator) for shape in ((m, k), (k, n)))
        return left.to(dtype), right.to(dtype)
    left, most = signs((m, k), generator), round(2 / torch.finfo(dtype).eps)
    if k > most:
        ranks = torch.rand((m, k), generator=generator).argsort(dim=1)
        left = torch.where(ranks < most, left, 0)
    return left.to(dtype), signs((k, n), generator).to(dtype)


def product(left: Tensor, right: Tensor, dtype: torch.dtype, *, roundings: int = 1) -> tuple[Tensor, Tensor]:
    """The product of two matrices, and its error bound if it is computed with float32 sums and stored as ``dtype``.

    Args:
        left: ``(..., m, k)`` on the CPU, with the values that the device gets.
        right: ``(..., k, n)`` likewise.
        dtype: of the result.
        roundings: how often values may be rounded to ``dtype`` in the computation, the result included.

    Returns:
        Values and bounds in float64.
    """
    left, right = left.double(), right.double()
    exact, sizes = left @ right, left.abs() @ right.abs()
    u = 4 * left.shape[-1] * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(dtype)
    error = (u / (1 - u) + (roundings - 1) * info.eps) * sizes
    # Values below the smallest normal number may be flushed to zero.
    return exact, error + info.eps / 2 * (exact.abs() + error) + info.tiny


def layer_bound(expected: Tensor, rounded: Tensor) -> Tensor:
    """The error bound of a layer, from its formula in float64 and in the dtype of the result; see the module."""
    info = torch.finfo(rounded.dtype)
    return FACTOR * ((rounded.double() - expected).abs().max() + info.eps / 2 * expected.abs()) + info.tiny


class WrongResult(NamedTuple):
    """A wrong result, or one that the device refused to compute."""

    case: str
    line: str
    refused: bool = False
    reads_agree: bool = True


class Comparison:
    """Moves inputs to one device, compares the results, and collects the wrong ones.

    Args:
        request: of a check; ``device``, ``address``, ``seed``, ``fault``.

    Attributes:
        device: where `move` brings tensors.
        generator: of all inputs.
        cases, elements: number of compared ones.
        worst: largest error, as a share of its bound.
        problems: the wrong results.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.name = request["device"]
        self.device = device_of(request)
        self.generator = torch.Generator().manual_seed(request.get("seed", 0))
        fault = request.get("fault") or {}
        self._kind, self._where = fault.get("kind", ""), fault.get("where", "")
        self.cases = self.elements = 0
        self.worst = 0.0
        self.problems: list[WrongResult] = []
        self._mover = Mover(self.device)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()

    def move(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, verified."""
        return self._mover.move(tensor, name="input")

    def move_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.move(tensor) for tensor in tensors]

    def falls_back(self, label: str) -> bool:
        """Whether the injected fault sends this attention through the math path."""
        return self._kind == "math" and self._where in label

    def exact(self, case: str, result: Tensor, expected: Tensor, *, gradient: bool = False) -> bool:
        """Compare a result on the device with exact values on the CPU; a zero may have either sign."""
        return self.close(case, result, expected, None, gradient=gradient)

    def close(
        self, case: str, result: Tensor, expected: Tensor, bound: Tensor | None, *, gradient: bool = False
    ) -> bool:
        """Compare a result on the device with float64 values within a bound; None: with exact values."""
        assert result.shape == expected.shape, (case, result.shape, expected.shape)
        faulty = self._kind in ("wrong", "nan", "zeros") or (self._kind == "gradient" and gradient)
        result = result.detach()
        if faulty and self._where in case and result.numel():
            result, self._kind = with_fault(result, self._kind), ""
        step(f"comparing {case}")
        found = result.cpu()
        self.cases += 1
        self.elements += found.numel()
        if bound is None:
            wrong = found != expected
        else:
            error = (found.double() - expected).abs()
            wrong = ~(error <= bound)  # true for NaN
            share = torch.where(error == 0, 0, error / bound).nan_to_num(nan=_BEYOND).clamp_max(_BEYOND)
            self.worst = max(self.worst, float(share.max()))
        if not wrong.any():
            return True
        again = result.cpu()
        same = torch.equal(*(read.reshape(-1).view(torch.uint8) for read in (found, again)))
        line = _line(case, found, expected, bound, wrong) + ("" if same else "; read back again, it was different")
        self.problems.append(WrongResult(case=case, line=line, reads_agree=same))
        return False

    def attempt(self, case: str, compute: Callable[[], Result]) -> Result | None:
        """The computed result; None if the device refuses, which is recorded."""
        step(f"computing {case}")
        try:
            return compute()
        except RuntimeError as error:
            self.refused(case, error)
            return None

    def layer(
        self,
        name: str,
        layer: Callable[..., Tensor],
        formula: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        upstream: Tensor,
        labels: Sequence[str],
    ) -> None:
        """Compare a layer and the gradients of all its inputs with its formula.

        Args:
            name: of the layer, for messages.
            layer: is called with the inputs on the device.
            formula: is called with them on the CPU, in float64 and in their own dtype.
            inputs, upstream: on the CPU; the latter is the gradient of the output.
            labels: of the inputs, for messages.
        """
        found = self.attempt(name, lambda: both_ways(layer, self.move_all(inputs), self.move(upstream)))
        if found is not None:
            expected = both_ways(formula, [tensor.double() for tensor in inputs], upstream.double())
            self.results(name, found, expected, both_ways(formula, inputs, upstream), labels)

    def results(
        self,
        name: str,
        found: Sequence[Tensor],
        expected: Sequence[Tensor],
        rounded: Sequence[Tensor],
        labels: Sequence[str],
    ) -> None:
        """Compare an output and its gradients with the formula in float64 and in their own dtype."""
        parts = ("output", *(f"gradient of {label}" for label in labels))
        for part, result, exact, narrow in zip(parts, found, expected, rounded, strict=True):
            self.close(f"{name}: {part}", result, exact, layer_bound(exact, narrow), gradient=part != "output")

    def refused(self, case: str, error: Exception) -> None:
        self.cases += 1
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.problems.append(WrongResult(case=case, line=f"{case}: refused with {message}", refused=True))

    def verdict(self, right: str, wrong: str, evidence: Iterable[str] = ()) -> Finding:
        """The finding on all results.

        Args:
            right, wrong: rows if all results are right, with ``cases``, or some are wrong, with ``wrong`` of ``cases``.
                There are rows for results whose readbacks differ, and if the only problems are refusals.
        """
        cases = f"{self.cases:,}"
        if not self.problems:
            compared = f"{self.elements:,} elements of {cases} results compared"
            compared += f", the largest error {100 * self.worst:.0f} % of its bound" if self.worst else ""
            return from_row(right, subject=self.name, evidence=[compared, *evidence], cases=cases)
        lines = [problem.line for problem in self.problems[:_SHOWN]]
        more = len(self.problems) - len(lines)
        lines += [*([f"and {more:,} more results"] if more else []), *evidence]
        if not all(problem.reads_agree for problem in self.problems):
            return from_row("arithmetic_read_back", subject=self.name, evidence=lines)
        row = "arithmetic_refused" if all(problem.refused for problem in self.problems) else wrong
        return from_row(row, subject=self.name, evidence=lines, wrong=f"{len(self.problems):,}", cases=cases)


def with_fault(result: Tensor, kind: str) -> Tensor:
    """A copy of a result with an injected fault; see the module."""
    broken = result.clone(memory_format=torch.contiguous_format)
    if kind == "zeros":
        return broken.zero_()
    flat = broken.view(-1)
    place = flat.numel() // 2
    flat[place] = float("nan") if kind == "nan" and flat.is_floating_point() else -flat[place] - 1
    return broken


def both_ways(layer: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = layer(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


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


def gemm(request: Mapping[str, Any]) -> list[Finding]:
    """Products of every dtype, shape and layout; with ``full`` larger shapes too.

    Each is computed twice: with small integers, where nothing may differ, and with normally distributed values within
    the bound of `product`. For the latter, sums in reduced precision are disabled, because the bound is that of float32
    sums; for the former torch's default applies.
    """
    with Comparison(request) as compare:
        for dtype in DTYPES:
            for shape in SHAPES + FULL_SHAPES if request.get("full") else SHAPES:
                _product(compare, dtype, shape, (False, False))
            for shape, layout in itertools.product(LAYOUT_SHAPES, LAYOUTS):
                _product(compare, dtype, shape, layout)
            _batch_and_linear(compare, dtype)
        refusal = _int8(compare)
        missing = [f"int8 was not compared: {refusal}"] if refusal else []
        return [compare.verdict("gemm_right", "gemm_wrong", missing)]


def _product(compare: Comparison, dtype: torch.dtype, shape: tuple[int, int, int], layout: tuple[bool, bool]) -> None:
    m, k, n = shape
    factors = " @ ".join("x.T" if transposed else "x" for transposed in layout)
    name = f"{name_of(dtype)} {m}x{k} by {k}x{n}{f' as {factors}' if any(layout) else ''}"

    def compute(left: Tensor, right: Tensor) -> Tensor:
        factors = zip((left, right), layout, strict=True)
        first, second = (
            compare.move(one.mT.contiguous()).mT if turned else compare.move(one) for one, turned in factors
        )
        return first @ second

    left, right = exact_factors(m, k, n, dtype, compare.generator)
    found = compare.attempt(f"{name}, exact", lambda: compute(left, right))
    if found is not None:
        compare.exact(f"{name}, exact", found, (left.double() @ right.double()).to(dtype))
    one, other = (spread(size, dtype, compare.generator) for size in ((m, k), (k, n)))
    _close(compare, name, lambda: compute(one, other), product(one, other, dtype))


def _batch_and_linear(compare: Comparison, dtype: torch.dtype) -> None:
    """A batch of 3 products, and a linear layer with a bias, which libraries add in the product's epilogue."""
    left, right = (spread((3, *size), dtype, compare.generator) for size in ((33, 65), (65, 31)))
    name = f"{name_of(dtype)} batch of 3, 33x65 by 65x31"
    _close(compare, name, lambda: torch.bmm(compare.move(left), compare.move(right)), product(left, right, dtype))

    layer = [spread(size, dtype, compare.generator) for size in ((65, 127), (96, 127), (96,))]
    inputs, weight, bias = layer
    plain, bound = product(inputs, weight.t(), dtype)
    # If the bias is added separately, the product is rounded to the dtype once more.
    bound = bound + torch.finfo(dtype).eps * (plain.abs() + bound + bias.double().abs())
    name = f"{name_of(dtype)} linear layer with bias, 65x127 to 96"
    _close(compare, name, lambda: functional.linear(*compare.move_all(layer)), (plain + bias.double(), bound))


def _close(compare: Comparison, name: str, compute: Callable[[], Tensor], expected: tuple[Tensor, Tensor]) -> None:
    with _float32_sums():
        found = compare.attempt(name, compute)
        if found is not None:
            compare.close(name, found, *expected)


def _int8(compare: Comparison) -> str:
    """``torch._int_mm``, whose sums are exact. Returns why the device does not have it, or an empty text."""
    for m, k, n in INT8_SHAPES:
        left, right = exact_factors(m, k, n, torch.int8, compare.generator)
        name = f"int8 {m}x{k} by {k}x{n}, exact"
        step(f"computing {name}")
        try:
            found = torch._int_mm(compare.move(left), compare.move(right))
        except (RuntimeError, NotImplementedError) as error:  # older cards and libraries have no such kernel
            return _refusal(error)
        compare.exact(name, found, (left.double() @ right.double()).to(torch.int32))
    return ""


def _refusal(error: Exception) -> str:
    """The reason why something is not available, in one line; an error of the device itself is raised again."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return " ".join(str(error).split())[:200]


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Sums in float32, also if a library splits them over several kernels."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def gemm_repeat(request: Mapping[str, Any]) -> list[Finding]:
    """Repeat a product for ``seconds`` in each dtype; compare every result with the first on the device, bit for bit.

    The first is compared with float64. One that differs is copied to the CPU: if it is within the rounding bound, the
    library only changes the order of sums between calls; if not, it is wrong. On an accelerator a second stream keeps
    the memory busy. Not covered: a device that is wrong in the same way every time.
    """
    fault = dict(request.get("fault") or {})
    lines, varying = [], []
    with Comparison({**request, "fault": None}) as compare:
        for dtype in REPEATED:
            name = name_of(dtype)
            kind = fault.pop("kind", "") if fault.get("where", "") in name else ""
            try:
                repeats, differing = _repeat(compare, dtype, request["seconds"], kind)
            except (RuntimeError, NotImplementedError) as error:
                if dtype is not torch.int8:  # not every device and library has such products
                    raise
                lines.append(f"{name} was not compared: {_refusal(error)}")
                continue
            lines.append(f"{name}: {repeats:,} times")
            varying += [f"{differing:,} of {name}"] if differing else []
        if varying and not compare.problems:
            return [from_row("gemm_repeat_varies", subject=compare.name, evidence=lines, varying=", ".join(varying))]
        return [compare.verdict("gemm_repeats", "gemm_repeat_wrong", lines)]


def _repeat(compare: Comparison, dtype: torch.dtype, seconds: float, fault: str) -> tuple[int, int]:
    """The number of products of one dtype, and of results that differed from the first within the bound."""
    name, (m, k, n) = name_of(dtype), REPEATED_SHAPES[compare.device.type]
    multiply = torch._int_mm if dtype is torch.int8 else torch.mm
    if dtype is torch.int8:
        left, right = exact_factors(m, k, n, dtype, compare.generator)
        exact = left.double() @ right.double()
        reference = (exact, torch.zeros_like(exact))
    else:
        left, right = (spread(size, dtype, compare.generator) for size in ((m, k), (k, n)))
        reference = product(left, right, dtype)
    factors = compare.move_all((left, right))
    step(f"computing {name}, the first")
    first = multiply(*factors)
    first_right = compare.close(f"{name}, the first", first, *reference)
    # Each call writes to another buffer, so that a product that wrote nothing is not taken for a correct one.
    ring = [torch.empty_like(first) for _ in range(_RING)]
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    add_load = _load(compare.device)
    number, varying, ends = 1, 0, time.monotonic() + seconds
    while number <= _LEAST_REPEATS or time.monotonic() < ends:
        step(f"computing {name}, repeats {number + 1} to {number + _RING}")
        counts = []
        add_load()
        for place in range(_RING):
            multiply(*factors, out=ring[place])
            if fault and number + 1 + place == FAULTY_REPEAT:
                ring[place] = with_fault(ring[place], fault)
            counts.append((ring[place].view(bits) != first.view(bits)).sum())
        for place, count in enumerate(torch.stack(counts).tolist()):
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


def gemm_rate(request: Mapping[str, Any]) -> list[Finding]:
    """The rate of large bfloat16 products, forward and backward, compared with measurements of the same model."""
    with Comparison(request) as compare:
        card = _card(compare.device) if compare.device.type == "cuda" else None
        if card is None or card.bf16_tflops is None:
            return [skipped("no rate of this card is known", subject=compare.name)]
        tflops = 3 * 2 * math.prod(RATED_SHAPE) / _median_s(compare, RATED_SHAPE) / 1e12
        return judge_rate(compare.name, card, tflops)


def _card(device: torch.device) -> Card | None:
    known = torch.cuda.get_device_properties(device)
    arch = getattr(known, "gcnArchName", None)
    return identify(arch=arch, vram_bytes=known.total_memory, name=known.name).card


def judge_rate(device: str, card: Card, tflops: float) -> list[Finding]:
    """The finding on the rate of large products (10^12 operations a second)."""
    known = card.bf16_tflops or 0
    slow = tflops < knowledge_data("thresholds.toml")["bf16_share"]["warn"] * known
    values: dict[str, Any] = {"card": card.name, "found": f"{tflops:.0f}", "known": known, "size": RATED_SHAPE[0]}
    return [from_row("gemm_slow" if slow else "gemm_rate", subject=device, **values)]


def _median_s(compare: Comparison, shape: tuple[int, int, int]) -> float:
    """Seconds of a forward product and the two of its backward pass."""
    rows, inputs, outputs = shape
    sizes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, weight, upstream = compare.move_all(spread(size, torch.bfloat16, compare.generator) for size in sizes)
    times = []
    for _ in range(_TIMINGS + 1):
        step(f"timing {shape}")
        torch.cuda.synchronize(compare.device)
        began = time.perf_counter()
        functional.linear(x, weight)
        upstream @ weight
        upstream.t() @ x
        torch.cuda.synchronize(compare.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one loads kernels
