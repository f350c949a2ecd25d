"""The memory of a card for the planner: by name, by size, or the one in this machine. Imports no torch."""

from __future__ import annotations

import re

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.cards import CARDS, Card
from hf_rocm_tune.machine.survey import Gpu, Machine, survey
from hf_rocm_tune.memory.plan import DESKTOP_BYTES, GIB, CardMemory

DEFAULT = "rx7900xt"
#: A 7900 XT's 20 GiB are 19.92 to 19.94 GiB to torch; what other cards lose was not read.
USABLE_SHARE = 19.9 / 20
_USUAL_BANDWIDTH = 800


def card_memory(
    *,
    name: str | None = None,
    vram_gib: float | None = None,
    desktop_gib: float | None = None,
    machine: Machine | None = None,
) -> CardMemory:
    """The memory to plan for.

    Args:
        name: of a card in the table, as ``rx7900xt``.
        vram_gib: nominal memory of a card that is not there.
        desktop_gib: held by others; read from the kernel, or assumed, where it is not given.
        machine: the machine; it is read unless given.

    Returns:
        The named card; else one of that size; else the card in this machine; else a 7900 XT.

    Raises:
        UsageError: no such card, a card whose memory is not known, or a size that cannot be.
    """
    if name is not None and vram_gib is not None:
        raise UsageError("--gpu and --vram say the same thing twice; keep one")
    if vram_gib is not None and not 1 <= vram_gib <= 1024:
        raise UsageError(f"--vram must be from 1 to 1024 GiB, got {vram_gib:g}")
    if desktop_gib is not None and desktop_gib < 0:
        raise UsageError(f"--desktop_gib must be 0 or more, got {desktop_gib:g}")
    here = _card_here(survey() if machine is None else machine)
    known = _named(name) if name else here.identity.card if here and vram_gib is None else None
    if known is None and vram_gib is None:
        known = _named(DEFAULT)
    size = vram_gib if vram_gib is not None else known.vram_gib if known else None
    if size is None:
        assert known is not None
        raise UsageError(f"the memory of {known.name} is not in the card table; give --vram in GiB")
    desktop, source = _desktop(desktop_gib, here, size)
    return CardMemory(
        name=known.name if known else f"a card of {size:g} GiB",
        usable=int(size * USABLE_SHARE * GIB),
        desktop=desktop,
        desktop_source=source,
        bandwidth=1e9 * (known.bandwidth_gb_s if known and known.bandwidth_gb_s else _USUAL_BANDWIDTH),
    )


def _named(name: str) -> Card:
    wanted = _letters(name)
    found = [card for card in CARDS if _letters(card.key) == wanted or _letters(card.name) == wanted]
    if not found:
        names = ", ".join(_letters(card.key) for card in CARDS)
        raise UsageError(f"--gpu {name} is not in the card table; it has {names}. Or give --vram in GiB")
    return found[0]


def _letters(name: str) -> str:
    """A name without spaces, dashes and what every card is called."""
    return re.sub(r"[^a-z0-9]|\b(amd|radeon|rx|pro|ai|instinct)\b|^rx", "", name.lower())


def _card_here(machine: Machine) -> Gpu | None:
    """The card with most memory of those that the kernel's driver describes."""
    described = [gpu for gpu in machine.gpus if gpu.sensors.vram_total_bytes.value and not gpu.integrated]
    return max(described, key=lambda gpu: gpu.sensors.vram_total_bytes.value or 0, default=None)


def _desktop(given: float | None, here: Gpu | None, size: float) -> tuple[int, str]:
    """Bytes that others hold, and how that is known."""
    if given is not None:
        return int(given * GIB), "given"
    if here is not None:
        used, total = here.sensors.vram_used_bytes.value, here.sensors.vram_total_bytes.value
        if used is not None and total and abs(total / GIB - size) < 1:
            return used, f"read from the card at {here.address}"
    return DESKTOP_BYTES, "assumed"
