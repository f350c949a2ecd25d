"""PCI devices: which display and compute devices there are, what sysfs states of one, and the path from it to the CPU.

A Radeon card since Vega 20 carries a switch of its own: the GPU hangs from a downstream port (1002:1479) of an upstream
port (1002:1478) that sits on the card's connector. The GPU's own link is the one inside the card and always reads as
full speed and width; the slot shows at the upstream port. amdgpu skips these bridges by their vendor id in the same way
(``amdgpu_device_partner_bandwidth``: "skip upstream/downstream switches internal to dGPU"). An example of the whole
chain on AM5 is in freebsd/drm-kmod#426: 1478, 1479, 744c.

Forms: kernel ``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-bus-pci-devices-aer``, ``sysfs-kernel-iommu_groups``.
Not covered: on which side of an Intel, ARM or server board a root port sits; that is unknown, not "the CPU".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hf_rocm_tune.machine.sysfs import (
    Reading,
    Tree,
    derived,
    list_names,
    parse_int,
    read_link_name,
    read_parsed,
    read_text,
    unknown,
)

DEVICES = "sys/bus/pci/devices"
AMD, NVIDIA, INTEL = 0x1002, 0x10DE, 0x8086

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI class codes: display controllers of any kind, and processing accelerators (how Instinct cards show themselves).
_DISPLAY, _ACCELERATOR = 0x03, 0x1200
# include/linux/ioport.h IORESOURCE_MEM; the first six lines of ``resource`` are the device's own BARs.
_MEMORY, _BARS = 0x200, 6
# Kinds of counters, by the name of their file and of the line with the total.
_AER = {
    "correctable": ("aer_dev_correctable", "TOTAL_ERR_COR"),
    "nonfatal": ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
    "fatal": ("aer_dev_fatal", "TOTAL_ERR_FATAL"),
}
# Ports of the card's own switch that do not have ATI's vendor id: pci.ids "Vega 10 PCIe Bridge".
_VEGA_10 = frozenset({(0x1022, 0x1470), (0x1022, 0x1471)})
# pci.ids, vendor 1022: ports of the 300, 400, 500 and 600 series; 57xx is the X570, whose tree is in ROCm/ROCm#910;
# 43b3 is an A320's, in freebsd/drm-kmod#334.
_CHIPSET = frozenset(
    {0x43B0, 0x43B1, 0x43B3, 0x43B4, 0x43C6, 0x43C7, 0x43E9, 0x43EA, 0x43F4, 0x43F5, 0x57A3, 0x57A4, 0x57AD}
)
# pci.ids, vendor 1022: "GPP Bridge" of Zen CPUs and of the EPYC families. The port to the chipset is one of these too,
# so this says "CPU" only where no bridge of the chipset follows.
_CPU = frozenset(
    {0x1453, 0x1454, 0x1483, 0x1484, 0x149A, 0x14A5, 0x14A7, 0x14AA, 0x14AB, 0x14B8, 0x14B9, 0x14BA, 0x14DB, 0x14DD}
    | {0x14EB, 0x14ED, 0x14EE, 0x150B, 0x150C, 0x153E, 0x1554, 0x1555, 0x15D3, 0x15DB, 0x1633, 0x1634, 0x1635}
)
# PCIe knows these widths; 0 means no link, 63 and 255 are what a sleeping device and an unknown capability read as.
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})

_Ids = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class DisplayDevice:
    """One display or compute device: its address, its ids, and its revision where that could be read."""

    address: str
    vendor_id: int
    device_id: int
    revision: int | None


@dataclass(frozen=True, kw_only=True)
class Link:
    """One PCI Express link, as ``current_link_*`` and ``max_link_*`` of the device at its lower end say.

    Attributes:
        device: PCI address of the device at the lower end.
        speed: in 10^9 transfers a second and lane (16.0 is PCIe 4.0). The link may be slower when idle.
        width: lanes in use.
        max_speed: what the device can, same unit.
        max_width: what the device can.
        port_max_speed, port_max_width: what the port at the upper end can; a slot with fewer lanes shows here.
    """

    device: str
    speed: Reading[float]
    width: Reading[int]
    max_speed: Reading[float]
    max_width: Reading[int]
    port_max_speed: Reading[float]
    port_max_width: Reading[int]


@dataclass(frozen=True, kw_only=True)
class Upward:
    """A device's path up to the CPU.

    Attributes:
        chain: addresses from the root port down to the device itself, which is always there.
        links: outside of the card, the one at the card's connector first.
        root_port: None where the device hangs from no bridge, or the path could not be followed.
        behind_chipset: None where a bridge of the path is not known here.
    """

    chain: tuple[str, ...]
    links: tuple[Link, ...]
    root_port: str | None
    behind_chipset: bool | None


def _parse_hex(text: str) -> int | None:
    """``0x744c`` and the like, of at most 64 bits, or None."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else None


