"""The whole machine in one frozen record, from the live machine or from a recording of one. Imports no torch.

A recording holds what was read and no more, and of files that say much (the command line, the kernel's configuration,
the CPUs, the state of the process) only the lines that are read: enough to diagnose a machine elsewhere, without its
disks' names or its users' groups. Surveying a recording gives the same record as the machine did. Whatever could not be
read is a ``Reading`` without a value and with the reason.

Not covered: a driver that hangs inside a read hangs the survey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_rocm_tune.machine.cards import Identity, identify
from hf_rocm_tune.machine.gpus import (
    AMD,
    INTEL,
    NVIDIA,
    DisplayDevice,
    GpuNode,
    Link,
    Sensors,
    Topology,
    list_display_devices,
    no_sensors,
    read_aer,
    read_atomics,
    read_bar_bytes,
    read_driver,
    read_iommu_type,
    read_peers,
    read_sensors,
    read_topology,
    read_upward,
)
from hf_rocm_tune.machine.host import Host, Kernel, keep, read_host, read_kernel
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.sysfs import LiveTree, Reading, RecordingTree, Tree, unknown
from hf_rocm_tune.machine.visible import is_integrated, visible_nodes

Vendor = Literal["amd", "nvidia", "intel", "other"]
_VENDORS: dict[int, Vendor] = {AMD: "amd", NVIDIA: "nvidia", INTEL: "intel"}


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
        iommu_type: of its IOMMU group: ``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating).
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


def survey(tree: Tree | None = None) -> Machine:
    """Read the machine, the live one unless another is given. Never raises; what could not be read has the reason."""
    tree = LiveTree() if tree is None else tree
    topology = read_topology(tree)
    devices, unlisted = list_display_devices(tree)
    return Machine(
        kernel=read_kernel(tree),
        host=read_host(tree),
        topology=topology,
        gpus=tuple(_read_gpu(tree, device, topology) for device in devices),
        unlisted=unlisted,
    )


def record(tree: Tree | None = None, *, source: str = "") -> tuple[Machine, dict[str, Any]]:
    """Read the machine, and make a recording of what was read, for `RecordedTree` and ready for JSON."""
    recorder = RecordingTree(LiveTree() if tree is None else tree, keep=keep)
    machine = survey(recorder)
    return machine, recorder.recording(source)


def _read_gpu(tree: Tree, device: DisplayDevice, topology: Topology) -> Gpu:
    address = device.address
    vendor = _VENDORS.get(device.vendor_id, "other")
    driver = read_driver(tree, address)
    sensors = (
        read_sensors(tree, address)
        if driver.value == "amdgpu"
        else no_sensors(f"{address}: its driver is {driver.value}, not amdgpu" if driver.value else driver.reason)
    )
    node = next((node for node in topology.nodes if node.pci_address == address), None)
    identity = _identify(device, node, sensors)
    upward = read_upward(tree, address)
    no_node = "the compute driver (KFD) does not list the device"
    return Gpu(
        address=address,
        vendor=vendor,
        vendor_id=device.vendor_id,
        device_id=device.device_id,
        driver=driver,
        node=node,
        identity=identity,
        integrated=_integrated(node, identity) if vendor == "amd" else None,
        path=upward.links,
        root_port=upward.root_port,
        behind_chipset=upward.behind_chipset,
        bar_bytes=read_bar_bytes(tree, address),
        iommu_type=read_iommu_type(tree, address),
        aer=read_aer(tree, upward.chain[::-1]),
        peers=read_peers(tree, node, topology) if node else unknown(no_node),
        atomics=read_atomics(tree, node, topology) if node else unknown(no_node),
        sensors=sensors,
    )


def _identify(device: DisplayDevice, node: GpuNode | None, sensors: Sensors) -> Identity:
    if device.vendor_id != AMD:
        return Identity(card=None, reason="not an AMD device")
    return identify(
        arch=node.arch if node else None,
        vram_bytes=node.vram_bytes if node and node.vram_bytes is not None else sensors.vram_total_bytes.value,
        name=node.name if node else "",
        device_id=device.device_id,
        revision=device.revision,
    )


def _integrated(node: GpuNode | None, identity: Identity) -> bool | None:
    if identity.card:
        return identity.card.integrated
    if node and is_integrated(node):
        return True
    # A node without memory figures may still be an integrated GPU of an architecture that is not listed here.
    return False if node and node.vram_bytes is not None else None


@dataclass(frozen=True, kw_only=True)
class JoinedDevice:
    """A device of torch and the card that it is.

    Attributes:
        device: as torch sees it.
        gpu: as the kernel sees it; None where it could not be told.
        reason: how it was told, or why it could not be.
    """

    device: TorchDevice
    gpu: Gpu | None
    reason: str

    @property
    def spoofed(self) -> bool:
        """Torch takes the card for another architecture than the kernel states: an override variable is at work."""
        return self.gpu is not None and self.gpu.arch is not None and self.gpu.arch != self.device.arch


def join(machine: Machine, devices: Sequence[TorchDevice], environ: Mapping[str, str]) -> tuple[JoinedDevice, ...]:
    """Tell which card each device of torch is, in torch's order: by PCI address, and where torch gives none, by order.

    Torch counts the devices that its filters leave, under the variables in `environ`; the kernel knows the cards,
    whatever the variables say.
    """
    found = {gpu.address: gpu for gpu in machine.gpus}
    nodes = visible_nodes(machine.topology.nodes, environ)

    def of(device: TorchDevice) -> tuple[Gpu | None, str]:
        if device.pci_address is not None:
            gpu, why = found.get(device.pci_address.lower()), f"PCI address {device.pci_address}"
            return gpu, why if gpu else f"{why} is not among the kernel's devices"
        if not machine.topology.complete:
            return None, "torch gives no PCI address, and the kernel's list could not be read whole"
        if nodes is None or len(nodes) != len(devices) or device.index >= len(nodes):
            return None, "torch gives no PCI address, and its devices are not as many as the kernel's"
        gpu = found.get(nodes[device.index].pci_address or "")
        if gpu is None:
            return None, "torch gives no PCI address, and neither does the kernel"
        return gpu, "its place in the kernel's order, because torch gives no address"

    joined = [(device, *of(device)) for device in devices]
    return tuple(JoinedDevice(device=device, gpu=gpu, reason=reason) for device, gpu, reason in joined)
