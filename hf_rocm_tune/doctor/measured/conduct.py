"""Lets a measured check run its children, and judges what all of them have in common: a child that gave no result."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.child import measure_in_child
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured import MEASURED, PACKAGE, Measured
from hf_rocm_tune.doctor.measured.faults import VARIABLE, DoctorFault
from hf_rocm_tune.hardware.child import Outcome
from hf_rocm_tune.hardware.software import TorchDevice
from hf_rocm_tune.ranks.trials import DEVICE_ERRORS

_TAIL_LINES = 6
_STACK_HEAD = "(most recent call first):"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Lets children of one check measure.

    Attributes:
        measured: the check.
        request: what all of its children are asked.
    """

    measured: Measured
    request: Mapping[str, Any]

    def __call__(self, *, environ: Mapping[str, str | None] | None = None, **more: Any) -> Outcome:
        """Let a fresh child measure.

        Args:
            environ: variables beside those of this process; None takes one away.
            more: goes into the request beside what is in it already.
        """
        measured = self.measured
        request = {**self.request, **more}
        return measure_in_child(measured.module, request, deadline_s=measured.deadline_s, environ=environ)


def checks() -> tuple[Check, ...]:
    """All measured checks, in their order."""
    return tuple(_check(measured) for measured in MEASURED.values())


def _check(measured: Measured) -> Check:
    def run(evidence: Evidence) -> Iterable[Finding]:
        fault = DoctorFault.from_environment(os.environ)
        mine = fault if fault is not None and fault.check == measured.name else None
        return run_measured(measured, requests(measured, evidence), fault=mine)

    return Check(
        name=measured.name,
        group=measured.group,
        about=measured.about,
        run=run,
        measured=True,
        full=measured.full,
        needs_gpu=True,
        needs_cards=measured.needs_cards,
        seconds=measured.seconds,
    )


def requests(measured: Measured, evidence: Evidence) -> list[dict[str, Any]]:
    """What the children of a check are asked on this machine: one request for each card, or one for all."""
    software = evidence.software
    common = {**measured.options, "hip": software is not None and software.build == "rocm"}
    if measured.every_card:
        return [{**common, **_device(device)} for device in evidence.devices]
    return [{**common, "devices": [_device(device) for device in evidence.seen_cards]}]


def _device(device: TorchDevice) -> dict[str, Any]:
    return {
        "device": f"cuda:{device.index}",
        "name": device.name,
        "arch": device.arch,
        "address": device.pci_address,
        "total_bytes": device.total_bytes,
    }


def run_measured(
    measured: Measured, asked: Iterable[Mapping[str, Any]], *, fault: DoctorFault | None = None
) -> list[Finding]:
    """Run a check.

    Args:
        measured: the check.
        asked: a request for each of its runs.
        fault: harms it on purpose; every finding says so, and one more.
    """
    module = importlib.import_module(f"{PACKAGE}.{measured.module}")
    findings: list[Finding] = []
    for request in asked:
        whole = {**request, "fault": fault.request()} if fault else dict(request)
        ask = Ask(measured=measured, request=whole)
        if hasattr(module, "conduct"):
            found = module.conduct(ask, whole)
        else:
            outcome = ask()
            found = module.judge(outcome, whole) if outcome.status == "done" else [failure(ask, outcome)]
        findings += [_named(finding, ask) for finding in found]
    return findings if fault is None else _marked(findings, fault)


def failure(ask: Ask, outcome: Outcome, *, subject: str = "") -> Finding:
    """The finding on a child that hung, died or left garbage.

    Args:
        ask: what asked for it.
        outcome: how it ended.
        subject: what it was about; the device unless given.
    """
    name, request = ask.measured.name, ask.request
    subject = subject or str(request.get("device", ""))
    evidence = [f"the measuring process {outcome.how}", *_printed(outcome)]
    if outcome.error.startswith("OutOfMemoryError"):
        return unknown(name, f"not enough memory is free: {outcome.error}", subject=subject, evidence=evidence)
    if outcome.error and not outcome.error.startswith(DEVICE_ERRORS):
        why = f"the measuring process {outcome.how}: a bug of ours, or a broken installation"
        return unknown(name, why, subject=subject, evidence=evidence)
    if outcome.status == "timeout":
        row = "measurement_hung"
    elif outcome.status == "garbage":
        row = "measurement_garbage"
    else:
        row = "measurement_refused" if outcome.error else "measurement_killed"
    return from_row(name, row, subject=subject, evidence=evidence, what=ask.measured.about, how=outcome.how)


def _named(finding: Finding, ask: Ask) -> Finding:
    """Under the name of the check, which may share its module; a card with its address, which no filter changes."""
    device, address = ask.request.get("device"), ask.request.get("address")
    subject = f"{device} at {address}" if address and finding.subject == device else finding.subject
    return replace(finding, check=ask.measured.name, subject=subject)


def _printed(outcome: Outcome) -> list[str]:
    """Of what it printed, what tells most: the innermost calls of a hang, else the end."""
    lines = [line.strip() for line in outcome.tail.splitlines() if line.strip()]
    stacks = [number for number, line in enumerate(lines) if line.endswith(_STACK_HEAD)]
    if outcome.status == "timeout" and stacks:
        return lines[stacks[-1] + 1 :][:_TAIL_LINES]
    return lines[-_TAIL_LINES:]


def _marked(findings: list[Finding], fault: DoctorFault) -> list[Finding]:
    said = f"a fault was put in on purpose: {VARIABLE}=check={fault.check},kind={fault.kind}"
    said += f",where={fault.where}" if fault.where else ""
    marked = [replace(finding, evidence=(said, *finding.evidence)) for finding in findings]
    return [from_row(fault.check, "fault_on_purpose", kind=fault.kind, name=fault.check), *marked]
