"""The kernel's files of GPUs: the compute driver's list (KFD), PCI devices and the path to the processor, sensors.

KFD: ``gfx_target_version`` is written by the kernel, so HSA_OVERRIDE_GFX_VERSION does not reach it (unsloth install.sh,
comment). ``p2p_links`` of a node are direct links over PCI Express, which the kernel lists only if CONFIG_HSA_AMD_P2P
and ``pcie_p2p`` are on, all memory is in the BAR and the bridges allow it (``kfd_dev_create_p2p_links``;
``amdgpu_device_is_peer_accessible``); ``io_links`` lead to the processor and over XGMI. Fields: kernel
``kfd_topology.c``, ``kfd_crat.h`` (CRAT_IOLINK_FLAGS_*), ``hsakmttypes.h``.

PCI: a Radeon card since Vega 20 carries a switch of its own: the GPU hangs from a downstream port (1002:1479) of an
upstream port (1002:1478) that sits on the card's connector. The GPU's own link is the one inside the card and always
reads as full speed and width; the slot's link is that of the upstream port. amdgpu skips these bridges by their vendor
id in the same way (``amdgpu_device_partner_bandwidth``). The whole chain on AM5 is in freebsd/drm-kmod#426. Forms:
kernel ``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-bus-pci-devices-aer``, ``sysfs-kernel-iommu_groups``.

Sensors: kernel documentation ``gpu/amdgpu/thermal`` (hwmon: millidegrees, microwatts; ``gpu_metrics``) and
``gpu/amdgpu/driver-misc`` (``mem_info_vram_*``). Which of ``temp1`` to ``temp3`` is which is read from their labels.
Reading wakes a card that sleeps. ``gpu_metrics`` is a structure behind a header of its size and of two revision
numbers: kernel ``kgd_pp_interface.h``, ``struct metrics_table_header`` and ``gpu_metrics_v1_3``, which a 7900 XT gives
(``smu_v13_0_0_ppt.c``); its ``indep_throttle_status`` has one meaning on all chips: ``amdgpu_smu.h``,
``SMU_THROTTLER_*_BIT``. The hotspot bit is left out: the firmware of Navi 31 and 48 sets it nearly always, even on an
idle card at 40 C (libdrm-amdgpu-sys-rs#7, drm/amd#3251, rocm-systems#11781). The hotspot's temperature is in hwmon.

Not covered: NVIDIA and Intel GPUs but for their PCI ids; on which side of an Intel, ARM or server board a root port
sits, which is unknown, not "the CPU"; whether direct copies are right; the throttle status of older revisions and of
Instinct cards and integrated GPUs, which differs from chip to chip.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from hf_rocm_tune.machine.sysfs import (
    LiveTree,
    Reading,
    Tree,
    derived,
    known,
    list_names,
    list_numbered,
    parse_int,
    read_bytes,
    read_int,
    read_link_name,
    read_parsed,
    read_properties,
    read_text,
    unknown,
)

NODES = "sys/class/kfd/kfd/topology/nodes"
_NO_DRIVER = "no driver"
# hsakmttypes.h HSA_HEAPTYPE: frame buffer that the CPU can map (1) and that it cannot (2). Small BAR splits VRAM so.
_FRAME_BUFFER_HEAPS = (1, 2)
_NO_ATOMICS = 1 << 2 | 1 << 3  # 32-bit and 64-bit
_NO_PEER_DMA = 1 << 4

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
# Widths of PCIe; 0 means no link, a sleeping device reads as 63, an unknown capability as 255.
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})

_NO_PORT = "no bridge above the device is known"

_HEADER = struct.Struct("<HBB")
_STATUS_OFFSET, _STATUS = 112, struct.Struct("<Q")
_UNFILLED = (1 << 64) - 1  # unused fields keep the driver's initial value: all ones
_HOTSPOT = 1 << 36  # SMU_THROTTLER_TEMP_HOTSPOT_BIT
_CAUSES: tuple[tuple[range, str], ...] = (
    (range(8), "power"),
    (range(16, 24), "current"),
    (range(32, 48), "temperature"),
    (range(56, 58), "other"),
)


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One GPU of the KFD topology.

    Attributes:
        index: place among the GPU nodes, from 0.
        node: number of the topology node (CPUs are nodes too).
        arch: ``gfx_target_version`` as LLVM spells it, for example ``gfx1100``.
        vram_bytes: sum of the frame-buffer banks; None where no bank could be read.
        pci_address: ``domain:bus:device.function``; None where the kernel gives no location.
        name: often only a code name; may be empty.
        has_cpu: the node holds CPU cores as well, as an APU's node may.
    """

    index: int
    node: int
    arch: str
    vram_bytes: int | None
    pci_address: str | None
    name: str
    has_cpu: bool


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All GPU nodes in KFD's order, and a line for each file that could not be read (or that there is no GPU).

    Not complete: a node could not be read, so the indices after it are uncertain.
    """

    nodes: tuple[GpuNode, ...]
    reasons: tuple[str, ...]
    complete: bool


def decode_arch(gfx_target_version: int) -> str:
    """``110000`` to ``gfx1100``, ``90402`` to ``gfx942``, ``90010`` to ``gfx90a``.

    The number is ``major * 10000 + minor * 100 + stepping``; LLVM spells minor and stepping as one hexadecimal digit.
    """
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def read_topology(tree: Tree | None = None) -> Topology:
    """Every GPU node that KFD lists, on the live machine unless another is given. Never raises; see `Topology`."""
    tree = tree or LiveTree()
    numbers = list_numbered(tree, NODES)
    if numbers.value is None:
        reason = f"no AMD GPU is listed by the kernel ({numbers.reason})"
        # A missing directory means no driver or no GPU; a forbidden one means unknown.
        no_driver = list_names(tree, "sys/class/kfd", absent=_NO_DRIVER).reason == _NO_DRIVER
        return Topology(nodes=(), reasons=(reason,), complete=no_driver)
    nodes: list[GpuNode] = []
    reasons: list[str] = []
    complete = True
    for number in numbers.value:
        properties = read_properties(tree, f"{NODES}/{number}/properties")
        if properties.value is None:
            complete = False
            reasons.append(properties.reason)
        elif not {"simd_count", "gfx_target_version"} <= properties.value.keys():
            complete = False
            reasons.append(f"/{NODES}/{number}/properties: no simd_count or no gfx_target_version")
        elif properties.value["simd_count"] and properties.value["gfx_target_version"]:
            vram = _read_vram_bytes(tree, number)
            if vram.reason:
                reasons.append(vram.reason)
            nodes.append(_gpu_node(tree, len(nodes), number, properties.value, vram.value))
    if not nodes and complete:
        reasons.append("KFD lists no GPU node")
    return Topology(nodes=tuple(nodes), reasons=tuple(reasons), complete=complete)


def _read_vram_bytes(tree: Tree, node: int) -> Reading[int]:
    """Sum of the frame-buffer banks of one node in bytes; system memory and shared apertures do not count."""
    where = f"{NODES}/{node}/mem_banks"
    banks = list_numbered(tree, where)
    if banks.value is None:
        return unknown(banks.reason)
    total = 0
    for bank in banks.value:
        properties = read_properties(tree, f"{where}/{bank}/properties")
        if properties.value is None:
            # A sum without one bank would be wrong.
            return unknown(properties.reason)
        if properties.value.get("heap_type") in _FRAME_BUFFER_HEAPS:
            total += properties.value.get("size_in_bytes", 0)
    return known(total or None, f"/{where}: no frame-buffer bank")


def _gpu_node(tree: Tree, index: int, number: int, properties: Mapping[str, int], vram: int | None) -> GpuNode:
    location = properties.get("location_id")
    address = None
    if location is not None:  # bus in bits 8-15, device in 3-7, function in 0-2
        bus, device, function = (location >> 8) & 0xFF, (location >> 3) & 0x1F, location & 7
        address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
    return GpuNode(
        index=index,
        node=number,
        arch=decode_arch(properties["gfx_target_version"]),
        vram_bytes=vram,
        pci_address=address,
        name=read_text(tree, f"{NODES}/{number}/name").value or "",
        has_cpu=properties.get("cpu_cores_count", 0) > 0,
    )


def read_peers(tree: Tree, node: GpuNode, topology: Topology) -> Reading[tuple[str, ...]]:
    """PCI addresses of the GPUs to which the kernel lists a direct link."""
    links = _read_links(tree, node, ("p2p_links", "io_links"))
    if links.value is None:
        return unknown(links.reason)
    numbers = {link.get("node_to") for link in links.value if not link.get("flags", 0) & _NO_PEER_DMA}
    found = (other.pci_address for other in topology.nodes if other.node in numbers and other.node != node.node)
    return Reading(value=tuple(address for address in found if address is not None))


def read_atomics(tree: Tree, node: GpuNode, topology: Topology) -> Reading[bool]:
    """Whether 32-bit and 64-bit atomics pass between this GPU and the processor."""
    links = _read_links(tree, node, ("io_links",))
    if links.value is None:
        return unknown(links.reason)
    gpus = {other.node for other in topology.nodes if not other.has_cpu}
    flags = [link["flags"] for link in links.value if "flags" in link and link.get("node_to") not in {None, *gpus}]
    if not flags:
        return unknown(f"/{NODES}/{node.node}/io_links: no link to the processor")
    return Reading(value=not any(flag & _NO_ATOMICS for flag in flags))


def _read_links(tree: Tree, node: GpuNode, kinds: tuple[str, ...]) -> Reading[list[Mapping[str, int]]]:
    found: list[Mapping[str, int]] = []
    for kind in kinds:
        where = f"{NODES}/{node.node}/{kind}"
        numbers = list_numbered(tree, where)
        for read in [read_properties(tree, f"{where}/{number}/properties") for number in numbers.value or ()]:
            if read.value is None:
                return unknown(read.reason)
            found.append(read.value)
        if numbers.value is None:
            return unknown(numbers.reason)
    return Reading(value=found)


class DisplayDevice(NamedTuple):
    """One display or compute device: its PCI address and ids."""

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
        max_speed, max_width: limits of the device.
        port_max_speed, port_max_width: limits of the port at the upper end; a slot with fewer lanes shows here.
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
        chain: addresses from the root port down to the device itself.
        links: outside of the card, the one at the card's connector first.
        root_port: None if there is no bridge above the device, or the path could not be followed.
        behind_chipset: a bridge of the path belongs to the chipset, not the CPU; None if a bridge is unknown.
    """

    chain: tuple[str, ...]
    links: tuple[Link, ...]
    root_port: str | None
    behind_chipset: bool | None