def _read_hex(tree: Tree, address: str, file: str) -> Reading[int]:
    """A file that holds one number as sysfs writes PCI ids."""
    return read_parsed(tree, f"{DEVICES}/{address}/{file}", _parse_hex, "not a hexadecimal number")


def list_display_devices(tree: Tree) -> tuple[tuple[DisplayDevice, ...], tuple[str, ...]]:
    """Every display or compute device in PCI order, and one line for whatever kept one from being listed."""
    names = list_names(tree, DEVICES)
    if names.value is None:
        return (), (names.reason,)
    found: list[DisplayDevice] = []
    reasons: list[str] = []
    in_order = sorted(
        filter(_ADDRESS.fullmatch, names.value), key=lambda name: [int(part, 16) for part in re.split("[:.]", name)]
    )
    for address in in_order:
        code = _read_hex(tree, address, "class")
        if code.value is None:
            reasons.append(code.reason)
        elif code.value >> 16 == _DISPLAY or code.value >> 8 == _ACCELERATOR:
            vendor, device = _read_hex(tree, address, "vendor"), _read_hex(tree, address, "device")
            if vendor.value is None or device.value is None:
                reasons.append(vendor.reason or device.reason)
            else:
                revision = _read_hex(tree, address, "revision").value
                found.append(
                    DisplayDevice(address=address, vendor_id=vendor.value, device_id=device.value, revision=revision)
                )
    return tuple(found), tuple(reasons)


def read_driver(tree: Tree, address: str) -> Reading[str]:
    """Name of the bound kernel driver (``amdgpu``, ``vfio-pci``)."""
    return read_link_name(tree, f"{DEVICES}/{address}/driver", absent="no driver is bound")


def read_bar_bytes(tree: Tree, address: str) -> Reading[int]:
    """Size of the largest memory BAR in bytes."""

    def largest(text: str) -> int | None:
        sizes = []
        for line in text.splitlines()[:_BARS]:
            numbers = [number for number in map(_parse_hex, line.split()) if number is not None]
            if len(numbers) == len(line.split()) == 3 and numbers[2] & _MEMORY and numbers[1] > numbers[0]:
                sizes.append(numbers[1] - numbers[0] + 1)
        return max(sizes, default=None)

    path = f"{DEVICES}/{address}/resource"
    return derived(read_text(tree, path), largest, f"/{path}: no memory BAR")


def read_iommu_group(tree: Tree, address: str) -> Reading[int]:
    """Number of the device's IOMMU group."""
    path = f"{DEVICES}/{address}/iommu_group"
    name = read_link_name(tree, path, absent="the device is in no IOMMU group")
    return derived(name, parse_int, f"/{path}: does not point at a numbered group")


def read_iommu_type(tree: Tree, group: Reading[int]) -> Reading[str]:
    """``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating), as the kernel states it of a group."""
    if group.value is None:
        return unknown(group.reason)
    path = f"sys/kernel/iommu_groups/{group.value}/type"
    text = read_text(tree, path)
    return derived(text, lambda t: t if re.fullmatch("[A-Za-z-]{1,24}", t) else None, f"/{path}: no type of a domain")


