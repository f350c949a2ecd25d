"""All checks, their selection, and running them: a failing check does not stop others, and skipped ones have a reason.

A check that measures is called in a child process with a deadline, once for each card (``request["device"]``); one of
two cards in this process, because its trials start their own children. This process never imports torch. By hand:
``echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.diagnose model``.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_rocm_tune.doctor import links, software, system
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, failure, one_line, skipped, warn
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import Task, answer, run_together
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.variables import ALLOCATOR

MODULE = "hf_rocm_tune.doctor.diagnose"
NOTHING_THERE = "not applicable on this machine"
_HUNG = ("measurement_hung", "pair_hung")
_ENOUGH_HANGS = 2
_MIB = 1 << 20
_GIB = 1 << 30

MEASURED = (
    Check("round_trip", "transfers", "copies to the card and back, by size, dtype and kind, cold and warm",
          measure="transfers.round_trip", full_deadline_s=300,
          options={"largest": 64 * _MIB, "repeats": 20, "seconds": 20},
          full={"largest": 256 * _MIB, "repeats": 100, "seconds": 200}, again={"HSA_ENABLE_SDMA": "0"}),
    Check("casts", "transfers", "casts on the card, compared with the CPU", measure="transfers.casts"),
    Check("bandwidth", "transfers", "speed of page-locked copies, compared with the rate of the link",
          measure="transfers.bandwidth", options={"mib": 256}),
    # 144: the cycle in which the RX 7900 XT of ROCm/ROCm#6603 failed
    Check("canaries", "memory", "memory while other memory is allocated and freed",
          measure="transfers.canaries", full_deadline_s=1800,
          options={"cycles": 40, "seconds": 4, "room": 24 * _GIB},
          full={"cycles": 400, "seconds": 1500, "room": 1 << 62}, again=dict.fromkeys(ALLOCATOR)),
    Check("pairs", "pairs", "copies between every ordered pair of cards, cold and warm",
          measure="pairs.pairs", deadline_s=45, full_deadline_s=45, needs_cards=2,
          options={"largest": 64 * _MIB, "repeats": 10},
          full={"largest": 1024 * _MIB, "repeats": 100}),
    Check("all_reduce", "pairs", "sums over all cards by RCCL, and alternatives if it fails",
          measure="pairs.all_reduce", deadline_s=120, needs_cards=2),
    Check("gemm", "compute", "a matrix product repeated under load, bit for bit, and its speed",
          measure="arithmetic.gemm", full_deadline_s=900, options={"seconds": 0.4}, full={"seconds": 30}),
    Check("model", "compute", "a small model forward and backward, plain, padded and packed, compared with float64",
          measure="arithmetic.model"),
    Check("attention", "compute", "attention forward and backward up to the longest planned length, and its backend",
          measure="arithmetic.attention", options={"length": 28_672, "seconds": 20, "total": 40}),
    Check("nf4", "compute", "4-bit weights of bitsandbytes, compared with their definition", measure="arithmetic.nf4"),
)  # fmt: skip
"""In the order in which they run within their groups."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in order of groups and checks, and the seconds of each check that ran."""

    findings: tuple[Finding, ...]
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """0 ok, 1 warnings, 2 failures. Unknown and skipped checks count as neither."""
        if self.count("fail"):
            return 2
        if self.count("warn"):
            return 1
        return 0

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    order = list(GROUPS)
    checks = [*system.CHECKS, *software.CHECKS, *links.CHECKS, *MEASURED, links.AFTER]
    return sorted(checks, key=lambda check: order.index(check.group))