def _parse_hex(text: str) -> int | None:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else None


def _read_hex(tree: Tree, address: str, file: str) -> Reading[int]:
    """A file that holds one number as sysfs writes PCI ids."""
    return read_parsed(tree, f"{DEVICES}/{address}/{file}", _parse_hex, "not a hexadecimal number")


def list_display_devices(tree: Tree) -> tuple[tuple[DisplayDevice, ...], tuple[str, ...]]:
    """Every display or compute device in PCI order, and one line for each that could not be read."""
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
                found.append(DisplayDevice(address, vendor.value, device.value, revision))
    return tuple(found), tuple(reasons)


def read_driver(tree: Tree, address: str) -> Reading[str]:
    """Name of the bound kernel driver (``amdgpu``, ``vfio-pci``)."""
    return read_link_name(tree, f"{DEVICES}/{address}/driver", absent="no driver is bound")


def read_bar_bytes(tree: Tree, address: str) -> Reading[int]:

    def largest(text: str) -> int | None:
        sizes = []
        for line in text.splitlines()[:_BARS]:
            numbers = [number for number in map(_parse_hex, line.split()) if number is not None]
            if len(numbers) == len(line.split()) == 3 and numbers[2] & _MEMORY and numbers[1] > numbers[0]:
                sizes.append(numbers[1] - numbers[0] + 1)
        return max(sizes, default=None)

    path = f"{DEVICES}/{address}/resource"
    return derived(read_text(tree, path), largest, f"/{path}: no memory BAR")


