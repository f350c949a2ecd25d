"""Matrix products by dtype, shape and layout (``gemm``), repeated (``gemm_repeat``), by two libraries (``blas``).

Faults: see `arithmetic`; ``where=bfloat16`` or ``where=127x257`` harms one of those products, ``where=int8`` the 37th
repeat of that dtype, ``where=rocblas`` or ``where=hipblaslt`` the products of a library.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_rocm_tune.doctor.arithmetic import DTYPES, Bench, exact_factors, harmed, name_of, product, spread
from hf_rocm_tune.doctor.findings import Finding, from_row, skipped
from hf_rocm_tune.machine.child import step

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

LIBRARIES = {"rocblas": "cublas", "hipblaslt": "cublaslt"}
"""By the names of ``torch.backends.cuda.preferred_blas_library``."""
VALUES = {"hipblaslt": "1", "rocblas": "0"}
"""Of TORCH_BLAS_PREFER_HIPBLASLT."""
TIMED_SHAPES = {"cuda": ((2048, 4096, 4096), (2048, 4096, 1024), (2048, 16, 4096)), "cpu": ((64, 128, 96),)}
"""Rows, inputs and outputs of linear layers in bfloat16: a projection, a grouped one, half of a LoRA pair."""
PREFERRED_FROM = 1.1
"""Ratio of times from which one library is called faster: below, clocks and noise decide. Our own bound."""
_TIMINGS = 7


def gemm(request: Mapping[str, Any]) -> list[Finding]:
    """Products of every dtype, shape and layout.

    Each is made twice: of small integers, where nothing may differ, and of normally distributed values against the
    bound of `arithmetic.product`. For the latter, sums in reduced precision are off, because the bound is that of
    float32 sums; for the former they are as torch has them by default.

    Args:
        request: ``device``, ``address``; ``full``: larger shapes too; ``seed``; ``fault``.
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
    """One shape, exact and with rounding."""
    m, k, n = shape
    signs = " @ ".join("x.T" if transposed else "x" for transposed in layout)
    name = f"{name_of(dtype)} {m}x{k} by {k}x{n}{f' as {signs}' if any(layout) else ''}"

    def compute(left: Tensor, right: Tensor) -> Tensor:
        factors = zip((left, right), layout, strict=True)
        first, second = (bench.move(one.mT.contiguous()).mT if turned else bench.move(one) for one, turned in factors)
        return first @ second

    left, right = exact_factors(m, k, n, dtype, bench.generator)
    exact = (left.double() @ right.double()).to(dtype)
    _try(bench, f"{name}, exact", compute, (left, right), lambda case, found: bench.exact(case, found, exact))
    left, right = (spread(size, dtype, bench.generator) for size in ((m, k), (k, n)))
    _close(bench, name, compute, (left, right), product(left, right, dtype))


def _batch_and_linear(bench: Bench, dtype: torch.dtype) -> None:
    """3 products at once, and a linear layer with a bias, which libraries add in the product's epilogue."""
    left, right = (spread((3, *size), dtype, bench.generator) for size in ((33, 65), (65, 31)))
    name = f"{name_of(dtype)} batch of 3, 33x65 by 65x31"
    _close(
        bench, name, lambda *factors: torch.bmm(*bench.move_all(factors)), (left, right), product(left, right, dtype)
    )

    inputs, weight, bias = (spread(size, dtype, bench.generator) for size in ((65, 127), (96, 127), (96,)))
    plain, bound = product(inputs, weight.t(), dtype)
    # Where the bias is added apart, the product was rounded to the dtype once before.
    bound = bound + torch.finfo(dtype).eps * (plain.abs() + bound + bias.double().abs())
    name = f"{name_of(dtype)} linear layer with bias, 65x127 to 96"
    layer = (inputs, weight, bias)
    right_and_bound = (plain + bias.double(), bound)
    _close(bench, name, lambda *inputs: functional.linear(*bench.move_all(inputs)), layer, right_and_bound)


def _close(
    bench: Bench,
    name: str,
    compute: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    right_and_bound: tuple[Tensor, Tensor],
) -> None:
    with _float32_sums():
        _try(bench, name, compute, inputs, lambda case, found: bench.close(case, found, *right_and_bound))