def select(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """The checks with the given names of checks or groups (the group, if a name is both); all by default."""
    names = {check.name for check in checks} | {check.group for check in checks}
    wrong = sorted(set(only) - names)
    if wrong:
        raise UsageError(f"there is no check or group {', '.join(wrong)}: `hf-rocm-tune doctor --help` names them all")
    if not only:
        return [*checks]
    return [check for check in checks if check.name in only or check.group in only]


def listing() -> str:
    """The groups, with their checks."""
    groups = []
    for group in GROUPS:
        names = ", ".join(check.name for check in all_checks() if check.group == group)
        groups.append(f"{group} ({names})")
    return "; ".join(groups)


def diagnose(
    evidence: Evidence,
    checks: Sequence[Check],
    *,
    full: bool = False,
    only: Iterable[str] = (),
    seconds_at_most: float = math.inf,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Diagnosis:
    """Run the checks that can run here.

    ``seconds_at_most``: after so many no check that measures begins, and the one that runs then is ended.
    """
    ends = time.monotonic() + seconds_at_most
    for name in only:
        reasons = [_why_not(check, evidence, ()) for check in checks if name in (check.name, check.group)]
        if reasons and all(reasons):
            raise UsageError(f"--only {name}: nothing was checked, because {reasons[0]}")
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    for check in checks:
        has_measured = any(measured.name in seconds for measured in MEASURED)
        if check is links.AFTER and not has_measured and check.name not in only:
            continue
        why_not = _why_not(check, evidence, findings)
        if why_not:
            if evidence.card_count >= check.needs_cards:
                findings.append(replace(skipped(why_not), check=check.name))
            continue
        began = time.monotonic()
        if check.measure and began >= ends:
            text = f"{seconds_at_most:.0f} s were over; --only {check.name} measures it"
            findings.append(replace(skipped(text), check=check.name))
            continue
        on_check(check)
        made: list[Finding] = []
        try:
            if check.run:
                results: Iterable[Finding] = check.run(evidence)
            else:
                results = _measure(check, evidence, full=full, left_s=ends - began)
            for finding in results:
                made.append(replace(finding, check=check.name))
        except Exception as error:  # a bug of ours in one check must not hide other findings
            made.append(crashed(check.name, error))
        seconds[check.name] = round(time.monotonic() - began, 3)
        findings += made or [replace(skipped(NOTHING_THERE), check=check.name)]
    for name in only:
        named = {check.name for check in checks if name in (check.name, check.group)} - {links.AFTER.name}
        if named and all(finding.text == NOTHING_THERE for finding in findings if finding.check in named):
            raise UsageError(f"--only {name}: nothing was checked, because it is {NOTHING_THERE}")
    return Diagnosis(findings=tuple(findings), seconds=seconds)


def crashed(name: str, error: Exception) -> Finding:
    """The finding that a check, or reading the machine, ended with an error of ours."""
    text = f"the check {name} ended with {one_line(error)}: a bug of this project, not a finding about your machine"
    fix = "please report it with the output of `hf-rocm-tune doctor --json`"
    source = f"this project: {MODULE}"
    return replace(warn("check_crashed", "A check failed with an error", text, fix, source), check=name)


def _why_not(check: Check, evidence: Evidence, findings: Iterable[Finding]) -> str:
    """Why a check is not run; empty if it runs."""
    software = evidence.software
    if check.measure and not evidence.devices:
        reason = software.problems.get("devices", f"torch {software.torch_version} lists no device")
        return f"torch sees no accelerator: {reason}"
    seen = len(evidence.seen_cards)
    usable = seen if check.measure else evidence.card_count
    if check.needs_cards > usable:
        return f"it needs {check.needs_cards} cards, and torch sees {seen} of {evidence.card_count}"
    # Every hang takes minutes, and a driver that hung in two checks will hang again.
    hung = dict.fromkeys(finding.check for finding in findings if finding.row in _HUNG)
    if not check.measure or len(hung) < _ENOUGH_HANGS:
        return ""
    return f"{' and '.join(hung)} did not return; --only {check.name} measures it anyway"


def _measure(check: Check, evidence: Evidence, *, full: bool, left_s: float) -> list[Finding]:
    """A measured check on this machine's devices, which all together have ``left_s`` seconds."""
    deadline_s = check.full_deadline_s if full else check.deadline_s
    check = replace(check, deadline_s=min(deadline_s, max(left_s, 1.0)))
    options = {**check.options}
    if full:
        options |= check.full
    options["hip"] = evidence.software.build == "rocm"
    if check.needs_cards:
        return run_measured(check, {**options, "devices": list(map(_device, evidence.seen_cards))})
    findings: list[Finding] = []
    for device in evidence.devices:
        findings += run_measured(check, {**options, **_device(device)})
    return findings


def _device(device: TorchDevice) -> dict[str, Any]:
    return {**asdict(device), "device": f"cuda:{device.index}", "address": device.pci_address}


def run_measured(check: Check, request: Mapping[str, Any]) -> list[Finding]:
    """Run a measured check for one request, which has its options."""
    if check.needs_cards:
        return _call(check, {**request, "deadline_s": check.deadline_s, "about": check.about})
    # A card is named with its address, which does not depend on filters of visible devices.
    device = request["device"]
    address = request.get("address")
    subject = f"{device} at {address}" if address else str(device)

    def in_child(environ: Mapping[str, str | None]) -> list[Finding]:
        task = Task(module=MODULE, arguments=(check.name,), request=request, environ=environ)
        (outcome,) = run_together([task], deadline_s=check.deadline_s)
        if outcome.result is None:
            return [failure(check.about, outcome, subject=subject)]
        made = [Finding(**values) for values in outcome.result["findings"]]
        return [replace(finding, subject=subject) if finding.subject == device else finding for finding in made]

    findings = in_child({})
    if not (check.again and request.get("hip") and _has_failed(findings)):
        return findings
    # A process reads these variables once: another one tells whether they are the cause.
    settings = " ".join(f"{name}={value}" for name, value in check.again.items())
    if all(value is None for value in check.again.values()):
        settings = "without allocator settings"
    result = "the same" if _has_failed(in_child(check.again)) else "right, so that is involved"
    evidence = f"{settings}: {result}"
    noted = []
    for finding in findings:
        if finding.status != "ok":
            finding = replace(finding, read=(*finding.read, evidence))
        noted.append(finding)
    return noted


def _has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _call(check: Check, request: dict[str, Any]) -> list[Finding]:
    module, _, function = check.measure.partition(".")
    made: list[Finding] = getattr(importlib.import_module(f"{__package__}.{module}"), function)(request)
    return made


def _measure_what_is_named(request: dict[str, Any]) -> dict[str, Any]:
    known = {check.name: check for check in MEASURED if not check.needs_cards}
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give one of {' '.join(known)}")
    check = known[sys.argv[1]]
    return {"findings": [finding.to_dict() for finding in _call(check, {**check.options, **request})]}


if __name__ == "__main__":
    answer(_measure_what_is_named)
