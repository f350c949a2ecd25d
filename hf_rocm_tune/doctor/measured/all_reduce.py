"""``all_reduce``: sums over all cards by value (``ranks.trial_measures`` measures, one child a rank).

Where RCCL fails, it is tried with NCCL_P2P_DISABLE=1 and then gloo, to say what works here. Faults: see
``ranks.trial_measures``; they harm the last rank on every way, unless ``where=over nccl`` picks the sums of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.measured.conduct import Ask
from hf_rocm_tune.doctor.measured.words import problem_lines, size_words
from hf_rocm_tune.ranks.trials import ReduceTrial, Way, try_all_reduce

_TAIL_LINES = 4
_WORDS: Mapping[Way, str] = {
    "rccl": "RCCL (backend nccl)",
    "rccl_without_p2p": "RCCL with NCCL_P2P_DISABLE=1",
    "gloo": "gloo",
}
_HOW = {"wrong": "gave wrong sums", "hung": "did not return", "died": "ended a rank"}
_WAYS: tuple[Way, ...] = ("rccl", "rccl_without_p2p", "gloo")


def conduct(ask: Ask, request: Mapping[str, Any]) -> list[Finding]:
    """One finding: right, or what is wrong and which way is right instead."""
    trials: list[ReduceTrial] = []
    on_cards = any(device["device"] != "cpu" for device in request["devices"])
    for way in _WAYS if on_cards else _WAYS[-1:]:
        trials.append(
            try_all_reduce(
                request["devices"],
                way,
                deadline_s=ask.measured.deadline_s,
                largest=request["largest"],
                repeats=request["repeats"],
                fault=request.get("fault"),
            )
        )
        if trials[-1].verdict in ("right", "untried"):
            break
    return [_finding(trials)]


def _finding(trials: list[ReduceTrial]) -> Finding:
    first, last = trials[0], trials[-1]
    evidence = [trial.reason for trial in trials]
    if first.verdict == "right":
        result = first.outcomes[0].result
        if result is not None and result["gb_per_s"]:
            evidence.append(f"{result['gb_per_s']:.2f} GB/s summing {size_words(result['repeated_bytes'])} of bfloat16")
        return from_row("all_reduce", "all_reduce_right", evidence=evidence, way=_WORDS[first.way])
    if first.verdict == "untried":
        return unknown("all_reduce", f"nothing was tried on the cards: {first.reason}")
    outcome = first.outcomes[first.telling_rank]
    evidence += problem_lines((outcome.result or {}).get("problems", []))
    evidence += outcome.tail.splitlines()[-_TAIL_LINES:] if outcome.result is None else []
    values = {"way": _WORDS[first.way], "how": _HOW[first.verdict]}
    if last.verdict != "right":
        row = "all_reduce_on_no_way"
    elif last.way == "rccl_without_p2p":
        row = "all_reduce_without_p2p"
    else:
        row = "all_reduce_over_gloo_only"
    return from_row("all_reduce", row, evidence=evidence, **values)
