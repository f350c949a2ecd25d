"""All checks, their selection, and running them: a failing check does not stop others, and skipped ones have a reason.

A check that measures is a table ``[checks.NAME]`` in ``knowledge/`` and the function that it names, which is called in
a child process with a deadline; this process never imports torch. ``request["device"]`` is ``cuda:0`` ... or ``cpu``;
``request["fault"]``, if given, is ``{"kind": ..., "where": ...}``, one of the check's own ``faults``; those of the
process itself (hang, kill, garbage ...) are injected by ``machine.child``. The function calls ``child.step("copying 64
MiB")`` before each part, so that a hang is named. A check of two cards is called in this process with
``request["devices"]``, because its trials start their own children; any other has one child for each card.

To try one by hand: ``echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.diagnose NAME``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hf_rocm_tune.doctor import links, software, system
from hf_rocm_tune.doctor.findings import (
    GROUPS,
    KNOWLEDGE,
    Again,
    Check,
    Evidence,
    Finding,
    all_rows,
    failure,
    from_row,
    knowledge_data,
    skipped,
    with_evidence,
)
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS, answer, run
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.variables import evaluate, read_fault

VARIABLE = "HF_ROCM_TUNE_DOCTOR_FAULT"
MODULE = "hf_rocm_tune.doctor.diagnose"
NOTHING_THERE = "not applicable on this machine"
_HUNG = ("measurement_hung", "pair_hung")
_ENOUGH_HANGS = 2

MEASURED: Mapping[str, Check] = {
    name: Check(name=name, measured=True, **{**entry, "faults": tuple(entry["faults"])})
    for file in sorted(KNOWLEDGE.glob("measured_*.toml"))
    for name, entry in knowledge_data(file.name)["checks"].items()
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in order of groups and checks.

    Attributes:
        findings: of all checks, including unknown and skipped ones.
        seconds: of each check that ran, by name.
    """

    findings: tuple[Finding, ...]
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """0 ok, 1 warnings, 2 failures. Unknown and skipped checks count as neither."""
        return 2 if self.count("fail") else 1 if self.count("warn") else 0

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    return in_order([*system.CHECKS, *software.CHECKS, *links.CHECKS, *MEASURED.values()])


def in_order(checks: Iterable[Check]) -> list[Check]:
    places = list(GROUPS)
    return sorted(checks, key=lambda check: places.index(check.group))