def read_aer(tree: Tree, addresses: Iterable[str]) -> dict[str, Reading[int]]:
    """Totals of the error counters since boot, summed over a card and the bridges above it.

    Both ends of a link count: the end that sees an error may not be the one that causes it, says the kernel's page. A
    device that has no counters or whose counters cannot be read adds nothing, so a sum is a lower bound.
    """

    def total(address: str, file: str, name: str) -> Reading[int]:
        def stated(text: str) -> int | None:
            lines = [line.split() for line in text.splitlines()]
            return next((parse_int(line[1]) for line in lines if len(line) > 1 and line[0] == name), None)

        path = f"{DEVICES}/{address}/{file}"
        return derived(read_text(tree, path), stated, f"/{path}: no {name}")

    chain = tuple(addresses)
    found = {}
    for kind, (file, name) in _AER.items():
        readings = [total(address, file, name) for address in chain]
        values = [reading.value for reading in readings if reading.value is not None]
        reason = readings[0].reason if readings else "no device to read counters of"
        found[kind] = Reading(value=sum(values)) if values else unknown(reason)
    return found


def read_upward(tree: Tree, address: str) -> Upward:
    """Follow a device up to its root port. Never raises; what cannot be followed is left out."""
    chain = _read_chain(tree, address)
    ids = [(_read_hex(tree, place, "vendor").value, _read_hex(tree, place, "device").value) for place in chain]
    # The topmost function that belongs to the card itself.
    connector = len(ids) - 1
    while ids[-1][0] == AMD and connector > 0 and (ids[connector - 1][0] == AMD or ids[connector - 1] in _VEGA_10):
        connector -= 1
    # From the root port down, ports alternate: root or downstream port, then upstream port or endpoint; a link has one
    # of the latter at its lower end. Where the count does not fit that (a bridge to conventional PCI), every function
    # is taken, which may list a link twice.
    lower_ends = range(connector, 0, -2 if connector % 2 else -1) if connector else range(1)
    return Upward(
        chain=chain,
        links=tuple(_read_link(tree, chain[place], chain[place - 1] if place else None) for place in lower_ends),
        root_port=chain[0] if len(chain) > 1 else None,
        behind_chipset=_is_behind_chipset(ids[:connector]),
    )


def _read_chain(tree: Tree, address: str) -> tuple[str, ...]:
    try:
        target = tree.link(f"{DEVICES}/{address}")
    except OSError:
        return (address,)
    # Below Intel's VMD a second hierarchy begins: only what follows the last host bridge counts.
    below = re.split(r"/pci[0-9a-f]{4,8}:[0-9a-f]{2}(?=/)", f"/{target}")[-1]
    chain = tuple(part for part in below.split("/") if part)
    whole = chain[-1:] == (address,) and all(map(_ADDRESS.fullmatch, chain)) and len(set(chain)) == len(chain)
    return chain if whole else (address,)


def _is_behind_chipset(bridges: list[_Ids]) -> bool | None:
    if any(vendor == 0x1022 and device in _CHIPSET for vendor, device in bridges):
        return True
    return False if bridges and all(vendor == 0x1022 and device in _CPU for vendor, device in bridges) else None


def _read_link(tree: Tree, lower: str, upper: str | None) -> Link:
    no_port = "no bridge above the device is known"
    return Link(
        device=lower,
        speed=_read_speed(tree, lower, "current_link_speed"),
        width=_read_width(tree, lower, "current_link_width"),
        max_speed=_read_speed(tree, lower, "max_link_speed"),
        max_width=_read_width(tree, lower, "max_link_width"),
        port_max_speed=_read_speed(tree, upper, "max_link_speed") if upper else unknown(no_port),
        port_max_width=_read_width(tree, upper, "max_link_width") if upper else unknown(no_port),
    )


def _read_speed(tree: Tree, address: str, file: str) -> Reading[float]:
    def parse(text: str) -> float | None:
        # "16.0 GT/s PCIe", "8 GT/s" before kernel 5.7, "Unknown" of a sleeping device.
        found = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", text, re.ASCII)
        return float(found[1]) if found else None

    return read_parsed(tree, f"{DEVICES}/{address}/{file}", parse, "no speed")


def _read_width(tree: Tree, address: str, file: str) -> Reading[int]:
    def parse(text: str) -> int | None:
        width = parse_int(text)
        return width if width in _WIDTHS else None

    return read_parsed(tree, f"{DEVICES}/{address}/{file}", parse, "no width of a link")
