"""Faithful machines, built part by part and written as a directory that stands for ``/``:
``Built("an AM5 board with one card").card(XT).igpu().survey(tmp_path)``.

Where the forms come from: the bridges of an AM5 machine with a 7900 XTX, from its full PCI list in
freebsd/drm-kmod#426; ids from amdgpu.ids and pci.ids; memory sizes from LACT#533 and rocminfo outputs; sysfs and hwmon
forms from the kernel's documentation and the drivers' sources (``kgd_pp_interface.h``, ``drivers/pci/pcie/aer.c``). No
machine is a copy of a real one: figures such as temperatures are invented.
"""

from __future__ import annotations

import os
import posixpath
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from hf_rocm_tune.machine.survey import Machine, survey

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What a model of card says of itself."""

    device: int
    revision: int
    gfx_target_version: int
    vram_bytes: int
    cap_w: int = 0
    pcie: tuple[float, int] = (16.0, 16)


XT = Chip(device=0x744C, revision=0xCC, gfx_target_version=110000, vram_bytes=20464 * MIB, cap_w=315)
XTX = Chip(device=0x744C, revision=0xC8, gfx_target_version=110000, vram_bytes=24560 * MIB, cap_w=355)
XT_9070 = replace(XT, device=0x7550, revision=0xC0, gfx_target_version=120001, vram_bytes=16304 * MIB, pcie=(32.0, 16))
R9700 = replace(XT_9070, device=0x7551, vram_bytes=32624 * MIB)
XT_9060 = replace(XT_9070, device=0x7590, gfx_target_version=120000)
XT_7800 = replace(XT, device=0x747E, revision=0xC8, gfx_target_version=110001, vram_bytes=16368 * MIB, cap_w=263)
XT_6700 = replace(XT, device=0x73DF, revision=0xC1, gfx_target_version=100301, vram_bytes=12272 * MIB)
XT_7600 = replace(XT, device=0x7480, revision=0xCF, gfx_target_version=110002, vram_bytes=8176 * MIB, pcie=(16.0, 8))
XT_6600 = replace(XT_6700, device=0x73FF, gfx_target_version=100302, vram_bytes=8176 * MIB, pcie=(16.0, 8))
XT_6500 = replace(XT_6600, device=0x743F, gfx_target_version=100304, vram_bytes=4080 * MIB, pcie=(16.0, 4))
RAPHAEL = Chip(device=0x164E, revision=0xC8, gfx_target_version=100306, vram_bytes=512 * MIB)
KRACKAN = Chip(device=0x1114, revision=0xC1, gfx_target_version=110502, vram_bytes=512 * MIB)
STRIX_HALO = Chip(device=0x1586, revision=0xC1, gfx_target_version=110501, vram_bytes=512 * MIB)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a card sits: lanes, 10^9 transfers a second and lane; ``idle``: the link has slowed down to 2.5."""

    width: int = 16
    speed: float = 16.0
    chipset: bool = False
    idle: bool = False


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What a card's sensors say; None leaves the file out. Degrees Celsius, watts, percent, bytes."""

    edge: float | None = 42.0
    hotspot: float | None = 48.0
    memory: float | None = 54.0
    power: float | None = 25.0
    busy: int | None = 0
    vram_used: int | None = 26 * MIB
    throttle: int | None = 0


# The usual: a card in a full slot, with nothing to do.
FULL_SLOT = Slot()
AT_REST = Readings()


def metrics_v1_3(throttle: int) -> bytes:
    """A ``gpu_metrics`` file of revision 1.3, 120 bytes, with nothing filled in but the throttle status."""
    return struct.pack("<HBB", 120, 1, 3) + b"\xff" * 108 + struct.pack("<Q", throttle)


def metrics_v2_1() -> bytes:
    """A ``gpu_metrics`` file as integrated GPUs give it."""
    return struct.pack("<HBB", 128, 2, 1) + b"\xff" * 124


