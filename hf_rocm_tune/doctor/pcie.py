"""The links between cards and processor: how wide, where the card hangs, its memory window, its error counters.

What a link can carry, by arithmetic: a lane carries its transfers less the share of the line code, 8b/10b up to 5 GT/s
and 128b/130b above (PCI Express base specification). PCIe 4.0 x16 gives 31.5 * 10^9 bytes a second in each direction;
packet headers take about a tenth more. Not covered: PCIe 6.0, which has no such code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_rocm_tune.doctor.evidence import Check, Evidence
from hf_rocm_tune.doctor.findings import Finding, from_row, knowledge_data, unknown
from hf_rocm_tune.machine.pci import Link
from hf_rocm_tune.machine.survey import Gpu, survey
from hf_rocm_tune.machine.sysfs import Reading

_MIB, _GIB = 1 << 20, 1 << 30
_CORRECTED = "correctable"
"""Errors after which the hardware has sent again, so that nothing was lost."""


@dataclass(frozen=True)
class Narrowest:
    """The link that sets the pace: lanes in use, which a link keeps while it is idle, and what both of its ends can, in
    10^9 transfers a second and lane."""

    link: Link
    width: int
    speed: float


def rate_gb_s(speed: float, width: int) -> float:
    """10^9 bytes a second in one direction.

    Args:
        speed: 10^9 transfers a second and lane.
        width: lanes.
    """
    return speed * width * (128 / 130 if speed >= 8 else 8 / 10) / 8


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
        found.append(Narrowest(link, width, speed))
    return min(found, key=lambda one: rate_gb_s(one.speed, one.width), default=None)


def _links(evidence: Evidence) -> Iterator[Finding]:
    known: dict[str, Narrowest] = {}
    for gpu in evidence.cards:
        slowest = narrowest(gpu.path)
        if slowest is None:
            seen = [reading.reason for link in gpu.path for reading in (link.width, link.speed) if reading.reason]
            yield unknown("; ".join(seen) or "its way to the processor could not be read", subject=gpu.address)
            continue
        known[gpu.address] = slowest
        yield _link(gpu, slowest)
        for link in gpu.path:
            now, able = link.speed.value, reachable_speed(link)
            if now is not None and able is not None and now < able:
                speeds = {"now": f"{now:g}", "speed": f"{able:g}"}
                yield from_row("link_slow_now", subject=gpu.address, where=link.device, **speeds)
    # Several cards differ by width, else by speed: by what their ends can, not by an idle link.
    if len({one.width for one in known.values()}) > 1:
        yield from_row("links_unequal", widths=", ".join(f"{place}: x{one.width}" for place, one in known.items()))
    elif len({one.speed for one in known.values()}) > 1:
        listed = ", ".join(f"{place}: x{one.width} at {one.speed:g} GT/s" for place, one in known.items())
        yield from_row("links_unequal_speed", speeds=listed)


def _link(gpu: Gpu, slowest: Narrowest) -> Finding:
    bounds = knowledge_data("thresholds.toml")
    speed, width, rate = f"{slowest.speed:g}", slowest.width, rate_gb_s(slowest.speed, slowest.width)
    limits = bounds["link_gb_s"]
    row = "link_full" if rate >= limits["x8"] else "link_half" if rate >= limits["x4"] else "link_narrow"
    values: dict[str, Any] = {"expect": bounds["expected"].get(speed, {}).get(f"x{width}", "")}
    values |= {"width": width, "speed": speed, "rate": rate}
    values |= {"where": slowest.link.device} if row != "link_full" else {}
    return from_row(row, subject=gpu.address, evidence=map(_describe, gpu.path), **values)


def _describe(link: Link) -> str:
    width, speed = link.width, link.speed
    lanes = f"x{width.value}" if width.value else f"width unknown ({width.reason})"
    rate = f"{speed.value:g} GT/s" if speed.value else f"speed unknown ({speed.reason})"
    ends = {"device": (link.max_width, link.max_speed), "port": (link.port_max_width, link.port_max_speed)}
    able = [f"{end}: x{lane.value} at {top.value:g}" for end, (lane, top) in ends.items() if lane.value and top.value]
    return f"{link.device}: {lanes} at {rate}" + (f" (able: {', '.join(able)})" if able else "")


def _slot(evidence: Evidence) -> Iterator[Finding]:
    on_chipset = "slot_of_chipset" if evidence.card_count < 2 else "slot_of_chipset_pair"
    for gpu in evidence.cards:
        path = " > ".join(filter(None, [*(link.device for link in gpu.path), gpu.root_port]))
        if gpu.behind_chipset is None:
            why = "which of the bridges above it belong to the processor is not known for this board"
            yield unknown(why, subject=gpu.address, evidence=[path] if path else [])
        else:
            yield from_row(on_chipset if gpu.behind_chipset else "slot_of_processor", subject=gpu.address, path=path)


def _atomics(evidence: Evidence) -> Iterator[Finding]:
    missing = "atomics_missing" if evidence.card_count < 2 else "atomics_missing_pair"
    for gpu in evidence.cards:
        if gpu.atomics.value is None:
            yield unknown(gpu.atomics.reason, subject=gpu.address)
        else:
            yield from_row("atomics_ok" if gpu.atomics.value else missing, subject=gpu.address)


def _bar(evidence: Evidence) -> Iterator[Finding]:
    share = knowledge_data("thresholds.toml")["bar_share"]["full"]
    for gpu in evidence.cards:
        vram = gpu.node.vram_bytes if gpu.node else gpu.sensors.vram_total_bytes.value
        window = gpu.bar_bytes
        if window.value is None or not vram:
            yield unknown(window.reason or "the size of the card's memory is not known", subject=gpu.address)
        elif window.value >= share * vram:
            yield from_row("bar_full", subject=gpu.address, bar_gib=window.value / _GIB)
        else:
            row = "bar_small" if evidence.card_count < 2 else "bar_small_pair"
            yield from_row(row, subject=gpu.address, bar_mib=window.value / _MIB, vram_gib=vram / _GIB)


def _errors(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        counted = _counted(gpu.aer)
        seen = [", ".join(f"{kind} {count:,}" for kind, count in counted.items())] if counted else []
        if not counted:
            reasons = {reading.reason for reading in gpu.aer.values()}
            yield unknown("; ".join(sorted(reasons)) or "the kernel has no error counters for it", subject=gpu.address)
        elif not any(counted.values()):
            yield from_row("aer_clean", subject=gpu.address, evidence=seen)
        yield from _by_kind(gpu.address, counted, seen, "aer_errors", "aer_corrected")


def _errors_since(evidence: Evidence) -> Iterator[Finding]:
    """What the counters have grown by since the machine was read, with all measurements in between."""
    now = {gpu.address: gpu for gpu in survey().gpus}
    for gpu in evidence.cards:
        before, after = _counted(gpu.aer), _counted(now[gpu.address].aer) if gpu.address in now else {}
        grown = {kind: after[kind] - count for kind, count in before.items() if after.get(kind, 0) > count}
        seen = [f"{kind}: {before[kind]:,} before, {after[kind]:,} after" for kind in grown]
        yield from _by_kind(gpu.address, grown, seen, "aer_rising", "aer_corrected_rising")
        if not grown and before and after:
            yield from_row("aer_still", subject=gpu.address)


def _counted(aer: Mapping[str, Reading[int]]) -> dict[str, int]:
    return {kind: reading.value for kind, reading in aer.items() if reading.value is not None}


def _by_kind(
    address: str, counts: Mapping[str, int], seen: list[str], lasting: str, corrected: str
) -> Iterator[Finding]:
    for row, is_corrected in ((lasting, False), (corrected, True)):
        met = [f"{count:,} {kind}" for kind, count in counts.items() if count and (kind == _CORRECTED) == is_corrected]
        if met:
            yield from_row(row, subject=address, evidence=seen, counts=" and ".join(met))


CHECKS = (
    Check(name="link_width", group="links", about="width and speed of every link up to the processor", run=_links),
    Check(name="slot", group="links", about="whether the card hangs from the chipset", run=_slot),
    Check(name="atomics", group="links", about="PCIe atomics between card and processor", run=_atomics),
    Check(name="bar", group="links", about="resizable BAR", run=_bar),
    Check(name="link_errors", group="links", about="PCIe error counters since boot", run=_errors),
    Check(
        name="link_errors_after",
        group="after",
        about="PCIe error counters again, after everything that was measured",
        run=_errors_since,
        measured=True,
        needs_gpu=True,
        seconds=0.1,
    ),
)
