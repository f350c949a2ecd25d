"""The whole machine in one frozen record. Imports no torch. None: unknown, with the reason in ``Machine.unread``.

The memory limit is that of a container with cgroup v2. Not covered: cgroup v1, limits of systemd units; a driver that
hangs inside a read hangs the survey.
"""

from __future__ import annotations

import grp
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.machine import gpus
from hf_rocm_tune.machine.cards import Card, identify
from hf_rocm_tune.machine.gpus import GpuNode, Sensors, Topology, Upward
from hf_rocm_tune.machine.process import is_integrated
from hf_rocm_tune.machine.sysfs import Files, parse_int

PARAMETERS = ("pcie_p2p", "runpm", "cwsr_enable", "ppfeaturemask")
_CONTAINER_FILES = {
    "run/secrets/kubernetes.io": "kubernetes",
    "var/run/secrets/kubernetes.io": "kubernetes",
    "run/.containerenv": "podman",
    ".dockerenv": "docker",
    ".singularity.d": "apptainer",
}
_VENDORS = {gpus.AMD: "amd", 0x10DE: "nvidia", 0x8086: "intel"}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One display or compute device on the PCI bus."""

    address: str
    vendor: str  # amd, nvidia, intel or other
    device_id: int
    driver: str | None  # the bound kernel driver
    node: GpuNode | None  # with the true architecture; None if KFD does not list it
    card: Card | None  # the row of the card table
    integrated: bool | None  # shares the CPU's memory
    upward: Upward
    bar_bytes: int | None  # of the largest memory BAR; as large as the VRAM with ReBAR
    iommu_type: str | None  # identity (passthrough), DMA or DMA-FQ (translating)
    aer: Mapping[str, int]  # error counters: correctable, nonfatal, fatal
    runtime_status: str | None  # of power management: active, suspended, error ...
    sensors: Sensors

    @property
    def arch(self) -> str | None:
        """Architecture in the kernel's list, which no override variable reaches, or that of its model."""
        if self.node:
            return self.node.arch
        return self.card.arch if self.card else None

    @property
    def vram_bytes(self) -> int | None:
        if self.node and self.node.vram_bytes:
            return self.node.vram_bytes
        return self.sensors.vram_total_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All of it."""

    platform: str  # as of `sys.platform`
    release: str  # of the kernel
    shm_bytes: int | None  # size of /dev/shm
    cpu: str
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None  # the container's, where it is below the host's memory
    device_nodes: Mapping[str, tuple[bool, str]]  # /dev/kfd and /dev/dri/renderD*: usable by this process, group
    cmdline: Sequence[str]  # boot parameters
    amdgpu: Mapping[str, str]  # parameters of the driver, of `PARAMETERS`, in force or at boot
    driver_version: str | None  # of amdgpu where it is not the kernel's own (DKMS)
    container: str | None  # docker, podman, lxc ...; None: none is recognised
    dxg: bool  # whether WSL passes a card through
    iommu: bool | None  # whether the kernel lists one
    topology: Topology
    gpus: tuple[Gpu, ...]
    unread: Mapping[str, str]  # why files could not be read, by path

    @property
    def amd(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def is_wsl(self) -> bool:
        return self.dxg or "microsoft" in self.release.lower()

    def why(self, *parts: str) -> str:
        """Why the files whose paths contain these parts could not be read."""
        reasons = (reason for path, reason in self.unread.items() if all(part in path for part in parts))
        return "; ".join(dict.fromkeys(reasons)) or f"the kernel states nothing for {' '.join(parts)}"


def survey(root: Path = Path("/")) -> Machine:
    """Read this machine, with the kernel's files below a root. Never raises."""
    files = Files(root)
    topology = gpus.read_topology(files)
    info = dict(re.findall(r"^(\w+):[ \t]+([0-9]{1,16}) kB[ \t]*$", files.text("proc/meminfo") or "", re.MULTILINE))
    memory = int(info["MemTotal"]) << 10 if "MemTotal" in info else None
    available = int(info["MemAvailable"]) << 10 if "MemAvailable" in info else None
    limit = parse_int(files.text("sys/fs/cgroup/memory.max") or "")
    if limit is not None and memory is not None and limit >= memory:
        limit = None
    model_name = re.search(r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$", files.text("proc/cpuinfo") or "", re.MULTILINE)
    if model_name:
        cpu = model_name[1]
    else:
        cpu = platform.processor() or "unknown processor"
    iommu = None
    classes = files.names("sys/class")
    if classes is not None:
        iommu = "iommu" in classes and bool(files.names("sys/class/iommu"))
    cmdline = (files.text("proc/cmdline") or "").split()
    return Machine(
        platform=sys.platform,
        release=platform.release(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        cpu=cpu,
        memory_bytes=memory,
        available_bytes=available,
        memory_limit_bytes=limit,
        device_nodes=_device_nodes(files),
        cmdline=cmdline,
        amdgpu=_parameters(files, cmdline),
        driver_version=files.matching("sys/module/amdgpu/version", r"[0-9]{1,3}(\.[0-9]{1,4}){1,3}.{0,20}"),
        container=_container(files),
        dxg=(files.root / "dev/dxg").exists(),
        iommu=iommu,
        topology=topology,
        gpus=tuple(_gpu(files, topology, *device) for device in gpus.list_display_devices(files)),
        unread=files.unread,
    )


def _parameters(files: Files, cmdline: Sequence[str]) -> dict[str, str]:
    """Parameters of amdgpu: in force, or at boot where the driver's directory cannot be read."""
    booted = dict(re.findall(r"(?:^| )amdgpu\.(\w+)=(\S+)", " ".join(cmdline)))
    parameters = {}
    for name in PARAMETERS:
        value = files.text(f"sys/module/amdgpu/parameters/{name}") or booted.get(name)
        if value:
            parameters[name] = value
    return parameters


def _container(files: Files) -> str | None:
    """What this process is contained in, by the files that container tools leave."""
    for path, name in _CONTAINER_FILES.items():
        if (files.root / path).exists():
            return name
    return files.matching("run/systemd/container", "[a-z-]{1,20}")


def _device_nodes(files: Files) -> dict[str, tuple[bool, str]]:
    names = [name for name in files.names("dev/dri") or [] if re.fullmatch("renderD[0-9]{1,6}", name)]
    nodes = {}
    for path in ("dev/kfd", *(f"dev/dri/{name}" for name in names)):
        node = files.root / path
        with suppress(OSError):
            group = str(node.stat().st_gid)
            with suppress(KeyError):  # a group that a container's image does not have
                group = grp.getgrgid(int(group)).gr_name
            nodes[f"/{path}"] = os.access(node, os.R_OK | os.W_OK), group
    return nodes


def _gpu(files: Files, topology: Topology, address: str, vendor_id: int, device_id: int) -> Gpu:
    vendor = _VENDORS.get(vendor_id, "other")
    driver = files.last(f"{gpus.DEVICES}/{address}/driver")
    sensors = Sensors(missing={"all": f"{address}: its driver is {driver}, not amdgpu"})
    if driver == "amdgpu":
        sensors = gpus.read_sensors(files, address)
    node = next((node for node in topology.nodes if node.pci_address == address), None)
    card = None
    integrated = None
    if vendor == "amd":
        pci = (device_id, files.hexadecimal(f"{gpus.DEVICES}/{address}/revision"))
        vram_bytes = (node and node.vram_bytes) or sensors.vram_total_bytes
        card = identify(arch=node.arch if node else None, vram_bytes=vram_bytes, pci=pci)
        if card:
            integrated = card.integrated
        elif node and is_integrated(node):
            integrated = True
        elif node and node.vram_bytes is not None:  # without a size it may be an integrated GPU of an unlisted kind
            integrated = False
    upward = gpus.read_upward(files, address)
    return Gpu(
        address=address,
        vendor=vendor,
        device_id=device_id,
        driver=driver,
        node=node,
        card=card,
        integrated=integrated,
        upward=upward,
        bar_bytes=gpus.read_bar_bytes(files, address),
        iommu_type=gpus.read_iommu_type(files, address),
        aer=gpus.read_aer(files, upward.chain),
        runtime_status=files.matching(f"{gpus.DEVICES}/{address}/power/runtime_status", "[a-z]{1,20}"),
        sensors=sensors,
    )
