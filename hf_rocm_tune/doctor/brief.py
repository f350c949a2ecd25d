"""The quick subset, for what wants to know before it starts: everything that is read, and what is measured quickest."""

from __future__ import annotations

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.diagnose import diagnose
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding
from hf_rocm_tune.doctor.live import read_here
from hf_rocm_tune.doctor.registry import all_checks

MEASURE_SECONDS = 10.0
"""What the measured checks of the quick subset may take together, by their own estimates."""
ASK_SECONDS = 20.0
"""After which torch is no longer waited for; it answers within a few seconds as a rule."""


def quick(evidence: Evidence | None = None, *, measure_seconds: float = MEASURE_SECONDS) -> list[Finding]:
    """Find out in a few seconds whether this machine is fit to train. Never raises for what it finds.

    Call it in one process of a job, before that process fills the card: what is measured is measured in children.

    Args:
        evidence: read from this machine unless given.
        measure_seconds: what measuring may take; 0 leaves it out.

    Returns:
        The findings, without those on checks that were not run.
    """
    known = read_here(deadline_s=ASK_SECONDS)[0] if evidence is None else evidence
    done = diagnose(known, affordable(all_checks(), known, measure_seconds))
    return [finding for finding in done.findings if finding.status != "skipped"]


def affordable(checks: list[Check], evidence: Evidence, measure_seconds: float) -> list[Check]:
    """All checks that read, and the quickest of those that measure, as long as they fit in the time given."""
    chosen = [check for check in checks if not check.measured]
    left = measure_seconds
    short = [check for check in checks if check.measured and not check.full]
    for check in sorted(short, key=lambda one: one.seconds):
        # A check of single cards takes its time on each of them.
        seconds = check.seconds * (1 if check.needs_cards > 1 else max(evidence.card_count, 1))
        if check.needs_cards <= evidence.card_count and seconds <= left:
            left -= seconds
            chosen.append(check)
    return chosen
