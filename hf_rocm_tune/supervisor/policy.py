"""What to do after a start has died: again, again without one step, or not again. Arithmetic only.

Rules, in this order:

    codes 0, 2, 3 and 130 are ends, not deaths: nothing is started again
    died in the upload: the result is complete, nothing is started again
    the second death at the same step: that step is left out from now on, because a restart alone would die there again
    the second exception (code 1) before the first step: given up, because nothing there changes by itself
    the fourth death at the same place, or more restarts without a new checkpoint than allowed: given up

Deaths count only since the newest checkpoint came to be: a run that gets on is worth starting again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_rocm_tune.supervisor.settings import Settings
from hf_rocm_tune.training.supervised import Phase

DEATHS_TO_SKIP = 2
DEATHS_TO_STOP = 4
EXCEPTIONS_TO_STOP = 2
_LONGEST_WAIT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Death:
    """How a start ended that should have gone on.

    Args:
        how: for people: "ended by SIGKILL".
        code: what the supervisor would return for it.
        phase: what was going on at the last sign of life; None before the job said anything.
        step: optimizer steps done by then.
        resumed_at: step of the checkpoint from which this start went on; 0 from the start.
        checkpoint: step of the newest verified checkpoint now; 0 for none.
    """

    how: str
    code: int
    phase: Phase | None
    step: int
    resumed_at: int
    checkpoint: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now.

    Args:
        action: "restart" or "stop".
        reason: for people.
        skip: an optimizer step to leave out from now on.
        wait_seconds: before the restart.
    """

    action: Literal["restart", "stop"]
    reason: str
    skip: int | None = None
    wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a start died.

    Args:
        name: for people.
        step: the optimizer step that is the cause, if a step may be: the one that was computed, or the one that was
            just done, whose kernels may still have been running.
    """

    name: str
    step: int | None = None


_AT_THE_START = Place(name="before the first step")


def place_of(death: Death) -> Place:
    """Where a start died."""
    if death.phase in (None, "start"):
        return _AT_THE_START
    if death.phase == "step":
        return Place(name=f"in step {death.step + 1}", step=death.step + 1)
    if death.phase == "between" and death.step == death.resumed_at:
        return _AT_THE_START
    if death.phase == "between":
        return Place(name=f"in step {death.step}", step=death.step)
    names = {
        "evaluate": f"in the evaluation after step {death.step}",
        "save": f"in the checkpoint of step {death.step}",
        "end": "in the save of the result",
        "publish": "in the upload of the result",
    }
    return Place(name=names[str(death.phase)])


def decide(deaths: Sequence[Death], skipped: Collection[int], settings: Settings) -> Decision:
    """What to do after the last of these deaths.

    Args:
        deaths: of this supervision, oldest first; at least one.
        skipped: optimizer steps that are left out already.
        settings: the limits.
    """
    last, place = deaths[-1], place_of(deaths[-1])
    if last.phase == "publish":
        return Decision(action="stop", reason="the result is complete on disk and only its upload died")
    recent = _since_the_newest_checkpoint(deaths)
    here = sum(place_of(death) == place for death in recent)
    raised = sum(death.code == 1 and place_of(death) == _AT_THE_START for death in recent)
    if here >= DEATHS_TO_STOP or raised >= EXCEPTIONS_TO_STOP:
        also = ", although it is left out" if place.step in skipped else ""
        return Decision(action="stop", reason=f"died {here} times {place.name}{also}")
    if len(recent) > settings.max_restarts:
        return Decision(action="stop", reason=f"{settings.max_restarts} restarts brought no new checkpoint")
    wait = min(settings.backoff_seconds * 2 ** (len(recent) - 1), _LONGEST_WAIT_SECONDS)
    if here >= DEATHS_TO_SKIP and place.step is not None and place.step not in skipped:
        if len(skipped) >= settings.max_skips:
            steps = ", ".join(map(str, sorted(skipped)))
            why = f"steps {steps} are left out already" if skipped else "no step may be left out"
            return Decision(action="stop", reason=f"died {here} times {place.name}, and {why} (--max_skips)")
        return Decision(
            action="restart",
            skip=place.step,
            wait_seconds=wait,
            reason=f"died {here} times {place.name}: the step is left out, its batches are not trained on",
        )
    return Decision(action="restart", wait_seconds=wait, reason=f"died {place.name}")


def _since_the_newest_checkpoint(deaths: Sequence[Death]) -> list[Death]:
    return [death for death in deaths if death.checkpoint == deaths[-1].checkpoint]
