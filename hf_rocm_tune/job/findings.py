"""What the doctor can read of this machine in a moment, looked at before a run and handed to its report.

Reading only: nothing is run on the card, and torch, which this process trains with, is asked here and not in a child.
One process of each machine looks. Warnings and failures are printed, a line each; all findings go into the report.

A failure does not stop the run. What is certain to end it (a card that torch does not see, a wheel without kernels for
it) ends it at once by itself, and the line printed just before says why. All else is a reading or a report of others
that may not hold here, and the run's own verification judges what really arrives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hf_rocm_tune.doctor.access import of_decision
from hf_rocm_tune.doctor.diagnose import quick
from hf_rocm_tune.doctor.findings import Evidence, Finding, from_row, own_environ, unknown
from hf_rocm_tune.machine import variables
from hf_rocm_tune.machine.software import Software, read_software
from hf_rocm_tune.machine.survey import survey

DEADLINE_S = 5.0
_VARIABLES = "variables"
_ON_THE_PROCESSOR = ("no_gpu", "no_card")
"""Rows that say that training would run on the processor: a run that does has just named its device."""


def look(*, doctor: bool, say: Callable[[str], None], deadline_s: float = DEADLINE_S) -> tuple[dict[str, Any], ...]:
    """Look at this machine, on its first rank.

    Args:
        doctor: False leaves only what the policy of environment variables has found already.
        say: takes each line for the user, but for what was said already: variables were spoken of when the package was
            imported, and of the processor as the device by the run.
        deadline_s: seconds after which the run goes on without an answer: a driver may hang inside a read.

    Returns:
        The findings as plain values; nothing on the other ranks.
    """
    if os.environ.get("LOCAL_RANK", "").strip() not in ("", "0", "-1"):
        return ()
    found: list[Finding] = []
    if doctor:
        software = read_software(in_process=True)
        found = _within(deadline_s, software, own_environ(os.environ))
        known = () if software.devices.value else _ON_THE_PROCESSOR
        grave = [finding for finding in found if finding.status in ("warn", "fail") and finding.row not in known]
        for finding in grave:
            if finding.check != _VARIABLES:
                say(_line(finding))
    told = {finding.subject for finding in found if finding.check == _VARIABLES}
    # A variable that is too late to set, or a choice of cards that cannot hold, is known to this process alone.
    late = [one for one in variables.DECISIONS if one.action in ("warn", "error") and one.variable not in told]
    return tuple(finding.to_dict() for finding in [*found, *(of_decision(one) for one in late)])


def _within(deadline_s: float, software: Software, variables: Mapping[str, str]) -> list[Finding]:
    """The findings of all checks that read, or one that says that there was no answer in time."""
    found: list[Finding] = []

    def read() -> None:
        try:
            evidence = Evidence(machine=survey(), software=software, environ=variables)
            found.extend(quick(evidence, measure_seconds=0.0))
        except Exception as error:  # a bug of ours; it is reported as such, and is no reason to refuse a run
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found.append(from_row("check_crashed", check="machine", name="machine", error=what))

    reader = threading.Thread(target=read, name="doctor", daemon=True)
    reader.start()
    reader.join(deadline_s)
    if reader.is_alive():
        reason = f"reading the kernel's files took more than {deadline_s:g} seconds; `hf-rocm-tune doctor` may say more"
        return [unknown(reason, check="machine")]
    return found


def _line(finding: Finding) -> str:
    label = "warning" if finding.status == "warn" else "failure"
    cure = f"; {finding.cure}" if finding.cure else ""
    return " ".join(f"{label}: {finding.title}: {finding.text}{cure} ({'; '.join(finding.sources)})".split())
