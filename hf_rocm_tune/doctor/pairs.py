"""Between cards: copies of every ordered pair (``pairs``), sums over all (``all_reduce``), and what a run would decide
(``grad_sync``). The trials are those of the preflight, which measures in children of its own; no torch here.

Faults: those of ``raw_copies`` for pairs (``where=cuda:1 to cuda:0`` harms one direction, ``where=cold`` the first
copy, ``where=strided`` or ``where=cast`` those that a kernel makes, ``where=through the host`` the staged copy); those
of ``preflight_ranks`` for sums, which harm the last rank on every way, unless ``where=over nccl`` picks one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hf_rocm_tune.doctor.findings import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured import failure
from hf_rocm_tune.ranks.preflight import PreflightFault, SyncWay, try_machine
from hf_rocm_tune.ranks.trials import PairTrial, ReduceTrial, Way, try_all_reduce, try_pairs

_PEER_ENGINES_OFF = {"HSA_ENABLE_PEER_SDMA": "0"}
_TAIL_LINES = 4
_WAYS: Mapping[Way, str] = {
    "rccl": "RCCL (backend nccl)",
    "rccl_without_p2p": "RCCL with NCCL_P2P_DISABLE=1",
    "gloo": "gloo",
}
_HOW = {"wrong": "gave wrong sums", "hung": "did not return", "died": "ended a rank"}
_DECISIONS: Mapping[SyncWay, str] = {
    "ddp": "grad_sync_ddp",
    "ddp_without_p2p": "grad_sync_without_p2p",
    "host": "grad_sync_host",
    "one_card": "grad_sync_one_card",
}
_SHOWN = 3
_UNITS = ((20 << 20, "20 MiB"), (2 << 20, "2 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB"))


def pairs(request: Mapping[str, Any]) -> list[Finding]:
    """A finding for each ordered pair; where one is wrong, it is tried once more with the engines for peers off."""
    findings = []
    for trial in _try_pairs(request, request["devices"], {}):
        again = None
        if trial.verdict != "right" and request.get("hip"):
            names = (trial.source, trial.destination)
            pair = [device for name in names for device in request["devices"] if device["device"] == name]
            again = _try_pairs(request, pair, _PEER_ENGINES_OFF)[0].reason
        findings.append(judge_pair(trial, again, str(request.get("about", ""))))
    return findings


def _try_pairs(request: Mapping[str, Any], devices: Sequence[Any], environ: Mapping[str, str]) -> list[PairTrial]:
    options = {name: request.get(name) for name in ("deadline_s", "largest", "repeats", "fault")}
    return try_pairs(devices, environ=environ, **options)  # type: ignore[arg-type]


def judge_pair(trial: PairTrial, again: str | None, about: str) -> Finding:
    """The finding on one pair.

    Args:
        trial: of it.
        again: how it went with the engines for peers off.
        about: what the check finds out.
    """
    subject = f"{trial.source}->{trial.destination}"
    names = {"source": trial.source, "destination": trial.destination}
    seen = [f"with HSA_ENABLE_PEER_SDMA=0: {again}"] if again else []
    result = trial.outcome.result
    if result is None:
        base = failure(about, trial.outcome, subject=subject)
        if base.status == "unknown":
            return base
        if trial.verdict == "untried":
            return unknown(trial.reason, subject=subject, evidence=base.evidence)
        row = "pair_hung" if trial.verdict == "hung" else "pair_died"
        return from_row(row, subject=subject, evidence=[*base.evidence, *seen], how=trial.outcome.how, **names)
    access = {True: "yes", False: "no", None: "not asked"}[result["peer_access"]]
    evidence = [
        *problem_lines(result["problems"]),
        f"{result['wrong']} of {result['cases']} copies wrong; torch's can_device_access_peer: {access}",
        f"through the host: {'wrong' if result['staged_wrong'] else 'right'}",
    ]
    if result["staged_wrong"]:
        row = "pair_wrong_through_host"
    else:
        row = "pair_wrong" if result["wrong"] else "pair_right"
    return from_row(row, subject=subject, evidence=[*evidence, *seen], **names)


def all_reduce(request: Mapping[str, Any]) -> list[Finding]:
    """Sums over RCCL; where that fails, with NCCL_P2P_DISABLE=1 and then over gloo, to say what works here."""
    trials: list[ReduceTrial] = []
    on_cards = any(device["device"] != "cpu" for device in request["devices"])
    options = {name: request.get(name) for name in ("deadline_s", "largest", "repeats", "fault")}
    for way in list(_WAYS) if on_cards else ["gloo"]:
        trials.append(try_all_reduce(request["devices"], way, **options))  # type: ignore[arg-type]
        if trials[-1].verdict in ("right", "untried"):
            break
    first, last = trials[0], trials[-1]
    evidence = [trial.reason for trial in trials]
    if first.verdict == "right":
        result = first.outcomes[0].result
        if result is not None and result["gb_per_s"]:
            evidence.append(f"{result['gb_per_s']:.2f} GB/s summing {size_words(result['repeated_bytes'])} of bfloat16")
        return [from_row("all_reduce_right", evidence=evidence, way=_WAYS[first.way])]
    if first.verdict == "untried":
        return [unknown(f"nothing was tried on the cards: {first.reason}")]
    outcome = first.outcomes[first.telling_rank]
    evidence += problem_lines((outcome.result or {}).get("problems", []))
    evidence += outcome.tail.splitlines()[-_TAIL_LINES:] if outcome.result is None else []
    if last.verdict != "right":
        row = "all_reduce_on_no_way"
    else:
        row = "all_reduce_without_p2p" if last.way == "rccl_without_p2p" else "all_reduce_over_gloo_only"
    return [from_row(row, evidence=evidence, way=_WAYS[first.way], how=_HOW[first.verdict])]


def grad_sync(request: Mapping[str, Any]) -> list[Finding]:
    """The way that ``--grad_sync auto`` takes on these cards, decided by its own preflight with the same trials.

    ``pairs`` and ``all_reduce`` look longer and say what may mend what they find; this says what a run does meanwhile.
    """
    said = request.get("fault")
    fault = PreflightFault(trial="ddp", kind=said["kind"], where=said["where"]) if said else None
    chosen = try_machine(request["devices"], environ=os.environ, fault=fault, limit_s=request["deadline_s"])
    if not chosen.shown and chosen.way != "one_card":
        return [unknown(chosen.reason, evidence=chosen.evidence)]
    return [from_row(_DECISIONS[chosen.way], evidence=chosen.evidence, reason=chosen.reason)]


def problem_lines(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line each for the first few problems: the case, and its damage where reading it back showed any."""
    lines = []
    for problem in problems[:_SHOWN]:
        damage = problem.get("damage")
        lines.append(f"{problem['case']}: {_damage_words(damage) if damage else 'right when it was read back'}")
    left = len(problems) - _SHOWN
    return [*lines, f"and {left} more"] if left > 0 else lines


def _damage_words(damage: Mapping[str, Any]) -> str:
    """One line about a ``Damage``: how much, where, how aligned, and what is there instead."""
    wrong, first = damage["wrong"], damage["first_offset"]
    kinds = {
        "zeros": "zeros",
        "poison": "poison (never written)",
        "stale": "of an earlier transfer",
        "flips": "differ in one bit",
    }
    shares = [f"{100 * damage[k] / wrong:.0f} % {words}" for k, words in kinds.items() if damage[k] / wrong >= 0.01]
    unit = next((words for size, words in _UNITS if damage["alignment"] >= size), None)
    aligned = "" if unit is None else f" ({'' if first else 'the run is '}a multiple of {unit})"
    return (
        f"{wrong:,} of {damage['nbytes']:,} bytes wrong, the first at offset {first:,}{aligned}, in a run of "
        f"{damage['length']:,}; {', '.join(shares) or 'other bytes'}; found {damage['found']} instead of "
        f"{damage['right']}"
    )


def size_words(nbytes: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    for unit, words in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {words}"
    return f"{nbytes:.0f} bytes"
