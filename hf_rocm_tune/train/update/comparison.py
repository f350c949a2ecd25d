"""Numbers that are read from a device later, and how they are compared with what they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TENSORS = 4
"""The most tensors that are sampled in a step."""
ELEMENTS = 32
"""Elements of a sample, neighbours of each other."""
TINY = 1e-37
"""What float32 may flush to zero."""


class Awaited(NamedTuple):
    """Numbers on a device, and what is done with them on the host."""

    numbers: Tensor  # float64 of shape [n]
    wrong: Callable[[Any], str | None]  # given the float64 array: what is wrong with it; None if nothing is


class Recomputed(NamedTuple):
    """What an operation has made of values, what it should have made, and how far both may lie apart; float64."""

    what: str
    made: Any
    expected: Any
    bound: Any

    def wrong(self) -> str | None:
        """The first element that is out of its bound, in words; what is no number is."""
        with np.errstate(invalid="ignore"):
            is_wrong = ~(np.abs(self.made - self.expected) <= self.bound)
        if not is_wrong.any():
            return None
        first = int(np.argmax(is_wrong))
        return f"{self.what} is {self.made[first]:.6g} instead of {self.expected[first]:.6g}"


class Elements:
    """Takes the numbers of a row one part after another."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = np.asarray(numbers, dtype=np.float64)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._numbers) - self._at

    def take(self, length: int) -> Any:
        """The next so many numbers."""
        self._at += length
        return self._numbers[self._at - length : self._at]


def copied(tensor: Tensor) -> Tensor:
    """In float64, and never the same memory."""
    if tensor.dtype == torch.float64:
        return tensor.clone()
    return tensor.double()
