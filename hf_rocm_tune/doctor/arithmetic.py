"""Matrix products by dtype, shape and layout (``gemm``), repeated (``gemm_repeat``) and timed (``gemm_rate``); and what
all checks of arithmetic share: inputs, the error bound against float64, and the count of wrong results.

*Exact* inputs leave no room at all: every product and every partial sum, in whatever order, is an integer that the
narrowest format in use can hold, so each correct implementation gives the same bits. All others are compared with
float64 on the CPU:

- a matrix product by the bound of its sums. With the unit roundoff u of float32, n rounded operations are off by at
  most ``gamma(n) = n u / (1 - n u)`` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, lemma 3.1),
  relative to the sum of absolute values. Matrix units cut addends off instead of rounding them, which costs at most
  ``4 u n`` (measured on tensor cores: Fasi and others 2021, PeerJ CS 7:e330); `product` allows that much.
- layers by what their own formula loses in the same dtype on the CPU: an element may be `FACTOR` times as far from
  float64 as the worst of those, as fused attention kernels are tested by their authors (flash-attention,
  tests/test_flash_attn.py, with a factor of 2 to 3); of 20 seeds on a CPU that computes right, the worst was 5.1.

A wrong result is read back a second time: where the two differ, the readback is at fault and not arithmetic.

Faults on purpose: ``wrong`` negates one element and takes one off, ``nan`` makes one NaN (``wrong`` among integers),
``zeros`` zeroes a whole result, ``gradient`` is ``wrong`` in a gradient only. The first result is harmed whose case
contains the request's ``where``: ``where=bfloat16`` or ``where=127x257`` harms one of those products, ``where=int8``
the 37th repeat of that dtype.
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
"""Least magnitude of inputs: products of two are normal numbers in float16, which a device that flushes subnormal
numbers to zero handles like any other."""
_EXACT_FLOAT32 = 64
_SHOWN = 3
_KEPT_PROBLEMS = 12
_BEYOND = 1e9
"""What stands for an error beyond all bounds, NaN among them."""

SHAPES = (
    *((1, 1, 1), (3, 5, 7), (17, 31, 63), (64, 64, 64), (127, 257, 129)),
    *((256, 512, 256), (1, 1024, 257), (513, 129, 1), (384, 1024, 16), (384, 16, 1024)),
)
"""m, k, n. Odd ones, where a tile is cut; one row or column, which takes other kernels; the two of a LoRA pair."""
FULL_SHAPES = ((1023, 1025, 1027), (2048, 4096, 2048), (2048, 64, 4096), (1, 4096, 4096))
LAYOUTS = ((False, True), (True, False), (True, True))
"""Whether the left and the right factor is a transposed view: input gradient and weight gradient of a linear layer."""
LAYOUT_SHAPES = ((64, 64, 64), (127, 257, 129))
INT8_SHAPES = ((32, 64, 48), (33, 1024, 128), (256, 512, 256))
"""What CUDA's kernel takes: more than 16 rows, the others multiples of 8."""

REPEATED = (torch.float16, torch.int8, torch.bfloat16, torch.float32)
"""float16 and int8 first: they are the ones of rocm-libraries#12344."""
REPEATED_SHAPES = {"cuda": (512, 4096, 1024), "cpu": (96, 128, 112)}
HARMED_REPEAT = 37
_RING = 4
_LEAST_REPEATS = 40
_BUSY_BYTES = 96 << 20
"""More than the Infinity Cache of an RX 7900 XT (80 MB), so that its memory is busy."""

RATED_SHAPE = (8192, 8192, 8192)
"""Of the product whose rate is compared with what was measured on other cards of the model."""
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
    ones and minus ones, in each row of the left factor at most as many as the format's largest run of integers (2048
    and 256), zeros elsewhere. int8: all values, for int32 sums.
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
    """The product of two matrices, to be computed with float32 sums and stored as ``dtype``, and its bound.

    Args:
        left: ``(..., m, k)`` on the CPU, with the values that the device gets.
        right: ``(..., k, n)`` likewise.
        dtype: of the result.
        roundings: how often the factors may have been rounded to ``dtype`` on the way, the result included.

    Returns:
        float64 values, and by how much each may be missed.
    """
    left, right = left.double(), right.double()
    exact, sizes = left @ right, left.abs() @ right.abs()
    u = 4 * left.shape[-1] * torch.finfo(torch.float32).eps / 2
    info = torch.finfo(dtype)
    error = (u / (1 - u) + (roundings - 1) * info.eps) * sizes
    # What is below the smallest normal number may be flushed to zero.
    return exact, error + info.eps / 2 * (exact.abs() + error) + info.tiny


