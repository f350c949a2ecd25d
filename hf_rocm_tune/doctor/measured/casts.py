"""``casts``: changes of dtype on the card and on the way to and from it, against the CPU's (``doctor.casts``).

Faults: those of ``raw_copies``; ``where=non_blocking`` or ``where=torch.bfloat16`` harms some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.machine.child import Outcome


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half.

    Args:
        request: ``device``, ``address``, ``fault``.

    Returns:
        ``compared`` casts, ``elements``, ``wrong`` elements and an ``example``.
    """
    from hf_rocm_tune.doctor.casts import compare_casts
    from hf_rocm_tune.machine.child import device_of, step
    from hf_rocm_tune.transfer.raw_copies import copies_for

    device = device_of(request)
    step(f"casting on {device}, and to and from it")
    return asdict(compare_casts(device, seed=0, copies=copies_for(request)))


def judge(outcome: Outcome, request: Mapping[str, Any]) -> list[Finding]:
    """One finding."""
    assert outcome.result is not None
    result, device = outcome.result, request["device"]
    evidence = [f"{result['elements']:,} elements in {result['compared']} casts, {result['wrong']:,} differ"]
    if not result["wrong"]:
        return [from_row("casts", "casts_right", subject=device, evidence=evidence, device=device)]
    evidence.append(f"the first: {result['example']}")
    return [from_row("casts", "casts_wrong", subject=device, evidence=evidence, device=device)]
