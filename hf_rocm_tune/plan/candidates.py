"""The choice of ``--auto_fit``: micro-batch, accumulation and checkpointing for a given effective batch.

From the plan alone, or corrected by tried steps. Arithmetic on bytes, without torch or trainer; speeds are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.plan.estimate import SLACK_FLOOR, SLACK_SHARE, Case, Estimate

#: Tries above a candidate that fits: each costs a step, and the estimates are within a few percent.
MOST_UPWARD = 2


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the user's settings require of the choice."""

    each: int  # sequences of one optimizer step on one rank
    ranks: int  # the effective batch is ``each * ranks``
    micro_batch: int | None  # as the user set it; None: to be chosen
    checkpointing: bool | None  # likewise

    @property
    def effective_batch(self) -> int:
        """Sequences to one optimizer step over all ranks."""
        return self.each * self.ranks

    def largest_up_to(self, limit: int) -> int:
        """The largest micro-batch up to ``limit`` that divides the effective batch."""
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
    """What the user requires, from the flags and from which of them were given.

    Args:
        ranks: processes of the job.
        effective_batch: None: the product of the other two flags.
        micro_batch, accumulation, checkpointing: as the flags have them, given or by default.
        given: names of the flags that the user set.

    Raises:
        UsageError: these cannot make the effective batch.
    """
    names = frozenset(given)
    keeps_micro, keeps_steps = "per_device_train_batch_size" in names, "gradient_accumulation_steps" in names
    if effective_batch is None:
        kept = micro_batch if keeps_micro or keeps_steps else None
        each = micro_batch * accumulation
    else:
        each, rest = divmod(effective_batch, ranks)
        if rest:
            raise UsageError(f"--effective_batch {effective_batch} cannot be divided evenly over {ranks} processes")
        kept = micro_batch if keeps_micro else max(1, each // accumulation) if keeps_steps else None
        steps = accumulation if keeps_steps else max(1, each // kept) if kept else each
        if kept is not None and kept * steps != each:
            set_flags = [f"--per_device_train_batch_size {micro_batch}"] if keeps_micro else []
            set_flags += [f"--gradient_accumulation_steps {accumulation}"] if keeps_steps else []
            raise UsageError(
                f"--effective_batch {effective_batch} over {ranks} process{'es' if ranks > 1 else ''} cannot be made "
                f"with {' and '.join(set_flags)}; drop {'one of them' if len(set_flags) > 1 else 'it'}"
            )
    flags = {f"{name}_checkpointing{more}" for name in ("activation", "gradient") for more in ("", "_kwargs")}
    return Demand(each=each, ranks=ranks, micro_batch=kept, checkpointing=checkpointing if flags & names else None)


def with_slack(peak: float) -> float:
    """A peak of the allocator with its assumed slack, in bytes."""
    return peak * (1 + SLACK_SHARE) + SLACK_FLOOR


@dataclass(frozen=True, kw_only=True)
class Way:
    """Settings that run the effective batch."""

    micro_batch: int  # sequences at a time on one card; rows where sequences are packed
    accumulation: int  # micro-batches per optimizer step
    checkpointing: bool  # activations are recomputed
    recompute: tuple[int, int] | None = None  # of which layers; see `estimate.Case`

    def describe(self) -> str:
        """As text."""
        on = "on" if self.checkpointing else "off"
        if self.recompute is not None:
            whole, selective = self.recompute
            on = f"of {whole} layers whole and of {selective} but for products and attention"
        return f"micro-batch {self.micro_batch} x {self.accumulation} accumulated, activation checkpointing {on}"


def _way(of: Way | Case) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("micro_batch", "accumulation", "checkpointing", "recompute")}


@dataclass(frozen=True, kw_only=True)
class Candidate(Way):
    """Settings that were planned."""

    predicted: int  # peak of torch's allocator, in bytes
    tokens_per_second: float  # the plan's estimate, for ranking only

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
    """A candidate that was tried."""

    candidate: Candidate
    fits: bool  # a worst-case step ran on all ranks, within the budget
    # highest peak of all ranks in bytes; None if it ended early or cannot be measured
    measured: int | None


def next_candidate(
    candidates: Sequence[Candidate], trials: Sequence[Trial], *, first: Candidate, budget: int
) -> Candidate | None:
    """What to try next; None if the fastest that fitted is the answer, or nothing is left.

        nothing fitted yet    the fastest that needs less than what failed, with at most half of its micro-batch
        something fitted      a faster one that should fit by the measured peaks; at most `MOST_UPWARD` of them

    Args:
        candidates: all of them.
        trials: so far.
        first: the first to try.
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
    """The result of a probe; None if nothing fitted."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: _preference(trial.candidate), default=None)


def _preference(candidate: Candidate) -> tuple[float, int]:
    """Order of the plan: the fastest; of equals the one that needs less."""
    return candidate.tokens_per_second, -candidate.predicted


def _ruled_out(candidate: Candidate, failed: Candidate) -> bool:
    """Whether the failure of another candidate rules this one out."""
    if (candidate.checkpointing, candidate.recompute) == (failed.checkpointing, failed.recompute):
        return 2 * candidate.micro_batch > failed.micro_batch
    return candidate.predicted >= failed.predicted


@dataclass(frozen=True, kw_only=True)
class Choice(Way):
    """The choice of a run, as in ``run.json`` and the report."""

    mode: str  # ``plan`` or ``probe``
    budget_bytes: int  # available to torch's allocator on the rank with least
    predicted_bytes: int  # the allocator's peak by the plan
    measured_bytes: int | None = None  # in the probe's step, on the rank with the highest peak; None: not measured
    tries: int = 0  # worst-case steps that the probe ran

    @classmethod
    def of(cls, candidate: Candidate, *, mode: str, budget: int, measured: int | None = None, tries: int = 0) -> Choice:
        """The choice of a candidate."""
        figures: dict[str, Any] = {
            "budget_bytes": budget,
            "predicted_bytes": candidate.predicted,
            "measured_bytes": measured,
        }
        return cls(**_way(candidate), **figures, mode=mode, tries=tries)

    @classmethod
    def from_record(cls, values: Mapping[str, Any], wanted: Demand) -> Choice:
        """The choice in ``run.json``.

        Raises:
            UsageError: it is invalid, or does not make the wanted effective batch.
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
