"""``blas``: hipBLASLt against rocBLAS, by result and by time. Only on ROCm. The child's half is ``blas_child``.

Faults: ``wrong``, ``nan``, ``zeros``; ``where=rocblas`` or ``where=hipblaslt`` chooses the library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, skipped
from hf_rocm_tune.doctor.measured.arithmetic import conducted, problem_lines
from hf_rocm_tune.doctor.measured.conduct import Ask

PREFERRED_FROM = 1.1
"""Ratio of times from which one library is called faster: below, clocks and noise decide. Our own bound."""
VALUES = {"hipblaslt": "1", "rocblas": "0"}
"""Of TORCH_BLAS_PREFER_HIPBLASLT."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import blas_child

    return blas_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child on a ROCm build."""
    if not request.get("hip"):
        return [skipped(ask.measured.name, "it compares two libraries of ROCm, and torch is no ROCm build")]
    return conducted(ask, request, judge)


def judge(check: str, result: Mapping[str, Any], request: Mapping[str, Any]) -> list[Finding]:
    """One finding: a library that is wrong, one that torch does not take, or the faster one."""
    device, wrong = request["device"], result["wrong_by"]
    lines = [_times(result, number) for number in range(len(result["shapes"]))]
    if len(wrong) == 1 and len(result["seconds"]) == 2:
        other = next(name for name in result["seconds"] if name not in wrong)
        told = {"device": device, "library": wrong[0], "other": other, "value": VALUES[other]}
        return [from_row(check, "gemm_library_wrong", subject=device, evidence=problem_lines(result), **told)]
    if wrong:
        told = {"device": device, "library": " and ".join(wrong)}
        return [from_row(check, "gemm_libraries_wrong", subject=device, evidence=problem_lines(result), **told)]
    if result["unavailable"]:
        lines += [f"{name}: {reason}" for name, reason in result["unavailable"].items()]
        told = {"device": device, "library": " and ".join(result["unavailable"])}
        return [from_row(check, "gemm_one_library", subject=device, evidence=lines, **told)]
    faster, ratio = _faster(result["seconds"])
    if ratio < PREFERRED_FROM:
        return [from_row(check, "gemm_prefers_neither", subject=device, evidence=lines, device=device)]
    row = f"gemm_prefers_{faster}"
    return [from_row(check, row, subject=device, evidence=lines, device=device, ratio=f"{ratio:.2f}")]


def _faster(seconds: Mapping[str, list[float]]) -> tuple[str, float]:
    """The faster library, and how many times as fast it is (geometric mean over shapes)."""
    pairs = list(zip(seconds["rocblas"], seconds["hipblaslt"], strict=True))
    ratio = math.exp(sum(math.log(rocblas / hipblaslt) for rocblas, hipblaslt in pairs) / len(pairs))
    return ("hipblaslt", ratio) if ratio >= 1 else ("rocblas", 1 / ratio)


def _times(result: Mapping[str, Any], number: int) -> str:
    rows, inputs, outputs = result["shapes"][number]
    times = ", ".join(f"{name} {1e3 * times[number]:.3g} ms" for name, times in result["seconds"].items())
    return f"bfloat16 linear layer {inputs} to {outputs}, {rows} rows, forward and backward: {times}"
