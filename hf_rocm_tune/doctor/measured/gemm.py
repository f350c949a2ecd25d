"""``gemm``: matrix products by dtype, shape and layout against float64. The child's half is ``gemm_child``.

Faults: ``wrong``, ``nan``, ``zeros``; ``where=bfloat16`` or ``where=127x257`` harms one of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.measured.arithmetic import conducted, verdict
from hf_rocm_tune.doctor.measured.conduct import Ask


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import gemm_child

    return gemm_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child."""
    return conducted(ask, request, judge)


def judge(check: str, result: Mapping[str, Any], request: Mapping[str, Any]) -> list[Finding]:
    """One finding."""
    missing = [f"{dtype} was not compared: {reason}" for dtype, reason in result["unavailable"].items()]
    return [verdict(check, result, request, right="gemm_right", wrong="gemm_wrong", evidence=missing)]
