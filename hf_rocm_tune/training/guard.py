"""Training that has died without an error: what to look for in the numbers of each step, and what may be behind it.

`StepGuard` is arithmetic on loss and gradient norm of one optimizer step after the other; it knows no trainer.

- NaN or infinity in either: the step must not be used. More than a few of them among the last 100, and the run stops.
- Loss and gradient norm exactly 0: nothing is learned. It is named after 3 steps in a row, and ends the run after 20.
- A loss far above those of the last steps: named. Far is 10 robust standard deviations (1.4826 times the median
  absolute deviation, as for a normal distribution) above their median, and at least 1.5 times it.

Not covered: numbers that are wrong and look right.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

SKIPPED_AMONG = 100
"""Steps among which skipped ones are counted."""

_DEAD_NAMED, _DEAD_STOPS = 3, 20
_REMEMBERED, _ENOUGH = 100, 30
_DEVIATIONS, _MAD_TO_SIGMA, _AT_LEAST = 10.0, 1.4826, 1.5
_SPIKE_PAUSE = 20

NOT_FINITE_CAUSES = (
    "a learning rate that is too high, fp16 that overflows, NaN in the data or the base weights, or wrong arithmetic "
    "on the device, which has been reported on these cards (the doctor tries it)"
)
DEAD_CAUSES = (
    "no label counts in the loss (answers cut off by --max_length, a mask that covers everything), or weights or "
    "activations that are zero on the device: https://github.com/huggingface/accelerate/issues/3043 (the doctor tries "
    "its arithmetic)"
)
SPIKE_CAUSES = "unusual rows in this batch, a learning rate that is too high, or wrong arithmetic on the device"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a step.

    Attributes:
        step: in which, from 1 on.
        kind: a word or two for the report, such as ``loss spike``.
        text: one line that says what, and the likely causes.
        stops: whether the run must end here.
    """

    step: int
    kind: str
    text: str
    stops: bool = False


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """On one step.

    Attributes:
        skip: its gradients must not be used.
        findings: what to tell.
    """

    skip: bool = False
    findings: tuple[Finding, ...] = ()


class StepGuard:
    """Judges the steps of one run, in order.

    Args:
        max_skipped: how many of the last 100 steps may be skipped; one more ends the run.

    Attributes:
        skipped: steps that were skipped so far.
    """

    def __init__(self, *, max_skipped: int) -> None:
        self._max_skipped = max_skipped
        self._skips: deque[int] = deque()
        self._dead = 0
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet_until = 0
        self.skipped = 0

    def judge(self, step: int, loss: float, grad_norm: float, *, scaled: bool = False) -> Judgement:
        """The verdict on a step whose gradients have not been used yet.

        Args:
            step: its number, from 1 on.
            loss: of the whole effective batch.
            grad_norm: of all trainable gradients, before clipping.
            scaled: whether a gradient scaler (fp16) looks after gradients that overflow: then only the loss counts.
        """
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaled):
            return self._not_finite(step, loss, grad_norm)
        dead = loss == 0 and grad_norm == 0
        self._dead = self._dead + 1 if dead else 0
        if dead:
            return self._nothing_learned(step)
        found = self._spike(step, loss)
        self._losses.append(loss)
        return Judgement(findings=(found,) if found else ())

    def _not_finite(self, step: int, loss: float, grad_norm: float) -> Judgement:
        self.skipped += 1
        self._skips.append(step)
        while self._skips[0] <= step - SKIPPED_AMONG:
            self._skips.popleft()
        count = len(self._skips)
        stops = count > self._max_skipped
        text = (
            f"step {step}: loss {loss:.4g}, gradient norm {grad_norm:.4g}: the step was not used ({count} of the last "
            f"{SKIPPED_AMONG}, at most {self._max_skipped} are let pass). Likely causes: {NOT_FINITE_CAUSES}"
        )
        return Judgement(skip=True, findings=(Finding(step=step, kind="not finite", text=text, stops=stops),))

    def _nothing_learned(self, step: int) -> Judgement:
        if self._dead not in (_DEAD_NAMED, _DEAD_STOPS):
            return Judgement()
        text = (
            f"step {step}: loss and gradient norm are exactly 0, for {self._dead} steps now: nothing is learned. "
            f"Likely causes: {DEAD_CAUSES}"
        )
        return Judgement(findings=(Finding(step=step, kind="dead", text=text, stops=self._dead == _DEAD_STOPS),))

    def _spike(self, step: int, loss: float) -> Finding | None:
        if len(self._losses) < _ENOUGH or step < self._quiet_until:
            return None
        median = statistics.median(self._losses)
        spread = _MAD_TO_SIGMA * statistics.median(abs(each - median) for each in self._losses)
        if loss <= max(median + _DEVIATIONS * spread, _AT_LEAST * abs(median)):
            return None
        self._quiet_until = step + _SPIKE_PAUSE
        text = (
            f"step {step}: the loss is {loss:.4g}, far above those of the last {len(self._losses)} steps (median "
            f"{median:.4g}). Likely causes: {SPIKE_CAUSES}"
        )
        return Finding(step=step, kind="loss spike", text=text)
