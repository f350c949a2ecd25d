"""``round_trip``: bytes from the host to the device and back. The child's half is ``round_trip_child``.

Faults: those of ``raw_copies``; ``where=to cuda:0`` harms the way there, ``where=back`` the way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row
from hf_rocm_tune.doctor.measured.conduct import Ask, failure
from hf_rocm_tune.doctor.measured.words import problem_lines, size_words
from hf_rocm_tune.machine.child import Outcome

VERDICTS = ("source", "read_back", "not_written", "sending", "memory", "mapping", "device_only")
"""See ``round_trip_child``; for each there is a row ``round_trip_VERDICT``."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's half."""
    from hf_rocm_tune.doctor.measured import round_trip_child

    return round_trip_child.measure(request)


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One child; where it finds wrong bytes, another with the copy engines (SDMA) off, to tell where they come from.

    The variable is read when HIP starts, so it takes a process of its own.
    """
    outcome = ask()
    if outcome.result is None:
        return [failure(ask, outcome)]
    if not outcome.result["wrong"] or not request.get("hip"):
        return judge(outcome, request)
    other = ask(environ={"HSA_ENABLE_SDMA": "0"})
    return judge(outcome, request, without_engines=other)


def judge(outcome: Outcome, request: Mapping[str, Any], *, without_engines: Outcome | None = None) -> list[Finding]:
    """One finding where all is right, else one for each way in which it is wrong."""
    assert outcome.result is not None
    result, device = outcome.result, request["device"]
    total = f"{result['cases']} cases, {size_words(result['bytes'])} there and back twice"
    left_out = [f"not tried, torch has no such copy: {'; '.join(result['left_out'])}"] if result["left_out"] else []
    if not result["wrong"]:
        evidence = [total, *left_out]
        return [from_row("round_trip", "round_trip_right", subject=device, evidence=evidence, device=device)]
    lines = [f"wrong: {result['wrong']} of {total}", *left_out]
    if without_engines is not None:
        lines.append(f"with HSA_ENABLE_SDMA=0: {_other(without_engines)}")
    findings = []
    for verdict in VERDICTS:
        problems = [problem for problem in result["problems"] if problem["verdict"] == verdict]
        if problems:
            evidence = [*problem_lines(problems), *lines]
            row = f"round_trip_{verdict}"
            findings.append(from_row("round_trip", row, subject=device, evidence=evidence, device=device))
    return findings


def _other(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"the measuring process {outcome.how}"
    wrong = outcome.result["wrong"]
    return f"{wrong} wrong" if wrong else "none wrong, so the copy engines or their driver are part of it"
