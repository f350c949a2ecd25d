"""The kernel's files of GPUs: the compute driver's list (KFD), PCI devices and the path to the processor, sensors.

KFD's ``gfx_target_version`` is the kernel's: HSA_OVERRIDE_GFX_VERSION does not reach it. A Radeon card since Vega 20
carries a switch: the GPU hangs from a downstream port (1002:1479) of an upstream port (1002:1478), whose link is the
slot's; the GPU's own always reads as full (freebsd/drm-kmod#426). Sensors: kernel documentation ``gpu/amdgpu/thermal``.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hf_rocm_tune.machine.sysfs import Files, parse_hex, parse_int

NODES = "sys/class/kfd/kfd/topology/nodes"
DEVICES = "sys/bus/pci/devices"
AMD = 0x1002
# Frame buffer that the CPU can map (1) and that it cannot (2): a small BAR splits VRAM so.
_FRAME_BUFFER_HEAPS = (1, 2)

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI class codes: display controllers of any kind, and processing accelerators (how Instinct cards show themselves).
_DISPLAY = 0x03
_ACCELERATOR = 0x1200
_MEMORY = 0x200  # IORESOURCE_MEM
_BARS = 6  # the first six lines of ``resource`` are the device's own BARs
_AER = {"correctable": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}
# pci.ids, vendor 1022: ports of the 300, 400, 500 and 600 series; 57xx is the X570 (ROCm/ROCm#910); 43b3 an A320's.
_CHIPSET = {0x43B0, 0x43B1, 0x43B3, 0x43B4, 0x43C6, 0x43C7, 0x43E9, 0x43EA, 0x43F4, 0x43F5, 0x57A3, 0x57A4, 0x57AD}
_WIDTHS = {1, 2, 4, 8, 12, 16, 32}  # 0: no link; 255: unknown
_ALL_ONES = "63"  # the width where no device answers: one that sleeps, or has fallen off the bus

# gpu_metrics 1.3 (kgd_pp_interface.h): size, two revision numbers, indep_throttle_status.
_METRICS = struct.Struct("<HBB108xQ")
HOTSPOT_C = 105.0
"""General knowledge, lower confidence: RDNA3 regulates on the hotspot, up to about 110 C."""
_UNFILLED = (1 << 64) - 1
_HOTSPOT = 1 << 36  # left out: firmware of Navi 31 and 48 sets it nearly always (rocm-systems#11781)
_CAUSES = {"power": 0xFF, "current": 0xFF << 16, "temperature": 0xFFFF << 32}


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One GPU of the KFD topology."""

    index: int  # among the GPU nodes, from 0
    arch: str  # as LLVM spells it, for example gfx1100
    vram_bytes: int | None  # None where a bank could not be read
    pci_address: str | None
    has_cpu: bool  # as an APU's node may


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All GPU nodes in KFD's order, and a line for each file that could not be read (or that there is no GPU)."""

    nodes: tuple[GpuNode, ...]
    reasons: tuple[str, ...]
    complete: bool  # False: a node could not be read, so the indices after it are uncertain


def decode_arch(gfx_target_version: int) -> str:
    """``110000`` to ``gfx1100``, ``90402`` to ``gfx942``, ``90010`` to ``gfx90a``."""
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def read_topology(files: Files | None = None) -> Topology:
    """Every GPU node that KFD lists, on this machine unless other files are given. Never raises."""
    files = files or Files()
    numbers = files.numbered(NODES)
    if numbers is None:
        # A missing directory means no driver or no GPU; a forbidden one means unknown.
        reason = f"no AMD GPU is listed by the kernel ({files.unread[NODES]})"
        no_driver = files.names("sys/class/kfd") is None and "No such file" in files.unread["sys/class/kfd"]
        return Topology(nodes=(), reasons=(reason,), complete=no_driver)
    nodes: list[GpuNode] = []
    reasons: list[str] = []
    for number in numbers:
        path = f"{NODES}/{number}/properties"
        properties = files.properties(path)
        if properties is None or not {"simd_count", "gfx_target_version"} <= properties.keys():
            reasons.append(files.unread.get(path, f"/{path}: no simd_count or no gfx_target_version"))
        elif properties["simd_count"] and properties["gfx_target_version"]:
            nodes.append(_gpu_node(files, len(nodes), number, properties))
    complete = not reasons
    if not nodes and not reasons:
        reasons.append("KFD lists no GPU node")
    return Topology(nodes=tuple(nodes), reasons=tuple(reasons), complete=complete)


def _vram_bytes(files: Files, where: str) -> int | None:
    """The sum of a node's banks of memory; None if one cannot be read, without which it would be wrong."""
    total = 0
    for number in files.numbered(where) or ():
        bank = files.properties(f"{where}/{number}/properties")
        if not bank:
            return None
        if bank.get("heap_type") in _FRAME_BUFFER_HEAPS:
            total += bank.get("size_in_bytes", 0)
    return total or None


