"""Measured checks: what is tried on the device itself, each in a child process with a deadline.

A check is an entry of ``knowledge/checks.toml`` and the function that it names, ``check(request) -> list[Finding] |
Again``. The child imports the function's module, and with it torch; this process never does. ``request["device"]`` is
``cuda:0`` ... or ``cpu``; ``request["fault"]``, where it is there, is ``{"kind": ..., "where": ...}``, one of the
check's own ``faults``. Faults of the process itself (hang, kill, garbage ...) are made by ``machine.child``. The
function calls ``child.step("copying 64 MiB")`` before each part, so that a hang can be told by name. Here is judged
what all of them have in common: a child that hung, died or left garbage.

To try one by hand: ``echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.measured NAME``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hf_rocm_tune.doctor.evidence import Check, Evidence
from hf_rocm_tune.doctor.findings import Finding, from_row, knowledge_data, unknown
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import ENDINGS, Outcome, answer, run
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.variables import read_pairs
from hf_rocm_tune.ranks.trials import DEVICE_ERRORS

VARIABLE = "HF_ROCM_TUNE_DOCTOR_FAULT"
MODULE = "hf_rocm_tune.doctor.measured"
_TAIL_LINES = 6
_STACK_HEAD = "(most recent call first):"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured check.

    Attributes:
        name: of the check.
        group: a key of ``GROUPS``.
        about: one line for ``doctor --list``.
        function: ``module.function`` in this package; several checks may share one.
        seconds: what it takes on a card, as an estimate.
        deadline_s: seconds after which a child is killed; generous, since a healthy one never waits for it.
        faults: kinds that it can be given as ``request["fault"]["kind"]``, beside those of every child.
        options: goes into the request.
        full: only run with ``--full``.
        needs_cards: with fewer discrete cards it does not exist. A check of two cards is called in this process with
            ``request["devices"]``, because the preflight that it shares its trials with has children of its own; any
            other has one child for each card.
    """

    name: str
    group: str
    about: str
    function: str
    seconds: float
    deadline_s: float = 120
    faults: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    full: bool = False
    needs_cards: int = 0

    def __call__(self, request: dict[str, Any]) -> list[Finding] | Again:
        """Measure in this process."""
        module, _, function = self.function.partition(".")
        made: list[Finding] | Again = getattr(importlib.import_module(f"{__package__}.{module}"), function)(request)
        return made


@dataclass(frozen=True, kw_only=True)
class Again:
    """Findings that a second child may say more about, with other variables, which a process reads only once.

    Attributes:
        findings: what is said where the second child gives no result.
        environ: variables beside those of the first child; None takes one away.
        request: what the second is asked more; it finds `findings` as ``request["first"]`` and gives them all again.
        words: "with HSA_ENABLE_SDMA=0".
    """

    findings: list[Finding]
    environ: Mapping[str, str | None]
    words: str
    request: Mapping[str, Any] = field(default_factory=dict)


MEASURED: Mapping[str, Measured] = {
    name: Measured(name=name, **{**entry, "faults": tuple(entry["faults"])})
    for name, entry in knowledge_data("checks.toml").items()
}


@dataclass(frozen=True, kw_only=True)
class DoctorFault:
    """A fault on purpose, so that a user can see that a check would find one.

    ``HF_ROCM_TUNE_DOCTOR_FAULT="check=round_trip,kind=zeros,where=page-locked"``

    Attributes:
        check: a key of ``MEASURED``.
        kind: one of that check's faults, or an ending of its process (``machine.child.ENDINGS``).
        where: only where these words are part of what the check says it is doing.
    """

    check: str
    kind: str
    where: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DoctorFault | None:
        """The fault that the variable asks for; None where it is unset or empty.

        Raises:
            UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
        """
        text = environ.get(VARIABLE, "").strip()
        if not text:
            return None
        example = dict.fromkeys(("check", "kind"), "both, for example check=round_trip,kind=zeros")
        values = read_pairs(VARIABLE, text, ("check", "kind", "where"), required=example)
        check, kind = values["check"], values["kind"]
        if check not in MEASURED:
            raise UsageError(f"{VARIABLE}: check={check} is not valid; expected one of {' '.join(MEASURED)}")
        kinds = (*MEASURED[check].faults, *ENDINGS)
        if kind not in kinds:
            raise UsageError(f"{VARIABLE}: kind={kind} is not valid for {check}; expected one of {' '.join(kinds)}")
        return cls(**values)


def checks() -> tuple[Check, ...]:
    """All measured checks, in their order."""
    return tuple(
        Check(
            name=one.name,
            group=one.group,
            about=one.about,
            run=partial(_on_this_machine, one),
            measured=True,
            full=one.full,
            needs_gpu=True,
            needs_cards=one.needs_cards,
            seconds=one.seconds,
        )
        for one in MEASURED.values()
    )


def _on_this_machine(measured: Measured, evidence: Evidence) -> list[Finding]:
    fault = DoctorFault.from_environment(os.environ)
    common = {"hip": evidence.software is not None and evidence.software.build == "rocm"}
    if measured.needs_cards:
        requests = [{**common, "devices": list(map(_device, evidence.seen_cards))}]
    else:
        requests = [{**common, **_device(device)} for device in evidence.devices]
    return run_measured(measured, requests, fault=fault if fault and fault.check == measured.name else None)


