"""The preflight of a job with several ranks: one rank of each machine tries its cards and chooses how to average.

It runs before any process group is created, since a hanging RCCL is what it looks for, and takes under 30 seconds once
all ranks have joined: the trials run in child processes that are killed at deadlines within that time (`LIMIT_S`). A
rank that never joins, or that is killed or stopped during the trials, ends the run with exit code 4 and one line.

From the fastest way to the safest: RCCL (NCCL) as the environment has it; RCCL without peer copies
(``NCCL_P2P_DISABLE=1``); through host memory over gloo; one card. A way is chosen if its sums were right. RCCL as it is
also needs right copies between all pairs of cards, because it uses them; and every way needs gloo, over which averages
are checked during the run (`gradients`). Trials that could not run in time are ignored.

The ranks communicate through a directory, so each machine decides for its own cards. Not covered: RCCL between
machines; peer copies of a model that is split over cards. Imports no torch.

Each trial runs in child processes, ``python -m hf_rocm_tune.cards.preflight pair|rank`` with the request on stdin,
which run `trial_measures` and are killed at a deadline. The doctor uses them too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.cards.watchdog import is_alive, make_private
from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.machine.child import ENDINGS, Outcome, Task, answer, run_groups, run_together, step
from hf_rocm_tune.machine.process import start_ticks
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
_Environ = Mapping[str, str | None]


class _Trial(ABC):
    """Common parts of trials of pairs and sums; ``telling``: the most informative of the children's outcomes."""

    outcomes: tuple[Outcome, ...]

    @property
    def telling(self) -> Outcome:
        return self.outcomes[0]

    @property
    def verdict(self) -> Verdict:
        statuses = {outcome.status for outcome in self.outcomes}
        if any(outcome.error and not outcome.error.startswith(DEVICE_ERRORS) for outcome in self.outcomes):
            return "untried"
        if statuses & {"died", "garbage"}:
            return "died"
        late = [outcome for outcome in self.outcomes if outcome.status == "timeout"]
        if late:
            return "untried" if any(outcome.step == IMPORTING for outcome in late) else "hung"
        wrong = any(outcome.result["wrong"] for outcome in self.outcomes if outcome.result)
        return "wrong" if wrong else "right"

    @property
    def seconds(self) -> float:
        """Time of the slowest child, including imports."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def problem(self) -> dict[str, Any] | None:
        """The first wrong copy or sum, see `trial_measures`."""
        problems = (self.telling.result or {}).get("problems")
        return problems[0] if problems else None

    @property
    @abstractmethod
    def reason(self) -> str:
        """The outcome in one line."""

    def told(self) -> str:
        """The outcome, the wrong bytes if any, and the time."""
        damage = (self.problem or {}).get("damage")
        instead = ""
        if damage:
            instead = (
                f"; {damage['wrong']:,} of {damage['nbytes']:,} bytes ({damage['kind']}) from offset "
                f"{damage['first_offset']:,}: {damage['found']} instead of {damage['right']}"
            )
        return f"{self.reason}{instead} ({self.seconds:.1f} s)"


@dataclass(frozen=True, kw_only=True)
class PairTrial(_Trial):
    """Copies from one card to another: ``source`` and ``destination``, such as ``cuda:0``; the child's outcome."""

    source: str
    destination: str
    outcome: Outcome

    @property
    def outcomes(self) -> tuple[Outcome, ...]:  # type: ignore[override]
        return (self.outcome,)

    @property
    def reason(self) -> str:
        said, result = f"copies {self.source} -> {self.destination}:", self.outcome.result
        if result is None:
            return f"{said} the trial {self.outcome.how}"
        if not result["wrong"]:
            return f"{said} {result['cases']} right"
        return f"{said} {result['wrong']} of {result['cases']} wrong, the first {result['problems'][0]['case']}"


