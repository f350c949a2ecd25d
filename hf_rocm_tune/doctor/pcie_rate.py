"""What the links between a card and the processor can carry, by arithmetic.

A lane carries its transfers less the share of the line code: 8b/10b up to 5 GT/s, 128b/130b above (PCI Express base
specification). PCIe 4.0 x16 gives 31.5 * 10^9 bytes a second in each direction; packet headers take about a tenth more.

Not covered: PCIe 6.0, which has no such code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_rocm_tune.machine.pci import Link


@dataclass(frozen=True, kw_only=True)
class Narrowest:
    """The link that sets the pace between a card and the processor.

    Attributes:
        link: the link.
        width: lanes in use, which a link keeps while it is idle.
        speed: what both of its ends can, in 10^9 transfers a second and lane.
    """

    link: Link
    width: int
    speed: float

    @property
    def rate_gb_s(self) -> float:
        """10^9 bytes a second in one direction."""
        return rate_gb_s(self.speed, self.width)


def rate_gb_s(speed: float, width: int) -> float:
    """10^9 bytes a second in one direction.

    Args:
        speed: 10^9 transfers a second and lane.
        width: lanes.
    """
    share = 128 / 130 if speed >= 8 else 8 / 10
    return speed * width * share / 8


def reachable_speed(link: Link) -> float | None:
    """The speed that both ends of a link can run at; an idle link runs slower. None where nothing is known of it."""
    ends = [reading.value for reading in (link.max_speed, link.port_max_speed) if reading.value is not None]
    now = link.speed.value
    # What runs faster than one of its ends is said to be able to is believed as it runs.
    return max(min(ends), now or 0.0) if ends else now


def narrowest(path: Sequence[Link]) -> Narrowest | None:
    """The link of a card's way that carries least; None where one of them is not known well enough to tell."""
    found: list[Narrowest] = []
    for link in path:
        speed, width = reachable_speed(link), link.width.value
        if speed is None or width is None:
            return None
        found.append(Narrowest(link=link, width=width, speed=speed))
    return min(found, key=lambda one: one.rate_gb_s, default=None)
