"""The links between cards and processor: how wide, where the card hangs, its memory window, its error counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.pcie_rate import Narrowest, narrowest, reachable_speed
from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.machine.pci import Link
from hf_rocm_tune.machine.survey import Gpu, survey
from hf_rocm_tune.machine.sysfs import Reading

_MIB, _GIB = 1 << 20, 1 << 30
CORRECTED = "correctable"


def _links(evidence: Evidence) -> Iterator[Finding]:
    slowest_of: dict[str, Narrowest] = {}
    for gpu in evidence.cards:
        slowest = narrowest(gpu.path)
        if slowest is None:
            seen = [reading.reason for link in gpu.path for reading in (link.width, link.speed) if reading.reason]
            yield unknown(
                "link_width", "; ".join(seen) or "its way to the processor could not be read", subject=gpu.address
            )
        else:
            slowest_of[gpu.address] = slowest
            yield _link(gpu, slowest)
            yield from _slow_now(gpu)
    yield from _unequal(slowest_of)


def _unequal(slowest_of: Mapping[str, Narrowest]) -> Iterator[Finding]:
    """That the links of several cards differ, by width, else by speed: by what their ends can, not by an idle link."""
    if len({one.width for one in slowest_of.values()}) > 1:
        listed = ", ".join(f"{address}: x{one.width}" for address, one in slowest_of.items())
        yield from_row("link_width", "links_unequal", widths=listed)
    elif len({one.speed for one in slowest_of.values()}) > 1:
        listed = ", ".join(f"{address}: x{one.width} at {one.speed:g} GT/s" for address, one in slowest_of.items())
        yield from_row("link_width", "links_unequal_speed", speeds=listed)


def _link(gpu: Gpu, slowest: Narrowest) -> Finding:
    bounds = knowledge_data("thresholds.toml")
    rate = slowest.rate_gb_s
    expect = bounds["expected"].get(f"{slowest.speed:g}", {}).get(f"x{slowest.width}", "")
    limits = bounds["link_gb_s"]
    row = "link_full" if rate >= limits["x8"] else "link_half" if rate >= limits["x4"] else "link_narrow"
    values: dict[str, Any] = {"width": slowest.width, "speed": f"{slowest.speed:g}", "rate": rate}
    if row != "link_full":
        values["where"] = slowest.link.device
    seen = [_describe(link) for link in gpu.path]
    return from_row("link_width", row, subject=gpu.address, evidence=seen, address=gpu.address, expect=expect, **values)


def _slow_now(gpu: Gpu) -> Iterator[Finding]:
    for link in gpu.path:
        now, able = link.speed.value, reachable_speed(link)
        if now is not None and able is not None and now < able:
            values = {"address": gpu.address, "where": link.device, "now": f"{now:g}", "speed": f"{able:g}"}
            yield from_row("link_width", "link_slow_now", subject=gpu.address, **values)


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
            yield unknown("slot", why, subject=gpu.address, evidence=[path] if path else [])
        else:
            row = on_chipset if gpu.behind_chipset else "slot_of_processor"
            yield from_row("slot", row, subject=gpu.address, address=gpu.address, path=path)


def _atomics(evidence: Evidence) -> Iterator[Finding]:
    missing = "atomics_missing" if evidence.card_count < 2 else "atomics_missing_pair"
    for gpu in evidence.cards:
        if gpu.atomics.value is None:
            yield unknown("atomics", gpu.atomics.reason, subject=gpu.address)
        else:
            row = "atomics_ok" if gpu.atomics.value else missing
            yield from_row("atomics", row, subject=gpu.address, address=gpu.address)


def _bar(evidence: Evidence) -> Iterator[Finding]:
    share = knowledge_data("thresholds.toml")["bar_share"]["full"]
    for gpu in evidence.cards:
        vram = gpu.node.vram_bytes if gpu.node else gpu.sensors.vram_total_bytes.value
        if gpu.bar_bytes.value is None or not vram:
            yield unknown(
                "bar", gpu.bar_bytes.reason or "the size of the card's memory is not known", subject=gpu.address
            )
        elif gpu.bar_bytes.value >= share * vram:
            gib = gpu.bar_bytes.value / _GIB
            yield from_row("bar", "bar_full", subject=gpu.address, address=gpu.address, bar_gib=gib)
        else:
            row = "bar_small" if evidence.card_count < 2 else "bar_small_pair"
            sizes: dict[str, Any] = {"bar_mib": gpu.bar_bytes.value / _MIB, "vram_gib": vram / _GIB}
            yield from_row("bar", row, subject=gpu.address, address=gpu.address, **sizes)


def _counted(aer: Mapping[str, Reading[int]]) -> dict[str, int]:
    return {kind: reading.value for kind, reading in aer.items() if reading.value is not None}


def _corrected(counts: Mapping[str, int]) -> dict[str, int]:
    """Errors after which the hardware has sent again, so that nothing was lost."""
    return {kind: count for kind, count in counts.items() if count and kind == CORRECTED}


def _lasting(counts: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in counts.items() if count and kind != CORRECTED}


def _listed(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{count:,} {kind}" for kind, count in counts.items())


def _errors(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        counted = _counted(gpu.aer)
        seen = [", ".join(f"{kind} {count:,}" for kind, count in counted.items())] if counted else []
        if not counted:
            reasons = {reading.reason for reading in gpu.aer.values()}
            why = "; ".join(sorted(reasons)) or "the kernel has no error counters for it"
            yield unknown("link_errors", why, subject=gpu.address)
        elif not any(counted.values()):
            yield from_row("link_errors", "aer_clean", subject=gpu.address, evidence=seen, address=gpu.address)
        for counts, row in ((_lasting(counted), "aer_errors"), (_corrected(counted), "aer_corrected")):
            if counts:
                about = {"address": gpu.address, "counts": _listed(counts)}
                yield from_row("link_errors", row, subject=gpu.address, evidence=seen, **about)


def _errors_since(evidence: Evidence) -> Iterator[Finding]:
    """What the counters have grown by since the machine was read, with all measurements in between."""
    now = {gpu.address: gpu for gpu in survey().gpus}
    for gpu in evidence.cards:
        before, after = _counted(gpu.aer), _counted(now[gpu.address].aer) if gpu.address in now else {}
        grown = {kind: after[kind] - count for kind, count in before.items() if after.get(kind, 0) > count}
        seen = [f"{kind}: {before[kind]:,} before, {after[kind]:,} after" for kind in grown]
        for counts, row in ((_lasting(grown), "aer_rising"), (_corrected(grown), "aer_corrected_rising")):
            if counts:
                about = {"address": gpu.address, "counts": _listed(counts)}
                yield from_row("link_errors_after", row, subject=gpu.address, evidence=seen, **about)
        if not grown and before and after:
            yield from_row("link_errors_after", "aer_still", subject=gpu.address, address=gpu.address)


CHECKS = (
    Check(name="link_width", group="links", about="width and speed of every link up to the processor", run=_links),
    Check(name="slot", group="links", about="whether the card hangs from the chipset", run=_slot),
    Check(name="atomics", group="links", about="PCIe atomics between card and processor", run=_atomics),
    Check(name="bar", group="links", about="resizable BAR", run=_bar),
    Check(name="link_errors", group="links", about="PCIe error counters since boot", run=_errors),
)

AFTER_MEASURING = Check(
    name="link_errors_after",
    group="after",
    about="PCIe error counters again, after everything that was measured",
    run=_errors_since,
    measured=True,
    needs_gpu=True,
    seconds=0.1,
)
