"""PCI devices: which display and compute devices there are, and what sysfs states of one of them.

Forms: kernel ``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-bus-pci-devices-aer``, ``sysfs-kernel-iommu_groups``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hf_rocm_tune.machine.sysfs import Reading, derived, list_names, parse_int, read_link_name, read_text, unknown
from hf_rocm_tune.machine.sysfs_tree import Tree

DEVICES = "sys/bus/pci/devices"
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
AMD, NVIDIA, INTEL = 0x1002, 0x10DE, 0x8086

# PCI class codes: display controllers of any kind, and processing accelerators (how Instinct cards show themselves).
_DISPLAY = 0x03
_ACCELERATOR = 0x1200
# include/linux/ioport.h IORESOURCE_MEM; the first six lines of ``resource`` are the device's own BARs.
_MEMORY = 0x200
_BARS = 6
# Kinds of counters, by the name of their file and of the line with the total.
_AER = {
    "correctable": ("aer_dev_correctable", "TOTAL_ERR_COR"),
    "nonfatal": ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
    "fatal": ("aer_dev_fatal", "TOTAL_ERR_FATAL"),
}


@dataclass(frozen=True, kw_only=True)
class DisplayDevice:
    """One display or compute device: its address, its ids, and its revision where that could be read."""

    address: str
    vendor_id: int
    device_id: int
    revision: int | None


def parse_hex(text: str) -> int | None:
    """``0x744c`` and the like, of at most 64 bits, or None."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else None


def read_hex(tree: Tree, path: str) -> Reading[int]:
    """A file that holds one number as sysfs writes PCI ids."""
    text = read_text(tree, path)
    return derived(text, parse_hex, f"/{path}: not a hexadecimal number: {(text.value or '')[:40]!r}")


def list_display_devices(tree: Tree) -> tuple[tuple[DisplayDevice, ...], tuple[str, ...]]:
    """Every display or compute device in PCI order, and one line for whatever kept one from being listed."""
    names = list_names(tree, DEVICES)
    if names.value is None:
        return (), (names.reason,)
    found: list[DisplayDevice] = []
    reasons: list[str] = []
    for address in sorted(filter(ADDRESS.fullmatch, names.value), key=_place):
        code = read_hex(tree, f"{DEVICES}/{address}/class")
        if code.value is None:
            reasons.append(code.reason)
        elif code.value >> 16 == _DISPLAY or code.value >> 8 == _ACCELERATOR:
            vendor = read_hex(tree, f"{DEVICES}/{address}/vendor")
            device = read_hex(tree, f"{DEVICES}/{address}/device")
            if vendor.value is None or device.value is None:
                reasons.append(vendor.reason or device.reason)
            else:
                revision = read_hex(tree, f"{DEVICES}/{address}/revision").value
                found.append(
                    DisplayDevice(address=address, vendor_id=vendor.value, device_id=device.value, revision=revision)
                )
    return tuple(found), tuple(reasons)


def _place(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def read_driver(tree: Tree, address: str) -> Reading[str]:
    """Name of the bound kernel driver (``amdgpu``, ``vfio-pci``)."""
    return read_link_name(tree, f"{DEVICES}/{address}/driver", absent="no driver is bound")


def read_bar_bytes(tree: Tree, address: str) -> Reading[int]:
    """Size of the largest memory BAR in bytes."""
    path = f"{DEVICES}/{address}/resource"
    text = read_text(tree, path)
    return derived(text, _largest_bar, f"/{path}: no memory BAR")


def _largest_bar(text: str) -> int | None:
    sizes = []
    for line in text.splitlines()[:_BARS]:
        numbers = [parse_hex(part) for part in line.split()]
        if len(numbers) == 3:
            start, end, flags = numbers
            if start is not None and end is not None and flags is not None and flags & _MEMORY and end > start:
                sizes.append(end - start + 1)
    return max(sizes, default=None)


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
    return derived(
        text, lambda value: value if re.fullmatch("[A-Za-z-]{1,24}", value) else None, f"/{path}: no type of a domain"
    )


def read_aer(tree: Tree, addresses: Iterable[str]) -> dict[str, Reading[int]]:
    """Totals of the error counters since boot, summed over a card and the bridges above it.

    Both ends of a link count: the end that sees an error may not be the one that causes it, says the kernel's page. A
    device that has no counters or whose counters cannot be read adds nothing, so a sum is a lower bound.
    """
    chain = tuple(addresses)
    return {kind: _summed([_total(tree, address, *place) for address in chain]) for kind, place in _AER.items()}


def _total(tree: Tree, address: str, file: str, line: str) -> Reading[int]:
    path = f"{DEVICES}/{address}/{file}"
    text = read_text(tree, path)
    return derived(text, lambda value: _line_value(value, line), f"/{path}: no {line}")


def _line_value(text: str, name: str) -> int | None:
    values = [
        parse_int(fields[1]) for fields in map(str.split, text.splitlines()) if fields[:1] == [name] and fields[1:]
    ]
    return values[0] if values else None


def _summed(readings: list[Reading[int]]) -> Reading[int]:
    values = [reading.value for reading in readings if reading.value is not None]
    if values:
        return Reading(value=sum(values))
    return unknown(readings[0].reason if readings else "no device to read counters of")