def allowance(right: Tensor, rounded: Tensor) -> Tensor:
    """How far each element may be from float64 (`right`), by the same formula in the dtype of the result; see the
    module."""
    info = torch.finfo(rounded.dtype)
    return FACTOR * ((rounded.double() - right).abs().max() + info.eps / 2 * right.abs()) + info.tiny


class WrongResult(NamedTuple):
    """A wrong result, or one that the device refused to compute, in one line."""

    case: str
    line: str
    refused: bool = False
    reads_agree: bool = True


class Bench:
    """Computes on one device, compares, counts results and keeps the first wrong ones.

    Args:
        request: of a check; ``device``, ``address``, ``seed``, ``fault``.

    Attributes:
        device: that is tried; `move` brings tensors there.
        generator: of all inputs.
        cases, elements: compared so far.
        wrong: results that are.
        worst: largest error, as a share of its bound.
        problems: the first wrong results.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.name = request["device"]
        self.device = device_of(request)
        self.generator = torch.Generator().manual_seed(request.get("seed", 0))
        fault = request.get("fault") or {}
        self._kind, self._where = fault.get("kind", ""), fault.get("where", "")
        self.cases = self.elements = self.wrong = 0
        self.worst = 0.0
        self.problems: list[WrongResult] = []
        self._mover = Mover(self.device)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._mover.close()

    def move(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, verified."""
        return self._mover.move(tensor, name="input")

    def move_all(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.move(tensor) for tensor in tensors]

    def falls_back(self, label: str) -> bool:
        """Whether the fault asks that attention goes through the math path here."""
        return self._kind == "math" and self._where in label

    def exact(self, case: str, result: Tensor, right: Tensor, *, gradient: bool = False) -> bool:
        """Compare a result on the device with the only right values, on the CPU; a zero may have either sign."""
        return self.close(case, result, right, None, gradient=gradient)

    def close(self, case: str, result: Tensor, right: Tensor, bound: Tensor | None, *, gradient: bool = False) -> bool:
        """Compare with float64 values that may be missed by a bound; where that is None, with the only right ones."""
        assert result.shape == right.shape, (case, result.shape, right.shape)
        wanted = self._kind in ("wrong", "nan", "zeros") or (self._kind == "gradient" and gradient)
        result = result.detach()
        if wanted and self._where in case and result.numel():
            result, self._kind = harmed(result, self._kind), ""
        step(f"comparing {case}")
        found = result.cpu()
        self.cases += 1
        self.elements += found.numel()
        if bound is None:
            wrong = found != right
        else:
            error = (found.double() - right).abs()
            wrong = ~(error <= bound)  # NaN is within no bound
            share = torch.where(error == 0, 0, error / bound).nan_to_num(nan=_BEYOND).clamp_max(_BEYOND)
            self.worst = max(self.worst, float(share.max()))
        if not wrong.any():
            return True
        again = result.cpu()
        same = torch.equal(*(read.reshape(-1).view(torch.uint8) for read in (found, again)))
        line = _line(case, found, right, bound, wrong) + ("" if same else "; read back again, it was different")
        self._keep(WrongResult(case=case, line=line, reads_agree=same))
        return False

    def attempt(self, case: str, compute: Callable[[], Result]) -> Result | None:
        """What is computed; None where that raises, which is noted: it is a fault of the installation."""
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
            name: of the layer, in words.
            layer: takes the inputs on the device.
            formula: takes them on the CPU, in float64 and once more in their own dtype.
            inputs, upstream: on the CPU; the latter is the gradient of the output.
            labels: of the inputs, in words.
        """
        found = self.attempt(name, lambda: both_ways(layer, self.move_all(inputs), self.move(upstream)))
        if found is not None:
            right = both_ways(formula, [tensor.double() for tensor in inputs], upstream.double())
            self.results(name, found, right, both_ways(formula, inputs, upstream), labels)

    def results(
        self,
        name: str,
        found: Sequence[Tensor],
        right: Sequence[Tensor],
        rounded: Sequence[Tensor],
        labels: Sequence[str],
    ) -> None:
        words = ("output", *(f"gradient of {label}" for label in labels))
        for what, result, exact, narrow in zip(words, found, right, rounded, strict=True):
            self.close(f"{name}: {what}", result, exact, allowance(exact, narrow), gradient=what != "output")

    def refused(self, case: str, error: Exception) -> None:
        self.cases += 1
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._keep(WrongResult(case=case, line=f"{case}: refused with {said}", refused=True))

    def verdict(self, right: str, wrong: str, evidence: Iterable[str] = ()) -> Finding:
        """The finding on all results by the rows for all right and for something wrong; both take ``cases``, the latter
        ``wrong``.

        A result that reads back in two ways has a row of its own, and so has one that the device refused to compute
        where nothing else is wrong.
        """
        cases = f"{self.cases:,}"
        if not self.wrong:
            compared = f"{self.elements:,} elements of {cases} results compared"
            compared += f", the largest error {100 * self.worst:.0f} % of its bound" if self.worst else ""
            return from_row(right, subject=self.name, evidence=[compared, *evidence], cases=cases)
        lines = [*self.problem_lines(), *evidence]
        if not all(problem.reads_agree for problem in self.problems):
            return from_row("arithmetic_read_back", subject=self.name, evidence=lines)
        row = "arithmetic_refused" if all(problem.refused for problem in self.problems) else wrong
        return from_row(row, subject=self.name, evidence=lines, wrong=f"{self.wrong:,}", cases=cases)

    def problem_lines(self) -> list[str]:
        """The first problems, one line each, and how many more there are."""
        lines = [problem.line for problem in self.problems[:_SHOWN]]
        left = self.wrong - len(lines)
        return [*lines, f"and {left:,} more results"] if left > 0 else lines

    def _keep(self, problem: WrongResult) -> None:
        self.wrong += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(problem)


def harmed(result: Tensor, kind: str) -> Tensor:
    """A copy of a result with a fault in it; see the module."""
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


def _line(case: str, found: Tensor, right: Tensor, bound: Tensor | None, wrong: Tensor) -> str:
    places, values = wrong.nonzero(), found[wrong].double()
    count, at = places.shape[0], tuple(places[0].tolist())
    allowed = "it is exact" if bound is None else f"it may differ by {float(bound[at]):.3g}"
    # The smallest box that holds all wrong elements: a cut tile of a kernel is told by its sides.
    box = " x ".join(str(int(column.max() - column.min()) + 1) for column in places.t())
    kinds = {"zero": int((values == 0).sum()), "NaN": int(values.isnan().sum())}
    shares = "".join(f"; {100 * number / count:.0f} % of them {kind}" for kind, number in kinds.items() if number)
    return (
        f"{case}: {count:,} of {found.numel():,} elements wrong, the first at {list(at)}"
        f"{f', all within {box}' if count > 1 else ''}: "
        f"{found[at].item():.7g} instead of {right[at].item():.7g} ({allowed}){shares}"
    )


def gemm(request: Mapping[str, Any]) -> list[Finding]:
    """Products of every dtype, shape and layout; with ``full`` larger shapes too.

    Each is made twice: of small integers, where nothing may differ, and of normally distributed values against the
    bound of `product`. For the latter, sums in reduced precision are off, because the bound is that of float32 sums;
    for the former they are as torch has them by default.
    """
    with Bench(request) as bench:
        for dtype in DTYPES:
            for shape in SHAPES + FULL_SHAPES if request.get("full") else SHAPES:
                _product(bench, dtype, shape, (False, False))
            for shape, layout in itertools.product(LAYOUT_SHAPES, LAYOUTS):
                _product(bench, dtype, shape, layout)
            _batch_and_linear(bench, dtype)
        refusal = _int8(bench)
        missing = [f"int8 was not compared: {refusal}"] if refusal else []
        return [bench.verdict("gemm_right", "gemm_wrong", missing)]


def _product(bench: Bench, dtype: torch.dtype, shape: tuple[int, int, int], layout: tuple[bool, bool]) -> None:
    m, k, n = shape
    signs = " @ ".join("x.T" if transposed else "x" for transposed in layout)
    name = f"{name_of(dtype)} {m}x{k} by {k}x{n}{f' as {signs}' if any(layout) else ''}"

    def compute(left: Tensor, right: Tensor) -> Tensor:
        factors = zip((left, right), layout, strict=True)
        first, second = (bench.move(one.mT.contiguous()).mT if turned else bench.move(one) for one, turned in factors)
        return first @ second

    left, right = exact_factors(m, k, n, dtype, bench.generator)
    found = bench.attempt(f"{name}, exact", lambda: compute(left, right))
    if found is not None:
        bench.exact(f"{name}, exact", found, (left.double() @ right.double()).to(dtype))
    one, other = (spread(size, dtype, bench.generator) for size in ((m, k), (k, n)))
    _close(bench, name, lambda: compute(one, other), product(one, other, dtype))


def _batch_and_linear(bench: Bench, dtype: torch.dtype) -> None:
    """3 products at once, and a linear layer with a bias, which libraries add in the product's epilogue."""
    left, right = (spread((3, *size), dtype, bench.generator) for size in ((33, 65), (65, 31)))
    name = f"{name_of(dtype)} batch of 3, 33x65 by 65x31"
    _close(bench, name, lambda: torch.bmm(bench.move(left), bench.move(right)), product(left, right, dtype))

    layer = [spread(size, dtype, bench.generator) for size in ((65, 127), (96, 127), (96,))]
    inputs, weight, bias = layer
    plain, bound = product(inputs, weight.t(), dtype)
    # Where the bias is added apart, the product was rounded to the dtype once before.
    bound = bound + torch.finfo(dtype).eps * (plain.abs() + bound + bias.double().abs())
    name = f"{name_of(dtype)} linear layer with bias, 65x127 to 96"
    _close(bench, name, lambda: functional.linear(*bench.move_all(layer)), (plain + bias.double(), bound))


