"""Read checks of the links between card and processor: width, slot, memory window, error counters.

The rate of a link by arithmetic is that of its lanes less the line code, 8b/10b up to 5 GT/s and 128b/130b above (PCI
Express base specification): PCIe 4.0 x16 has 31.5 * 10^9 bytes a second in each direction, of which packet headers take
about a tenth. Not covered: PCIe 6.0, which has no such code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, fail, note, ok, unknown, warn
from hf_rocm_tune.machine.gpus import Link
from hf_rocm_tune.machine.survey import Gpu, survey

X4_GB_S = 8.0
X8_GB_S = 16.0
"""Rates below which a link is that of four, or eight, lanes of PCIe 4.0."""
_MIB = 1 << 20
_GIB = 1 << 30
_SYSFS = "kernel documentation: sysfs-bus-pci"
_AER = "kernel documentation: PCI Express AER"
_AER_SOURCES = f"{_AER}; rocm-libraries#12344"
_BAR = "kernel documentation: amdgpu module parameters; ROCm/ROCm#6342"
_RATES = f"{_SYSFS}; ROCm/ROCm#2253"
_SLOTS = "rocm.docs radeon-ryzen docs-5.7.0: limitations; ROCm/ROCm#2429"
_SEAT = "reseat the card, try another slot or no riser, run stock clocks"
_EXPECTED = {
    (16.0, 16): "; 28 to 29 were measured on a 7900 XTX",
    (16.0, 8): "; 13 to 14 are to be expected, and x8 is what two cards on one board usually have",
    (16.0, 4): "; 6.5 to 7 are to be expected",
    (8.0, 16): ", as on a board of PCIe 3.0 or with such a setting in the BIOS",
}


class LinkRate(NamedTuple):
    """The state of a link: lanes, 10^9 transfers a second and lane, PCI address of the device at its lower end."""

    width: int
    speed: float
    where: str

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second in one direction."""
        return self.speed * self.width * (128 / 130 if self.speed >= 8 else 8 / 10) / 8


def narrowest(path: Sequence[Link]) -> LinkRate | None:
    """The slowest link between a card and the processor, at the speed that both ends support (an idle link runs
    slower); None if width or speed of one of them is unknown."""
    rates = [LinkRate(link.width or 0, link.able or 0.0, link.device) for link in path]
    if not rates or not all(rate.gb_s for rate in rates):
        return None
    return min(rates, key=lambda rate: rate.gb_s)


def _links(evidence: Evidence) -> Iterator[Finding]:
    status = _graver_with_two(evidence)
    for gpu in evidence.cards:
        if not all(link.answers for link in gpu.upward.links):
            yield _silent(evidence, gpu)
            continue
        yield _link(evidence, gpu)
        if gpu.upward.behind_chipset:
            yield status("slot_of_chipset", "a card is on a slot of the chipset",
                         f"{gpu.address} reaches the processor through the chipset "
                         f"({' > '.join(reversed(gpu.upward.chain))}), which shares its lanes with disks and network; "
                         "with several cards, AMD supports slots of the processor only, and HIP errors were reported",
                         "move the card to a slot of the processor", _SLOTS, gpu.address)  # fmt: skip


def _silent(evidence: Evidence, gpu: Gpu) -> Finding:
    """A card whose link reads as all ones: it sleeps, or is gone."""
    managed = evidence.machine.amdgpu.get("runpm") != "0"
    source = "TheRock#8232; kernel documentation: sysfs-bus-pci"
    status = gpu.runtime_status or "nothing"
    state = f"{gpu.address}: its link reads as all ones, and its power management says {status}"
    if any(known is gpu for _, known in evidence.joined):
        return note("card_slept", "the card slept", f"{state}; torch has woken it since",
                    "run `doctor` again for the state of the link", source, gpu.address)  # fmt: skip
    fix = f"{_SEAT}; read `sudo dmesg | grep amdgpu`, and switch the machine off and on"
    if managed:
        fix = (
            "add the boot parameter `amdgpu.runpm=0`, which keeps it awake, and switch the machine off and on; if it "
            f"happens again: {_SEAT}"
        )
    return fail("card_lost", "The card does not answer on its bus",
                f"{state}: it did not wake up, or has fallen off the bus (a cable or riser, its power supply)", fix,
                source, gpu.address)  # fmt: skip