def read_mes_firmware(tree: Tree, address: str) -> Reading[int]:
    """Version of the scheduler's firmware (MES), as amdgpu states it (``amdgpu_ucode.c``: ``fw_version``)."""
    return _read_hex(tree, address, "fw_version/mes_fw_version")


def read_display(tree: Tree, address: str) -> Reading[bool]:
    """Whether a display is connected to one of the device's connectors (``drm/card0/card0-DP-1/status``)."""
    where = f"{DEVICES}/{address}/drm"
    cards = list_names(tree, where)
    if cards.value is None:
        return unknown(cards.reason)
    found = [(card, name) for card in cards.value for name in list_names(tree, f"{where}/{card}").value or ()]
    ends = [f"{where}/{card}/{name}" for card, name in found if name.startswith(f"{card}-")]
    return Reading(value=any(read_text(tree, f"{end}/status").value == "connected" for end in ends))


def read_iommu_type(tree: Tree, address: str) -> Reading[str]:
    """``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating), as the kernel states of the device's group."""
    link = f"{DEVICES}/{address}/iommu_group"
    name = read_link_name(tree, link, absent="the device is in no IOMMU group")
    group = derived(name, parse_int, f"/{link}: does not point at a numbered group")
    if group.value is None:
        return unknown(group.reason)
    path = f"sys/kernel/iommu_groups/{group.value}/type"
    text = read_text(tree, path)
    return derived(text, lambda t: t if re.fullmatch("[A-Za-z-]{1,24}", t) else None, f"/{path}: no type of a domain")


