"""The trials before a run on several cards: every ordered pair copies right, and an all-reduce gives the right sums.

Each is made in child processes that are killed at a deadline, so nothing here hangs and nothing here imports torch.
What follows from a failed trial is decided elsewhere: the preflight chooses how gradients are averaged, the doctor says
what may cure it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.distributed.preflight_child import IMPORTING, PAIR, RANK
from hf_rocm_tune.machine.child import Outcome, Task, run_groups, run_together

MODULE = "hf_rocm_tune.distributed.preflight_child"

Verdict = Literal["right", "wrong", "hung", "died", "untried"]
"""``untried``: a child was still importing torch at the deadline, or ended with an exception that is no device's (a
broken installation, no memory): that says nothing about the cards."""
FAILED: frozenset[Verdict] = frozenset({"wrong", "hung", "died"})
Way = Literal["rccl", "rccl_without_p2p", "gloo"]
"""How ranks average: over RCCL (or NCCL) as the environment has it, with NCCL_P2P_DISABLE=1, or through the host."""

DEVICE_ERRORS = ("RuntimeError", "AcceleratorError", "CorruptionError", "Dist")
"""How the names of those exceptions begin that a device, its driver or RCCL is the reason of."""

_LARGEST = 64 << 20
_LARGEST_FULL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PairTrial:
    """Copies from one card to another.

    Attributes:
        source, destination: as asked for, ``cuda:0``.
        outcome: of the child; its result is that of ``preflight_pairs.measure``.
    """

    source: str
    destination: str
    outcome: Outcome

    @property
    def pair(self) -> str:
        return f"{self.source} -> {self.destination}"

    @property
    def verdict(self) -> Verdict:
        return _verdict([self.outcome])

    @property
    def staged_right(self) -> bool | None:
        """Whether the copy through the host was right; None where it was not made."""
        return None if self.outcome.result is None else not self.outcome.result["staged_wrong"]

    @property
    def seconds(self) -> float:
        """That the child took, the imports included."""
        return self.outcome.seconds

    @property
    def problem(self) -> dict[str, Any] | None:
        """The first wrong copy, see ``preflight_pairs``."""
        return _first_problem([self.outcome])

    @property
    def reason(self) -> str:
        """One line."""
        result = self.outcome.result
        if result is None:
            return f"copies {self.pair}: the trial {self.outcome.how}"
        if not result["wrong"]:
            return f"copies {self.pair}: {result['cases']} right"
        first = result["problems"][0]
        return f"copies {self.pair}: {result['wrong']} of {result['cases']} wrong, the first {first['case']}"


@dataclass(frozen=True, kw_only=True)
class ReduceTrial:
    """An all-reduce over all ranks.

    Attributes:
        way: how it was made.
        outcomes: of the ranks, in their order; results are those of ``preflight_ranks.measure``.
    """

    way: Way
    outcomes: tuple[Outcome, ...]

    @property
    def verdict(self) -> Verdict:
        return _verdict(self.outcomes)

    @property
    def seconds(self) -> float:
        """That the slowest child took, the imports included."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def problem(self) -> dict[str, Any] | None:
        """The first wrong sum, see ``preflight_ranks``."""
        return _first_problem([self.outcomes[self.telling_rank]])

    @property
    def reason(self) -> str:
        """One line; where a rank died, it is that one, and not those that waited for it."""
        said = f"all-reduce over {self.way}:"
        if "timeout" in {outcome.status for outcome in self.outcomes} and self.verdict != "died":
            return f"{said} {'; '.join(f'rank {rank} {outcome.how}' for rank, outcome in enumerate(self.outcomes))}"
        rank = self.telling_rank
        result = self.outcomes[rank].result
        if result is None:
            return f"{said} rank {rank} {self.outcomes[rank].how}"
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
    full: bool = False,
    repeats: int = 10,
    largest: int | None = None,
    environ: Mapping[str, str | None] | None = None,
    fault: Mapping[str, str] | None = None,
) -> list[PairTrial]:
    """Copy between every ordered pair, each in a fresh process, one after the other.

    Args:
        devices: ``device`` (``cuda:0``; ``cpu`` in tests) and ``address`` (PCI, or None) of each.
        deadline_s: seconds for each pair, the imports included.
        full: copies up to 1 GiB instead of 64 MiB.
        repeats: of the copy of 1 MiB.
        largest: bytes of the largest copy, instead of what `full` says.
        environ: variables of the children.
        fault: see ``preflight_pairs``.
    """
    largest = largest or (_LARGEST_FULL if full else _LARGEST)
    trials = []
    for source, destination in itertools.permutations(devices, 2):
        task = _pair_task(source, destination, largest=largest, repeats=repeats, environ=environ, fault=fault)
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
        faults: by the name of a sum, or ``pairs``; see `try_all_reduce` and ``preflight_pairs``.

    Returns:
        The trials of the pairs, and those of the sums by their names.
    """
    harmed = faults or {}
    couples = list(itertools.permutations(devices, 2)) if pairs else []
    common: dict[str, Any] = {"largest": largest, "repeats": repeats}
    copies = [_pair_task(*pair, **common, environ=_threads(), fault=harmed.get("pairs")) for pair in couples]
    with contextlib.ExitStack() as stack:
        groups = [[copy] for copy in copies]
        for name, way in sums.items():
            tasks = _rank_tasks(devices, way, deadline_s=deadline_s, **common, environ=None, fault=harmed.get(name))
            groups.append(stack.enter_context(tasks))
        outcomes = run_groups(groups, deadline_s=deadline_s)
    copied, summed = outcomes[: len(copies)], outcomes[len(copies) :]
    trials = [
        PairTrial(source=source["device"], destination=destination["device"], outcome=outcome)
        for (source, destination), [outcome] in zip(couples, copied, strict=True)
    ]
    reduced = {
        name: ReduceTrial(way=way, outcomes=tuple(outcome))
        for (name, way), outcome in zip(sums.items(), summed, strict=True)
    }
    return trials, reduced


def try_all_reduce(
    devices: Sequence[Mapping[str, Any]],
    way: Way,
    *,
    deadline_s: float,
    largest: int = _LARGEST,
    repeats: int = 5,
    environ: Mapping[str, str | None] | None = None,
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
        fault: see ``preflight_ranks``; ``rank`` says which rank is harmed, the last unless given.
    """
    with _rank_tasks(
        devices, way, deadline_s=deadline_s, largest=largest, repeats=repeats, environ=environ, fault=fault
    ) as tasks:
        return ReduceTrial(way=way, outcomes=tuple(run_together(tasks, deadline_s=deadline_s)))


