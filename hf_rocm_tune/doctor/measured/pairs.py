"""``pairs``: copies between every ordered pair of cards (``ranks.trial_measures`` measures, in own children).

Faults: those of ``raw_copies``; ``where=cuda:1 to cuda:0`` harms one direction, ``where=cold`` the first copy,
``where=strided`` or ``where=cast`` those that a kernel makes, ``where=through the host`` the staged copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured.conduct import Ask, failure
from hf_rocm_tune.doctor.measured.words import problem_lines
from hf_rocm_tune.ranks.trials import PairTrial, try_pairs

_PEER_ENGINES_OFF = {"HSA_ENABLE_PEER_SDMA": "0"}


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """A finding for each ordered pair; where one is wrong, it is tried once more with the engines for peers off."""
    findings = []
    for trial in _try(ask, request, {}):
        other = None
        if trial.verdict != "right" and request.get("hip"):
            names = (trial.source, trial.destination)
            pair = [device for name in names for device in request["devices"] if device["device"] == name]
            other = _try(ask, {**request, "devices": pair}, _PEER_ENGINES_OFF)[0]
        findings.append(_finding(ask, trial, other))
    return findings


def _try(ask: Ask, request: Mapping[str, Any], environ: Mapping[str, str]) -> list[PairTrial]:
    return try_pairs(
        request["devices"],
        deadline_s=ask.measured.deadline_s,
        largest=request["largest"],
        repeats=request["repeats"],
        environ=environ,
        fault=request.get("fault"),
    )


def _finding(ask: Ask, trial: PairTrial, other: PairTrial | None) -> Finding:
    subject = f"{trial.source}->{trial.destination}"
    names = {"source": trial.source, "destination": trial.destination}
    seen = [f"with HSA_ENABLE_PEER_SDMA=0: {other.reason}"] if other else []
    result = trial.outcome.result
    if result is None:
        hung = trial.verdict == "hung"
        base = failure(ask, trial.outcome, subject=subject)
        if base.status == "unknown":
            return base
        if trial.verdict == "untried":
            return unknown("pairs", trial.reason, subject=subject, evidence=base.evidence)
        row = "pair_hung" if hung else "pair_died"
        evidence = [*base.evidence, *seen]
        return from_row("pairs", row, subject=subject, evidence=evidence, how=trial.outcome.how, **names)
    access = {True: "yes", False: "no", None: "not asked"}[result["peer_access"]]
    evidence = [
        *problem_lines(result["problems"]),
        f"{result['wrong']} of {result['cases']} copies wrong; torch's can_device_access_peer: {access}",
    ]
    evidence.append(f"through the host: {'wrong' if result['staged_wrong'] else 'right'}")
    if result["staged_wrong"]:
        row = "pair_wrong_through_host"
    else:
        row = "pair_wrong" if result["wrong"] else "pair_right"
    return from_row("pairs", row, subject=subject, evidence=[*evidence, *seen], **names)
