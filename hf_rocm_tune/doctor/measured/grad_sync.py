"""``grad_sync``: the decision that training on all cards would take, made by its own preflight with the same trials.

``pairs`` and ``all_reduce`` look longer and say what may cure what they find; this says what a run does meanwhile.
Faults: those of an all-reduce; they harm the sums over RCCL as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured.conduct import Ask
from hf_rocm_tune.ranks.preflight import PreflightFault, SyncWay, try_machine

_ROWS: Mapping[SyncWay, str] = {
    "ddp": "grad_sync_ddp",
    "ddp_without_p2p": "grad_sync_without_p2p",
    "host": "grad_sync_host",
    "one_card": "grad_sync_one_card",
}


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One finding: the way that ``--grad_sync auto`` takes on these cards."""
    said = request.get("fault")
    fault = PreflightFault(trial="ddp", kind=said["kind"], where=said["where"]) if said else None
    chosen = try_machine(request["devices"], environ=os.environ, fault=fault, limit_s=ask.measured.deadline_s)
    if not chosen.shown and chosen.way != "one_card":
        return [unknown("grad_sync", chosen.reason, evidence=chosen.evidence)]
    return [from_row("grad_sync", _ROWS[chosen.way], evidence=chosen.evidence, reason=chosen.reason)]