def _pair_task(
    source: Mapping[str, Any],
    destination: Mapping[str, Any],
    *,
    largest: int,
    repeats: int,
    environ: Mapping[str, str | None] | None,
    fault: Mapping[str, str] | None,
) -> Task:
    request = {
        "source": dict(source),
        "destination": dict(destination),
        "largest": largest,
        "repeats": repeats,
        "fault": dict(fault) if fault else None,
    }
    return Task(module=MODULE, arguments=(PAIR,), request=request, environ=environ or {})


@contextlib.contextmanager
def _rank_tasks(
    devices: Sequence[Mapping[str, Any]],
    way: Way,
    *,
    deadline_s: float,
    largest: int,
    repeats: int,
    environ: Mapping[str, str | None] | None,
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
        yield [
            Task(
                module=MODULE,
                arguments=(RANK,),
                request={
                    **device,
                    "rank": rank,
                    "world": len(devices),
                    "backend": "gloo" if way == "gloo" else "nccl",
                    "store": str(Path(folder) / "store"),
                    # Longer than the deadline: the children are ended from here, and say where they stood.
                    "timeout_s": 2 * deadline_s,
                    "largest": largest,
                    "repeats": repeats,
                    "fault": dict(fault) if fault and rank == victim else None,
                },
                environ={**variables, **(environ or {})},
            )
            for rank, device in enumerate(devices)
        ]


def _threads() -> dict[str, str | None]:
    """One thread for each of several processes, as torchrun sets it, where nobody has said otherwise."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}


def _verdict(outcomes: Sequence[Outcome]) -> Verdict:
    statuses = {outcome.status for outcome in outcomes}
    if any(outcome.error and not outcome.error.startswith(DEVICE_ERRORS) for outcome in outcomes):
        return "untried"
    if statuses & {"died", "garbage"}:
        return "died"
    late = [outcome for outcome in outcomes if outcome.status == "timeout"]
    if late:
        return "untried" if any(outcome.step == IMPORTING for outcome in late) else "hung"
    wrong = any(outcome.result["wrong"] for outcome in outcomes if outcome.result)
    return "wrong" if wrong else "right"


def _first_problem(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    for outcome in outcomes:
        if outcome.result and outcome.result["problems"]:
            problem: dict[str, Any] = outcome.result["problems"][0]
            return problem
    return None
