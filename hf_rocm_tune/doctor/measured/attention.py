"""``attention``: scaled_dot_product_attention forward and backward by dtype, and which backend really runs.

The child's half is ``attention_child``. Faults: ``wrong``, ``nan``, ``zeros``, ``gradient``; ``where=flash`` or
``where=padded`` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured.arithmetic import verdict
from hf_rocm_tune.doctor.measured.conduct import Ask, failure
from hf_rocm_tune.machine.child import Outcome

FLAG = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
TRAINED = ("bfloat16", "float16")
"""The dtypes that have fused kernels; float32 has none on most cards, and nobody trains in it here."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import attention_child

    return attention_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child; where it finds no fused backend on ROCm, another with AOTriton's flag, which a process reads once."""
    outcome = ask()
    if outcome.result is None:
        return [failure(ask, outcome)]
    slow = _unfused(outcome.result)
    flagged = None
    if slow and request.get("hip") and os.environ.get(FLAG) != "1":
        flagged = ask(environ={FLAG: "1"}, only_backends=True)
    return judge(ask.measured.name, outcome.result, request, flagged=flagged)


def judge(
    check: str, result: Mapping[str, Any], request: Mapping[str, Any], *, flagged: Outcome | None = None
) -> list[Finding]:
    """One finding on the results, one on what runs."""
    apart = [
        f"{dtype}: outputs of flash and math differ by at most {value:.2g}" for dtype, value in result["apart"].items()
    ]
    gradient_only = bool(result["problems"]) and all("gradient" in problem["case"] for problem in result["problems"])
    wrong = "attention_gradient_wrong" if gradient_only else "attention_wrong"
    right = verdict(check, result, request, right="attention_right", wrong=wrong, evidence=apart)
    return [right, _what_runs(check, result, request, flagged)]


def _what_runs(check: str, result: Mapping[str, Any], request: Mapping[str, Any], flagged: Outcome | None) -> Finding:
    device, slow = request["device"], _unfused(result)
    none = [dtype for dtype in TRAINED if "refused" in result["backends"][dtype]["default"]]
    if none:
        reason = result["backends"][none[0]]["default"]["refused"]
        return unknown(check, f"no backend runs {none[0]} attention: {reason}", subject=device)
    lines = [_runs_line(dtype, ways) for dtype, ways in result["backends"].items()]
    lines += [f"kernels in {dtype}: {', '.join(names)}" for dtype, names in result["kernels"].items() if names]
    told = {"device": device, "dtypes": " and ".join(slow)}
    if not slow:
        return from_row(check, "attention_fused", subject=device, evidence=lines, device=device)
    lines += [line for dtype in slow[:1] for line in _refusals(dtype, result["backends"][dtype])]
    if flagged is not None and flagged.result is not None and not _unfused(flagged.result):
        lines += [f"with {FLAG}=1: {_runs_line(name, ways)}" for name, ways in flagged.result["backends"].items()]
        return from_row(check, "attention_needs_flag", subject=device, evidence=lines, flag=FLAG, **told)
    if flagged is not None:
        lines.append(f"with {FLAG}=1: {'the same' if flagged.result else f'the measuring process {flagged.how}'}")
    return from_row(check, "attention_unfused", subject=device, evidence=lines, **told)


def _unfused(result: Mapping[str, Any]) -> list[str]:
    """The training dtypes in which a pass without a wish goes through the math path."""
    return [dtype for dtype in TRAINED if "math" in result["backends"][dtype]["default"].values()]


def _runs_line(dtype: str, ways: Mapping[str, Mapping[str, str]]) -> str:
    default = ways["default"]
    if "refused" in default:
        return f"{dtype}: none"
    able = [name for name, way in ways.items() if name != "default" and "refused" not in way]
    said = f"{dtype}: {default['forward']} forward, {default['backward']} backward; possible are {', '.join(able)}"
    odd = [name for name in able if name not in (ways[name]["forward"], "math")]
    return f"{said}; asked for {', '.join(odd)}, another one ran" if odd else said


def _refusals(dtype: str, ways: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [
        f"{dtype}, {name} refused: {way['refused'][:300]}"
        for name, way in ways.items()
        if name in ("flash", "efficient") and "refused" in way
    ]