@dataclass(frozen=True, kw_only=True)
class ReduceTrial(_Trial):
    """An all-reduce over all ranks: its way, and the outcomes of the ranks in order."""

    way: Way
    outcomes: tuple[Outcome, ...]

    @property
    def telling(self) -> Outcome:
        return self.outcomes[self.telling_rank]

    @property
    def reason(self) -> str:
        """If a rank died, the outcome of that rank, not of those that waited for it."""
        said = f"all-reduce over {self.way}:"
        if "timeout" in {outcome.status for outcome in self.outcomes} and self.verdict != "died":
            return f"{said} {'; '.join(f'rank {rank} {outcome.how}' for rank, outcome in enumerate(self.outcomes))}"
        rank, result = self.telling_rank, self.telling.result
        if result is None:
            return f"{said} rank {rank} {self.telling.how}"
        if not result["wrong"]:
            return f"{said} {result['cases']} sums right on {len(self.outcomes)} ranks"
        first = result["problems"][0]["case"]
        return f"{said} rank {rank} got {result['wrong']} of {result['cases']} sums wrong, the first: {first}"

    @property
    def telling_rank(self) -> int:
        """The rank with the most informative outcome: the first to die, by a signal rather than a lost connection."""
        ranks = range(len(self.outcomes))
        dead = [rank for rank in ranks if self.outcomes[rank].status in ("died", "garbage")]
        if dead:
            return min(dead, key=lambda rank: (bool(self.outcomes[rank].error), self.outcomes[rank].seconds))
        late = [rank for rank in ranks if self.outcomes[rank].status == "timeout"]
        wrong = [rank for rank in ranks if (self.outcomes[rank].result or {}).get("wrong")]
        return (late or wrong or [0])[0]


def try_pairs(
    devices: Sequence[Mapping[str, Any]],
    *,
    deadline_s: float,
    largest: int,
    repeats: int = 10,
    environ: _Environ | None = None,
    fault: Mapping[str, str] | None = None,
) -> list[PairTrial]:
    """Copy between every ordered pair, each in a new process, one after another.

    Args:
        devices: ``device`` (``cuda:0``; ``cpu`` in tests) and ``address`` (PCI, or None) of each.
        deadline_s: seconds for each pair, including imports.
        largest: bytes of the largest copy.
        repeats: number of copies of 1 MiB.
        environ: additional environment variables of the children.
        fault: see `trial_measures.measure_pair`.
    """
    trials = []
    for source, destination in itertools.permutations(devices, 2):
        task = _pair_task(source, destination, {"largest": largest, "repeats": repeats}, environ, fault)
        outcome = run_together([task], deadline_s=deadline_s)[0]
        trials.append(PairTrial(source=source["device"], destination=destination["device"], outcome=outcome))
    return trials


