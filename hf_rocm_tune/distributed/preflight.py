"""The preflight of a job of several ranks: one rank of each machine tries its cards, and all ranks hear the decision.

It comes before any process group, since RCCL that hangs is what it looks for, and takes under 30 seconds once the ranks
have met: the trials run in children that are killed at deadlines which together stay within that (`LIMIT_S`), and the
waiting of the other ranks has limits of its own. A rank that never comes, a rank that is killed or stopped while it
tries, and a store that goes away end the run with exit code 4 and one line.

Each machine decides for its own cards, and the weakest decision counts for all. Not covered: RCCL between machines,
which is not tried; peer copies of a model that is split over cards, for which ``distributed.choice`` is not asked.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_rocm_tune.distributed.choice import P2P_VARIABLE, WAYS, GradSyncChoice, SyncWay, choose, weakest
from hf_rocm_tune.distributed.preflight_fault import PreflightFault
from hf_rocm_tune.distributed.preflight_meeting import Meeting, boot_of_this_machine, lives
from hf_rocm_tune.distributed.preflight_trials import (
    FAILED,
    PairTrial,
    ReduceTrial,
    Way,
    try_all_reduce,
    try_at_once,
)
from hf_rocm_tune.errors import StallError, TuneError

LIMIT_S = 30.0
"""Seconds for all trials of a machine, killing included."""
MEET_S = 90.0
"""Seconds for the ranks to meet: they start together, but import from cold disks."""

_SPARE_S = 5.0  # beyond LIMIT_S, for the decision to come through, and for children that the kernel holds
_KILLING_S = 1.5  # of each trial that is ended at its deadline
_SHORTEST_S = 7.0  # that a trial is worth having: the imports of a ROCm build, RCCL's start, the sums
_LARGEST = 25 << 20  # bytes of the largest copy and sum: a bucket of DistributedDataParallel
_LARGEST_ON_CPU = (1 << 20) + 4  # bytes; there it is the patterns that take the time
_REPEATS = 3

Asked = Literal["auto", "ddp", "host"]


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What came out, the same on every rank.

    Attributes:
        asked: how the user wants gradients to be averaged.
        choice: how they are.
        machines: of each machine, by its name.
        seconds: from the meeting of the ranks to the decision.
        fault: what was harmed on purpose; empty without.
    """

    asked: Asked
    choice: GradSyncChoice
    machines: Mapping[str, GradSyncChoice]
    seconds: float
    fault: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the report, as plain JSON values."""
        return {
            "asked": self.asked,
            **self.choice.to_dict(),
            "machines": {name: choice.way for name, choice in self.machines.items()},
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
    meet_s: float = MEET_S,
    limit_s: float = LIMIT_S,
) -> tuple[Preflight, Meeting]:
    """Meet, try, decide. Collective: every rank of the job calls it before it joins a process group.

    Args:
        asked: ``--grad_sync``.
        device: of this rank: ``device`` (``cuda:1``, ``cpu``) and ``address`` (PCI, or None).
        environ: of this rank, as its launcher has filled it.
        meet_s, limit_s: see `MEET_S` and `LIMIT_S`.

    Returns:
        The decision, and what has to be kept until the process group is up.

    Raises:
        UsageError: the fault that is asked for does not exist.
        StallError: a rank did not come, or gave no decision; see `insist` for what follows from the decision itself.
    """
    fault = PreflightFault.from_environment(environ)
    meeting = Meeting(environ, limit_s=meet_s)
    ranks = fault if fault is not None and fault.trial == "ranks" else None
    if ranks is not None and ranks.kind == "absent":
        _stay_away(ranks, meeting)
    members = _meet(meeting, device, environ, meet_s)
    began = time.monotonic()
    first = {machine: min(who) for machine, who in _by_machine(members).items()}
    mine = members[meeting.rank]["machine"]
    if first[mine] == meeting.rank:
        if ranks is not None:
            os.kill(os.getpid(), signal.SIGKILL if ranks.kind == "kill" else signal.SIGSTOP)
        devices = [members[rank]["device"] for rank in _by_machine(members)[mine]]
        meeting.tell(f"choice/{mine}", _try_and_tell(devices, asked, environ, fault, limit_s))
    said = meeting.hear(
        [f"choice/{machine}" for machine in first],
        limit_s=limit_s + _SPARE_S,
        missing=lambda keys: _no_decision(keys, first, members, limit_s + _SPARE_S),
        gone=lambda: _ended(first[mine], members, mine, meeting),
    )
    meeting.part(limit_s=_SPARE_S)
    for one in said:
        if "error" in one:
            raise StallError(one["error"])
    names = {machine: members[rank]["host"] for machine, rank in first.items()}
    single = len(set(names.values())) == len(names)
    machines = {
        names[machine] if single else f"{names[machine]} (from rank {first[machine]})": GradSyncChoice.from_dict(one)
        for machine, one in zip(first, said, strict=True)
    }
    done = Preflight(
        asked=asked,
        choice=weakest(machines),
        machines=machines,
        seconds=time.monotonic() - began,
        fault=fault.text() if fault else "",
    )
    return done, meeting


def try_machine(
    devices: Sequence[Mapping[str, Any]],
    *,
    asked: Asked = "auto",
    environ: Mapping[str, str],
    fault: PreflightFault | None = None,
    limit_s: float = LIMIT_S,
) -> GradSyncChoice:
    """Try the cards of this machine, and decide. Imports no torch.

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
    return _Ladder(devices, environ, fault, limit_s).climb(asked)


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
        cure = (
            f"set {P2P_VARIABLE}=1, or leave --grad_sync at auto, which does"
            if way == "ddp_without_p2p"
            else "leave --grad_sync at auto, or give --grad_sync host"
        )
        raise StallError(
            f"--grad_sync ddp failed the preflight, while averaging {done.choice.name} works: {cure} ({reason})"
        )


