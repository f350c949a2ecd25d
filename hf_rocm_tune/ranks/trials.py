"""The trials before a run on several cards: every ordered pair copies right, and an all-reduce gives the right sums.

Each is made in child processes that are killed at a deadline, so nothing here hangs and nothing here imports torch;
what the children measure is `trial_measures`. The preflight chooses by the outcomes how gradients are averaged, the
doctor says what may help. A child is ``python -m hf_rocm_tune.ranks.trials pair|rank``, the request on stdin.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import Outcome, Task, answer, run_groups, run_together, step

Verdict = Literal["right", "wrong", "hung", "died", "untried"]
"""``untried``: a child was still importing torch at the deadline, or ended with an exception that is no device's (a
broken installation, no memory): that says nothing about the cards."""
FAILED: frozenset[Verdict] = frozenset({"wrong", "hung", "died"})
Way = Literal["rccl", "rccl_without_p2p", "gloo"]
"""How ranks average: over RCCL (or NCCL) as the environment has it, with NCCL_P2P_DISABLE=1, or through the host."""

DEVICE_ERRORS = ("RuntimeError", "AcceleratorError", "CorruptionError", "Dist")
"""How the names of those exceptions begin that a device, its driver or RCCL is the reason of."""
IMPORTING = "importing torch"
"""The step of a child that has not begun to measure yet."""

_MODULE = "hf_rocm_tune.ranks.trials"
_LARGEST = 64 << 20
_Environ = Mapping[str, str | None]


class _Trial:
    """What pairs and sums have in common: the outcomes of their children; ``telling`` is the one that says most."""

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
        """That the slowest child took, the imports included."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def problem(self) -> dict[str, Any] | None:
        """The first wrong copy or sum, see `trial_measures`."""
        problems = (self.telling.result or {}).get("problems")
        return problems[0] if problems else None

    @property
    def reason(self) -> str:
        """What came out, in one line."""
        raise NotImplementedError

    def told(self) -> str:
        """The reason, what stood there instead, and how long it took."""
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
    """Copies from one card to another: ``source`` and ``destination`` as asked for, ``cuda:0``; the child's outcome."""

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
    """An all-reduce over all ranks: how it was made, and the outcomes of the ranks in their order."""

    way: Way
    outcomes: tuple[Outcome, ...]

    @property
    def telling(self) -> Outcome:
        return self.outcomes[self.telling_rank]

    @property
    def reason(self) -> str:
        """Where a rank died, it is that one, and not those that waited for it."""
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
        """The rank whose outcome says most: the first to die, by a signal rather than of a broken connection."""
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
    """Copy between every ordered pair, each in a fresh process, one after the other.

    Args:
        devices: ``device`` (``cuda:0``; ``cpu`` in tests) and ``address`` (PCI, or None) of each.
        deadline_s: seconds for each pair, the imports included.
        largest: bytes of the largest copy.
        repeats: of the copy of 1 MiB.
        environ: variables of the children.
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
    largest: int = _LARGEST,
    repeats: int = 5,
    faults: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> tuple[list[PairTrial], dict[str, ReduceTrial]]:
    """Copy between every ordered pair and sum over all ranks, all at the same time.

    Trials do not disturb each other where they are right. What hangs on a card may hold up the others on it, so what
    fails beside a failed pair is to be tried again alone.

    Args:
        devices: see `try_pairs`.
        pairs: whether copies are tried.
        sums: ways to sum, by a name each.
        deadline_s: seconds for all of it, the imports included.
        largest: bytes of the largest copy and sum.
        repeats: of the copy of 1 MiB and of the sum of 25 MiB.
        faults: by the name of a sum, or ``pairs``; see `trial_measures`.

    Returns:
        The trials of the pairs, and those of the sums by their names.
    """
    harmed = faults or {}
    couples = list(itertools.permutations(devices, 2)) if pairs else []
    common = {"largest": largest, "repeats": repeats}
    groups = [[_pair_task(*couple, common, _threads(), harmed.get("pairs"))] for couple in couples]
    with contextlib.ExitStack() as stack:
        for name, way in sums.items():
            groups.append(stack.enter_context(_rank_tasks(devices, way, deadline_s, common, None, harmed.get(name))))
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
    largest: int = _LARGEST,
    repeats: int = 5,
    environ: _Environ | None = None,
    fault: Mapping[str, Any] | None = None,
) -> ReduceTrial:
    """Sum over one rank for each device, each rank in a fresh process.

    Args:
        devices: see `try_pairs`. On the CPU the only way is gloo.
        way: see `Way`.
        deadline_s: seconds for all of it, the imports included.
        largest: bytes of the largest sum.
        repeats: of the sum of 25 MiB.
        environ: variables of the children.
        fault: see `trial_measures.measure_sums`; ``rank`` says which rank is harmed, the last unless given.
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
    """The tasks of all ranks, as long as the folder in which they meet is there."""
    variables = _threads()
    if "NCCL_DEBUG" not in os.environ:
        variables["NCCL_DEBUG"] = "WARN"  # RCCL's own warnings, on the IOMMU for one, are evidence
    if way == "rccl_without_p2p":
        variables["NCCL_P2P_DISABLE"] = "1"
    victim = int((fault or {}).get("rank", len(devices) - 1))
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-ranks-", ignore_cleanup_errors=True) as folder:
        shared = {
            "world": len(devices),
            "backend": "gloo" if way == "gloo" else "nccl",
            "store": str(Path(folder) / "store"),
            # Longer than the deadline: the children are ended from here, and say where they stood.
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
    """One thread for each of several processes, as torchrun sets it, where nobody has said otherwise."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    """The child's part."""
    if sys.argv[1:] not in (["pair"], ["rank"]):
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give pair or rank")
    step(IMPORTING)
    from hf_rocm_tune.ranks import trial_measures

    return (trial_measures.measure_pair if sys.argv[1] == "pair" else trial_measures.measure_sums)(request)


if __name__ == "__main__":
    sys.exit(answer(_measure))