def read_aer(tree: Tree, addresses: Iterable[str]) -> dict[str, Reading[int]]:
    """Totals of the error counters since boot, summed over a card and the bridges above it.

    Both ends of a link are counted: the end that reports an error may not be the one that causes it (kernel page).
    Counters that cannot be read are left out, so a sum is a lower bound.
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
    """Follow a device up to its root port. Never raises; unreadable parts are left out."""
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
    # Intel's VMD begins a second hierarchy: only the part after the last host bridge counts.
    below = re.split(r"/pci[0-9a-f]{4,8}:[0-9a-f]{2}(?=/)", f"/{target}")[-1]
    chain = tuple(part for part in below.split("/") if part)
    whole = chain[-1:] == (address,) and all(map(_ADDRESS.fullmatch, chain)) and len(set(chain)) == len(chain)
    return chain if whole else (address,)


def _is_behind_chipset(bridges: list[tuple[int | None, int | None]]) -> bool | None:
    if any(vendor == 0x1022 and device in _CHIPSET for vendor, device in bridges):
        return True
    return False if bridges and all(vendor == 0x1022 and device in _CPU for vendor, device in bridges) else None


def _read_link(tree: Tree, lower: str, upper: str | None) -> Link:
    def speed(address: str | None, which: str = "max") -> Reading[float]:
        path = f"{DEVICES}/{address}/{which}_link_speed"
        return read_parsed(tree, path, _parse_speed, "no speed") if address else unknown(_NO_PORT)

    def width(address: str | None, which: str = "max") -> Reading[int]:
        path = f"{DEVICES}/{address}/{which}_link_width"
        return read_parsed(tree, path, _parse_width, "no width of a link") if address else unknown(_NO_PORT)

    return Link(
        device=lower,
        speed=speed(lower, "current"),
        width=width(lower, "current"),
        max_speed=speed(lower),
        max_width=width(lower),
        port_max_speed=speed(upper),
        port_max_width=width(upper),
    )


def _parse_speed(text: str) -> float | None:
    # "16.0 GT/s PCIe", "8 GT/s" before kernel 5.7, "Unknown" of a sleeping device.
    found = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", text, re.ASCII)
    return float(found[1]) if found else None


def _parse_width(text: str) -> int | None:
    width = parse_int(text)
    return width if width in _WIDTHS else None


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """amdgpu's hwmon and load files of one card at one moment.

    Attributes:
        power_w: average or momentary, as the driver has it.
        power_cap_w: limit in force.
        utilisation: busy share of the card, 0 to 1.
        vram_used_bytes, vram_total_bytes: as the driver counts them, of all processes.
        throttle: bits of the current clock limits, in the chip-independent form of ``gpu_metrics``; `throttle_causes`
            names them. A power limit is normal under load.
    """

    edge_c: Reading[float]
    hotspot_c: Reading[float]
    memory_c: Reading[float]
    power_w: Reading[float]
    power_cap_w: Reading[float]
    utilisation: Reading[float]
    vram_used_bytes: Reading[int]
    vram_total_bytes: Reading[int]
    throttle: Reading[int]


def read_sensors(tree: Tree, address: str) -> Sensors:
    """All sensors of the amdgpu card at a PCI address. Never raises."""
    device = f"{DEVICES}/{address}"
    hwmon = _read_hwmon(tree, f"{device}/hwmon")
    channels = ("temp1", "temp2", "temp3") if hwmon.value else ()
    labels = {read_text(tree, f"{hwmon.value}/{channel}_label").value or "": channel for channel in channels}
    busy = f"{device}/gpu_busy_percent"
    average, momentary = (_read_watts(tree, hwmon, f"power1_{kind}") for kind in ("average", "input"))
    metrics = read_bytes(tree, f"{device}/gpu_metrics")
    return Sensors(
        edge_c=_read_temperature(tree, hwmon, labels, "edge"),
        hotspot_c=_read_temperature(tree, hwmon, labels, "junction"),
        memory_c=_read_temperature(tree, hwmon, labels, "mem"),
        power_w=momentary if average.value is None and momentary.value is not None else average,
        power_cap_w=_read_watts(tree, hwmon, "power1_cap"),
        utilisation=derived(read_int(tree, busy), lambda n: n / 100 if n <= 100 else None, f"/{busy}: more than 100 %"),
        vram_used_bytes=read_int(tree, f"{device}/mem_info_vram_used"),
        vram_total_bytes=read_int(tree, f"{device}/mem_info_vram_total"),
        throttle=unknown(metrics.reason) if metrics.value is None else parse_throttle(metrics.value),
    )


def no_sensors(reason: str) -> Sensors:
    return Sensors(**{field.name: unknown(reason) for field in fields(Sensors)})


def _read_hwmon(tree: Tree, path: str) -> Reading[str]:
    def first(names: list[str]) -> str | None:
        return next((f"{path}/{name}" for name in names if re.fullmatch("hwmon[0-9]{1,6}", name)), None)

    return derived(list_names(tree, path), first, f"/{path}: no monitor in it")


def _read_temperature(tree: Tree, hwmon: Reading[str], labels: dict[str, str], label: str) -> Reading[float]:
    def parse(text: str) -> float | None:
        celsius = int(text) / 1000 if re.fullmatch("-?[0-9]{1,7}", text, re.ASCII) else -300.0
        # Outside of this range a sensor is missing or asleep.
        return celsius if -60.0 <= celsius <= 200.0 else None

    if hwmon.value is None:
        return unknown(hwmon.reason)
    if label not in labels:
        return unknown(f"/{hwmon.value}: no temperature is labelled {label!r}")
    return read_parsed(tree, f"{hwmon.value}/{labels[label]}_input", parse, "no temperature")


def _read_watts(tree: Tree, hwmon: Reading[str], file: str) -> Reading[float]:
    if hwmon.value is None:
        return unknown(hwmon.reason)
    return derived(read_int(tree, f"{hwmon.value}/{file}"), lambda microwatts: microwatts / 1_000_000, "")


def parse_throttle(metrics: bytes) -> Reading[int]:
    """The chip-independent throttle status in a ``gpu_metrics`` file, without the hotspot bit."""
    if len(metrics) < _HEADER.size:
        return unknown("gpu_metrics: shorter than its header")
    size, form, content = _HEADER.unpack_from(metrics)
    if (form, content) != (1, 3):
        return unknown(f"gpu_metrics: revision {form}.{content} has no throttle status of a known meaning")
    if min(size, len(metrics)) < _STATUS_OFFSET + _STATUS.size:
        return unknown(f"gpu_metrics: {len(metrics)} bytes, too short for revision {form}.{content}")
    (status,) = _STATUS.unpack_from(metrics, _STATUS_OFFSET)
    if status == _UNFILLED:
        return unknown("gpu_metrics: this chip states no throttle status")
    return Reading(value=status & ~_HOTSPOT)


def throttle_causes(status: int) -> tuple[str, ...]:
    """``power``, ``current``, ``temperature``, ``other`` (bits without a name too): the limits that a status names."""
    named = tuple(name for bits, name in _CAUSES if any(status >> bit & 1 for bit in bits))
    return named or (("other",) if status else ())


def core_dumps(tree: Tree | None = None) -> frozenset[str]:
    """The current core dumps of amdgpu, as "devcd1 of 0000:03:00.0"; empty if they cannot be read.

    They show that the driver saw the GPU fail; reading them needs no root. The kernel lists a dump as
    ``/sys/class/devcoredump/devcdN`` with a link to the device that failed and drops it after five minutes (Linux
    ``drivers/base/devcoredump.c``); amdgpu writes one when it resets a GPU, where the kernel has CONFIG_DEV_COREDUMP
    (``amdgpu_dev_coredump.c``). An empty list proves nothing: not every fault leaves a dump.
    """
    tree, where = tree or LiveTree(), "sys/class/devcoredump"
    found = set()
    for name in list_names(tree, where).value or []:
        device = f"{where}/{name}/failing_device"
        if read_link_name(tree, f"{device}/driver").value == "amdgpu":
            found.add(f"{name} of {read_link_name(tree, device).value or 'an unnamed device'}")
    return frozenset(found)
