"""The preflight of a job with several ranks: one rank of each machine tries its cards and chooses how to average.

It runs before any process group is created, since a hanging RCCL is what it looks for: in child processes that are
killed at deadlines. Tried in turn: gloo, which every method needs; RCCL as the environment has it; RCCL without peer
copies. The fastest method whose sums were right is chosen; without any, the run ends. Not covered: RCCL between
machines; peer copies of a split (see the doctor).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import StallError, TuneError
from hf_rocm_tune.machine.child import ENDINGS, Outcome, Task, answer, run_together, step
from hf_rocm_tune.machine.variables import read_spec

# ---- trials --------------------------------------------------------------------------------------------------

Verdict = Literal["right", "wrong", "hung", "died", "untried"]
"""``untried``: a child was still importing torch at the deadline, or ended with an exception that does not come from a
device (a broken installation, no memory): no statement about the cards."""
FAILED: frozenset[Verdict] = frozenset({"wrong", "hung", "died"})

DEVICE_ERRORS = ("RuntimeError", "AcceleratorError", "CorruptionError", "Dist")
"""Prefixes of the names of exceptions that a device, its driver or RCCL causes."""
IMPORTING = "importing torch"
"""The step of a child that has not begun to measure."""

_MODULE = "hf_rocm_tune.cards.preflight"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of the copies of a pair or of sums, one outcome per child."""

    subject: str  # ``cuda:0 -> cuda:1``, or over what was summed
    what: str  # ``copies`` or ``sums``
    outcomes: tuple[Outcome, ...]

    @property
    def verdict(self) -> Verdict:
        statuses = {outcome.status for outcome in self.outcomes}
        if any(outcome.error and not outcome.error.startswith(DEVICE_ERRORS) for outcome in self.outcomes):
            return "untried"
        if statuses & {"died", "garbage"}:
            return "died"
        if "timeout" in statuses:
            importing = any(outcome.status == "timeout" and outcome.step == IMPORTING for outcome in self.outcomes)
            return "untried" if importing else "hung"
        if any(_has_wrong(outcome) for outcome in self.outcomes):
            return "wrong"
        return "right"

    @property
    def _decisive(self) -> tuple[int, Outcome]:
        """The child with the most informative outcome: the first to die, by a signal rather than a lost connection."""

        def priority(child: tuple[int, Outcome]) -> tuple[int, bool, float]:
            outcome = child[1]
            if outcome.status in ("died", "garbage"):
                return 0, bool(outcome.error), outcome.seconds
            if outcome.status == "timeout":
                return 1, False, 0.0
            if _has_wrong(outcome):
                return 2, False, 0.0
            return 3, False, 0.0

        return min(enumerate(self.outcomes), key=priority)

    @property
    def reason(self) -> str:
        """The decisive outcome in words."""
        number, outcome = self._decisive
        ranks = len(self.outcomes)
        if outcome.result is None:
            who = f"rank {number}" if ranks > 1 else "the trial"
            return f"{self.subject}: {who} {outcome.how}"
        wrong, cases = outcome.result["wrong"], outcome.result["cases"]
        if not wrong:
            where = f" on {ranks} ranks" if ranks > 1 else ""
            return f"{self.subject}: {cases} {self.what} right{where}"
        first = outcome.result["problems"][0]["case"]
        where = f"rank {number}: " if ranks > 1 else ""
        return f"{self.subject}: {where}{wrong} of {cases} {self.what} wrong, the first: {first}"

    def describe(self) -> str:
        """The outcome, the first wrong bytes if any, and the time of the slowest child, including imports."""
        _, outcome = self._decisive
        problems = (outcome.result or {}).get("problems")
        damage = problems[0].get("damage") if problems else None
        instead = ""
        if damage:
            instead = (
                f"; {damage['wrong']:,} of {damage['nbytes']:,} bytes ({damage['kind']}) from offset "
                f"{damage['first_offset']:,}: {damage['found']} instead of {damage['right']}"
            )
        slowest = max(outcome.seconds for outcome in self.outcomes)
        return f"{self.reason}{instead} ({slowest:.1f} s)"


def _has_wrong(outcome: Outcome) -> bool:
    """Whether a child has measured something wrong."""
    return bool((outcome.result or {}).get("wrong"))


def try_pair(
    source: Mapping[str, Any],
    destination: Mapping[str, Any],
    *,
    deadline_s: float,
    environ: Mapping[str, str | None],
    **sizes: int,
) -> Trial:
    """Copy between two devices, each a ``device`` and a PCI ``address``, in a new process.

    ``sizes``: ``largest`` in bytes, and ``repeats``.
    """
    request = {"source": dict(source), "destination": dict(destination), **sizes}
    outcomes = run_together([Task(module=_MODULE, request=request, environ=environ)], deadline_s=deadline_s)
    return Trial(subject=f"{source['device']} -> {destination['device']}", what="copies", outcomes=tuple(outcomes))


