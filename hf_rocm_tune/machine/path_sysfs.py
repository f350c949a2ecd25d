"""The way from a card up to the CPU: its links, its root port, and whether it leads through the chipset.

A Radeon card since Vega 20 carries a switch of its own: the GPU hangs from a downstream port (1002:1479) of an upstream
port (1002:1478) that sits on the card's connector. The GPU's own link is the one inside the card and always reads as
full speed and width; the slot shows at the upstream port. amdgpu skips these bridges by their vendor id in the same way
(``amdgpu_device_partner_bandwidth``: "skip upstream/downstream switches internal to dGPU"). An example of the whole
chain on AM5 is in freebsd/drm-kmod#426: 1478, 1479, 744c.

Not covered: on which side of an Intel, ARM or server board a root port sits; that is unknown, not "the CPU".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_rocm_tune.machine.machine import Link
from hf_rocm_tune.machine.pci_sysfs import ADDRESS, AMD, DEVICES, read_hex
from hf_rocm_tune.machine.sysfs import Reading, derived, parse_int, read_text, unknown
from hf_rocm_tune.machine.sysfs_tree import Tree

Ids = tuple[int | None, int | None]

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
_NO_PORT = "no bridge above the device is known"


@dataclass(frozen=True, kw_only=True)
class Upward:
    """A device's way up.

    Attributes:
        chain: addresses from the root port down to the device itself, which is always there.
        links: outside of the card, the one at the card's connector first.
        root_port: None where the device hangs from no bridge, or the way could not be followed.
        behind_chipset: None where a bridge of the way is not known here.
    """

    chain: tuple[str, ...]
    links: tuple[Link, ...]
    root_port: str | None
    behind_chipset: bool | None


def read_upward(tree: Tree, address: str) -> Upward:
    """Follow a device up to its root port. Never raises; what cannot be followed is left out."""
    chain = _read_chain(tree, address)
    ids = [_read_ids(tree, place) for place in chain]
    connector = _connector(ids)
    return Upward(
        chain=chain,
        links=tuple(
            _read_link(tree, chain[place], chain[place - 1] if place else None) for place in _lower_ends(connector)
        ),
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
    whole = (
        bool(chain) and chain[-1] == address and all(map(ADDRESS.fullmatch, chain)) and len(set(chain)) == len(chain)
    )
    return chain if whole else (address,)


def _read_ids(tree: Tree, address: str) -> Ids:
    return (
        read_hex(tree, f"{DEVICES}/{address}/vendor").value,
        read_hex(tree, f"{DEVICES}/{address}/device").value,
    )


def _connector(ids: list[Ids]) -> int:
    """Place in the chain of the topmost function that belongs to the card itself."""
    place = len(ids) - 1
    while ids[-1][0] == AMD and place > 0 and (ids[place - 1][0] == AMD or ids[place - 1] in _VEGA_10):
        place -= 1
    return place


def _lower_ends(connector: int) -> range:
    """Places of the functions at the lower end of a link, from the connector up.

    From the root port down, ports alternate: root or downstream port, then upstream port or endpoint. Where the count
    does not fit that (a bridge to conventional PCI), every function is taken, which may list a link twice.
    """
    step = 2 if connector % 2 else 1
    return range(connector, 0, -step) if connector else range(1)


def _is_behind_chipset(bridges: list[Ids]) -> bool | None:
    if any(vendor == 0x1022 and device in _CHIPSET for vendor, device in bridges):
        return True
    return False if bridges and all(vendor == 0x1022 and device in _CPU for vendor, device in bridges) else None


def _read_link(tree: Tree, lower: str, upper: str | None) -> Link:
    return Link(
        device=lower,
        speed=_read_speed(tree, lower, "current_link_speed"),
        width=_read_width(tree, lower, "current_link_width"),
        max_speed=_read_speed(tree, lower, "max_link_speed"),
        max_width=_read_width(tree, lower, "max_link_width"),
        port_max_speed=_read_speed(tree, upper, "max_link_speed") if upper else unknown(_NO_PORT),
        port_max_width=_read_width(tree, upper, "max_link_width") if upper else unknown(_NO_PORT),
    )


def _read_speed(tree: Tree, address: str, file: str) -> Reading[float]:
    path = f"{DEVICES}/{address}/{file}"
    text = read_text(tree, path)
    return derived(text, _parse_speed, f"/{path}: no speed: {(text.value or '')[:40]!r}")


def _parse_speed(text: str) -> float | None:
    # "16.0 GT/s PCIe", "8 GT/s" before kernel 5.7, "Unknown" of a sleeping device.
    found = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", text, re.ASCII)
    return float(found[1]) if found else None


def _read_width(tree: Tree, address: str, file: str) -> Reading[int]:
    path = f"{DEVICES}/{address}/{file}"
    text = read_text(tree, path)
    return derived(text, _parse_width, f"/{path}: no width of a link: {(text.value or '')[:40]!r}")


def _parse_width(text: str) -> int | None:
    width = parse_int(text)
    return width if width in _WIDTHS else None
