"""The preflight of a job with several ranks: one rank of each machine tries its cards and chooses how to average.

It runs before any process group is created, since a hanging RCCL is what it looks for: in child processes that are
killed at deadlines, under 30 seconds in all once the ranks have joined. Tried in turn: gloo, which every way needs;
RCCL as the environment has it; RCCL without peer copies (``NCCL_P2P_DISABLE=1``). The fastest way whose sums were right
is chosen; without any, the run ends. Not covered: RCCL between machines; peer copies of a split (see the doctor).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.machine.child import ENDINGS, Outcome, Task, answer, run_together, step
from hf_rocm_tune.machine.variables import read_spec

# ---- trials --------------------------------------------------------------------------------------------------

Verdict = Literal["right", "wrong", "hung", "died", "untried"]
"""``untried``: a child was still importing torch at the deadline, or ended with an exception that does not come from a
device (a broken installation, no memory): no statement about the cards."""
FAILED: frozenset[Verdict] = frozenset({"wrong", "hung", "died"})
Way = Literal["rccl", "rccl_without_p2p", "gloo"]
"""How ranks sum: over RCCL (or NCCL) as the environment has it, with NCCL_P2P_DISABLE=1, or over gloo."""

DEVICE_ERRORS = ("RuntimeError", "AcceleratorError", "CorruptionError", "Dist")
"""Prefixes of the names of exceptions that a device, its driver or RCCL causes."""
IMPORTING = "importing torch"
"""The step of a child that has not begun to measure."""

_MODULE = "hf_rocm_tune.cards.preflight"


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A trial of a pair or of sums, one outcome per child."""

    outcomes: tuple[Outcome, ...]

    @property
    def _said(self) -> tuple[str, str]:
        """The subject, and what was tried on it."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        statuses = {outcome.status for outcome in self.outcomes}
        if any(outcome.error and not outcome.error.startswith(DEVICE_ERRORS) for outcome in self.outcomes):
            return "untried"
        if statuses & {"died", "garbage"}:
            return "died"
        if "timeout" in statuses:
            importing = any(each.status == "timeout" and each.step == IMPORTING for each in self.outcomes)
            return "untried" if importing else "hung"
        return "wrong" if any((outcome.result or {}).get("wrong") for outcome in self.outcomes) else "right"

    @property
    def telling_rank(self) -> int:
        """The child with the most informative outcome: the first to die, by a signal rather than a lost connection."""

        def rank(child: int) -> tuple[int, bool, float]:
            each = self.outcomes[child]
            if each.status in ("died", "garbage"):
                return 0, bool(each.error), each.seconds
            return 1 if each.status == "timeout" else 2 if (each.result or {}).get("wrong") else 3, False, 0.0

        return min(range(len(self.outcomes)), key=rank)

    @property
    def reason(self) -> str:
        (said, what), telling = self._said, self.outcomes[self.telling_rank]
        who = f"rank {self.telling_rank}" if len(self.outcomes) > 1 else ""
        if telling.result is None:
            return f"{said}: {who or 'the trial'} {telling.how}"
        wrong, cases = telling.result["wrong"], telling.result["cases"]
        if not wrong:
            return f"{said}: {cases} {what} right" + f" on {len(self.outcomes)} ranks" * bool(who)
        first = telling.result["problems"][0]["case"]
        return f"{said}: {f'{who}: ' * bool(who)}{wrong} of {cases} {what} wrong, the first: {first}"

    def told(self) -> str:
        """The outcome, the first wrong bytes if any, and the time of the slowest child, including imports."""
        problems, instead = (self.outcomes[self.telling_rank].result or {}).get("problems"), ""
        if problems and (damage := problems[0].get("damage")):
            instead = (
                f"; {damage['wrong']:,} of {damage['nbytes']:,} bytes ({damage['kind']}) from offset "
                f"{damage['first_offset']:,}: {damage['found']} instead of {damage['right']}"
            )
        return f"{self.reason}{instead} ({max(outcome.seconds for outcome in self.outcomes):.1f} s)"


@dataclass(frozen=True, kw_only=True)
class PairTrial(_Trial):
    """Copies from one card to another, such as ``cuda:0``; the child's outcome."""

    source: str
    destination: str

    @property
    def _said(self) -> tuple[str, str]:
        return f"{self.source} -> {self.destination}", "copies"


@dataclass(frozen=True, kw_only=True)
class ReduceTrial(_Trial):
    way: Way

    @property
    def _said(self) -> tuple[str, str]:
        return f"all-reduce over {self.way}", "sums"


