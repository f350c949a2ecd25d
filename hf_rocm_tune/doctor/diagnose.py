"""Runs checks one after another: none of them stops another, and what was not run is said with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hf_rocm_tune.doctor.check import GROUPS, Check
from hf_rocm_tune.doctor.checks.variables import of_decision
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, skipped
from hf_rocm_tune.doctor.rows import all_rows
from hf_rocm_tune.machine.variables import evaluate

#: Exit codes of the command.
FINE, WARNINGS, FAILURES = 0, 1, 2
NOTHING_THERE = "there is nothing of the kind on this machine"
_HUNG = ("measurement_hung", "pair_hung")
_ENOUGH_HANGS = 2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in order of groups and checks.

    Attributes:
        findings: what was found, and what was not run or not found out.
        seconds: of each check that ran, by name.
    """

    findings: tuple[Finding, ...]
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """0 fine, 1 warnings, 2 failures. What was not run or not found out counts as neither."""
        return exit_code(self.findings)

    def count(self, status: str) -> int:
        """How many findings have a status."""
        return sum(finding.status == status for finding in self.findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the command for these findings."""
    met = {finding.status for finding in findings}
    return FAILURES if "fail" in met else WARNINGS if "warn" in met else FINE


def in_order(checks: Iterable[Check]) -> list[Check]:
    """Checks in the order of their groups; within a group as they come."""
    places = {group: place for place, group in enumerate(GROUPS)}
    return sorted(checks, key=lambda check: places[check.group])


def diagnose(
    evidence: Evidence,
    checks: Sequence[Check],
    *,
    full: bool = False,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Diagnosis:
    """Run the checks that can run here.

    Args:
        evidence: see ``Evidence``.
        checks: in any order.
        full: run long checks as well.
        on_check: called before each check that runs.
    """
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    for check in in_order(checks):
        if evidence.card_count < check.needs_cards:
            continue
        why_not = _why_not(check, evidence, full=full) or _given_up(check, findings)
        if why_not:
            findings.append(skipped(check.name, why_not))
            continue
        on_check(check)
        began = time.monotonic()
        made = [finding for finding in _run(check, evidence) if finding.needs_cards <= evidence.card_count]
        seconds[check.name] = round(time.monotonic() - began, 3)
        findings += made or [skipped(check.name, NOTHING_THERE)]
    findings += _variables_for(evidence, findings)
    return Diagnosis(findings=tuple(findings), seconds=seconds)


def _variables_for(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """What the policy of variables adds when it is told what was found: for example that RCCL should not use peers."""
    rows = all_rows()
    names = {name for finding in findings if finding.row in rows for name in rows[finding.row].environ}
    if not names:
        return []
    before = evaluate(evidence.variables, evidence.facts())
    told = evaluate(evidence.variables, evidence.facts(frozenset(names)))
    new = [decision for decision in told if decision not in before]
    # Two cards that want different values of one variable: there is no line to print, and each finding says its own.
    values = {name: {one.value for one in new if one.variable == name} for name in {one.variable for one in new}}
    return [of_decision("variables", one, found=True) for one in new if len(values[one.variable]) == 1]


def _why_not(check: Check, evidence: Evidence, *, full: bool) -> str:
    """Why a check cannot run or is not to; empty where it runs."""
    if not check.measured:
        return ""
    if evidence.recorded:
        return "recorded: nothing can be measured on a machine that is not here"
    if check.needs_gpu and not evidence.devices:
        return f"torch sees no accelerator: {_no_devices(evidence)}"
    if check.needs_cards > len(evidence.seen_cards):
        return f"torch sees {len(evidence.seen_cards)} of {evidence.card_count} cards"
    if check.full and not full:
        return f"takes about {_duration(check.seconds)}; --full runs it"
    return ""


def _given_up(check: Check, findings: Iterable[Finding]) -> str:
    """Why nothing more is measured: every hang takes minutes, and a driver that hung in two checks hangs on."""
    hung = dict.fromkeys(finding.check for finding in findings if finding.row in _HUNG)
    if not check.measured or check.group == "after" or len(hung) < _ENOUGH_HANGS:
        return ""
    return f"{' and '.join(hung)} did not return; --only {check.name} measures it all the same"


def _no_devices(evidence: Evidence) -> str:
    software = evidence.software
    if software is None:
        return "nothing is known of the software"
    if software.devices.value is None:
        return software.devices.reason
    return f"torch {software.torch_version.value} lists no device"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _run(check: Check, evidence: Evidence) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in check.run(evidence):
            found.append(finding)
    except Exception as error:  # a bug of ours in one check must not hide what the others find; it is reported as such
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        found.append(from_row(check.name, "check_crashed", name=check.name, error=what))
    return found
