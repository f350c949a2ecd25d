"""``norm``: normalisation, embedding, softmax and cross entropy, forward and backward, by dtype, against float64.

The child's half is ``norm_child``. Faults: ``wrong``, ``nan``, ``zeros``, ``gradient``; ``where=RMSNorm`` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.measured.arithmetic import conducted, verdict
from hf_rocm_tune.doctor.measured.conduct import Ask


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import norm_child

    return norm_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child."""
    return conducted(ask, request, judge)


def judge(check: str, result: Mapping[str, Any], request: Mapping[str, Any]) -> list[Finding]:
    """One finding."""
    return [verdict(check, result, request, right="norm_right", wrong="norm_wrong")]