def _gpu_node(files: Files, index: int, number: int, properties: Mapping[str, int]) -> GpuNode:
    location = properties.get("location_id")
    address = None
    if location is not None:
        bus = (location >> 8) & 0xFF  # bits 8 to 15
        device = (location >> 3) & 0x1F  # 3 to 7
        function = location & 7  # 0 to 2
        address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
    return GpuNode(
        index=index,
        arch=decode_arch(properties["gfx_target_version"]),
        vram_bytes=_vram_bytes(files, f"{NODES}/{number}/mem_banks"),
        pci_address=address,
        has_cpu=properties.get("cpu_cores_count", 0) > 0,
    )


# ---- PCI -----------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """One PCI Express link; speeds in 10^9 transfers a second and lane (16.0 is PCIe 4.0). None: unknown."""

    device: str  # PCI address of the device at the lower end
    speed: float | None  # now; it may be slower when idle
    width: int | None  # lanes in use
    able: float | None  # the speed that both ends are able to reach
    answers: bool = True  # False: all bits of its status read as ones, as of a device that is gone or without power
    whole: bool = False  # the lower end has no more lanes and no higher speed: a card may have eight or four lanes


class Upward(NamedTuple):
    """A device's path up to the CPU."""

    chain: tuple[str, ...]  # addresses from the root port down to the device itself
    links: tuple[Link, ...]  # outside of the card, the one at the card's connector first
    behind_chipset: bool  # a bridge of AMD's chipsets is on the path


def list_display_devices(files: Files) -> list[tuple[str, int, int]]:
    """Every display or compute device in PCI order: address, vendor and device id."""
    names = filter(_ADDRESS.fullmatch, files.names(DEVICES) or ())
    devices = []
    for address in sorted(names, key=lambda name: [int(part, 16) for part in re.split("[:.]", name)]):
        code = files.hexadecimal(f"{DEVICES}/{address}/class") or 0
        vendor, device = _ids(files, address)
        is_gpu = code >> 16 == _DISPLAY or code >> 8 == _ACCELERATOR
        if is_gpu and vendor is not None and device is not None:
            devices.append((address, vendor, device))
    return devices


def _ids(files: Files, address: str) -> tuple[int | None, int | None]:
    return files.hexadecimal(f"{DEVICES}/{address}/vendor"), files.hexadecimal(f"{DEVICES}/{address}/device")


def read_bar_bytes(files: Files, address: str) -> int | None:
    """Size of the largest memory BAR."""

    def largest(text: str) -> int | None:
        sizes = []
        for line in text.splitlines()[:_BARS]:
            numbers = [parse_hex(word) for word in line.split()]
            if len(numbers) != 3:
                continue
            start, last, flags = numbers
            if start is None or last is None or flags is None:
                continue
            if flags & _MEMORY and last > start:
                sizes.append(last - start + 1)
        return max(sizes, default=None)

    return files.parsed(f"{DEVICES}/{address}/resource", largest, "no memory BAR")


def read_iommu_type(files: Files, address: str) -> str | None:
    """``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating), as the kernel states of the device's group."""
    group = files.last(f"{DEVICES}/{address}/iommu_group")
    return files.matching(f"sys/kernel/iommu_groups/{group}/type", "[A-Za-z-]{1,24}") if group else None


def read_aer(files: Files, addresses: Iterable[str]) -> dict[str, int]:
    """Totals of the error counters since boot by kind, summed over both ends of all links above; a lower bound."""
    totals: Counter[str] = Counter()
    for address, (kind, name) in itertools.product(addresses, _AER.items()):
        text = files.text(f"{DEVICES}/{address}/aer_dev_{kind}") or ""
        stated = re.search(rf"^{name} ([0-9]{{1,20}})$", text, re.MULTILINE)
        if stated:
            totals[kind] += int(stated[1])
    return dict(totals)


def read_upward(files: Files, address: str) -> Upward:
    """Follow a device up to its root port. Never raises; unreadable parts are left out."""
    chain = tuple(filter(_ADDRESS.fullmatch, files.link(f"{DEVICES}/{address}").split("/")))
    if chain[-1:] != (address,) or len(set(chain)) < len(chain):
        chain = (address,)
    ids = [_ids(files, function) for function in chain]
    # The topmost function that belongs to the card itself.
    connector = len(ids) - 1
    while connector > 0 and ids[-1][0] == AMD == ids[connector - 1][0]:
        connector -= 1
    # From the root port down, ports alternate: root or downstream port, then upstream port or endpoint; a link has one
    # of the latter at its lower end.
    if connector:
        links = tuple(_link(files, chain[at], chain[at - 1]) for at in range(connector, 0, -2))
    else:
        links = (_link(files, chain[0], None),)
    behind = any(vendor == 0x1022 and device in _CHIPSET for vendor, device in ids[:connector])
    return Upward(chain=chain, links=links, behind_chipset=behind)