def _try(
    bench: Bench,
    name: str,
    compute: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    compare: Callable[[str, Tensor], bool],
) -> None:
    step(f"computing {name}")
    try:
        found = compute(*inputs)
    except RuntimeError as error:  # every device has these: a refusal is a fault of the installation
        bench.refused(name, error)
    else:
        compare(name, found)


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
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def gemm_repeat(request: Mapping[str, Any]) -> list[Finding]:
    """The same product again and again, every result against the first, bit for bit, on the device.

    The first is compared with float64. One that differs is brought to the CPU: if all of it is still within the
    rounding bound, the library only adds in another order from call to call; if not, it is wrong. On an accelerator a
    second stream keeps the memory busy meanwhile. Not covered: a device that is wrong in the same way every time.

    Args:
        request: ``device``, ``address``; ``seconds``: how long in each dtype; ``seed``; ``fault``.
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


def blas(request: Mapping[str, Any]) -> list[Finding]:
    """The same products by rocBLAS and by hipBLASLt, their results and their times.

    Only on ROCm. On a CUDA build the two names would stand for cuBLAS and cuBLASLt; a CPU build has no such choice and
    times one library twice.

    Args:
        request: ``device``, ``address``, ``hip``; ``seed``; ``fault``.
    """
    if not request.get("hip"):
        return [skipped("it compares two libraries of ROCm, and torch is no ROCm build")]
    wrong = []
    with Bench(request) as bench:
        unavailable = {name: reason for name in LIBRARIES if (reason := _not_taken(name, bench.device))}
        names = [name for name in LIBRARIES if name not in unavailable]
        left, right = exact_factors(192, 512, 320, torch.bfloat16, bench.generator)
        exact = (left.double() @ right.double()).to(torch.bfloat16)
        placed = bench.move_all((left, right))
        for name in names:
            step(f"computing a product by {name}")
            _prefer(name, bench.device)
            if not bench.exact(f"bfloat16 product by {name}", placed[0] @ placed[1], exact):
                wrong.append(name)
        shapes = TIMED_SHAPES[bench.device.type]
        seconds = {shape: _medians(bench, names, shape) for shape in shapes}
        problems = bench.problem_lines()
    lines = [
        f"bfloat16 linear layer {inputs} to {outputs}, {rows} rows, forward and backward: "
        + ", ".join(f"{name} {1e3 * median:.3g} ms" for name, median in seconds[rows, inputs, outputs].items())
        for rows, inputs, outputs in shapes
    ]
    return [judge_blas(bench.name, wrong, unavailable, list(seconds.values()), problems, lines)]


def judge_blas(
    device: str,
    wrong: list[str],
    unavailable: Mapping[str, str],
    seconds: list[dict[str, float]],
    problems: list[str],
    lines: list[str],
) -> Finding:
    """A library that is wrong, one that torch does not take, or the faster one."""
    if len(wrong) == 1 and not unavailable:
        other = next(name for name in LIBRARIES if name not in wrong)
        told = {"library": wrong[0], "other": other, "value": VALUES[other]}
        return from_row("gemm_library_wrong", subject=device, evidence=problems, **told)
    if wrong:
        return from_row("gemm_libraries_wrong", subject=device, evidence=problems, library=" and ".join(wrong))
    if unavailable:
        lines = [*lines, *(f"{name}: {reason}" for name, reason in unavailable.items())]
        return from_row("gemm_one_library", subject=device, evidence=lines, library=" and ".join(unavailable))
    ratio = math.exp(statistics.mean(math.log(one["rocblas"] / one["hipblaslt"]) for one in seconds))
    faster, ratio = ("hipblaslt", ratio) if ratio >= 1 else ("rocblas", 1 / ratio)
    if ratio < PREFERRED_FROM:
        return from_row("gemm_prefers_neither", subject=device, evidence=lines)
    return from_row(f"gemm_prefers_{faster}", subject=device, evidence=lines, ratio=f"{ratio:.2f}")


def _prefer(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library(LIBRARIES[name])


def _not_taken(name: str, device: torch.device) -> str:
    """Why torch does not take a library here; empty where it does. It may also take another one without raising."""
    if device.type != "cuda":
        return ""
    try:
        taken = torch.backends.cuda.preferred_blas_library(LIBRARIES[name])
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    library = str(taken).rpartition(".")[2]  # an enumeration of C++: "_BlasBackend.Cublaslt"
    return "" if library.lower() == LIBRARIES[name] else f"torch takes {library} on this architecture"


def _medians(bench: Bench, names: list[str], shape: tuple[int, int, int]) -> dict[str, float]:
    """Seconds of a forward product and the two of its backward pass, by library."""
    rows, inputs, outputs = shape
    sizes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, weight, upstream = bench.move_all(spread(size, torch.bfloat16, bench.generator) for size in sizes)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(_TIMINGS + 1):
        for name in names:  # in turn, so that a clock that changes changes it for both
            step(f"timing {shape} by {name}")
            _prefer(name, bench.device)
            _synchronize(bench.device)
            began = time.perf_counter()
            functional.linear(x, weight)
            upstream @ weight
            upstream.t() @ x
            _synchronize(bench.device)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(all_of[1:]) for name, all_of in times.items()}  # the first one loads kernels


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