def try_pairs(
    devices: Sequence[Mapping[str, Any]],
    *,
    deadline_s: float,
    largest: int,
    repeats: int = 10,
    environ: Mapping[str, str | None] | None = None,
) -> list[PairTrial]:
    """Copy between every ordered pair of ``device`` and PCI ``address``, each in a new process, in turn."""
    trials = []
    for source, destination in itertools.permutations(devices, 2):
        request = {"source": dict(source), "destination": dict(destination), "largest": largest, "repeats": repeats}
        task = Task(module=_MODULE, arguments=("pair",), request=request, environ=environ or {})
        found = tuple(run_together([task], deadline_s=deadline_s))
        trials.append(PairTrial(source=source["device"], destination=destination["device"], outcomes=found))
    return trials


def try_all_reduce(
    devices: Sequence[Mapping[str, Any]],
    way: Way,
    *,
    deadline_s: float,
    largest: int = (64 << 20),
    repeats: int = 5,
    fault: Mapping[str, Any] | None = None,
) -> ReduceTrial:
    """Sum over one rank per device, each rank in a new process; ``fault``: see `trial_measures.measure_sums`, on its
    ``rank``, by default the last."""
    # One thread per process, as torchrun sets it; RCCL's own warnings, such as those on the IOMMU, are evidence.
    ours = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
    variables = {name: value for name, value in ours.items() if name not in os.environ}
    if way == "rccl_without_p2p":
        variables["NCCL_P2P_DISABLE"] = "1"
    victim = int((fault or {}).get("rank", len(devices) - 1))
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-ranks-", ignore_cleanup_errors=True) as folder:
        shared = {
            "world": len(devices),
            "backend": "gloo" if way == "gloo" else "nccl",
            "store": str(Path(folder) / "store"),
            "timeout_s": 2 * deadline_s,  # the parent kills the children before, and knows their last step
            "largest": largest,
            "repeats": repeats,
        }
        requests = [{**device, **shared, "rank": rank, "fault": None} for rank, device in enumerate(devices)]
        if fault:
            requests[victim]["fault"] = dict(fault)
        tasks = [Task(module=_MODULE, arguments=("rank",), request=each, environ=variables) for each in requests]
        return ReduceTrial(way=way, outcomes=tuple(run_together(tasks, deadline_s=deadline_s)))


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    if sys.argv[1:] not in (["pair"], ["rank"]):
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give pair or rank")
    step(IMPORTING)
    from hf_rocm_tune.cards import trial_measures

    return (trial_measures.measure_pair if sys.argv[1] == "pair" else trial_measures.measure_sums)(request)


# ---- the preflight -------------------------------------------------------------------------------------------

LIMIT_S = 30.0
"""Seconds for all trials of a machine, including killing the children."""
MEET_S = 90.0
"""Seconds for all ranks to join: they start together, but import from cold disks."""
P2P_VARIABLE = "NCCL_P2P_DISABLE"
VARIABLE = "HF_ROCM_TUNE_PREFLIGHT_FAULT"

_SPARE_S = 5.0  # beyond LIMIT_S, for passing on the decision, and for children that the kernel holds
_KILLING_S = 1.5  # for killing a trial at its deadline
_SHORTEST_S = 3.0  # a shorter trial is not begun
_LARGEST = 25 << 20  # bytes of the largest sum: a bucket of DistributedDataParallel
_LARGEST_ON_CPU = (1 << 20) + 4  # bytes; there the patterns take most of the time
_REPEATS = 3

_NOT_CURED = (
    f"{P2P_VARIABLE}=1 does not help against page faults of RCCL in training (ROCm/legacy-rocm-build#6505): if a run "
    "ends with one, give --grad_sync host"
)

GradSync = Literal["ddp", "host"]
"""How gradients are averaged: by the process group, or through the host. The only list of the ways to choose from."""
Asked = Literal["auto", GradSync]
"""The values of ``--grad_sync``: a way, or what works in the preflight."""
SyncWay = Literal["ddp", "ddp_without_p2p", "host", "one_card"]
_NAMES: Mapping[SyncWay, str] = {
    "ddp": "over the process group as it is",
    "ddp_without_p2p": f"over RCCL with {P2P_VARIABLE}=1",
    "host": "through host memory, over gloo",
    "one_card": "not at all: only one card can train",
}
_stores: list[Any] = []  # keeps the store of this job's ranks alive, if this process hosts it

