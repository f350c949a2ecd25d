"""``nf4``: what bitsandbytes quantises, dequantises and multiplies in NF4. The child's half is ``nf4_child``.

Faults: ``wrong``, ``nan``, ``zeros``, ``gradient``; ``absmax`` doubles one scale; ``where=product`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, skipped
from hf_rocm_tune.doctor.measured.arithmetic import conducted, verdict
from hf_rocm_tune.doctor.measured.conduct import Ask


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import nf4_child

    return nf4_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child."""
    return conducted(ask, request, judge)


def judge(check: str, result: Mapping[str, Any], request: Mapping[str, Any]) -> list[Finding]:
    """One finding."""
    device = request["device"]
    if result["missing"]:
        return [skipped(check, "bitsandbytes is not installed", subject=device)]
    if result["unavailable"]:
        reason = result["unavailable"]
        return [from_row(check, "nf4_refused", subject=device, device=device, reason=reason)]
    errors = [
        f"mean error of normally distributed weights in {dtype}: {error:.4f}"
        for dtype, error in result["error"].items()
    ]
    return [verdict(check, result, request, right="nf4_right", wrong="nf4_wrong", evidence=errors)]
