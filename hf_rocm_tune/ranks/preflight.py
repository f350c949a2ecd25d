"""The preflight of a job of several ranks: one rank of each machine tries its cards, and the others hear the decision.

It comes before any process group, since RCCL that hangs is what it looks for, and takes under 30 seconds once the ranks
have met: the trials run in children that are killed at deadlines which together stay within that (`LIMIT_S`). A rank
that never comes, and one that is killed or stopped while it tries, end the run with exit code 4 and one line.

From the fastest way to the safest: RCCL (NCCL) as the environment has it; RCCL without copies from card to card
(``NCCL_P2P_DISABLE=1``); through host memory over gloo; one card. A way is taken when its sums were right. RCCL as it
is needs right copies between all pairs of cards as well, because that is what it does; and every way needs gloo, over
which averages are judged while the run goes on (`gradients`). What could not be tried in time counts for nothing.

The ranks meet in a directory (`meeting`), so each machine decides for its own cards. Not covered: RCCL between
machines; peer copies of a model that is split over cards. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.machine.child import ENDINGS
from hf_rocm_tune.machine.variables import read_pairs
from hf_rocm_tune.ranks import meeting
from hf_rocm_tune.ranks.trials import FAILED, PairTrial, ReduceTrial, Way, try_all_reduce, try_at_once

LIMIT_S = 30.0
"""Seconds for all trials of a machine, killing included."""
MEET_S = 90.0
"""Seconds for the ranks to meet: they start together, but import from cold disks."""
P2P_VARIABLE = "NCCL_P2P_DISABLE"
VARIABLE = "HF_ROCM_TUNE_PREFLIGHT_FAULT"

_SPARE_S = 5.0  # beyond LIMIT_S, for the decision to come through, and for children that the kernel holds
_KILLING_S = 1.5  # of each trial that is ended at its deadline
_SHORTEST_S = 7.0  # that a trial is worth having: the imports of a ROCm build, RCCL's start, the sums
_LARGEST = 25 << 20  # bytes of the largest copy and sum: a bucket of DistributedDataParallel
_LARGEST_ON_CPU = (1 << 20) + 4  # bytes; there it is the patterns that take the time
_REPEATS = 3
_POLL_S = 0.05

Asked = Literal["auto", "ddp", "host"]
SyncWay = Literal["ddp", "ddp_without_p2p", "host", "one_card"]
WAYS: tuple[SyncWay, ...] = ("ddp", "ddp_without_p2p", "host", "one_card")
"""From the strongest to the weakest."""
_NAMES: Mapping[SyncWay, str] = {
    "ddp": "over the process group as it is",
    "ddp_without_p2p": f"over RCCL with {P2P_VARIABLE}=1",
    "host": "through host memory, over gloo",
    "one_card": "not at all: only one card can train",
}

# The kinds of transfer.raw_copies and of trial_measures, which import torch.
_COPY_FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable", *ENDINGS)
_SUM_FAULTS = ("wrong", "zeros", "own", "absent", *ENDINGS)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "pairs": _COPY_FAULTS,
    "ddp": _SUM_FAULTS,
    "ddp_without_p2p": _SUM_FAULTS,
    "host": _SUM_FAULTS,
    "ranks": ("absent", "kill", "stop"),
}
_KEYS = ("trial", "kind", "where", "rank")


@dataclass(frozen=True, kw_only=True)
class PreflightFault:
    """A fault on purpose in the preflight of a real run, so that a user can see what it would decide.

    ``HF_ROCM_TUNE_PREFLIGHT_FAULT="trial=ddp,kind=hang"`` harms one kind of trial:

    ==================== =========================================================================================
    trial                kinds
    ==================== =========================================================================================
    ``pairs``            a copy from card to card: ``zeros zero_range flip stale drop unstable``, or an ending
    ``ddp``              the sums over the process group as it is: ``wrong zeros own absent``, or an ending
    ``ddp_without_p2p``  the same with ``NCCL_P2P_DISABLE=1``
    ``host``             the same over gloo
    ``ranks``            the ranks of the run themselves: ``absent``: one never joins; ``kill``, ``stop``: the one that
                         makes the trials of its machine is killed, or stopped
    ==================== =========================================================================================

    Endings of the trial's child: ``hang stop kill crash garbage silent`` (see ``machine.child``). Without cards
    there are no pairs: ``trial=pairs`` then copies from memory to memory through the same code.

    Attributes:
        trial, kind: see above.
        where: only what has these words in it: ``cuda:0 to cuda:1``, ``cold``, ``repeat 1``.
        rank: whom it hits; None: the last rank.

    Raises:
        UsageError: there is no such trial, or it has no such kind.
    """

    trial: str
    kind: str
    where: str = ""
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.trial not in _KINDS:
            raise UsageError(f"{VARIABLE}: trial={self.trial} is not valid; expected one of {' '.join(_KINDS)}")
        if self.kind not in _KINDS[self.trial]:
            kinds = " ".join(_KINDS[self.trial])
            raise UsageError(f"{VARIABLE}: kind={self.kind} is not valid for {self.trial}; expected one of {kinds}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PreflightFault | None:
        """The fault that the variable asks for; None where it is unset or empty.

        Raises:
            UsageError: names what is unknown, missing, given twice or not valid, and what is valid.
        """
        text = environ.get(VARIABLE, "").strip()
        if not text:
            return None
        example = dict.fromkeys(("trial", "kind"), "both, for example trial=ddp,kind=hang")
        values = read_pairs(VARIABLE, text, _KEYS, required=example)
        rank = values.pop("rank", None)
        if rank is not None and not rank.isdecimal():
            raise UsageError(f"{VARIABLE}: rank={rank} is not valid; give the number of a rank")
        return cls(**values, rank=None if rank is None else int(rank))

    def of(self, trial: str) -> dict[str, Any] | None:
        """The fault as the child of a trial takes it; None where it is for another trial."""
        if trial != self.trial:
            return None
        # An ending without words would come before anything was tried.
        first = "copying" if trial == "pairs" else "summing"
        where = self.where or (first if self.kind in ENDINGS else "")
        return {"kind": self.kind, "where": where} | ({} if self.rank is None else {"rank": self.rank})

    def text(self) -> str:
        """As it was asked for."""
        given = {"trial": self.trial, "kind": self.kind, "where": self.where, "rank": self.rank}
        return ",".join(f"{key}={value}" for key, value in given.items() if value not in ("", None))


@dataclass(frozen=True, kw_only=True)
class GradSyncChoice:
    """How gradients are averaged, and why."""

    way: SyncWay
    reason: str  # one line
    evidence: tuple[str, ...] = ()  # one line for each trial: what was tried, what came out, how long it took
    shown: bool = True  # a trial showed that this way gives right sums

    @property
    def name(self) -> str:
        """The way in words, to go on after "gradients are averaged"."""
        return _NAMES[self.way]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"way": self.way, "reason": self.reason, "evidence": list(self.evidence), "shown": self.shown}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What came out, the same on every rank of a machine."""

    asked: Asked  # how the user wants gradients to be averaged
    choice: GradSyncChoice  # how they are
    seconds: float  # from the meeting of the ranks to the decision
    fault: str = ""  # what was harmed on purpose

    def to_dict(self) -> dict[str, Any]:
        """For the report, as plain JSON values."""
        return {
            "asked": self.asked,
            **self.choice.to_dict(),
            "seconds": round(self.seconds, 1),
            "fault_injection": self.fault or None,
        }

    def lines(self) -> list[str]:
        """For the terminal: the decision, and all evidence where anything failed."""
        asked = "" if self.asked == "auto" else f" (--grad_sync {self.asked})"
        first = f"preflight: gradients are averaged {self.choice.name}{asked}: {self.choice.reason}"
        fault = [f"the preflight is harmed on request: {self.fault}"] if self.fault else []
        clean = self.choice.way == "ddp" and self.choice.shown
        return [*fault, f"{first} ({self.seconds:.0f} s)", *([] if clean else self.choice.evidence)]


