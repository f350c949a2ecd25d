"""What the compute driver says of a GPU's links: to which other GPUs it has direct ones, and whether atomics pass.

``p2p_links`` of a node are direct links over PCI Express. The kernel lists one only if CONFIG_HSA_AMD_P2P and
``pcie_p2p`` are on, all memory is in the BAR and the bridges allow it (``kfd_topology.c`` ``kfd_dev_create_p2p_links``;
``amdgpu_device.c`` ``amdgpu_device_is_peer_accessible``). ``io_links`` lead to the processor and over XGMI. Flags:
``kfd_crat.h``, CRAT_IOLINK_FLAGS_*.

Not covered: whether direct copies are right; only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_rocm_tune.machine.kfd import NODES, GpuNode, Topology
from hf_rocm_tune.machine.sysfs import Reading, list_numbered, read_properties, unknown
from hf_rocm_tune.machine.sysfs_tree import Tree

_NO_ATOMICS = 1 << 2 | 1 << 3
_NO_PEER_DMA = 1 << 4


def read_peers(tree: Tree, node: GpuNode, topology: Topology) -> Reading[tuple[str, ...]]:
    """PCI addresses of the GPUs to which the kernel lists a direct link; empty where it lists none."""
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
        if numbers.value is None:
            return unknown(numbers.reason)
        for number in numbers.value:
            properties = read_properties(tree, f"{where}/{number}/properties")
            if properties.value is None:
                return unknown(properties.reason)
            found.append(properties.value)
    return Reading(value=found)