def _device(device: TorchDevice) -> dict[str, Any]:
    return {
        "device": f"cuda:{device.index}",
        "name": device.name,
        "arch": device.arch,
        "address": device.pci_address,
        "total_bytes": device.total_bytes,
    }


def run_measured(
    measured: Measured, requests: Iterable[Mapping[str, Any]], *, fault: DoctorFault | None = None
) -> list[Finding]:
    """Run a check.

    Args:
        measured: the check.
        requests: one for each of its runs.
        fault: harms it on purpose; every finding says so, and one more.
    """
    findings: list[Finding] = []
    for asked in requests:
        request: dict[str, Any] = {**measured.options, **asked}
        if fault is not None:
            request["fault"] = {"kind": fault.kind, "where": fault.where}
        if measured.needs_cards:
            made = measured({**request, "deadline_s": measured.deadline_s, "about": measured.about})
            assert not isinstance(made, Again)
        else:
            made = _in_child(measured, request)
        # A card is named with its address, which no filter of visible devices changes.
        device, address = request.get("device"), request.get("address")
        for finding in made:
            subject = f"{device} at {address}" if address and finding.subject == device else finding.subject
            findings.append(replace(finding, check=measured.name, subject=subject))
    if fault is None:
        return findings
    said = f"a fault was put in on purpose: {VARIABLE}=check={fault.check},kind={fault.kind}"
    said += f",where={fault.where}" if fault.where else ""
    marked = [replace(finding, evidence=(said, *finding.evidence)) for finding in findings]
    return [from_row("fault_on_purpose", check=fault.check, kind=fault.kind, name=fault.check), *marked]


def _in_child(measured: Measured, request: Mapping[str, Any]) -> list[Finding]:
    ask = partial(run, MODULE, measured.name, deadline_s=measured.deadline_s)
    outcome = ask(request=request)
    if outcome.result is None:
        return [failure(measured.about, outcome, subject=str(request["device"]))]
    findings, again = outcome.result["findings"], outcome.result["again"]
    if again is not None:
        second = ask(request={**request, **again["request"], "first": findings}, environ=again["environ"])
        if second.result is None:
            line = f"{again['words']}: the measuring process {second.how}"
            return with_evidence(map(Finding.from_dict, findings), line)
        findings = second.result["findings"]
    return [Finding.from_dict(values) for values in findings]


def with_evidence(findings: Iterable[Finding], line: str) -> list[Finding]:
    """Findings with one more line of evidence each, but for those that are all right."""
    return [one if one.status == "ok" else replace(one, evidence=(*one.evidence, line)) for one in findings]


def failure(what: str, outcome: Outcome, *, subject: str) -> Finding:
    """The finding on a child that hung, died or left garbage.

    Args:
        what: it was to find out.
        outcome: how it ended.
        subject: what it was about.
    """
    evidence = [f"the measuring process {outcome.how}", *_printed(outcome)]
    if outcome.error.startswith("OutOfMemoryError"):
        return unknown(f"not enough memory is free: {outcome.error}", subject=subject, evidence=evidence)
    if outcome.error and not outcome.error.startswith(DEVICE_ERRORS):
        why = f"the measuring process {outcome.how}: a bug of ours, or a broken installation"
        return unknown(why, subject=subject, evidence=evidence)
    if outcome.status == "timeout":
        row = "measurement_hung"
    elif outcome.status == "garbage":
        row = "measurement_garbage"
    else:
        row = "measurement_refused" if outcome.error else "measurement_killed"
    return from_row(row, subject=subject, evidence=evidence, what=what, how=outcome.how)


def _printed(outcome: Outcome) -> list[str]:
    """Of what it printed, what tells most: the innermost calls of a hang, else the end."""
    lines = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    stacks = [number for number, line in enumerate(lines) if line.endswith(_STACK_HEAD)]
    if outcome.status == "timeout" and stacks:
        return lines[stacks[-1] + 1 :][:_TAIL_LINES]
    return lines[-_TAIL_LINES:]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child: measure what the command line names.

    Raises:
        UsageError: it names no check that measures in a child of this module.
    """
    names = [name for name, one in MEASURED.items() if not one.needs_cards]
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give one of {' '.join(names)}")
    return measure_here(MEASURED[sys.argv[1]], request)


def measure_here(measured: Measured, request: Mapping[str, Any]) -> dict[str, Any]:
    """``findings``, and ``again`` where a second child is wanted; plain JSON values."""
    made = measured({**measured.options, **request, "first": list(map(Finding.from_dict, request.get("first", ())))})
    if isinstance(made, Again):
        again = {"environ": dict(made.environ), "words": made.words, "request": dict(made.request)}
        return {"findings": [one.to_dict() for one in made.findings], "again": again}
    return {"findings": [one.to_dict() for one in made], "again": None}


if __name__ == "__main__":
    # Under its own name, which the modules of the checks import it by.
    from hf_rocm_tune.doctor.measured import measure as measure_check

    sys.exit(answer(measure_check))