def _close(bench: Bench, name: str, compute: Callable[[], Tensor], right_and_bound: tuple[Tensor, Tensor]) -> None:
    with _float32_sums():
        found = bench.attempt(name, compute)
        if found is not None:
            bench.close(name, found, *right_and_bound)


def _int8(bench: Bench) -> str:
    """``torch._int_mm``, whose sums are exact; why the device does not have it, empty where it has."""
    for m, k, n in INT8_SHAPES:
        left, right = exact_factors(m, k, n, torch.int8, bench.generator)
        name = f"int8 {m}x{k} by {k}x{n}, exact"
        step(f"computing {name}")
        try:
            found = torch._int_mm(bench.move(left), bench.move(right))
        except (RuntimeError, NotImplementedError) as error:  # older cards and libraries have no such kernel
            return _refusal(error)
        bench.exact(name, found, (left.double() @ right.double()).to(torch.int32))
    return ""


def _refusal(error: Exception) -> str:
    """Why something is not there, in one line; an error of the device itself is none of these."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return " ".join(str(error).split())[:200]


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Sums in float32 also where a library splits them over several kernels."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def gemm_repeat(request: Mapping[str, Any]) -> list[Finding]:
    """The same product again and again for ``seconds`` in each dtype, every result against the first, bit for bit, on
    the device.

    The first is compared with float64. One that differs is brought to the CPU: if all of it is still within the
    rounding bound, the library only adds in another order from call to call; if not, it is wrong. On an accelerator a
    second stream keeps the memory busy meanwhile. Not covered: a device that is wrong in the same way every time.
    """
    fault = dict(request.get("fault") or {})
    lines, varying = [], []
    with Bench({**request, "fault": None}) as bench:
        for dtype in REPEATED:
            name = name_of(dtype)
            kind = fault.pop("kind", "") if fault.get("where", "") in name else ""
            try:
                repeats, differing = _repeat(bench, dtype, request["seconds"], kind)
            except (RuntimeError, NotImplementedError) as error:
                if dtype is not torch.int8:  # not every device and library multiplies those
                    raise
                lines.append(f"{name} was not compared: {_refusal(error)}")
                continue
            lines.append(f"{name}: {repeats:,} times")
            varying += [f"{differing:,} of {name}"] if differing else []
        if varying and not bench.wrong:
            return [from_row("gemm_repeat_varies", subject=bench.name, evidence=lines, varying=", ".join(varying))]
        return [bench.verdict("gemm_repeats", "gemm_repeat_wrong", lines)]


def _repeat(bench: Bench, dtype: torch.dtype, seconds: float, fault: str) -> tuple[int, int]:
    """How often one dtype was multiplied, and how many results differed from the first within the bound."""
    name, (m, k, n) = name_of(dtype), REPEATED_SHAPES[bench.device.type]
    multiply = torch._int_mm if dtype is torch.int8 else torch.mm
    if dtype is torch.int8:
        left, right = exact_factors(m, k, n, dtype, bench.generator)
        exact = left.double() @ right.double()
        reference = (exact, torch.zeros_like(exact))
    else:
        left, right = (spread(size, dtype, bench.generator) for size in ((m, k), (k, n)))
        reference = product(left, right, dtype)
    factors = bench.move_all((left, right))
    step(f"computing {name}, the first")
    first = multiply(*factors)
    first_right = bench.close(f"{name}, the first", first, *reference)
    # Into a buffer of its own each time: what is read has to have been written by this call.
    ring = [torch.empty_like(first) for _ in range(_RING)]
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    add_load = _load(bench.device)
    number, varying, ends = 1, 0, time.monotonic() + seconds
    while number <= _LEAST_REPEATS or time.monotonic() < ends:
        step(f"computing {name}, repeats {number + 1} to {number + _RING}")
        counts = []
        add_load()
        for place in range(_RING):
            multiply(*factors, out=ring[place])
            if fault and number + 1 + place == HARMED_REPEAT:
                ring[place] = harmed(ring[place], fault)
            counts.append((ring[place].view(bits) != first.view(bits)).sum())
        for place, count in enumerate(torch.stack(counts).tolist()):
            # Where the first was wrong already, a repeat that differs from it may be the right one.
            if not count:
                bench.cases += 1
            elif bench.close(f"{name}, repeat {number + 1 + place}", ring[place], *reference) and first_right:
                varying += 1
        number += _RING
    return number, varying


def _load(device: torch.device) -> Callable[[], object]:
    """Adds traffic on a second stream of an accelerator; nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    stream, busy = torch.cuda.Stream(device), torch.ones(_BUSY_BYTES // 4, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    busy.record_stream(stream)  # or its memory would be given to a result while it is still written

    def add() -> None:
        with torch.cuda.stream(stream):
            busy.neg_()

    return add


def gemm_rate(request: Mapping[str, Any]) -> list[Finding]:
    """The rate of large bfloat16 products, forward and backward, compared with what was measured on such cards."""
    with Bench(request) as bench:
        card = _card(bench.device) if bench.device.type == "cuda" else None
        if card is None or card.bf16_tflops is None:
            return [skipped("no rate of this card is known", subject=bench.name)]
        tflops = 3 * 2 * math.prod(RATED_SHAPE) / _median_s(bench, RATED_SHAPE) / 1e12
        return judge_rate(bench.name, card, tflops)


def _card(device: torch.device) -> Card | None:
    known = torch.cuda.get_device_properties(device)
    arch = getattr(known, "gcnArchName", None)
    return identify(arch=arch, vram_bytes=known.total_memory, name=known.name).card


def judge_rate(device: str, card: Card, tflops: float) -> list[Finding]:
    """The finding on the rate of large products (10^12 operations a second)."""
    known = card.bf16_tflops or 0
    slow = tflops < knowledge_data("thresholds.toml")["bf16_share"]["warn"] * known
    told: dict[str, Any] = {"card": card.name, "found": f"{tflops:.0f}", "known": known}
    return [from_row("gemm_slow" if slow else "gemm_rate", subject=device, size=RATED_SHAPE[0], **told)]


def _median_s(bench: Bench, shape: tuple[int, int, int]) -> float:
    """Seconds of a forward product and the two of its backward pass."""
    rows, inputs, outputs = shape
    sizes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, weight, upstream = bench.move_all(spread(size, torch.bfloat16, bench.generator) for size in sizes)
    times = []
    for _ in range(_TIMINGS + 1):
        step(f"timing {shape}")
        torch.cuda.synchronize(bench.device)
        began = time.perf_counter()
        functional.linear(x, weight)
        upstream @ weight
        upstream.t() @ x
        torch.cuda.synchronize(bench.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one loads kernels