def try_all_reduce(
    devices: Sequence[Mapping[str, Any]], method: SyncMethod, *, deadline_s: float, fault: PreflightFault | None = None
) -> Trial:
    """Sum over one rank per device, each rank in a new process."""
    # One thread per process, as torchrun sets it; RCCL's own warnings, such as those on the IOMMU, are evidence.
    ours = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"}
    variables = {name: value for name, value in ours.items() if name not in os.environ}
    if method == "ddp_without_p2p":
        variables[P2P_VARIABLE] = "1"
    on_cards = any(device["device"] != "cpu" for device in devices)
    backend = "nccl" if on_cards and method != "host" else "gloo"
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-ranks-", ignore_cleanup_errors=True) as folder:
        shared = {
            "world": len(devices),
            "backend": backend,
            "store": str(Path(folder) / "store"),
            "timeout_s": 2 * deadline_s,  # the parent kills the children before, and knows their last step
            "largest": _LARGEST if on_cards else _LARGEST_ON_CPU,
            "repeats": _REPEATS,
        }
        requests = [{**device, **shared, "rank": rank} for rank, device in enumerate(devices)]
        if fault is not None and fault.trial == method:  # an ending comes after something was tried
            victim = -1 if fault.rank is None else fault.rank
            requests[victim]["fault"] = {"kind": fault.kind, "where": "summing"}
        tasks = [Task(module=_MODULE, request=request, environ=variables) for request in requests]
        outcomes = run_together(tasks, deadline_s=deadline_s)
    over = {"gloo": "gloo", "nccl": "RCCL"}[backend]
    if method == "ddp_without_p2p":
        over += " without peer copies"
    return Trial(subject=f"all-reduce over {over}", what="sums", outcomes=tuple(outcomes))


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    step(IMPORTING)
    from hf_rocm_tune.cards import trial_measures

    if "source" in request:
        return trial_measures.measure_pair(request)
    return trial_measures.measure_sums(request)


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
"""How gradients are averaged: by the process group, or through the host. The only list of methods to choose from."""
Asked = Literal["auto", GradSync]
"""The values of ``--grad_sync``: a method, or what works in the preflight."""
SyncMethod = Literal["ddp", "ddp_without_p2p", "host", "one_card"]
_NAMES: Mapping[SyncMethod, str] = {
    "ddp": "over the process group as it is",
    "ddp_without_p2p": f"over RCCL with {P2P_VARIABLE}=1",
    "host": "through host memory, over gloo",
    "one_card": "not at all: only one card can train",
}
_stores: list[Any] = []  # keeps the store of this job's ranks alive, if this process hosts it


