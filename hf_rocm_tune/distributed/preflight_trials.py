"""The trials before a run on several cards: every ordered pair copies right, and an all-reduce gives the right sums.

Each is made in child processes that are killed at a deadline, so nothing here hangs and nothing here imports torch.
What follows from a failed trial is decided elsewhere: the preflight chooses how gradients are averaged, the doctor says
what may cure it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rocm_tune.distributed.preflight_child import PAIR, RANK
from hf_rocm_tune.hardware.child import Outcome, Task, run_together

MODULE = "hf_rocm_tune.distributed.preflight_child"

Verdict = Literal["right", "wrong", "hung", "died"]
Way = Literal["rccl", "rccl_without_p2p", "gloo"]
"""How ranks average: over RCCL (or NCCL) as the environment has it, with NCCL_P2P_DISABLE=1, or through the host."""

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
    def reason(self) -> str:
        """One line; where a rank died, it is that one, and not those that waited for it."""
        said = f"all-reduce over {self.way}:"
        if self.verdict == "hung":
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
    """Copy between every ordered pair, each in a fresh process.

    Args:
        devices: ``device`` (``cuda:0``; ``cpu`` in tests) and ``address`` (PCI, or None) of each.
        deadline_s: seconds for each pair, the imports included.
        full: copies up to 1 GiB instead of 64 MiB.
        repeats: of the copy of 1 MiB.
        largest: bytes of the largest copy, instead of what `full` says.
        environ: variables of the children.
        fault: see ``preflight_pairs``.
    """
    trials = []
    for source, destination in itertools.permutations(devices, 2):
        request = {
            "source": dict(source),
            "destination": dict(destination),
            "largest": largest or (_LARGEST_FULL if full else _LARGEST),
            "repeats": repeats,
            "fault": dict(fault) if fault else None,
        }
        task = Task(module=MODULE, arguments=(PAIR,), request=request, environ=environ or {})
        outcome = run_together([task], deadline_s=deadline_s)[0]
        trials.append(PairTrial(source=source["device"], destination=destination["device"], outcome=outcome))
    return trials


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
    # RCCL's own warnings, on the IOMMU for one, are evidence; threads as torchrun sets them.
    wanted = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    variables: dict[str, str | None] = {name: value for name, value in wanted.items() if name not in os.environ}
    if way == "rccl_without_p2p":
        variables["NCCL_P2P_DISABLE"] = "1"
    victim = int((fault or {}).get("rank", len(devices) - 1))
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-ranks-", ignore_cleanup_errors=True) as folder:
        tasks = [
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
        return ReduceTrial(way=way, outcomes=tuple(run_together(tasks, deadline_s=deadline_s)))


def _verdict(outcomes: Sequence[Outcome]) -> Verdict:
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"died", "garbage"}:
        return "died"
    if "timeout" in statuses:
        return "hung"
    wrong = any(outcome.result["wrong"] for outcome in outcomes if outcome.result)
    return "wrong" if wrong else "right"