def run(
    *,
    asked: Asked,
    device: Mapping[str, Any],
    environ: Mapping[str, str],
    place: Path,
    meet_s: float = MEET_S,
    limit_s: float = LIMIT_S,
) -> Preflight:
    """Meet, try, decide. Every rank of the job calls it before it joins a process group.

    Args:
        asked: ``--grad_sync``.
        device: of this rank: ``device`` (``cuda:1``, ``cpu``) and ``address`` (PCI, or None).
        environ: of this rank, as its launcher has filled it.
        place: directory that the ranks of this machine have in common, and no other job; it is made.
        meet_s, limit_s: see `MEET_S` and `LIMIT_S`.

    Raises:
        UsageError: the fault that is asked for does not exist.
        StallError: a rank did not come, or gave no decision; see `insist` for what follows from the decision itself.
    """
    fault = PreflightFault.from_environment(environ)
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    here = int(environ.get("LOCAL_WORLD_SIZE", world))
    harmed = fault if fault is not None and fault.trial == "ranks" else None
    while harmed and harmed.kind == "absent" and rank == (world - 1 if harmed.rank is None else harmed.rank):
        time.sleep(0.2)
    meeting.make_place(place)
    (place / f"left-{rank}").unlink(missing_ok=True)  # of a job that was killed here
    mine = {"rank": rank, "pid": os.getpid(), "born": meeting.born(os.getpid()), "device": dict(device)}
    meeting.write(place / f"rank-{rank}", mine)
    ranks = range(rank // here * here, rank // here * here + here)
    try:
        members = _meet(place, ranks, world, meet_s)
        began = time.monotonic()
        if rank != ranks[0]:
            said = _hear(place, members[0], limit_s + _SPARE_S)
        else:
            if harmed is not None:
                os.kill(os.getpid(), signal.SIGKILL if harmed.kind == "kill" else signal.SIGSTOP)
            devices = [member["device"] for member in members]
            said = _try_and_tell(place, devices, asked=asked, environ=environ, fault=fault, limit_s=limit_s)
    finally:
        _leave(place, rank, ranks)
    if "error" in said:
        raise StallError(said["error"])
    choice = GradSyncChoice(**{**said, "evidence": tuple(said["evidence"])})
    seconds = time.monotonic() - began
    return Preflight(asked=asked, choice=choice, seconds=seconds, fault=fault.text() if fault else "")


def _try_and_tell(place: Path, devices: Sequence[Mapping[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The choice for all ranks of this machine, or the error that kept this one from making it."""
    try:
        said = try_machine(devices, **wanted).to_dict()
    except TuneError as error:
        said = {"error": str(error)}
    meeting.write(place / "choice", {"pid": os.getpid(), "choice": said})
    return said


def _leave(place: Path, rank: int, ranks: range) -> None:
    """This rank has heard all; the last one takes the directory away."""
    with contextlib.suppress(OSError):
        (place / f"left-{rank}").touch()
    files = {other: meeting.read(place / f"rank-{other}") for other in ranks if not (place / f"left-{other}").exists()}
    if not any(said is not None and meeting.is_alive(said["pid"], said["born"]) for said in files.values()):
        shutil.rmtree(place, ignore_errors=True)


def _meet(place: Path, ranks: range, world: int, limit_s: float) -> list[dict[str, Any]]:
    """What every rank of this machine says of itself; a file of a process that has ended does not count."""
    ends_at = time.monotonic() + limit_s
    found: dict[int, dict[str, Any]] = {}
    while missing := [rank for rank in ranks if rank not in found]:
        for rank in missing:
            said = meeting.read(place / f"rank-{rank}")
            if said is not None and meeting.is_alive(said["pid"], said["born"]):
                found[rank] = said
        if time.monotonic() > ends_at:
            raise StallError(
                f"rank {', '.join(map(str, missing))} of {world} did not come to the preflight within {limit_s:.0f} s: "
                "see what it printed, and whether it sees a card as the others do (a rank that computes on the "
                "processor does not come); --preflight off starts without it"
            )
        time.sleep(_POLL_S)
    return [found[rank] for rank in ranks]


def _hear(place: Path, first: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The decision of the rank that tries the cards."""
    who, ends_at = f"rank {first['rank']} (process {first['pid']})", time.monotonic() + limit_s
    try:
        while True:
            alive = meeting.is_alive(first["pid"], first["born"])  # before its file is looked for
            told = meeting.read(place / "choice")
            if told is not None and told["pid"] == first["pid"]:
                return dict(told["choice"])
            if not alive:
                raise StallError(
                    f"{who} ended while it tried the cards for the preflight, and said nothing: it was killed, or the "
                    "system was short of memory (see `dmesg`); start the job again"
                )
            if time.monotonic() > ends_at:
                raise StallError(
                    f"{who} was to try the cards here and gave no decision within {limit_s:.0f} s: it is stopped or "
                    f"stuck in the driver (`cat /proc/{first['pid']}/status`); train on one card, or start again after "
                    "a reboot"
                )
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        # A launcher whose rank has died asks the others to end: what they waited for says why.
        if meeting.is_alive(first["pid"], first["born"]):
            raise
        raise StallError(f"{who} ended while it tried the cards for the preflight; start the job again") from None


def insist(done: Preflight, *, one_card: str) -> None:
    """End the run where it cannot go on as it was asked to.

    Args:
        done: the decision.
        one_card: the command that trains on one card.

    Raises:
        StallError: no way works, or not the one that the user has asked for.
    """
    way, reason = done.choice.way, done.choice.reason
    if way == "one_card":
        raise StallError(
            f"the preflight found no way to average gradients over these cards ({reason}): train on one card with "
            f"{one_card}; gloo needs this machine's own name to resolve (`getent hosts $(hostname)`), and "
            "`hf-rocm-tune doctor` says more"
        )
    if done.asked == "ddp" and way != "ddp":
        fix = (
            f"set {P2P_VARIABLE}=1, or leave --grad_sync at auto, which does"
            if way == "ddp_without_p2p"
            else "leave --grad_sync at auto, or give --grad_sync host"
        )
        raise StallError(
            f"--grad_sync ddp failed the preflight, while averaging {done.choice.name} works: {fix} ({reason})"
        )


def try_machine(
    devices: Sequence[Mapping[str, Any]],
    *,
    asked: Asked = "auto",
    environ: Mapping[str, str],
    fault: PreflightFault | None = None,
    limit_s: float = LIMIT_S,
) -> GradSyncChoice:
    """Try the cards of this machine, in the order in which trials decide, and choose. Imports no torch.

    Args:
        devices: ``device`` and ``address`` of each rank's, in the order of the ranks.
        asked: of ``host`` no more is tried than it needs.
        environ: for the user's own ``NCCL_P2P_DISABLE``, which is kept.
        fault: harms a trial on purpose.
        limit_s: seconds for all of it.
    """
    if len(devices) < 2:
        way: SyncWay = "host" if asked == "host" else "ddp"
        return GradSyncChoice(way=way, reason="one rank on this machine: there is no pair to try", shown=False)
    on_cards = any(device["device"] != "cpu" for device in devices)
    limits: dict[str, Any] = {"largest": _LARGEST if on_cards else _LARGEST_ON_CPU, "repeats": _REPEATS}
    said = environ.get(P2P_VARIABLE, "").strip()
    peers, may_disable = said in ("", "0"), said == "" and on_cards
    ends_at = time.monotonic() + limit_s
    sums: dict[SyncWay, ReduceTrial] = {}

    def harm(trial: str) -> dict[str, Any] | None:
        return None if fault is None else fault.of(trial)

    def left(later: int) -> float:
        """Seconds for a trial, with enough kept for those that may have to follow it."""
        return ends_at - time.monotonic() - _KILLING_S - later * (_SHORTEST_S + _KILLING_S)

    def sum_over(way: SyncWay, later: int = 0) -> None:
        over: dict[str, Way] = {"ddp": "rccl" if on_cards else "gloo", "ddp_without_p2p": "rccl_without_p2p"}
        if (deadline_s := left(later)) >= _SHORTEST_S / 2:
            over_way = over.get(way, "gloo")
            sums[way] = try_all_reduce(devices, over_way, deadline_s=deadline_s, fault=harm(way), **limits)

    if asked == "host":
        sum_over("host")
        return choose((), sums, otherwise="host")
    # At once on cards all but RCCL, which may hold them up when it hangs; without cards everything.
    ways: dict[str, Way] = {"host": "gloo"} if on_cards else {"ddp": "gloo", "host": "gloo"}
    pairs, found = try_at_once(
        devices,
        pairs=on_cards or (fault is not None and fault.trial == "pairs"),
        sums=ways,
        deadline_s=left(later=1 + may_disable if on_cards else 0),
        faults={trial: harm(trial) for trial in ("pairs", *ways)},
        **limits,
    )
    sums.update({way: found[way] for way in WAYS if way in found})
    peers_fail = peers and any(trial.verdict in FAILED for trial in pairs)
    # Beside a card that hangs, gloo may have failed for no fault of its own; alone it has a fair trial.
    again = on_cards and sums["host"].verdict != "right"
    if "ddp" not in sums and not peers_fail:
        sum_over("ddp", later=may_disable + again)
    if may_disable and (peers_fail or ("ddp" in sums and sums["ddp"].verdict in FAILED)):
        sum_over("ddp_without_p2p", later=int(again))
    if again:
        sum_over("host")
    return choose(pairs, sums, peers=peers)


def choose(
    pairs: Sequence[PairTrial],
    sums: Mapping[SyncWay, ReduceTrial],
    *,
    peers: bool = True,
    otherwise: SyncWay = "ddp",
) -> GradSyncChoice:
    """The strongest way that the trials have shown to work.

    Args:
        pairs: copies between cards; none on a machine without.
        sums: all-reduces, by the way that each of them stands for; a way that is missing was not tried.
        peers: RCCL as the environment has it may copy from card to card.
        otherwise: the way, not shown, where nothing has failed and nothing could be tried in time either.
    """
    trials: list[PairTrial | ReduceTrial] = [*pairs, *sums.values()]
    evidence = tuple(trial.told() for trial in trials)
    bad_pairs = [trial for trial in pairs if trial.verdict in FAILED] if peers else []
    # What made way for a weaker one: a failed pair explains a failed all-reduce, so it comes first.
    against = [trial.reason for trial in [*bad_pairs, *(trial for trial in sums.values() if trial.verdict in FAILED)]]
    untried = [trial.reason for trial in trials if trial.verdict == "untried"]
    ruled_out: set[SyncWay] = {"ddp"} if bad_pairs else set()
    if "host" in sums and sums["host"].verdict in FAILED:
        ruled_out = {"ddp", "ddp_without_p2p", "host"}
        against = [f"gloo, over which averages are judged, does not work: {sums['host'].reason}"]
    for way, trial in sorted(sums.items(), key=lambda one: WAYS.index(one[0])):
        if trial.verdict == "right" and way not in ruled_out:
            also = (against or untried)[:1]
            if way == "ddp" and pairs:
                few = sum(pair.verdict == "untried" for pair in pairs)
                all_right = f"all {len(pairs)} pairs copy right"
                also = [f"{few} of {len(pairs)} pairs not tried in time" if few else all_right]
            elif way == "ddp":
                also = []
            return GradSyncChoice(way=way, reason="; ".join([trial.reason, *also]), evidence=evidence)
    if against:
        return GradSyncChoice(way="one_card", reason=against[0], evidence=evidence, shown=False)
    reason = f"the trials say nothing about these cards: {[*untried, 'there was no time for any'][0]}"
    return GradSyncChoice(way=otherwise, reason=reason, evidence=evidence, shown=False)