# The kinds of trial_measures, which imports torch.
_ALLOWED = {"trial": ("ddp", "ddp_without_p2p", "host"), "kind": ("wrong", "zeros", "own", "absent", *ENDINGS)}


@dataclass(frozen=True, kw_only=True)
class PreflightFault:
    """An injected fault: ``HF_ROCM_TUNE_PREFLIGHT_FAULT="trial=ddp,kind=hang"`` lets one way's trial fail."""

    trial: str  # ``ddp``, ``ddp_without_p2p`` or ``host``
    kind: str  # ``wrong zeros own absent``, or an ending of the trial's child, see `machine.child`
    where: str = ""  # only cases whose description contains this text (``cold``)
    rank: int | None = None  # which gets it; None: the last

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PreflightFault | None:
        """The fault in the variable; None if it is unset or empty."""
        if not (text := environ.get(VARIABLE, "").strip()):
            return None
        required = dict.fromkeys(("trial", "kind"), "both, for example trial=ddp,kind=hang")
        return read_spec(cls, VARIABLE, text, allowed=_ALLOWED, least={"rank": 0}, required=required)

    def of(self, trial: str) -> dict[str, Any] | None:
        """The fault in the form that the child of a trial expects; None if it is for another trial."""
        if trial != self.trial:
            return None
        # Without ``where`` an ending would come before anything was tried.
        where = self.where or ("summing" if self.kind in ENDINGS else "")
        return {"kind": self.kind, "where": where} | ({} if self.rank is None else {"rank": self.rank})


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The outcome, the same on every rank of a machine."""

    asked: Asked = "auto"  # ``--grad_sync``
    way: SyncWay
    reason: str  # one line
    evidence: Sequence[str] = ()  # one line per trial: what was tried, its outcome, its time
    shown: bool = True  # a trial showed that this way gives right sums
    seconds: float = 0.0  # from when all ranks have joined to the decision
    fault: str = ""  # the injected fault

    @property
    def name(self) -> str:
        """The way in words, to follow "gradients are averaged"."""
        return _NAMES[self.way]

    def to_dict(self) -> dict[str, Any]:
        found = {**vars(self), "seconds": round(self.seconds, 1)}
        return found | {"fault_injection": found.pop("fault") or None}

    def lines(self) -> list[str]:
        """For the terminal: the decision, and all evidence if anything failed."""
        asked = "" if self.asked == "auto" else f" (--grad_sync {self.asked})"
        first = f"preflight: gradients are averaged {self.name}{asked}: {self.reason}"
        fault = [f"a fault is injected into the preflight on request: {self.fault}"] if self.fault else []
        page_faults = [_NOT_CURED] if self.way == "ddp_without_p2p" else []
        evidence = [] if self.way == "ddp" and self.shown else self.evidence
        return [*fault, f"{first} ({self.seconds:.0f} s)", *page_faults, *evidence]


def run(
    *,
    asked: Asked,
    device: Mapping[str, Any],
    environ: Mapping[str, str],
    meet_s: float = MEET_S,
    limit_s: float = LIMIT_S,
) -> Preflight:
    """Run the preflight. Every rank of the job calls it before it joins a process group; it meets the others at the
    address in ``os.environ``. Imports torch."""
    from torch import distributed

    fault = PreflightFault.from_environment(environ)
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    here = int(environ.get("LOCAL_WORLD_SIZE", world))
    first = rank // here * here
    began = time.monotonic()
    ended = f"rank {first} ended while it tried the cards for the preflight, or rank 0 did: start the job again"
    try:
        store = next(distributed.rendezvous("env://", timeout=timedelta(seconds=meet_s)))[0]  # type: ignore[attr-defined]
        _stores.append(store)
        store.set(f"preflight-device-{rank}", json.dumps(dict(device)))
        devices = [json.loads(store.get(f"preflight-device-{each}")) for each in range(first, first + here)]
    except distributed.DistError as error:
        timed_out = time.monotonic() >= began + meet_s or "timed out" in str(error).lower()
        if not timed_out:  # a connection broke: rank 0, which holds the store, had joined
            raise StallError(ended) from error
        raise StallError(
            f"not all of {world} ranks joined the preflight within {meet_s:.0f} s: see what the others printed, and "
            "whether they see a card as this one does; --preflight off starts without the preflight"
        ) from error
    began, name = time.monotonic(), f"preflight-choice-{first}"
    if rank == first:
        try:
            found = vars(try_machine(devices, asked=asked, environ=environ, fault=fault, limit_s=limit_s))
        except TuneError as error:
            found = {"error": str(error)}
        store.set(name, json.dumps(found))
    latest = limit_s + _SPARE_S
    try:
        while not store.check([name]):
            if time.monotonic() > began + latest:
                raise StallError(
                    f"rank {first} tries the cards of this machine and made no decision within {latest:.0f} s: train "
                    "on one card, or start again after a reboot"
                )
            time.sleep(0.05)
        found = json.loads(store.get(name))
    except distributed.DistError as error:
        raise StallError(ended) from error
    if "error" in found:
        raise StallError(found["error"])
    return Preflight(**found | {"seconds": time.monotonic() - began, "fault": environ.get(VARIABLE, "").strip()})


def insist(done: Preflight, *, one_card: str) -> None:
    if done.way == "one_card":
        raise StallError(
            f"the preflight found no way to average gradients over these cards ({done.reason}): train on one card with "
            f"{one_card}; gloo needs this machine's own name to resolve (`getent hosts $(hostname)`); "
            "`hf-rocm-tune doctor` has more details"
        )
    if done.asked == "ddp" and done.way != "ddp":
        fix = f"set {P2P_VARIABLE}=1" if done.way == "ddp_without_p2p" else "give --grad_sync host"
        raise StallError(
            f"--grad_sync ddp failed the preflight, while averaging {done.name} works: leave --grad_sync at "
            f"auto, or {fix} ({done.reason})"
        )


def try_machine(
    devices: Sequence[Mapping[str, Any]],
    *,
    asked: Asked = "auto",
    environ: Mapping[str, str],
    fault: PreflightFault | None = None,
    limit_s: float = LIMIT_S,
) -> Preflight:
    """Try the cards of this machine and choose how to average. Imports no torch."""
    if len(devices) < 2:
        return _unknown(asked, "one rank on this machine: no pair to try")
    on_cards = any(device["device"] != "cpu" for device in devices)
    over: dict[SyncWay, Way] = {"host": "gloo"} if on_cards or asked == "host" else {"ddp": "gloo", "host": "gloo"}
    if on_cards and asked != "host":
        over["ddp"] = "rccl"
        if not environ.get(P2P_VARIABLE, "").strip():  # else the user has decided
            over["ddp_without_p2p"] = "rccl_without_p2p"
    more: dict[str, Any] = {"largest": _LARGEST if on_cards else _LARGEST_ON_CPU, "repeats": _REPEATS}
    ends_at = time.monotonic() + limit_s
    sums: dict[SyncWay, ReduceTrial] = {}
    for left, (way, backend) in zip(range(len(over), 0, -1), over.items(), strict=True):
        deadline_s = (ends_at - time.monotonic()) / left - _KILLING_S  # leaves time for those that may have to follow
        if deadline_s >= _SHORTEST_S:
            injected = fault.of(way) if fault else None
            sums[way] = try_all_reduce(devices, backend, deadline_s=deadline_s, fault=injected, **more)
            if (sums[way].verdict in FAILED) == (way == "host"):
                break  # nothing works without gloo; and what was not shown to fail needs no other way
    return choose(sums, asked)


def choose(sums: Mapping[SyncWay, ReduceTrial], asked: Asked = "auto") -> Preflight:
    """The fastest way that the trials have shown to work."""
    evidence = tuple(trial.told() for trial in sums.values())
    against = [trial.reason for trial in sums.values() if trial.verdict in FAILED]
    untried = [trial.reason for trial in sums.values() if trial.verdict == "untried"]
    if "host" in sums and sums["host"].verdict in FAILED:
        against = [f"gloo, over which averages are checked, does not work: {sums['host'].reason}"]
    else:
        fastest: tuple[SyncWay, ...] = ("ddp", "ddp_without_p2p", "host")
        for way in fastest:
            if way in sums and sums[way].verdict == "right":
                also = [] if way == "ddp" else [*against, *untried][:1]
                return Preflight(asked=asked, way=way, reason="; ".join([sums[way].reason, *also]), evidence=evidence)
    if against:
        return Preflight(asked=asked, way="one_card", reason=against[0], evidence=evidence, shown=False)
    why = [*untried, "there was no time for any"][0]
    return _unknown(asked, f"the trials gave no result for these cards: {why}", evidence)


def _unknown(asked: Asked, reason: str, evidence: tuple[str, ...] = ()) -> Preflight:
    way: SyncWay = "host" if asked == "host" else "ddp"
    return Preflight(asked=asked, way=way, reason=reason, evidence=evidence, shown=False)


if __name__ == "__main__":
    answer(_measure)
