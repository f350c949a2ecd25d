"""Delays on a card, in milliseconds: `torch.cuda._sleep` counts ticks whose length depends on the card."""

from __future__ import annotations

from functools import cache

import torch

_TICKS = 1_000_000


@cache
def ticks_of_a_millisecond() -> float:
    """Measured by events: 100,000 on RDNA3, whose clock for this has 100 MHz, about 2,000,000 on others."""
    torch.cuda._sleep(1)  # starts the card
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(_TICKS)
    end.record()
    end.synchronize()
    return _TICKS / begin.elapsed_time(end)


def sleep(milliseconds: float) -> None:
    """Delay what is queued from now on on the current stream."""
    torch.cuda._sleep(int(milliseconds * ticks_of_a_millisecond()))