def _link(evidence: Evidence, gpu: Gpu) -> Finding:
    slowest = narrowest(gpu.upward.links)
    if slowest is None:
        ends = [evidence.machine.why(link.device, "current_link") for link in gpu.upward.links]
        return unknown("; ".join(ends) or "the links to the processor could not be read", subject=gpu.address)
    width = slowest.width
    rate = slowest.gb_s
    text = (
        f"the narrowest link between {gpu.address} and the processor, at {slowest.where}, has {width} lanes at up to "
        f"{slowest.speed:g} GT/s: {rate:.1f} GB/s each way by arithmetic{_EXPECTED.get((slowest.speed, width), '')}"
    )
    read = [
        f"{link.device}: x{link.width or '?'} at {link.speed or 0:g} GT/s (able: {link.able or 0:g})"
        for link in gpu.upward.links
    ]
    fix = "move the card to a slot of the processor, and check the BIOS settings of its lanes and its generation"
    if rate < X8_GB_S and gpu.upward.links[0].whole and slowest.where == gpu.upward.links[0].device:
        text = f"{text}. The card itself has no more lanes"
        return ok("link_whole", f"PCIe x{width}, all lanes of the card", text, _RATES, subject=gpu.address, read=read)
    if rate < X4_GB_S:
        text += ". That makes transfers slow, not wrong"
        return warn("link_narrow", f"x{width} link: {rate:.1f} GB/s at most", text, fix, _RATES, gpu.address, read)
    if rate < X8_GB_S and evidence.card_count < 2:
        return note("link_half", f"PCIe x{width}, {rate:.0f} GB/s", text, fix, _RATES, gpu.address, read)
    return ok("link_ok", f"PCIe x{width}", text, _RATES, subject=gpu.address, read=read)


def _bar(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        window = gpu.bar_bytes
        vram = gpu.vram_bytes
        if window is None or not vram:
            why = evidence.machine.why(gpu.address, "resource") if vram else "the card's memory size is not known"
            yield unknown(why, subject=gpu.address)
        elif window >= 0.9 * vram:
            text = f"{gpu.address}: the largest BAR is {window / _GIB:.0f} GiB, the whole memory"
            yield ok("bar_full", "resizable BAR", text, _SYSFS, subject=gpu.address)
        else:
            yield _graver_with_two(evidence)(
                "bar_small", "resizable BAR is off",
                f"{gpu.address}: the largest BAR is {window / _MIB:.0f} MiB, and the card has {vram / _GIB:.0f} GiB; "
                "this is among the causes of wrong or missing copies between cards",
                'switch on "Above 4G decoding" and "Resizable BAR" ("Smart Access Memory") in the BIOS',
                _BAR, gpu.address)  # fmt: skip


def _graver_with_two(evidence: Evidence) -> Callable[..., Finding]:
    """A note on one card; a warning where several have to copy to each other."""
    return warn if evidence.card_count > 1 else note


def _errors(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        wrong = _uncorrected(gpu.aer)
        if not gpu.aer:
            yield unknown(evidence.machine.why(gpu.address, "aer_dev"), subject=gpu.address)
        elif wrong:
            yield warn("aer_errors", "The PCIe link has uncorrected errors",
                       f"{gpu.address} counted {wrong} errors since boot: a riser, a slot or a power supply?",
                       f"{_SEAT}; read the counter again under load: a rising count matters", _AER_SOURCES,
                       gpu.address)  # fmt: skip
        else:
            corrected = gpu.aer.get("correctable", 0)
            text = f"{gpu.address}: since boot; what was corrected was sent again, so nothing was lost"
            title = f"{corrected:,} corrected errors" if corrected else "no errors"
            yield ok("aer_clean", title, text, _AER, subject=gpu.address)


def _errors_since(evidence: Evidence) -> Iterator[Finding]:
    """The errors counted since the machine was read, which is before all measurements."""
    now = {gpu.address: gpu.aer for gpu in survey(evidence.root).gpus}
    for gpu in evidence.cards:
        after = now.get(gpu.address, {})
        grown = {kind: after[kind] - count for kind, count in gpu.aer.items() if after.get(kind, 0) > count}
        read = [f"{kind}: {gpu.aer[kind]:,} before, {after[kind]:,} after" for kind in grown]
        wrong = _uncorrected(grown)
        if wrong:
            yield fail("aer_rising", "Uncorrected PCIe errors during the measurements",
                       f"{gpu.address} counted {wrong} more errors while this doctor ran",
                       f"{_SEAT}; do not train on it before the counter stops rising", _AER_SOURCES, gpu.address,
                       read)  # fmt: skip
        elif grown:
            yield warn("aer_corrected_rising", "Corrected PCIe errors during the measurements",
                       f"{gpu.address} counted {grown['correctable']:,} more errors while this doctor ran: the link is "
                       "marginal", f"{_SEAT}, and run the doctor again", _AER_SOURCES, gpu.address, read)  # fmt: skip
        elif gpu.aer and after:
            text = f"{gpu.address}: the counters did not rise"
            yield ok("aer_still", "no PCIe errors while measuring", text, _AER, subject=gpu.address)


def _uncorrected(counts: Mapping[str, int]) -> str:
    """The uncorrected errors in words; empty where there are none."""
    return " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count and kind != "correctable")


CHECKS = (
    Check(
        "link", "links", "width and speed of the links up to the processor, and whether they pass the chipset", _links
    ),
    Check("bar", "links", "resizable BAR", _bar),
    Check("link_errors", "links", "PCIe error counters since boot", _errors),
)
AFTER = Check("link_errors_after", "after", "PCIe error counters again, after all measurements", _errors_since)