def aer_files(place: str, counts: Mapping[str, int]) -> dict[str, str]:
    """The error counters of a device, with the counts of ``correctable``, ``nonfatal`` and ``fatal`` errors."""
    names = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}
    lines = {
        kind: f"TLP {counts.get(kind, 0)}\nTOTAL_ERR_{name} {counts.get(kind, 0)}\n" for kind, name in names.items()
    }
    return {f"{place}/aer_dev_{kind}": f"DLP 0\n{text}" for kind, text in lines.items()}


DEVICES = "sys/bus/pci/devices"
NODES = "sys/class/kfd/kfd/topology/nodes"


class Built:
    """A machine in the making; ``source``: where it comes from. Every method adds a part and returns the machine."""

    def __init__(self, source: str, *, cpu: str = "AMD Ryzen 7 7800X3D 8-Core Processor") -> None:
        self.files: dict[str, str] = {}
        self.binary: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.names: dict[str, list[str]] = {"sys/class/drm": []}
        self.nodes: dict[str, bool] = {}
        self.process: dict[str, Any] = {"platform": "linux", "shm_bytes": 32 * GIB}  # what is in no file
        self.source = source
        self._cards = 0
        self._group = "render"
        self._bus = 1
        self._kfd_nodes = 0
        self._iommu: str | None = None
        self._chipset: str | None = None
        self.files["proc/cpuinfo"] = f"processor\t: 0\nmodel name\t: {cpu}\n"
        self.kernel().memory().iommu("DMA-FQ")

    # Host and kernel.

    def kernel(
        self, release: str = "6.14.0-37-generic", *, cmdline: str = "ro quiet splash", pcie_p2p: str = "Y"
    ) -> Built:
        """The running kernel. Call it before adding cards; ``pcie_p2p``: amdgpu's parameter."""
        self.process["release"], self._pcie_p2p = release, pcie_p2p
        self.files["proc/cmdline"] = f"BOOT_IMAGE=/boot/vmlinuz-{release} root=UUID=4cb2 {cmdline}\n"
        return self

    def memory(self, gib: float = 64, *, available_gib: float | None = None) -> Built:
        """Memory of the host."""
        sizes = {"MemTotal": gib, "MemAvailable": gib * 0.9 if available_gib is None else available_gib}
        self.files["proc/meminfo"] = "".join(f"{name}: {int(size * MIB):>15} kB\n" for name, size in sizes.items())
        return self

    def iommu(self, kind: str | None) -> Built:
        """``DMA``, ``DMA-FQ`` (translating), ``identity`` (passthrough), or None for no IOMMU. Call it before cards."""
        self._iommu = kind
        self.names.pop("sys/class/iommu", None)
        if kind is not None:
            self.names["sys/class/iommu"] = ["ivhd0"]
        return self

    def user(self, *, usable: bool, group: str = "render") -> Built:
        """Whether this process may use the device nodes, which are of this group. Call it after cards."""
        self.nodes = dict.fromkeys(self.nodes, usable)
        self._group = group
        return self

    def without_node(self, path: str) -> Built:
        """A device node that is not there. Call it after cards."""
        del self.nodes[path]
        return self

    def parameter(self, **values: str) -> Built:
        """Parameters of amdgpu, as they are in force."""
        self.files |= {f"sys/module/amdgpu/parameters/{name}": f"{value}\n" for name, value in values.items()}
        return self

    def dkms(self, version: str) -> Built:
        """A driver that was installed apart from the kernel."""
        self.files["sys/module/amdgpu/version"] = f"{version}\n"
        return self

    def asleep(self, status: str) -> Built:
        """The last card answers no more: its link reads as all ones. ``status``: of its power management."""
        gpu = f"0000:{self._bus - 1:02x}:00.0"
        for port in (f"0000:{self._bus - 3:02x}:00.0", f"0000:{self._bus - 2:02x}:00.0", gpu):
            self.files |= {
                f"{DEVICES}/{port}/current_link_width": "63",
                f"{DEVICES}/{port}/current_link_speed": "Unknown",
            }
        self.files[f"{DEVICES}/{gpu}/power/runtime_status"] = f"{status}\n"
        return self

    def container(self, *, devices: bool = True, shm_bytes: int = 64 * MIB, tool: str = "docker") -> Built:
        """Put this process in a container; without ``devices``, the nodes are not passed in. Call it after cards."""
        marks = {"docker": ".dockerenv", "podman": "run/.containerenv", "apptainer": ".singularity.d/actions/exec"}
        marks["kubernetes"] = "var/run/secrets/kubernetes.io/serviceaccount/token"
        self.files[marks.get(tool, "run/systemd/container")] = f"{tool}\n"
        self.process["shm_bytes"] = shm_bytes
        if not devices:
            self.nodes.clear()
        return self

    def memory_limit(self, size: int) -> Built:
        """A control group's limit on this process's memory."""
        self.files["sys/fs/cgroup/memory.max"] = f"{size}\n"
        return self

    # Devices.

    def card(
        self,
        chip: Chip = XT,
        *,
        slot: Slot = FULL_SLOT,
        readings: Readings = AT_REST,
        bar_bytes: int | None = None,
        aer: Mapping[str, int] | None = None,
        driver: str | None = "amdgpu",
        kfd: bool = True,
    ) -> Built:
        """A discrete AMD card with its own switch; ``bar_bytes``: by default all memory, ``kfd``: KFD lists it."""
        above = self._ports(slot)
        first = self._take_buses(3)
        up, down, gpu = (f"0000:{first + offset:02x}:00.0" for offset in range(3))
        reached = min(slot.speed, chip.pcie[0])
        now = 2.5 if slot.idle else reached
        width = min(slot.width, chip.pcie[1])
        chain = [*above, up, down, gpu]
        self._device(above[-1], link=(now, width), able=(slot.speed, slot.width))
        self._device(up, ids=(0x1002, 0x1478), kind=0x060400, link=(now, width), able=chip.pcie, aer=aer or {})
        self._device(down, ids=(0x1002, 0x1479), kind=0x060400, link=chip.pcie, able=chip.pcie)
        self._device(gpu, ids=(0x1002, chip.device), revision=chip.revision, link=chip.pcie, able=chip.pcie)
        self._hang(chain)
        self._amd_function(gpu, chip, readings, bar_bytes or 1 << (chip.vram_bytes - 1).bit_length(), driver, kfd=kfd)
        return self

    def igpu(self, chip: Chip = RAPHAEL, *, driver: str | None = "amdgpu", kfd: bool = True) -> Built:
        """The GPU in the processor; it takes the next free bus, so after the cards as on AM5."""
        root, gpu = "0000:00:08.1", f"0000:{self._take_buses(1):02x}:00.0"
        self._device(root, ids=(0x1022, 0x14DD), kind=0x060400, link=(16.0, 16), able=(16.0, 16))
        self._device(gpu, ids=(0x1002, chip.device), revision=chip.revision, link=(16.0, 16), able=(16.0, 16))
        self._hang([root, gpu])
        readings = Readings(hotspot=None, memory=None, throttle=None)
        self._amd_function(gpu, chip, readings, chip.vram_bytes, driver, kfd=kfd, metrics=metrics_v2_1())
        return self

    def nvidia(self, *, slot: Slot = FULL_SLOT, device: int = 0x2684, driver: str | None = "nvidia") -> Built:
        """A card of NVIDIA's, which hangs from its slot without a switch of its own (0x2684: RTX 4090, pci.ids)."""
        above = self._ports(slot)
        gpu = f"0000:{self._take_buses(1):02x}:00.0"
        self._device(above[-1], link=(slot.speed, slot.width), able=(slot.speed, slot.width))
        self._device(gpu, ids=(0x10DE, device), revision=0xA1, link=(slot.speed, slot.width), able=(16.0, 16))
        self._hang([*above, gpu])
        self._bars(gpu, 32 * GIB)
        self._bind(gpu, driver)
        return self

    # The result.

    def write(self, root: Path) -> dict[str, Any]:
        """The machine's files below a directory; returns the facts that are in no file."""
        for path, target in sorted(self.links.items()):
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if posixpath.dirname(path) == DEVICES and target:  # its files stand where it leads, as in a real sysfs
                (root / posixpath.normpath(posixpath.join(DEVICES, target))).mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(target or ".")
        for path, listed in self.names.items():
            for name in ["", *listed]:
                (root / path / name).mkdir(parents=True, exist_ok=True)
        texts = {path: text.encode() for path, text in self.files.items()}
        for path, content in (texts | self.binary | dict.fromkeys(self.nodes, b"")).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        return self.process

    def survey(self, root: Path) -> Machine:
        """The machine, read from a directory in which it is written."""
        process = self.write(root)
        refused = {str(root / path) for path, usable in self.nodes.items() if not usable}
        access = os.access
        with mock.patch("os.access", lambda path, mode: str(path) not in refused and access(path, mode)):
            machine = survey(root)
        nodes = {path: (usable, self._group) for path, (usable, _) in machine.device_nodes.items()}
        return replace(machine, device_nodes=nodes, **process)

    # Parts of devices.

    def _ports(self, slot: Slot) -> list[str]:
        """Addresses from the root port down to the port that the slot hangs from."""
        if not slot.chipset:
            self._cards += 1
            root = f"0000:00:01.{self._cards}"
            self._device(root, ids=(0x1022, 0x14DB), kind=0x060400)
            return [root]
        root = "0000:00:02.1"
        if self._chipset is None:
            first = self._take_buses(2)
            self._chipset, self._chipset_bus, self._chipset_slots = f"0000:{first:02x}:00.0", first + 1, 0
            self._device(root, ids=(0x1022, 0x14DB), kind=0x060400, link=(16.0, 4), able=(16.0, 4))
            self._device(self._chipset, ids=(0x1022, 0x43F4), kind=0x060400, link=(16.0, 4), able=(16.0, 4))
            self._hang([root, self._chipset])
        port = f"0000:{self._chipset_bus:02x}:{self._chipset_slots:02x}.0"
        self._chipset_slots += 1
        self._device(port, ids=(0x1022, 0x43F5), kind=0x060400)
        return [root, self._chipset, port]

    def _take_buses(self, count: int) -> int:
        self._bus += count
        return self._bus - count

    def _device(
        self,
        address: str,
        *,
        ids: tuple[int, int] | None = None,
        kind: int = 0x030000,
        revision: int = 0,
        link: tuple[float, int] | None = None,
        able: tuple[float, int] | None = None,
        aer: Mapping[str, int] | None = None,
    ) -> None:
        place = f"{DEVICES}/{address}"
        if ids:
            values = {"vendor": (ids[0], 4), "device": (ids[1], 4), "class": (kind, 6), "revision": (revision, 2)}
            self.files.update({f"{place}/{name}": f"0x{value:0{width}x}\n" for name, (value, width) in values.items()})
            self.files.update(aer_files(place, aer or {}))
        for prefix, pair in (("current", link), ("max", able)):
            if pair:
                self.files[f"{place}/{prefix}_link_speed"] = f"{pair[0]} GT/s PCIe\n"
                self.files[f"{place}/{prefix}_link_width"] = f"{pair[1]}\n"

    def _hang(self, chain: list[str]) -> None:
        for depth, address in enumerate(chain):
            way = "/".join(chain[: depth + 1])
            self.links[f"{DEVICES}/{address}"] = f"../../../devices/pci0000:00/{way}"

    def _bars(self, address: str, size: int) -> None:
        lines = ["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13
        lines[0] = f"0x{0xF800000000:016x} 0x{0xF800000000 + size - 1:016x} 0x000000000014220c"
        lines[2] = f"0x{0xF000000000:016x} 0x{0xF000000000 + 2 * MIB - 1:016x} 0x000000000014220c"
        lines[4] = "0x000000000000e000 0x000000000000e0ff 0x0000000000040101"
        lines[5] = "0x00000000f6b00000 0x00000000f6bfffff 0x0000000000040200"
        self.files[f"{DEVICES}/{address}/resource"] = "\n".join([*lines, ""])

    def _bind(self, address: str, driver: str | None) -> None:
        if driver:
            self.links[f"{DEVICES}/{address}/driver"] = f"../../../../bus/pci/drivers/{driver}"
        if self._iommu:
            group = 10 + self._bus
            self.links[f"{DEVICES}/{address}/iommu_group"] = f"../../../../kernel/iommu_groups/{group}"
            self.files[f"sys/kernel/iommu_groups/{group}/type"] = f"{self._iommu}\n"

    def _amd_function(
        self,
        address: str,
        chip: Chip,
        readings: Readings,
        bar_bytes: int,
        driver: str | None,
        *,
        kfd: bool,
        metrics: bytes | None = None,
    ) -> None:
        self._bars(address, bar_bytes)
        self._bind(address, driver)
        if driver != "amdgpu":
            return
        self.files["sys/module/amdgpu/parameters/pcie_p2p"] = f"{self._pcie_p2p}\n"
        self._sensors(address, chip, readings, metrics)
        number = sum(path.startswith("dev/dri/renderD") for path in self.nodes)
        self.nodes[f"dev/dri/renderD{128 + number}"] = True
        if kfd:
            self._kfd_node(address, chip)

    def _sensors(self, address: str, chip: Chip, readings: Readings, metrics: bytes | None) -> None:
        place = f"{DEVICES}/{address}"
        hwmon = f"{place}/hwmon/hwmon{self._bus}"
        channels = {"edge": readings.edge, "junction": readings.hotspot, "mem": readings.memory}
        for channel, (label, degrees) in enumerate(channels.items(), start=1):
            if degrees is not None:
                self.files[f"{hwmon}/temp{channel}_label"] = f"{label}\n"
                self.files[f"{hwmon}/temp{channel}_input"] = f"{int(degrees * 1000)}\n"
        if readings.power is not None:
            self.files[f"{hwmon}/power1_average"] = f"{int(readings.power * 1_000_000)}\n"
        if chip.cap_w:
            self.files[f"{hwmon}/power1_cap"] = f"{chip.cap_w * 1_000_000}\n"
        sizes = {"gpu_busy_percent": readings.busy, "mem_info_vram_used": readings.vram_used}
        for name, value in {**sizes, "mem_info_vram_total": chip.vram_bytes}.items():
            if value is not None:
                self.files[f"{place}/{name}"] = f"{value}\n"
        content = metrics if readings.throttle is None else metrics_v1_3(readings.throttle)
        if content is not None:
            self.binary[f"{place}/gpu_metrics"] = content

    def _kfd_node(self, address: str, chip: Chip) -> None:
        if not self._kfd_nodes:
            self._write_node({"cpu_cores_count": 16, "simd_count": 0, "gfx_target_version": 0}, (0, 64 * GIB))
            self.nodes["dev/kfd"] = True
        bus, device, function = (int(part, 16) for part in address.replace(".", ":").split(":")[1:])
        properties = {"cpu_cores_count": 0, "simd_count": 168, "vendor_id": 0x1002, "domain": 0}
        properties |= {"gfx_target_version": chip.gfx_target_version, "location_id": bus << 8 | device << 3 | function}
        self._write_node(properties, (1, chip.vram_bytes))

    def _write_node(self, properties: Mapping[str, int], bank: tuple[int, int]) -> None:
        place = f"{NODES}/{self._kfd_nodes}"
        self._kfd_nodes += 1
        self.files[f"{place}/properties"] = "".join(f"{key} {value}\n" for key, value in properties.items())
        heap, size = bank
        self.files[f"{place}/mem_banks/0/properties"] = f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n"