def try_at_once(
    devices: Sequence[Mapping[str, Any]],
    *,
    pairs: bool,
    sums: Mapping[str, Way],
    deadline_s: float,
    largest: int,
    repeats: int,
    faults: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> tuple[list[PairTrial], dict[str, ReduceTrial]]:
    """Copy between every ordered pair and sum over all ranks, all at the same time.

    Successful trials do not disturb each other. A hanging trial may block others on its card, so a trial that fails
    beside a failed pair should be repeated alone.

    Returns:
        The trials of the pairs, and those of the sums by name.
    """
    injected = faults or {}
    couples = list(itertools.permutations(devices, 2)) if pairs else []
    common = {"largest": largest, "repeats": repeats}
    groups = [[_pair_task(*couple, common, _threads(), injected.get("pairs"))] for couple in couples]
    with contextlib.ExitStack() as stack:
        for name, way in sums.items():
            groups.append(stack.enter_context(_rank_tasks(devices, way, deadline_s, common, None, injected.get(name))))
        outcomes = run_groups(groups, deadline_s=deadline_s)
    copied, summed = outcomes[: len(couples)], outcomes[len(couples) :]
    trials = [
        PairTrial(source=source["device"], destination=destination["device"], outcome=outcome)
        for (source, destination), [outcome] in zip(couples, copied, strict=True)
    ]
    found = zip(sums.items(), summed, strict=True)
    return trials, {name: ReduceTrial(way=way, outcomes=tuple(outcome)) for (name, way), outcome in found}


def try_all_reduce(
    devices: Sequence[Mapping[str, Any]],
    way: Way,
    *,
    deadline_s: float,
    largest: int = (64 << 20),
    repeats: int = 5,
    environ: _Environ | None = None,
    fault: Mapping[str, Any] | None = None,
) -> ReduceTrial:
    """Sum over one rank per device, each rank in a new process.

    Args:
        devices: see `try_pairs`. On the CPU the only way is gloo.
        way: see `Way`.
        deadline_s: seconds for the trial, including imports.
        largest: bytes of the largest sum.
        repeats: number of sums of 25 MiB.
        environ: additional environment variables of the children.
        fault: see `trial_measures.measure_sums`; ``rank``: the rank that gets it, by default the last.
    """
    common = {"largest": largest, "repeats": repeats}
    with _rank_tasks(devices, way, deadline_s, common, environ, fault) as tasks:
        return ReduceTrial(way=way, outcomes=tuple(run_together(tasks, deadline_s=deadline_s)))


def _pair_task(
    source: Mapping[str, Any],
    destination: Mapping[str, Any],
    common: Mapping[str, int],
    environ: _Environ | None,
    fault: Mapping[str, Any] | None,
) -> Task:
    request = {"source": dict(source), "destination": dict(destination), **common, "fault": dict(fault or {}) or None}
    return Task(module=_MODULE, arguments=("pair",), request=request, environ=environ or {})


@contextlib.contextmanager
def _rank_tasks(
    devices: Sequence[Mapping[str, Any]],
    way: Way,
    deadline_s: float,
    common: Mapping[str, int],
    environ: _Environ | None,
    fault: Mapping[str, Any] | None,
) -> Iterator[list[Task]]:
    """The tasks of all ranks; the directory of their store exists within the block."""
    variables = _threads()
    if "NCCL_DEBUG" not in os.environ:
        variables["NCCL_DEBUG"] = "WARN"  # RCCL's own warnings, such as those on the IOMMU, are evidence
    if way == "rccl_without_p2p":
        variables["NCCL_P2P_DISABLE"] = "1"
    victim = int((fault or {}).get("rank", len(devices) - 1))
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-ranks-", ignore_cleanup_errors=True) as folder:
        shared = {
            "world": len(devices),
            "backend": "gloo" if way == "gloo" else "nccl",
            "store": str(Path(folder) / "store"),
            # Longer than the deadline: the children are killed by the parent, which then knows their last step.
            "timeout_s": 2 * deadline_s,
            **common,
        }
        yield [
            Task(
                module=_MODULE,
                arguments=("rank",),
                request={**device, **shared, "rank": rank, "fault": dict(fault) if fault and rank == victim else None},
                environ={**variables, **(environ or {})},
            )
            for rank, device in enumerate(devices)
        ]


def _threads() -> dict[str, str | None]:
    """One thread per process, as torchrun sets it, unless the user has set OMP_NUM_THREADS."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    """Runs in the child."""
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
_SHORTEST_S = 7.0  # least useful time of a trial: imports of a ROCm build, RCCL's start, the sums
_LARGEST = 25 << 20  # bytes of the largest copy and sum: a bucket of DistributedDataParallel
_LARGEST_ON_CPU = (1 << 20) + 4  # bytes; there the patterns take most of the time
_REPEATS = 3
_POLL_S = 0.05

_NOT_CURED = (
    f"{P2P_VARIABLE}=1 does not help against page faults of RCCL in training (ROCm/legacy-rocm-build#6505): if a run "
    "ends with one, give --grad_sync host"
)

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

# The kinds of transfer.damage and of trial_measures, which import torch.
_COPY_FAULTS = ("zeros", "zero_range", "flip", "stale", "drop", "unstable", *ENDINGS)
_SUM_FAULTS = ("wrong", "zeros", "own", "absent", *ENDINGS)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "pairs": _COPY_FAULTS,
    "ddp": _SUM_FAULTS,
    "ddp_without_p2p": _SUM_FAULTS,
    "host": _SUM_FAULTS,
    "ranks": ("absent", "kill", "stop"),
}


@dataclass(frozen=True, kw_only=True)
class PreflightFault:
    """An injected fault in the preflight of a real run, to see what it would decide.

    ``HF_ROCM_TUNE_PREFLIGHT_FAULT="trial=ddp,kind=hang"`` lets one kind of trial fail:

    ==================== =========================================================================================
    trial                kinds
    ==================== =========================================================================================
    ``pairs``            a copy from card to card: ``zeros zero_range flip stale drop unstable``, or an ending
    ``ddp``              the sums over the process group as it is: ``wrong zeros own absent``, or an ending
    ``ddp_without_p2p``  the same with ``NCCL_P2P_DISABLE=1``
    ``host``             the same over gloo
    ``ranks``            the ranks of the run themselves: ``absent``: one never joins; ``kill``, ``stop``: the one that
                         runs the trials of its machine is killed, or stopped
    ==================== =========================================================================================

    Endings of the trial's child: ``hang stop kill crash garbage silent`` (see ``machine.child``). Without cards
    there are no pairs: ``trial=pairs`` then copies within host memory through the same code.

    Attributes:
        trial, kind: see above.
        where: only cases whose description contains this text: ``cuda:0 to cuda:1``, ``cold``, ``repeat 1``.
        rank: the rank that gets the fault; None: the last.
    """

    trial: str
    kind: str
    where: str = ""
    rank: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PreflightFault | None:
        """The fault in the variable; None if it is unset or empty."""
        if not (text := environ.get(VARIABLE, "").strip()):
            return None
        required = dict.fromkeys(("trial", "kind"), "both, for example trial=ddp,kind=hang")
        fault = read_spec(cls, VARIABLE, text, allowed={"trial": tuple(_KINDS)}, least={"rank": 0}, required=required)
        if fault.kind not in _KINDS[fault.trial]:
            valid = " ".join(_KINDS[fault.trial])
            raise UsageError(f"{VARIABLE}: kind={fault.kind} is not valid for {fault.trial}; expected one of {valid}")
        return fault

    def of(self, trial: str) -> dict[str, Any] | None:
        """The fault in the form that the child of a trial expects; None if it is for another trial."""
        if trial != self.trial:
            return None
        # Without ``where`` an ending would come before anything was tried.
        first = "copying" if trial == "pairs" else "summing"
        where = self.where or (first if self.kind in ENDINGS else "")
        return {"kind": self.kind, "where": where} | ({} if self.rank is None else {"rank": self.rank})


@dataclass(frozen=True, kw_only=True)
class GradSyncChoice:
    """How gradients are averaged, and why."""

    way: SyncWay
    reason: str  # one line
    evidence: tuple[str, ...] = ()  # one line per trial: what was tried, its outcome, its time
    shown: bool = True  # a trial showed that this way gives right sums

    @property
    def name(self) -> str:
        """The way in words, to follow "gradients are averaged"."""
        return _NAMES[self.way]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"way": self.way, "reason": self.reason, "evidence": list(self.evidence), "shown": self.shown}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The outcome, the same on every rank of a machine."""

    asked: Asked  # ``--grad_sync``
    choice: GradSyncChoice
    seconds: float  # from when all ranks have joined to the decision
    fault: str = ""  # the injected fault

    def to_dict(self) -> dict[str, Any]:
        """For the report, as plain JSON values."""
        return {
            "asked": self.asked,
            **self.choice.to_dict(),
            "seconds": round(self.seconds, 1),
            "fault_injection": self.fault or None,
        }

    def lines(self) -> list[str]:
        """For the terminal: the decision, and all evidence if anything failed."""
        asked = "" if self.asked == "auto" else f" (--grad_sync {self.asked})"
        first = f"preflight: gradients are averaged {self.choice.name}{asked}: {self.choice.reason}"
        fault = [f"a fault is injected into the preflight on request: {self.fault}"] if self.fault else []
        clean = self.choice.way == "ddp" and self.choice.shown
        page_faults = [_NOT_CURED] if self.choice.way == "ddp_without_p2p" else []
        return [*fault, f"{first} ({self.seconds:.0f} s)", *page_faults, *([] if clean else self.choice.evidence)]


def run(
    *,
    asked: Asked,
    device: Mapping[str, Any],
    environ: Mapping[str, str],
    place: Path,
    meet_s: float = MEET_S,
    limit_s: float = LIMIT_S,
) -> Preflight:
    """Run the preflight. Every rank of the job calls it before it joins a process group."""
    fault = PreflightFault.from_environment(environ)
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    here = int(environ.get("LOCAL_WORLD_SIZE", world))
    injected = fault if fault is not None and fault.trial == "ranks" else None
    while injected and injected.kind == "absent" and rank == (world - 1 if injected.rank is None else injected.rank):
        time.sleep(0.2)
    make_private(place)
    (place / f"left-{rank}").unlink(missing_ok=True)  # of an earlier job that was killed
    mine = {"rank": rank, "pid": os.getpid(), "born": start_ticks(os.getpid()), "device": dict(device)}
    _write_note(place / f"rank-{rank}", mine)
    ranks = range(rank // here * here, rank // here * here + here)
    try:
        members = _join(place, ranks, world, meet_s)
        began = time.monotonic()
        if rank != ranks[0]:
            said = _await_choice(place, members[0], limit_s + _SPARE_S)
        else:
            if injected is not None:
                os.kill(os.getpid(), signal.SIGKILL if injected.kind == "kill" else signal.SIGSTOP)
            devices = [member["device"] for member in members]
            said = _try_and_publish(place, devices, asked=asked, environ=environ, fault=fault, limit_s=limit_s)
    finally:
        _leave(place, rank, ranks)
    if "error" in said:
        raise StallError(said["error"])
    choice = GradSyncChoice(**{**said, "evidence": tuple(said["evidence"])})
    seconds = time.monotonic() - began
    return Preflight(asked=asked, choice=choice, seconds=seconds, fault=environ.get(VARIABLE, "").strip())


def _try_and_publish(place: Path, devices: Sequence[Mapping[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Make the choice for all ranks of this machine and write it, or the error, for the others."""
    try:
        said = try_machine(devices, **wanted).to_dict()
    except TuneError as error:
        said = {"error": str(error)}
    _write_note(place / "choice", {"pid": os.getpid(), "choice": said})
    return said


def _write_note(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: a reader sees the old or the new content."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)


def _read_note(file: Path) -> dict[str, Any] | None:
    """The content of a file of `_write_note`; None without one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _leave(place: Path, rank: int, ranks: range) -> None:
    """Mark this rank as done; the last one deletes the directory."""
    with contextlib.suppress(OSError):
        (place / f"left-{rank}").touch()
    files = {other: _read_note(place / f"rank-{other}") for other in ranks if not (place / f"left-{other}").exists()}
    if not any(said is not None and is_alive(said["pid"], said["born"]) for said in files.values()):
        shutil.rmtree(place, ignore_errors=True)


def _join(place: Path, ranks: range, world: int, limit_s: float) -> list[dict[str, Any]]:
    """Wait for the notes of all ranks of this machine; those of processes that have ended do not count."""
    ends_at = time.monotonic() + limit_s
    found: dict[int, dict[str, Any]] = {}
    while missing := [rank for rank in ranks if rank not in found]:
        for rank in missing:
            said = _read_note(place / f"rank-{rank}")
            if said is not None and is_alive(said["pid"], said["born"]):
                found[rank] = said
        if time.monotonic() > ends_at:
            raise StallError(
                f"rank {', '.join(map(str, missing))} of {world} did not join the preflight within {limit_s:.0f} s: "
                "see what it printed, and whether it sees a card as the others do (a rank on the CPU does not join); "
                "--preflight off starts without the preflight"
            )
        time.sleep(_POLL_S)
    return [found[rank] for rank in ranks]


def _await_choice(place: Path, first: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Wait for the decision of the rank that tries the cards."""
    who, ends_at = f"rank {first['rank']} (process {first['pid']})", time.monotonic() + limit_s
    try:
        while True:
            alive = is_alive(first["pid"], first["born"])  # checked before its file is read
            note = _read_note(place / "choice")
            if note is not None and note["pid"] == first["pid"]:
                return dict(note["choice"])
            if not alive:
                raise StallError(
                    f"{who} ended while it tried the cards for the preflight, without a message: it was killed, or the "
                    "system was out of memory (see `dmesg`); start the job again"
                )
            if time.monotonic() > ends_at:
                raise StallError(
                    f"{who} tries the cards of this machine and made no decision within {limit_s:.0f} s: it is stopped "
                    f"or stuck in the driver (`cat /proc/{first['pid']}/status`); train on one card, or start again "
                    "after a reboot"
                )
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        # A launcher whose rank has died ends the others: the reason is that rank.
        if is_alive(first["pid"], first["born"]):
            raise
        raise StallError(f"{who} ended while it tried the cards for the preflight; start the job again") from None


def insist(done: Preflight, *, one_card: str) -> None:
    """End the run if it cannot average as requested."""
    way, reason = done.choice.way, done.choice.reason
    if way == "one_card":
        raise StallError(
            f"the preflight found no way to average gradients over these cards ({reason}): train on one card with "
            f"{one_card}; gloo needs this machine's own name to resolve (`getent hosts $(hostname)`); "
            "`hf-rocm-tune doctor` has more details"
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
    """Try the cards of this machine and choose how to average. Imports no torch."""
    if len(devices) < 2:
        way: SyncWay = "host" if asked == "host" else "ddp"
        return GradSyncChoice(way=way, reason="one rank on this machine: no pair to try", shown=False)
    on_cards = any(device["device"] != "cpu" for device in devices)
    limits: dict[str, Any] = {"largest": _LARGEST if on_cards else _LARGEST_ON_CPU, "repeats": _REPEATS}
    said = environ.get(P2P_VARIABLE, "").strip()
    peers, may_disable = said in ("", "0"), said == "" and on_cards
    ends_at = time.monotonic() + limit_s
    sums: dict[SyncWay, ReduceTrial] = {}

    def fault_of(trial: str) -> dict[str, Any] | None:
        return None if fault is None else fault.of(trial)

    def left(later: int) -> float:
        """Seconds for a trial, if ``later`` more trials may have to follow it."""
        return ends_at - time.monotonic() - _KILLING_S - later * (_SHORTEST_S + _KILLING_S)

    def sum_over(way: SyncWay, later: int = 0) -> None:
        over: dict[str, Way] = {"ddp": "rccl" if on_cards else "gloo", "ddp_without_p2p": "rccl_without_p2p"}
        if (deadline_s := left(later)) >= _SHORTEST_S / 2:
            over_way = over.get(way, "gloo")
            sums[way] = try_all_reduce(devices, over_way, deadline_s=deadline_s, fault=fault_of(way), **limits)

    if asked == "host":
        sum_over("host")
        return choose((), sums, otherwise="host")
    # At the same time: on cards everything but RCCL, which may block the others when it hangs; without cards all.
    ways: dict[str, Way] = {"host": "gloo"} if on_cards else {"ddp": "gloo", "host": "gloo"}
    pairs, found = try_at_once(
        devices,
        pairs=on_cards or (fault is not None and fault.trial == "pairs"),
        sums=ways,
        deadline_s=left(later=1 + may_disable if on_cards else 0),
        faults={trial: fault_of(trial) for trial in ("pairs", *ways)},
        **limits,
    )
    sums.update({way: found[way] for way in WAYS if way in found})
    peers_fail = peers and any(trial.verdict in FAILED for trial in pairs)
    # Beside a card that hangs, gloo may have failed although it works: it is tried again alone.
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
    """The fastest way that the trials have shown to work."""
    trials: list[PairTrial | ReduceTrial] = [*pairs, *sums.values()]
    evidence = tuple(trial.told() for trial in trials)
    bad_pairs = [trial for trial in pairs if trial.verdict in FAILED] if peers else []
    # Reasons against a way: a failed pair explains a failed all-reduce, so it comes first.
    against = [trial.reason for trial in [*bad_pairs, *(trial for trial in sums.values() if trial.verdict in FAILED)]]
    untried = [trial.reason for trial in trials if trial.verdict == "untried"]
    ruled_out: set[SyncWay] = {"ddp"} if bad_pairs else set()
    if "host" in sums and sums["host"].verdict in FAILED:
        ruled_out = {"ddp", "ddp_without_p2p", "host"}
        against = [f"gloo, over which averages are checked, does not work: {sums['host'].reason}"]
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
    reason = f"the trials gave no result for these cards: {[*untried, 'there was no time for any'][0]}"
    return GradSyncChoice(way=otherwise, reason=reason, evidence=evidence, shown=False)


if __name__ == "__main__":
    sys.exit(answer(_measure))
