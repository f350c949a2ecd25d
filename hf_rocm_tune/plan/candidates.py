"""Which micro-batch and checkpointing ``--auto_fit`` takes: from the plan alone, or corrected by steps that were tried.

The effective batch is given; a way to run it is a micro-batch, the accumulation that goes with it, and checkpointing.
Pure arithmetic on bytes: no torch, no trainer. What is fast is the plan's estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import SLACK_FLOOR, SLACK_SHARE, Case, Estimate

#: Tries above a way that is known to fit: each costs a step, and the estimates are within a few percent.
MOST_UPWARD = 2


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the choice must hold to."""

    each: int  # sequences of one optimizer step on one rank
    ranks: int  # how many; the effective batch is ``each * ranks``
    micro_batch: int | None  # kept as the user set it; None: to be chosen
    checkpointing: bool | None  # likewise

    @property
    def effective_batch(self) -> int:
        """Sequences to one optimizer step over all ranks."""
        return self.each * self.ranks

    def largest_up_to(self, limit: int) -> int:
        """The largest micro-batch that reaches the effective batch exactly and is not above ``limit``."""
        return self.micro_batch or next(size for size in range(limit, 0, -1) if self.each % size == 0)


def demand(
    *,
    ranks: int,
    effective_batch: int | None,
    micro_batch: int,
    accumulation: int,
    checkpointing: bool,
    given: Iterable[str],
) -> Demand:
    """What the user wants, from the flags and from which of them were given.

    Args:
        ranks: processes of the job.
        effective_batch: None: what the other two flags make.
        micro_batch, accumulation, checkpointing: as the flags have them, given or by default.
        given: names of the flags that the user set.

    Raises:
        UsageError: the effective batch cannot be made of these.
    """
    names = frozenset(given)
    keeps_micro, keeps_steps = "per_device_train_batch_size" in names, "gradient_accumulation_steps" in names
    if effective_batch is None:
        kept = micro_batch if keeps_micro or keeps_steps else None
        each = micro_batch * accumulation
    else:
        each, rest = divmod(effective_batch, ranks)
        if rest:
            raise UsageError(f"--effective_batch {effective_batch} cannot be divided over {ranks} processes evenly")
        kept = micro_batch if keeps_micro else max(1, each // accumulation) if keeps_steps else None
        steps = accumulation if keeps_steps else max(1, each // kept) if kept else each
        if kept is not None and kept * steps != each:
            said = [f"--per_device_train_batch_size {micro_batch}"] if keeps_micro else []
            said += [f"--gradient_accumulation_steps {accumulation}"] if keeps_steps else []
            raise UsageError(
                f"--effective_batch {effective_batch} over {ranks} process{'es' if ranks > 1 else ''} cannot be made "
                f"with {' and '.join(said)}; leave {'one of them' if len(said) > 1 else 'it'} away"
            )
    flags = {f"{name}_checkpointing{more}" for name in ("activation", "gradient") for more in ("", "_kwargs")}
    return Demand(each=each, ranks=ranks, micro_batch=kept, checkpointing=checkpointing if flags & names else None)


def with_slack(peak: float) -> float:
    """A peak of the allocator with what it cannot reuse, in bytes; the plan's assumption."""
    return peak * (1 + SLACK_SHARE) + SLACK_FLOOR


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run the effective batch."""

    micro_batch: int  # sequences at a time on one card; rows where sequences are packed
    accumulation: int  # micro-batches to one optimizer step
    checkpointing: bool  # activations are recomputed
    recompute: tuple[int, int] | None = None  # of which layers; see `estimate.Case`

    def describe(self) -> str:
        """In words."""
        on = "on" if self.checkpointing else "off"
        if self.recompute is not None:
            whole, selective = self.recompute
            on = f"of {whole} layers whole and of {selective} but for products and attention"
        return f"micro-batch {self.micro_batch} x {self.accumulation} accumulated, activation checkpointing {on}"


def _way(of: Way | Case) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("micro_batch", "accumulation", "checkpointing", "recompute")}


@dataclass(frozen=True, kw_only=True)
class Candidate(Way):
    """A way that the plan has looked at."""

    predicted: int  # peak of torch's allocator, in bytes
    tokens_per_second: float  # by the plan's estimate, which ranks ways and is no figure of a card

    @classmethod
    def of(cls, option: Estimate) -> Candidate:
        """A case of the plan."""
        speed = option.tokens_per_second
        return cls(**_way(option.case), predicted=int(option.allocated), tokens_per_second=speed)

    def fits(self, budget: int, *, scale: float = 1.0) -> bool:
        """Whether its predicted peak, times ``scale``, and the allocator's slack fit."""
        return with_slack(self.predicted * scale) <= budget


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A way that was tried."""

    candidate: Candidate  # the way
    fits: bool  # a worst-case step went through on all ranks, within the budget
    # its peak, the highest of all ranks, in bytes; None where it ended early or nothing measures it
    measured: int | None


def next_candidate(
    candidates: Sequence[Candidate], trials: Sequence[Trial], *, first: Candidate, budget: int
) -> Candidate | None:
    """What to try next; None where the fastest that fitted is the answer, or nothing is left to try.

        nothing fitted yet    the fastest of those that need less than what failed, with half of its micro-batch or less
        something fitted      a faster one, where the measured peaks say that it has room; at most `MOST_UPWARD` of them

    Args:
        candidates: all ways.
        trials: so far.
        first: where to begin.
        budget: bytes for the allocator.
    """
    if not trials:
        return first
    failed = [trial.candidate for trial in trials if not trial.fits]
    tried = [trial.candidate for trial in trials]
    left = [each for each in candidates if each not in tried and not any(_ruled_out(each, one) for one in failed)]
    best = fastest_that_fitted(trials)
    if best is None:
        return max(left, key=_preference, default=None)
    ratios = [trial.measured / trial.candidate.predicted for trial in trials if trial.fits and trial.measured]
    upward = len(trials) - 1 - next(number for number, trial in enumerate(trials) if trial.fits)
    if not ratios or upward >= MOST_UPWARD:
        return None
    faster = [each for each in left if each.tokens_per_second > best.candidate.tokens_per_second]
    return max((each for each in faster if each.fits(budget, scale=max(ratios))), key=_preference, default=None)


def fastest_that_fitted(trials: Iterable[Trial]) -> Trial | None:
    """The answer of a probe; None where nothing fitted."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: _preference(trial.candidate), default=None)


def _preference(candidate: Candidate) -> tuple[float, int]:
    """Orders as the plan does: the fastest; of equals the one that needs less."""
    return candidate.tokens_per_second, -candidate.predicted


def _ruled_out(candidate: Candidate, failed: Candidate) -> bool:
    """Whether another way's failure says that this one is not worth a try."""
    if (candidate.checkpointing, candidate.recompute) == (failed.checkpointing, failed.recompute):
        return 2 * candidate.micro_batch > failed.micro_batch
    return candidate.predicted >= failed.predicted


@dataclass(frozen=True, kw_only=True)
class Choice(Way):
    """What a run was given, as ``run.json`` and the report have it."""

    mode: str  # ``plan`` or ``probe``
    budget_bytes: int  # what there was for torch's allocator on the rank that had least
    predicted_bytes: int  # the allocator's peak by the plan
    measured_bytes: int | None = None  # in the probe's step, on the rank that took most; None where nothing measured it
    tries: int = 0  # worst-case steps that the probe ran

    @classmethod
    def of(cls, candidate: Candidate, *, mode: str, budget: int, measured: int | None = None, tries: int = 0) -> Choice:
        """The choice of a way."""
        figures: dict[str, Any] = {
            "budget_bytes": budget,
            "predicted_bytes": candidate.predicted,
            "measured_bytes": measured,
        }
        return cls(**_way(candidate), **figures, mode=mode, tries=tries)

    @classmethod
    def from_record(cls, values: Mapping[str, Any], wanted: Demand) -> Choice:
        """What ``run.json`` has.

        Raises:
            UsageError: it cannot be understood, or does not make the wanted effective batch.
        """
        try:
            mix = values.get("recompute")
            choice = cls(**{**values, "recompute": None if mix is None else (int(mix[0]), int(mix[1]))})
            if choice.micro_batch * choice.accumulation != wanted.each:
                raise ValueError(f"{choice.micro_batch} x {choice.accumulation} is not {wanted.each}")
        except (IndexError, TypeError, ValueError) as error:
            raise UsageError(
                f"run.json holds a choice of --auto_fit that cannot be used ({error}): choose another --output_dir, or "
                "give --overwrite_output_dir"
            ) from error
        return choice