def _link(files: Files, lower: str, upper: str | None) -> Link:
    def speed(address: str, which: str) -> float | None:
        # "16.0 GT/s PCIe", "8 GT/s" before kernel 5.7, "Unknown" of a sleeping device.
        text = files.matching(f"{DEVICES}/{address}/{which}_link_speed", r"[0-9]{1,3}(\.[0-9])? GT/s.*")
        return None if text is None else float(text.partition(" ")[0])

    def known_width(text: str) -> int | None:
        width = parse_int(text)
        return width if width in _WIDTHS else None

    path = f"{DEVICES}/{lower}/current_link_width"
    current = speed(lower, "current")
    width = files.parsed(path, known_width, "no width of a link")
    ends = [lower, upper] if upper else [lower]
    limits = [limit for limit in (speed(end, "max") for end in ends) if limit is not None]
    able = current
    if limits:  # a link that runs faster than the stated maximum of one end is able to do what it does
        able = max(min(limits), current or 0.0)
    own_width = parse_int(files.text(f"{DEVICES}/{lower}/max_link_width") or "")
    own_speed = speed(lower, "max")
    at_best = None not in (own_width, own_speed) and (width, able) == (own_width, own_speed)
    return Link(lower, current, width, able, files.text(path) != _ALL_ONES, at_best)


# ---- sensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """amdgpu's hwmon and load files of one card at one moment; None: unknown, with the reason in ``missing``."""

    edge_c: float | None = None
    hotspot_c: float | None = None
    memory_c: float | None = None
    power_w: float | None = None  # average or momentary, as the driver has it
    power_cap_w: float | None = None  # limit in force
    utilisation: float | None = None  # busy share of the card, 0 to 1
    vram_used_bytes: int | None = None  # by all processes
    vram_total_bytes: int | None = None
    throttle: frozenset[str] | None = None  # see `read_throttle`; a power limit is normal under load
    missing: Mapping[str, str] = field(default_factory=dict)


def read_sensors(files: Files, address: str) -> Sensors:
    """All sensors of the amdgpu card at a PCI address. Never raises."""
    device = f"{DEVICES}/{address}"
    monitors = [name for name in files.names(f"{device}/hwmon") or () if re.fullmatch("hwmon[0-9]{1,6}", name)]
    hwmon = f"{device}/hwmon/{monitors[0]}" if monitors else device
    labels = {}
    if monitors:  # which of temp1 to temp3 is which is read from their labels
        labels = {files.text(f"{hwmon}/temp{n}_label"): f"{hwmon}/temp{n}_input" for n in (1, 2, 3)}
    power = "power1_average" if "power1_average" in (files.names(hwmon) or ()) else "power1_input"
    # Where, the divisor to the unit, and bounds: outside of them a sensor is missing or asleep.
    wanted: dict[str, tuple[str, int, float, float]] = {
        "power_w": (f"{hwmon}/{power}", 1_000_000, 0, math.inf),
        "power_cap_w": (f"{hwmon}/power1_cap", 1_000_000, 0, math.inf),
        "utilisation": (f"{device}/gpu_busy_percent", 100, 0, 1),
        "vram_used_bytes": (f"{device}/mem_info_vram_used", 1, 0, 1 << 64),
        "vram_total_bytes": (f"{device}/mem_info_vram_total", 1, 0, 1 << 64),
    }
    for name, label in (("edge", "edge"), ("hotspot", "junction"), ("memory", "mem")):
        path = labels.get(label, f"{hwmon}/temperature labelled {label}")
        wanted[f"{name}_c"] = path, 1000, -60, 200
    values = {}
    missing = {}
    for name, (path, *scale) in wanted.items():
        values[name] = files.parsed(path, partial(_scaled, scale), "no such value")
        if values[name] is None:
            missing[name] = files.unread[path]
    metrics = files.content(f"{device}/gpu_metrics")
    throttle = read_throttle(metrics or b"")
    if throttle is None:
        missing["throttle"] = "no status of a known meaning" if metrics else files.unread[f"{device}/gpu_metrics"]
    return Sensors(**values, throttle=throttle, missing=missing)  # type: ignore[arg-type]


def _scaled(scale: Sequence[float], text: str) -> float | None:
    divisor, low, high = scale
    if not re.fullmatch("-?[0-9]{1,20}", text, re.ASCII):
        return None
    value = int(text) / divisor if divisor > 1 else int(text)
    return value if low <= value <= high else None


def read_throttle(metrics: bytes) -> frozenset[str] | None:
    """What lowers the clocks, ``power``, ``current`` or ``temperature``, by the chip-independent status in a
    ``gpu_metrics`` file of revision 1.3; None for another, or where the chip states none."""
    size, form, content, status = _METRICS.unpack_from(metrics.ljust(_METRICS.size, b"\0"))
    if (form, content) != (1, 3) or min(size, len(metrics)) < _METRICS.size or status == _UNFILLED:
        return None
    return frozenset(name for name, bits in _CAUSES.items() if status & ~_HOTSPOT & bits)
