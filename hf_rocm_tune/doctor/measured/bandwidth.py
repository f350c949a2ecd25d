"""``bandwidth``: page-locked memory to the card and back, against what its link gives by arithmetic.

Fault: ``slow``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.doctor.pcie_rate import rate_gb_s
from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.machine.child import Outcome

LEAST_SHARE = 0.7
"""Of a link's arithmetic rate: our own bound. A healthy x16 measured 0.90 to 0.92 of it (ROCm/ROCm#2253)."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import bandwidth_child

    return bandwidth_child.measure(request)


def judge(outcome: Outcome, request: Mapping[str, Any]) -> list[Finding]:
    """One finding: the figures, and the name of the link that they are those of."""
    assert outcome.result is not None
    result, device = outcome.result, request["device"]
    there, back = result["to_device"], result["from_device"]
    measured = f"{there:.1f} GB/s to {device}, {back:.1f} GB/s from it, page-locked, {request['mib']} MiB at a time"
    values: dict[str, Any] = {"device": device, "there": there, "back": back}
    narrow = _narrowest(result["links"])
    if narrow is None:
        return [from_row("bandwidth", "bandwidth_of_unknown_link", subject=device, evidence=[measured], **values)]
    width, speed, where = narrow
    rate = rate_gb_s(speed, width)
    values |= {"width": width, "speed": f"{speed:g}", "rate": rate}
    evidence = [measured, f"under load: x{width} at {speed:g} GT/s at {where}, {rate:.1f} GB/s each way by arithmetic"]
    if min(there, back) < LEAST_SHARE * rate:
        row = "bandwidth_low"
        values["share"] = 100 * min(there, back) / rate
    elif rate < knowledge_data("thresholds.toml")["link_gb_s"]["x4"]:
        row = "bandwidth_of_narrow_link"
    else:
        row = "bandwidth_right"
    return [from_row("bandwidth", row, subject=device, evidence=evidence, **values)]


def _narrowest(links: Sequence[Mapping[str, Any]]) -> tuple[int, float, str] | None:
    """Width, speed and place of the slowest link, as it ran under load; None where none could be read."""
    read = [(link["width"], link["speed"], link["device"]) for link in links if link["width"] and link["speed"]]
    return min(read, key=lambda link: rate_gb_s(link[1], link[0])) if read else None