def select(checks: Sequence[Check], *, only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[Check]:
    """The checks with the given names of checks or groups (the group, if a name is both); all by default.

    Raises:
        UsageError: an unknown name, or no check is left.
    """
    wanted, unwanted = set(only), set(skip)
    names = [*dict.fromkeys(check.group for check in checks), *(check.name for check in checks)]
    for name in sorted(wanted | unwanted):
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise UsageError(f"there is no check or group {name!r}: {hint}`hf-rocm-tune doctor --list` names them all")
    chosen = [check for check in checks if not wanted or {check.name, check.group} & wanted]
    chosen = [check for check in chosen if not {check.name, check.group} & unwanted]
    if not chosen:
        raise UsageError("--only and --skip leave no check to run: give other names")
    return chosen


def listing(checks: Sequence[Check]) -> str:
    """The checks by group, with their descriptions."""
    width = max(len(check.name) for check in checks)
    blocks = []
    for group, title in GROUPS.items():
        lines = []
        for check in (one for one in checks if one.group == group):
            notes = ["with --full only"] if check.full else []
            notes += ["on an accelerator"] if check.measured else []
            notes += [f"with {check.needs_cards} cards"] if check.needs_cards > 1 else []
            lines.append(f"  {check.name:<{width}}  {check.about}" + (f" ({', '.join(notes)})" if notes else ""))
        blocks += ["\n".join([f"{group}: {title}", *lines])] if lines else []
    return "\n\n".join(blocks)


def diagnose(
    evidence: Evidence,
    checks: Sequence[Check],
    *,
    full: bool = False,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Diagnosis:
    """Run the checks that can run here, long ones with `full`; `on_check` is called before each that runs."""
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    for check in in_order(checks):
        if evidence.card_count < check.needs_cards:
            continue
        if why_not := _why_not(check, evidence, findings, full=full):
            findings.append(skipped(why_not, check=check.name))
            continue
        on_check(check)
        began = time.monotonic()
        made = [finding for finding in _run(check, evidence) if finding.needs_cards <= evidence.card_count]
        seconds[check.name] = round(time.monotonic() - began, 3)
        findings += made or [skipped(NOTHING_THERE, check=check.name)]
    findings += _variables_for(evidence, findings)
    return Diagnosis(findings=tuple(findings), seconds=seconds)


def _run(check: Check, evidence: Evidence) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in check.run(evidence) if check.run else _measure(check, evidence):
            found.append(replace(finding, check=check.name))
    except Exception as error:  # a bug of ours in one check must not hide other findings
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        found.append(from_row("check_crashed", check=check.name, name=check.name, error=what))
    return found


def _why_not(check: Check, evidence: Evidence, findings: Iterable[Finding], *, full: bool) -> str:
    """Why a check is not run; empty if it runs."""
    if not check.measured:
        return ""
    if evidence.recorded:
        return "nothing can be measured in a recording"
    if not evidence.devices:
        known = evidence.software
        why = "the software is unknown" if known is None else known.devices.reason
        return f"torch sees no accelerator: {why or f'torch {known and known.torch_version.value} lists no device'}"
    if check.needs_cards > len(evidence.seen_cards):
        return f"torch sees {len(evidence.seen_cards)} of {evidence.card_count} cards"
    if check.full and not full:
        seconds = check.seconds
        takes = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        return f"takes about {takes}; --full runs it"
    # Every hang takes minutes, and a driver that hung in two checks will hang again.
    hung = dict.fromkeys(finding.check for finding in findings if finding.row in _HUNG)
    if check.group == "after" or len(hung) < _ENOUGH_HANGS:
        return ""
    return f"{' and '.join(hung)} did not return; --only {check.name} measures it anyway"


def _variables_for(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """Decisions of the policy of variables that depend on the findings: for example that RCCL should not use peers."""
    rows = all_rows()
    names = {name for finding in findings if finding.row in rows for name in rows[finding.row].environ}
    if not names:
        return []
    before = evaluate(evidence.variables, evidence.facts())
    found = evaluate(evidence.variables, evidence.facts(frozenset(names)))
    return [system.of_decision(one, found=True) for one in found if one not in before]


@dataclass(frozen=True, kw_only=True)
class DoctorFault:
    """An injected fault, which shows that a check detects it.

    ``HF_ROCM_TUNE_DOCTOR_FAULT="check=round_trip,kind=zeros,where=page-locked"``

    Attributes:
        check: a key of ``MEASURED``.
        kind: one of that check's faults, or an ending of its process (``machine.child.ENDINGS``).
        where: only in steps whose description contains this text.
    """

    check: str
    kind: str
    where: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DoctorFault | None:
        """The fault in the variable; None if it is unset or empty.

        Raises:
            UsageError: an unknown, missing, repeated or invalid key or value; names the valid ones.
        """
        kinds = {name: (*check.faults, *ENDINGS) for name, check in MEASURED.items()}
        return read_fault(cls, VARIABLE, environ, by="check", kinds=kinds, example="check=round_trip,kind=zeros")


def _measure(check: Check, evidence: Evidence) -> list[Finding]:
    """A measured check on this machine's devices, with the fault of the environment."""
    fault = DoctorFault.from_environment(os.environ)
    common = {"hip": evidence.build == "rocm"}
    if check.needs_cards:
        requests = [{**common, "devices": list(map(_device, evidence.seen_cards))}]
    else:
        requests = [{**common, **_device(device)} for device in evidence.devices]
    return run_measured(check, requests, fault=fault if fault and fault.check == check.name else None)


def _device(device: TorchDevice) -> dict[str, Any]:
    return {**asdict(device), "device": f"cuda:{device.index}", "address": device.pci_address}


def run_measured(
    check: Check, requests: Iterable[Mapping[str, Any]], *, fault: DoctorFault | None = None
) -> list[Finding]:
    """Run a measured check, once for each request. With an injected fault every finding says so, and an extra one."""
    findings: list[Finding] = []
    for asked in requests:
        request: dict[str, Any] = {**check.options, **asked}
        if fault is not None:
            request["fault"] = {"kind": fault.kind, "where": fault.where}
        if check.needs_cards:
            made = _call(check, {**request, "deadline_s": check.deadline_s, "about": check.about})
            assert not isinstance(made, Again)
        else:
            made = _in_child(check, request)
        # A card is named with its address, which does not depend on filters of visible devices.
        device, address = request.get("device"), request.get("address")
        for finding in made:
            subject = f"{device} at {address}" if address and finding.subject == device else finding.subject
            findings.append(replace(finding, check=check.name, subject=subject))
    if fault is None:
        return findings
    note = f"an injected fault: {VARIABLE}=check={fault.check},kind={fault.kind}"
    note += f",where={fault.where}" if fault.where else ""
    marked = [replace(finding, evidence=(note, *finding.evidence)) for finding in findings]
    return [from_row("fault_on_purpose", check=fault.check, kind=fault.kind, name=fault.check), *marked]


def _in_child(check: Check, request: Mapping[str, Any]) -> list[Finding]:
    ask = partial(run, MODULE, check.name, deadline_s=check.deadline_s)
    outcome = ask(request=request)
    if outcome.result is None:
        return [failure(check.about, outcome, subject=str(request["device"]))]
    findings, again = outcome.result["findings"], outcome.result["again"]
    if again is not None:
        second = ask(request={**request, **again["request"], "first": findings}, environ=again["environ"])
        if second.result is None:
            line = f"{again['words']}: the measuring process {second.how}"
            return with_evidence(map(Finding.from_dict, findings), line)
        findings = second.result["findings"]
    return [Finding.from_dict(values) for values in findings]


def _call(check: Check, request: dict[str, Any]) -> list[Finding] | Again:
    module, _, function = check.function.partition(".")
    made: list[Finding] | Again = getattr(importlib.import_module(f"{__package__}.{module}"), function)(request)
    return made


def measure_here(check: Check, request: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: ``findings``, and ``again`` if a second child is needed; JSON values."""
    first = list(map(Finding.from_dict, request.get("first", ())))
    made = _call(check, {**check.options, **request, "first": first})
    if isinstance(made, Again):
        again = {"environ": dict(made.environ), "words": made.words, "request": dict(made.request)}
        return {"findings": [one.to_dict() for one in made.findings], "again": again}
    return {"findings": [one.to_dict() for one in made], "again": None}


def _measure_what_is_named(request: dict[str, Any]) -> dict[str, Any]:
    names = [name for name, one in MEASURED.items() if not one.needs_cards]
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give one of {' '.join(names)}")
    return measure_here(MEASURED[sys.argv[1]], request)


if __name__ == "__main__":
    sys.exit(answer(_measure_what_is_named))