class _Ladder:
    """The trials of one machine, in the order in which they decide, within one limit."""

    def __init__(
        self,
        devices: Sequence[Mapping[str, Any]],
        environ: Mapping[str, str],
        fault: PreflightFault | None,
        limit_s: float,
    ) -> None:
        self._devices, self._fault = devices, fault
        self._on_cards = any(device["device"] != "cpu" for device in devices)
        self._largest = _LARGEST if self._on_cards else _LARGEST_ON_CPU
        said = environ.get(P2P_VARIABLE, "").strip()
        self._peers = said in ("", "0")
        self._may_disable_peers = said == "" and self._on_cards
        self._ends_at = time.monotonic() + limit_s
        self._pairs: list[PairTrial] = []
        self._sums: dict[SyncWay, ReduceTrial] = {}

    def climb(self, asked: Asked) -> GradSyncChoice:
        """Try until a way is shown to work."""
        if asked == "host":
            self._sum("host")
            return choose((), self._sums, otherwise="host")
        self._try_at_once()
        peers_fail = self._peers and any(trial.verdict in FAILED for trial in self._pairs)
        # Beside a card that hangs, gloo may have failed for no fault of its own; alone it has a fair trial.
        again = self._on_cards and self._sums["host"].verdict != "right"
        if "ddp" not in self._sums and not peers_fail:
            self._sum("ddp", later=self._may_disable_peers + again)
        if self._may_disable_peers and (peers_fail or self._failed("ddp")):
            self._sum("ddp_without_p2p", later=int(again))
        if again:
            self._sum("host")
        return choose(self._pairs, self._sums, peers=self._peers)

    def _try_at_once(self) -> None:
        """On cards all but RCCL, which may hold them up when it hangs; without cards everything."""
        ways: dict[str, Way] = {"host": "gloo"} if self._on_cards else {"ddp": "gloo", "host": "gloo"}
        self._pairs, sums = try_at_once(
            self._devices,
            pairs=self._on_cards or (self._fault is not None and self._fault.trial == "pairs"),
            sums=ways,
            deadline_s=self._left(later=1 + self._may_disable_peers if self._on_cards else 0),
            largest=self._largest,
            repeats=_REPEATS,
            faults={trial: self._of(trial) for trial in ("pairs", *ways)},
        )
        self._sums.update({way: sums[way] for way in WAYS if way in sums})

    def _sum(self, way: SyncWay, *, later: int = 0) -> None:
        deadline_s = self._left(later=later)
        if deadline_s < _SHORTEST_S / 2:
            return
        over = {"ddp": "rccl" if self._on_cards else "gloo", "ddp_without_p2p": "rccl_without_p2p", "host": "gloo"}
        self._sums[way] = try_all_reduce(
            self._devices,
            over[way],  # type: ignore[arg-type]  # a dict's values are plain text to mypy
            deadline_s=deadline_s,
            largest=self._largest,
            repeats=_REPEATS,
            fault=self._of(way),
        )

    def _left(self, *, later: int) -> float:
        """Seconds for a trial, with enough kept for those that may have to follow it."""
        return self._ends_at - time.monotonic() - _KILLING_S - later * (_SHORTEST_S + _KILLING_S)

    def _failed(self, way: SyncWay) -> bool:
        return way in self._sums and self._sums[way].verdict in FAILED

    def _of(self, trial: str) -> dict[str, Any] | None:
        return None if self._fault is None else self._fault.of(trial)


