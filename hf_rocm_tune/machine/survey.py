"""The whole machine in one record, from the live machine or from a recording of one. Imports no torch.

A recording holds what was read and no more, and of files that say much (the command line, the kernel's configuration,
the CPUs, the state of the process) only the lines that are read: enough to diagnose a machine elsewhere, without its
disks' names or its users' groups. Surveying a recording gives the same record as the machine did.

Not covered: a driver that hangs inside a read hangs the survey.
"""

from __future__ import annotations

from typing import Any

from hf_rocm_tune.machine import host_sysfs, kernel_sysfs
from hf_rocm_tune.machine.cards import Identity, identify
from hf_rocm_tune.machine.joined import JoinedDevice as JoinedDevice
from hf_rocm_tune.machine.joined import join as join
from hf_rocm_tune.machine.keep_sysfs import keep
from hf_rocm_tune.machine.kfd import GpuNode, Topology, read_topology
from hf_rocm_tune.machine.kfd_links_sysfs import read_atomics, read_peers
from hf_rocm_tune.machine.machine import Gpu as Gpu
from hf_rocm_tune.machine.machine import Machine as Machine
from hf_rocm_tune.machine.machine import Vendor
from hf_rocm_tune.machine.path_sysfs import read_upward
from hf_rocm_tune.machine.pci_sysfs import (
    AMD,
    INTEL,
    NVIDIA,
    DisplayDevice,
    list_display_devices,
    read_aer,
    read_bar_bytes,
    read_driver,
    read_iommu_group,
    read_iommu_type,
)
from hf_rocm_tune.machine.sensors_sysfs import no_sensors, read_sensors
from hf_rocm_tune.machine.sysfs import unknown
from hf_rocm_tune.machine.sysfs_tree import LiveTree, RecordingTree, Tree
from hf_rocm_tune.machine.visible import is_integrated

_VENDORS: dict[int, Vendor] = {AMD: "amd", NVIDIA: "nvidia", INTEL: "intel"}
_NO_NODE = "the compute driver (KFD) does not list the device"


def survey(tree: Tree | None = None) -> Machine:
    """Read the machine. Never raises; what could not be read is unknown, with the reason.

    Args:
        tree: the live machine by default.
    """
    tree = LiveTree() if tree is None else tree
    topology = read_topology(tree)
    devices, unlisted = list_display_devices(tree)
    return Machine(
        kernel=kernel_sysfs.read_kernel(tree),
        host=host_sysfs.read_host(tree),
        topology=topology,
        gpus=tuple(_read_gpu(tree, device, topology) for device in devices),
        unlisted=unlisted,
    )


def record(tree: Tree | None = None, *, source: str = "") -> tuple[Machine, dict[str, Any]]:
    """Read the machine, and make a recording of what was read.

    Args:
        tree: the live machine by default.
        source: where this machine comes from, for the recording.

    Returns:
        The machine, and what :class:`~hf_rocm_tune.machine.sysfs_tree.RecordedTree` takes, ready for JSON.
    """
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
    vram = node.vram_bytes if node and node.vram_bytes is not None else sensors.vram_total_bytes.value
    identity = _identify(device, vendor, node, vram)
    upward = read_upward(tree, address)
    group = read_iommu_group(tree, address)
    return Gpu(
        address=address,
        vendor=vendor,
        vendor_id=device.vendor_id,
        device_id=device.device_id,
        driver=driver,
        node=node,
        identity=identity,
        integrated=_integrated(vendor, node, identity),
        path=upward.links,
        root_port=upward.root_port,
        behind_chipset=upward.behind_chipset,
        bar_bytes=read_bar_bytes(tree, address),
        iommu_group=group,
        iommu_type=read_iommu_type(tree, group),
        aer=read_aer(tree, upward.chain[::-1]),
        peers=read_peers(tree, node, topology) if node else unknown(_NO_NODE),
        atomics=read_atomics(tree, node, topology) if node else unknown(_NO_NODE),
        sensors=sensors,
    )


def _identify(device: DisplayDevice, vendor: Vendor, node: GpuNode | None, vram: int | None) -> Identity:
    if vendor != "amd":
        return Identity(card=None, reason="not an AMD device")
    return identify(
        arch=node.arch if node else None,
        vram_bytes=vram,
        name=node.name if node else "",
        device_id=device.device_id,
        revision=device.revision,
    )


def _integrated(vendor: Vendor, node: GpuNode | None, identity: Identity) -> bool | None:
    if vendor != "amd":
        return None
    if identity.card:
        return identity.card.integrated
    if node and is_integrated(node):
        return True
    # A node without memory figures may still be an integrated GPU of an architecture that is not listed here.
    return False if node and node.vram_bytes is not None else None