@dataclass(frozen=True, kw_only=True)
class PreflightFault:
    """An injected fault: ``HF_ROCM_TUNE_PREFLIGHT_FAULT="trial=ddp,kind=hang"`` lets one method's trial fail."""

    trial: str  # ``ddp``, ``ddp_without_p2p`` or ``host``
    kind: str  # ``wrong``: an element of each sum; or an ending of the trial's child, see `machine.child`
    rank: int | None = None  # which gets it; None: the last

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PreflightFault | None:
        text = environ.get(VARIABLE, "").strip()
        if not text:
            return None
        required = dict.fromkeys(("trial", "kind"), "both, for example trial=ddp,kind=hang")
        allowed = {"trial": ("ddp", "ddp_without_p2p", "host"), "kind": ("wrong", *ENDINGS)}
        return read_spec(cls, VARIABLE, text, allowed=allowed, least={"rank": 0}, required=required)


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The outcome, the same on every rank of a machine."""

    asked: Asked = "auto"  # ``--grad_sync``
    method: SyncMethod
    reason: str  # one line
    evidence: Sequence[str] = ()  # one line per trial: what was tried, its outcome, its time
    shown: bool = True  # a trial showed that this method gives right sums
    seconds: float = 0.0  # from when all ranks have joined to the decision
    fault_injection: str | None = None

    @property
    def name(self) -> str:
        """The method in words, to follow "gradients are averaged"."""
        return _NAMES[self.method]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "seconds": round(self.seconds, 1)}

    def lines(self) -> list[str]:
        lines = []
        if self.fault_injection:
            lines.append(f"a fault is injected into the preflight on request: {self.fault_injection}")
        asked = "" if self.asked == "auto" else f" (--grad_sync {self.asked})"
        what = f"preflight: gradients are averaged {self.name}{asked}: {self.reason}"
        lines.append(f"{what} ({self.seconds:.0f} s)")
        if self.method == "ddp_without_p2p":
            lines.append(_NOT_CURED)
        if self.method != "ddp" or not self.shown:
            lines += self.evidence
        return lines


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
    rank = int(environ["RANK"])
    world = int(environ["WORLD_SIZE"])
    here = int(environ.get("LOCAL_WORLD_SIZE", world))
    first = rank // here * here
    name = f"preflight-choice-{first}"
    latest = limit_s + _SPARE_S
    ends_at = time.monotonic() + meet_s
    late = (
        f"not all of {world} ranks joined the preflight within {meet_s:.0f} s: see what the others printed, and "
        "whether they see a card as this one does; --preflight off starts without the preflight"
    )
    try:
        store = next(distributed.rendezvous("env://", timeout=timedelta(seconds=meet_s)))[0]  # type: ignore[attr-defined]
        _stores.append(store)
        store.set(f"preflight-device-{rank}", json.dumps(dict(device)))
        devices = [json.loads(store.get(f"preflight-device-{number}")) for number in range(first, first + here)]
        began = time.monotonic()
        if rank == first:
            try:
                choice = vars(try_machine(devices, asked=asked, environ=environ, fault=fault, limit_s=limit_s))
            except TuneError as error:
                choice = {"error": str(error)}
            store.set(name, json.dumps(choice))
        ends_at = began + latest
        late = (
            f"rank {first} tries the cards of this machine and made no decision within {latest:.0f} s: train on one "
            "card, or start again after a reboot"
        )
        store.wait([name], timedelta(seconds=latest))
        choice = json.loads(store.get(name))
    except distributed.DistError as error:
        if time.monotonic() >= ends_at or "timed out" in str(error).lower():
            raise StallError(late) from error
        # a connection broke: rank 0, which holds the store, had joined
        raise StallError(
            f"rank {first} ended while it tried the cards for the preflight, or rank 0 did: start the job again"
        ) from error
    if "error" in choice:
        raise StallError(choice["error"])
    choice["seconds"] = time.monotonic() - began
    choice["fault_injection"] = environ.get(VARIABLE, "").strip() or None
    return Preflight(**choice)


def insist(done: Preflight, *, one_card: str) -> None:
    if done.method == "one_card":
        raise StallError(
            f"the preflight found no way to average gradients over these cards ({done.reason}): train on one card with "
            f"{one_card}; gloo needs this machine's own name to resolve (`getent hosts $(hostname)`); "
            "`hf-rocm-tune doctor` has more details"
        )
    if done.asked == "ddp" and done.method != "ddp":
        fix = f"set {P2P_VARIABLE}=1" if done.method == "ddp_without_p2p" else "give --grad_sync host"
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
    methods: list[SyncMethod] = ["host"]
    if asked != "host" and any(device["device"] != "cpu" for device in devices):
        methods.append("ddp")
        if not environ.get(P2P_VARIABLE, "").strip():  # else the user has decided
            methods.append("ddp_without_p2p")
    elif asked != "host":
        methods.insert(0, "ddp")  # over gloo, too
    ends_at = time.monotonic() + limit_s
    sums: dict[SyncMethod, Trial] = {}
    for left, method in zip(range(len(methods), 0, -1), methods, strict=True):
        deadline_s = (ends_at - time.monotonic()) / left - _KILLING_S  # leaves time for those that may have to follow
        if deadline_s >= _SHORTEST_S:
            sums[method] = try_all_reduce(devices, method, deadline_s=deadline_s, fault=fault)
            if (sums[method].verdict in FAILED) == (method == "host"):
                break  # nothing works without gloo; and what was not shown to fail needs no other method
    return choose(sums, asked)


def choose(sums: Mapping[SyncMethod, Trial], asked: Asked = "auto") -> Preflight:
    evidence = tuple(trial.describe() for trial in sums.values())
    against = [trial.reason for trial in sums.values() if trial.verdict in FAILED]
    untried = [trial.reason for trial in sums.values() if trial.verdict == "untried"]
    fastest: tuple[SyncMethod, ...] = ("ddp", "ddp_without_p2p", "host")
    right = [method for method in fastest if method in sums and sums[method].verdict == "right"]
    if "host" in sums and sums["host"].verdict in FAILED:
        against = [f"gloo, over which averages are checked, does not work: {sums['host'].reason}"]
        right = []
    if right:
        method = right[0]
        reason = sums[method].reason
        if method != "ddp":  # and why not a faster one
            reason = "; ".join([reason, *[*against, *untried][:1]])
        return Preflight(asked=asked, method=method, reason=reason, evidence=evidence)
    if against:
        return Preflight(asked=asked, method="one_card", reason=against[0], evidence=evidence, shown=False)
    why = [*untried, "there was no time for any"][0]
    return _unknown(asked, f"the trials gave no result for these cards: {why}", evidence)


def _unknown(asked: Asked, reason: str, evidence: tuple[str, ...] = ()) -> Preflight:
    method: SyncMethod = "host" if asked == "host" else "ddp"
    return Preflight(asked=asked, method=method, reason=reason, evidence=evidence, shown=False)


if __name__ == "__main__":
    answer(_measure)
