"""What machine this is: everything that the kernel tells without root, in one frozen record.

Only data, no reader: :mod:`hf_rocm_tune.machine.survey` fills it from a
:class:`~hf_rocm_tune.machine.sysfs_tree.Tree`, which may be the live machine, a directory or a recording. Whatever
could not be read is a ``Reading`` without a value and with the reason; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hf_rocm_tune.machine.cards import Identity
from hf_rocm_tune.machine.kfd import GpuNode, Topology
from hf_rocm_tune.machine.sysfs import Reading

Vendor = Literal["amd", "nvidia", "intel", "other"]


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
class Sensors:
    """amdgpu's hwmon and load files of one card at one moment.

    Attributes:
        edge_c, hotspot_c, memory_c: temperatures in degrees Celsius.
        power_w: board power (average or momentary, as the driver has it) in watts.
        power_cap_w: limit in force in watts.
        utilisation: busy share of the card, 0 to 1.
        vram_used_bytes, vram_total_bytes: as the driver counts them, of all processes.
        throttle: bits of what limits the clocks at this moment, in the chip-independent form of ``gpu_metrics``;
            :func:`hf_rocm_tune.machine.throttle_sysfs.throttle_causes` names them. A power limit is normal under load.
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


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One display or compute device on the PCI bus.

    Attributes:
        address: PCI address, ``domain:bus:device.function``.
        vendor: by PCI vendor id.
        vendor_id, device_id: PCI ids.
        driver: name of the bound kernel driver.
        node: its KFD node, which holds the true architecture; None where KFD does not list it.
        identity: the row of the card table, or why there is none.
        integrated: shares the CPU's memory (None: not known).
        path: the links from the card up to the root port; the first is the one nearest to the card's own connector.
        root_port: PCI address of the root port at the end of ``path``; None where it could not be followed.
        behind_chipset: whether the path passes a bridge that belongs to the chipset and not to the CPU (None: unknown).
        bar_bytes: size of the largest memory BAR in bytes; as large as the VRAM where ReBAR is on.
        iommu_group: number of its IOMMU group.
        iommu_type: ``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating).
        aer: error counters by name (``correctable``, ``nonfatal``, ``fatal``): totals since boot of the card and of the
            bridges above it, because either end of a link may be the one that counts.
        peers: PCI addresses of the GPUs to which the kernel lists a direct link. Whether copies are right is another
            question.
        atomics: whether PCIe atomics pass between it and the processor, as the compute driver says.
        sensors: of amdgpu cards.
    """

    address: str
    vendor: Vendor
    vendor_id: int
    device_id: int
    driver: Reading[str]
    node: GpuNode | None
    identity: Identity
    integrated: bool | None
    path: tuple[Link, ...]
    root_port: str | None
    behind_chipset: bool | None
    bar_bytes: Reading[int]
    iommu_group: Reading[int]
    iommu_type: Reading[str]
    aer: Mapping[str, Reading[int]]
    peers: Reading[tuple[str, ...]]
    atomics: Reading[bool]
    sensors: Sensors

    @property
    def arch(self) -> str | None:
        """Architecture that the kernel states (``gfx1100``), which no override variable reaches."""
        return self.node.arch if self.node else None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The running kernel.

    Attributes:
        release: ``uname -r``.
        cmdline: boot parameters by name, only those that concern this project (iommu, amdgpu, pci, pcie); a
            parameter without a value has "".
        config: ``/boot/config-*`` or ``/proc/config.gz``: the CONFIG_ names that concern this project.
        amdgpu_version: of an out-of-tree driver; in-tree drivers have none.
        amdgpu_parameters: ``/sys/module/amdgpu/parameters`` by name, those that concern this project.
        iommu_present: whether the kernel lists an IOMMU.
    """

    release: Reading[str]
    cmdline: Reading[Mapping[str, str]]
    config: Reading[Mapping[str, str]]
    amdgpu_version: Reading[str]
    amdgpu_parameters: Mapping[str, Reading[str]]
    iommu_present: Reading[bool]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A device node and what this process may do with it.

    Attributes:
        path: for example ``/dev/kfd``.
        exists: whether it is there.
        usable: whether this process may read and write it (None: not known).
        group: name of its group, ``render`` or ``video`` as a rule; None where unknown.
    """

    path: str
    exists: bool
    usable: bool | None
    group: str | None


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory, container, and what this process may do.

    Attributes:
        platform: ``linux``, ``windows`` or ``darwin``.
        cpu: its name.
        memory_bytes, available_bytes, swap_bytes: of the whole host.
        memory_limit_bytes: cgroup's limit where it is below the host's memory.
        shm_bytes: size of ``/dev/shm``.
        container: ``docker``, ``podman`` or the like; None outside of one.
        seccomp: mode of this process (0 off, 2 filter).
        nodes: ``/dev/kfd`` and every ``/dev/dri/renderD*``.
        groups: names of the groups that this process is in, out of those that own ``nodes``.
    """

    platform: str
    cpu: Reading[str]
    memory_bytes: Reading[int]
    available_bytes: Reading[int]
    swap_bytes: Reading[int]
    memory_limit_bytes: Reading[int]
    shm_bytes: Reading[int]
    container: Reading[str]
    seccomp: Reading[int]
    nodes: tuple[Node, ...]
    groups: Reading[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All of it.

    Attributes:
        gpus: every display or compute device, in PCI order.
        topology: KFD's own list, with what could not be read of it.
        unlisted: one line for each thing that kept a PCI device from being listed; with it, ``gpus`` may lack some.
    """

    kernel: Kernel
    host: Host
    topology: Topology
    gpus: tuple[Gpu, ...]
    unlisted: tuple[str, ...] = ()

    @property
    def amd(self) -> tuple[Gpu, ...]:
        """The AMD devices."""
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards."""
        return tuple(gpu for gpu in self.amd if gpu.integrated is False)
