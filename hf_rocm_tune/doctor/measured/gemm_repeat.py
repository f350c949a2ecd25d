"""``gemm_repeat``: one matrix product many times under load, bit for bit. The child's half is ``gemm_repeat_child``.

Faults: ``wrong``, ``nan``, ``zeros``, in the 37th repeat; ``where=int8`` chooses the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.doctor.measured.arithmetic import conducted, verdict
from hf_rocm_tune.doctor.measured.conduct import Ask


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import gemm_repeat_child

    return gemm_repeat_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child."""
    return conducted(ask, request, judge)


def judge(check: str, result: Mapping[str, Any], request: Mapping[str, Any]) -> list[Finding]:
    """One finding: a wrong repeat, else one that varies within rounding, else all the same."""
    lines = [f"{dtype}: {count:,} times" for dtype, count in result["repeats"].items()]
    lines += [f"{dtype} was not compared: {reason}" for dtype, reason in result["unavailable"].items()]
    varying = {dtype: count for dtype, count in result["varying"].items() if count}
    if varying and not result["wrong"]:
        device, told = request["device"], ", ".join(f"{count:,} of {dtype}" for dtype, count in varying.items())
        return [from_row(check, "gemm_repeat_varies", subject=device, evidence=lines, device=device, varying=told)]
    return [verdict(check, result, request, right="gemm_repeats", wrong="gemm_repeat_wrong", evidence=lines)]
