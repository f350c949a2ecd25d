"""Environment variables: what the policy in ``environ`` decides, in its own words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import NO_VARIABLES, Evidence
from hf_rocm_tune.doctor.finding import Finding, Status, from_row, unknown
from hf_rocm_tune.machine.variables import Decision, evaluate

_STATUS: dict[str, Status] = {"error": "fail", "warn": "warn", "info": "info", "set": "info"}


def of_decision(check: str, decision: Decision, *, found: bool = False) -> Finding:
    """A decision of the policy as a finding.

    Args:
        check: name of the check that says it.
        decision: what was decided.
        found: it rests on what the doctor has measured, of which a run knows nothing.
    """
    names = decision.variable.split(", ")
    value = "" if decision.value is None else f"={shlex.quote(decision.value)}"
    seen = [f"{name}={given}" for name, given in zip(names, (decision.value or "").split(" | "), strict=False)]
    cure = decision.cure
    if decision.action == "set":
        who = "no run sets it by itself" if found else "this package sets it for its own processes"
        cure = f"`export {decision.variable}{value}`; {who}"
    return Finding(
        check=check,
        row=f"environ:{decision.variable}",
        status=_STATUS.get(decision.action, "info"),
        title=f"{decision.variable}{value}" if len(names) == 1 else f"{decision.variable} at once",
        text=decision.reason,
        evidence=tuple(seen) if len(names) > 1 else (),
        cure=cure,
        sources=tuple(name.strip() for name in decision.source.split(";")),
        subject=decision.variable,
    )


def _variables(evidence: Evidence) -> Iterator[Finding]:
    if evidence.environ is None:
        yield unknown("variables", NO_VARIABLES)
        return
    decisions = evaluate(evidence.environ, evidence.facts())
    spoken = [decision for decision in decisions if decision.action in _STATUS]
    yield from (of_decision("variables", decision) for decision in spoken)
    if not spoken:
        kept = [f"{decision.variable}={decision.value}: {decision.reason}" for decision in decisions]
        yield from_row("variables", "variables_ok", evidence=kept)


CHECKS = (
    Check(name="variables", group="variables", about="variables that are harmful, ignored or missing", run=_variables),
)