def _meet(
    meeting: Meeting, device: Mapping[str, Any], environ: Mapping[str, str], limit_s: float
) -> dict[int, dict[str, Any]]:
    """What every rank says of itself."""
    # The agent of a launcher is a machine of its own, even where two of them share one.
    machine = f"{boot_of_this_machine() or socket.gethostname()}/{environ.get('GROUP_RANK', '0')}"
    mine = {"machine": machine, "host": socket.gethostname(), "pid": os.getpid(), "device": dict(device)}
    meeting.tell(f"rank/{meeting.rank}", mine)
    everyone = range(meeting.world)
    said = meeting.hear(
        [f"rank/{rank}" for rank in everyone],
        limit_s=limit_s,
        missing=lambda keys: (
            f"rank {', '.join(key.partition('/')[2] for key in keys)} of {meeting.world} did not come to the preflight "
            f"within {limit_s:.0f} s: see what it printed, and whether it sees a card as the others do (a rank that "
            "computes on the processor does not come); --preflight off starts without it"
        ),
        gone=lambda: "",
    )
    return dict(zip(everyone, said, strict=True))


def _by_machine(members: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each machine."""
    found: dict[str, list[int]] = {}
    for rank, member in members.items():
        found.setdefault(member["machine"], []).append(rank)
    return found


def _try_and_tell(
    devices: Sequence[Mapping[str, Any]],
    asked: Asked,
    environ: Mapping[str, str],
    fault: PreflightFault | None,
    limit_s: float,
) -> dict[str, Any]:
    """The choice for the other ranks, or the error that kept this one from making it."""
    try:
        return try_machine(devices, asked=asked, environ=environ, fault=fault, limit_s=limit_s).to_dict()
    except TuneError as error:
        return {"error": str(error)}


def _no_decision(
    keys: Sequence[str], first: Mapping[str, int], members: Mapping[int, Mapping[str, Any]], limit_s: float
) -> str:
    who = [first[key.removeprefix("choice/")] for key in keys]
    named = ", ".join(f"rank {rank} on {members[rank]['host']} (process {members[rank]['pid']})" for rank in who)
    return (
        f"{named} was to try the cards there and gave no decision within {limit_s:.0f} s: it is stopped or stuck in "
        f"the driver (`cat /proc/{members[who[0]]['pid']}/status`); train on one card, or start again after a reboot"
    )


def _ended(rank: int, members: Mapping[int, Mapping[str, Any]], mine: str, meeting: Meeting) -> str:
    """Why it is no use to wait for the rank that tries this machine's cards; empty as long as it lives."""
    if rank == meeting.rank or members[rank]["machine"] != mine or lives(members[rank]["pid"]):
        return ""
    return (
        f"rank {rank} (process {members[rank]['pid']}) ended while it tried the cards for the preflight, and said "
        "nothing: it was killed, or the system was short of memory (see `dmesg`); start the job again"
    )


def _stay_away(fault: PreflightFault, meeting: Meeting) -> None:
    victim = meeting.world - 1 if fault.rank is None else fault.rank
    while meeting.rank == victim:
        time.sleep(0.2)
