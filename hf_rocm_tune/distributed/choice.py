"""How gradients are averaged, decided by what trials have shown: one ladder for the preflight and for the doctor.

From the fastest way to the safest: RCCL (NCCL) as the environment has it; RCCL without copies from card to card
(``NCCL_P2P_DISABLE=1``); through host memory over gloo; one card. A way is taken when its sums were right. RCCL as it
is needs right copies between all pairs of cards as well, because that is what it does; and every way needs gloo, over
which averages are judged while the run goes on (``gradients``).

What could not be tried in time counts for nothing: it neither recommends a way nor rules it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_rocm_tune.distributed.preflight_trials import FAILED, PairTrial, ReduceTrial

SyncWay = Literal["ddp", "ddp_without_p2p", "host", "one_card"]
WAYS: tuple[SyncWay, ...] = ("ddp", "ddp_without_p2p", "host", "one_card")
"""From the strongest to the weakest."""
P2P_VARIABLE = "NCCL_P2P_DISABLE"

_NAMES: Mapping[SyncWay, str] = {
    "ddp": "over the process group as it is",
    "ddp_without_p2p": f"over RCCL with {P2P_VARIABLE}=1",
    "host": "through host memory, over gloo",
    "one_card": "not at all: only one card can train",
}


@dataclass(frozen=True, kw_only=True)
class GradSyncChoice:
    """How gradients are averaged, and why.

    Attributes:
        way: one of `WAYS`.
        reason: one line.
        evidence: one line for each trial: what was tried, what came out, how long it took.
        shown: whether a trial showed that this way gives right sums.
    """

    way: SyncWay
    reason: str
    evidence: tuple[str, ...] = ()
    shown: bool = True

    @property
    def name(self) -> str:
        """The way in words, to go on after "gradients are averaged"."""
        return _NAMES[self.way]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"way": self.way, "reason": self.reason, "evidence": list(self.evidence), "shown": self.shown}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> GradSyncChoice:
        """What `to_dict` gave."""
        return cls(**{**said, "evidence": tuple(said["evidence"])})


def choose(
    pairs: Sequence[PairTrial],
    sums: Mapping[SyncWay, ReduceTrial],
    *,
    peers: bool = True,
    otherwise: SyncWay = "ddp",
) -> GradSyncChoice:
    """The first way of the ladder that the trials have shown to work.

    Args:
        pairs: copies between cards; none on a machine without.
        sums: all-reduces, by the way that each of them stands for; a way that is missing was not tried.
        peers: RCCL as the environment has it may copy from card to card.
        otherwise: the way, not shown, where nothing has failed and nothing could be tried in time either.
    """
    trials: list[PairTrial | ReduceTrial] = [*pairs, *sums.values()]
    evidence = tuple(told(trial) for trial in trials)
    bad_pairs = [trial for trial in pairs if trial.verdict in FAILED] if peers else []
    bad_sums = [trial for trial in sums.values() if trial.verdict in FAILED]
    # What made way for a weaker one: a failed pair explains a failed all-reduce, so it comes first.
    against = [trial.reason for trial in bad_pairs] + [trial.reason for trial in bad_sums]
    untried = [trial.reason for trial in trials if trial.verdict == "untried"]
    ruled_out: set[SyncWay] = {"ddp"} if bad_pairs else set()
    if "host" in sums and sums["host"].verdict in FAILED:
        ruled_out = {"ddp", "ddp_without_p2p", "host"}
        against = [f"gloo, over which averages are judged, does not work: {sums['host'].reason}"]
    for way, trial in sorted(sums.items(), key=lambda one: WAYS.index(one[0])):
        if trial.verdict == "right" and way not in ruled_out:
            reason = "; ".join([trial.reason, *(against or untried)[:1]]) if way != "ddp" else _all_right(pairs, trial)
            return GradSyncChoice(way=way, reason=reason, evidence=evidence)
    if against:
        return GradSyncChoice(way="one_card", reason=against[0], evidence=evidence, shown=False)
    reason = f"the trials say nothing about these cards: {[*untried, 'there was no time for any'][0]}"
    return GradSyncChoice(way=otherwise, reason=reason, evidence=evidence, shown=False)


def weakest(choices: Mapping[str, GradSyncChoice]) -> GradSyncChoice:
    """What counts for all machines of a job: the weakest of their choices.

    Args:
        choices: of each machine, by a name for it; not empty.
    """
    if len(choices) == 1:
        return next(iter(choices.values()))
    machine, least = max(choices.items(), key=lambda one: (WAYS.index(one[1].way), not one[1].shown))
    return GradSyncChoice(
        way=least.way,
        reason=f"{machine}: {least.reason}",
        evidence=tuple(f"{name}: {line}" for name, choice in choices.items() for line in choice.evidence),
        shown=all(choice.shown for choice in choices.values()),
    )


def told(trial: PairTrial | ReduceTrial) -> str:
    """A trial in one line: what came out, what stood there instead, and how long it took."""
    problem = trial.problem
    damage = (problem or {}).get("damage")
    instead = ""
    if damage:
        instead = (
            f"; {damage['wrong']:,} of {damage['nbytes']:,} bytes ({damage['kind']}) from offset "
            f"{damage['first_offset']:,}: {damage['found']} instead of {damage['right']}"
        )
    return f"{trial.reason}{instead} ({trial.seconds:.1f} s)"


def _all_right(pairs: Sequence[PairTrial], trial: ReduceTrial) -> str:
    untried = sum(pair.verdict == "untried" for pair in pairs)
    if not pairs:
        return trial.reason
    copies = f"{untried} of {len(pairs)} pairs not tried in time" if untried else f"all {len(pairs)} pairs copy right"
    return f"{trial.reason}; {copies}"
