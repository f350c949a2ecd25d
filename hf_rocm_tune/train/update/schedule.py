"""Learning rates, from the definition of their schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


class Schedule:
    """Learning rates by the definition of a schedule; the trainer's own code and a user's callback may set others.

    Args:
        of_args: the schedule is the one that ``args`` names; False: the caller's own, whose functions define it.

    Attributes:
        refusal: why rates are not computed; None if they are.
    """

    def __init__(
        self, scheduler: Any, optimizer: Any, args: Any, max_steps: int, *, of_args: bool, excused: bool
    ) -> None:
        self._scheduler = scheduler
        self._groups = optimizer.param_groups
        self._base = [group.get("initial_lr") for group in self._groups]
        self._warmup = args.get_warmup_steps(max_steps)
        self._steps = max_steps
        self._factor: Callable[[int], float] | None = None  # of the base rate, by our definition; None: by its own
        if of_args and not args.lr_scheduler_kwargs:
            kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
            self._factor = self._definition_of(kind)
        self._first = getattr(scheduler, "last_epoch", 0)  # a resumed run's first rates may be of an earlier schedule
        self.refusal: str | None = None
        if type(scheduler) is not LambdaLR:
            self.refusal = f"the schedule is {type(scheduler).__name__}"
        elif excused:
            self.refusal = "the trainer or a callback has code of its own"
        elif not all(isinstance(rate, float | int) for rate in self._base):
            self.refusal = "a group has no rate of its own"

    def wrong(self) -> str | None:
        """The first group whose rate is not that of its schedule."""
        step = getattr(self._scheduler, "last_epoch", 0)
        if self.refusal is not None or step <= self._first:
            return None
        for number, (group, base) in enumerate(zip(self._groups, self._base, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                continue
            factor = self._factor or self._scheduler.lr_lambdas[number]
            expected = base * factor(step)
            if not math.isclose(rate, expected, rel_tol=1e-9, abs_tol=1e-30):
                return (
                    f"the learning rate of group {number} is {rate:.9g} instead of {expected:.9g} (update {step + 1})"
                )
        return None

    def _definition_of(self, kind: str) -> Callable[[int], float] | None:
        definitions: dict[str, Callable[[int], float]] = {
            "linear": self._linear,
            "cosine": self._cosine,
            "constant": lambda _: 1.0,
            "constant_with_warmup": self._warming_up,
        }
        return definitions.get(kind)

    def _warming_up(self, step: int) -> float:
        return min(1.0, step / max(1, self._warmup))

    def _left(self, step: int) -> float:
        return (self._steps - step) / max(1, self._steps - self._warmup)

    def _linear(self, step: int) -> float:
        if step < self._warmup:
            return self._warming_up(step)
        return max(0.0, self._left(step))

    def _cosine(self, step: int) -> float:
        if step < self._warmup:
            return self._warming_up(step)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (1.0 - self._left(step)))))
