"""What the command shows, in whatever form: the findings with their groups, and what they are about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_rocm_tune.doctor.check import GROUPS
from hf_rocm_tune.doctor.diagnose import Diagnosis
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.links import link_of
from hf_rocm_tune.doctor.redact import Identity, scrub_finding, scrub_text, scrub_variable
from hf_rocm_tune.version import __version__

STATUSES = ("fail", "warn", "info", "ok", "unknown", "skipped")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A diagnosis and its surroundings.

    Attributes:
        diagnosis: what was found.
        groups: check name to group.
        about: the machine in one line.
        source: where a recording comes from; empty for this machine.
        fault: the fault that was put in on request; empty without one.
        seconds: that all of it took.
    """

    diagnosis: Diagnosis
    groups: Mapping[str, str]
    about: str
    source: str
    fault: str
    seconds: float

    def by_group(self) -> dict[str, list[Finding]]:
        """Titles of groups to their findings, in order; what was not run is left out, see ``not_run``."""
        found: dict[str, list[Finding]] = {title: [] for title in GROUPS.values()}
        for finding in self.diagnosis.findings:
            if finding.status != "skipped":
                found[GROUPS[self.groups[finding.check]]].append(finding)
        return {title: findings for title, findings in found.items() if findings}

    def not_run(self) -> dict[str, list[str]]:
        """Reasons to the checks that were not run for them."""
        found: dict[str, list[str]] = {}
        for finding in self.diagnosis.findings:
            if finding.status == "skipped":
                found.setdefault(finding.text, []).append(finding.check)
        return found

    def summary(self) -> str:
        """The counts in one line."""
        words = {
            "fail": ("failure", "failures"),
            "warn": ("warning", "warnings"),
            "info": ("note", "notes"),
            "ok": ("fine", "fine"),
            "unknown": ("not known", "not known"),
            "skipped": ("not looked at", "not looked at"),
        }
        counts = {status: self.diagnosis.count(status) for status in STATUSES}
        shown = [f"{count} {words[status][count != 1]}" for status, count in counts.items() if count]
        return ", ".join(shown) or "nothing was looked at"

    def scrubbed(self, identity: Identity) -> Report:
        """The same without names, secrets and serial numbers, to be given to others."""
        findings = tuple(scrub_finding(finding, identity) for finding in self.diagnosis.findings)
        return replace(
            self,
            diagnosis=replace(self.diagnosis, findings=findings),
            about=scrub_text(self.about, identity),
            source=scrub_text(self.source, identity),
            fault=scrub_variable(self.fault, identity),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": 1,
            "version": __version__,
            "machine": self.about,
            "recorded": self.source or None,
            "fault_injection": self.fault or None,
            "exit_code": self.diagnosis.exit_code,
            "counts": {status: self.diagnosis.count(status) for status in STATUSES},
            "seconds": round(self.seconds, 1),
            "seconds_by_check": self.diagnosis.seconds,
            "findings": [
                {
                    **finding.to_dict(),
                    "group": self.groups[finding.check],
                    "links": [link for source in finding.sources if (link := link_of(source))],
                }
                for finding in self.diagnosis.findings
            ],
        }


def about(evidence: Evidence) -> str:
    """The machine in one line: what it computes on, its processor, kernel and torch."""
    machine, software = evidence.machine, evidence.software
    cards = [gpu.identity.card.name if gpu.identity.card else f"AMD {gpu.arch or 'GPU'}" for gpu in evidence.candidates]
    cards = cards or [device.name for device in evidence.devices] or ["no card"]
    version = software.torch_version.value if software else None
    kernel = machine.kernel.release.value
    parts = [
        " + ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(cards).items()),
        machine.host.cpu.value or "unknown processor",
        f"{machine.host.platform} {kernel}" if kernel else machine.host.platform,
        f"torch {version}" if version else "no torch",
    ]
    return ", ".join(parts)
