"""The AMD GPUs that the kernel's compute driver (KFD) lists, in its order, read without root and without torch.

``gfx_target_version`` is written by the kernel, so HSA_OVERRIDE_GFX_VERSION does not reach it: it is the card's true
architecture even where a user has it spoofed (unsloth install.sh, comment). ``p2p_links`` of a node are direct links
over PCI Express, which the kernel lists only if CONFIG_HSA_AMD_P2P and ``pcie_p2p`` are on, all memory is in the BAR
and the bridges allow it (``kfd_dev_create_p2p_links``; ``amdgpu_device_is_peer_accessible``); ``io_links`` lead to the
processor and over XGMI.

Not covered: NVIDIA and Intel GPUs, Windows, and whether direct copies are right: only a measurement tells. Field
meanings: kernel ``kfd_topology.c``, ``kfd_crat.h`` (CRAT_IOLINK_FLAGS_*) and ``hsakmttypes.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.machine.sysfs import Reading, Tree, as_tree, known, list_numbered, read_properties, read_text, unknown

NODES = "sys/class/kfd/kfd/topology/nodes"
# hsakmttypes.h HSA_HEAPTYPE: frame buffer that the CPU can map (1) and that it cannot (2). Small BAR splits VRAM so.
_FRAME_BUFFER_HEAPS = (1, 2)
_NO_ATOMICS = 1 << 2 | 1 << 3  # 32-bit and 64-bit
_NO_PEER_DMA = 1 << 4


@dataclass(frozen=True, kw_only=True)
class GpuNode:
    """One GPU of the KFD topology.

    Attributes:
        index: place among the GPU nodes, from 0.
        node: number of the topology node (CPUs are nodes too).
        gfx_target_version: as the kernel writes it, for example 110000.
        arch: the same as LLVM spells it, for example ``gfx1100``.
        simd_count: SIMD units; two a compute unit on RDNA. Not to be used to identify a card.
        vram_bytes: sum of the frame-buffer banks in bytes; None where no bank could be read.
        pci_address: ``domain:bus:device.function``; None where the kernel gives no location.
        name: the kernel's name of the chip, often only a code name; may be empty.
        has_cpu: the node holds CPU cores as well, as an APU's node may.
    """

    index: int
    node: int
    gfx_target_version: int
    arch: str
    simd_count: int
    vram_bytes: int | None
    pci_address: str | None
    name: str
    has_cpu: bool


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All GPU nodes, and why some or all are missing.

    Attributes:
        nodes: in KFD's order.
        reasons: one line for each thing that could not be read; on a machine without an AMD GPU one line says so.
        complete: False where a node could not be read, so that indices after it are not certain.
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


def read_topology(root: Tree | Path = Path("/")) -> Topology:
    """Every GPU node that KFD lists. Never raises; see ``Topology.reasons`` for what could not be read."""
    tree = as_tree(root)
    numbers = list_numbered(tree, NODES)
    if numbers.value is None:
        reason = f"no AMD GPU is listed by the kernel ({numbers.reason})"
        # A missing directory is an answer (no driver, no GPU); one that may not be read is not.
        return Topology(nodes=(), reasons=(reason,), complete=_has_no_driver(tree))
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


def _has_no_driver(tree: Tree) -> bool:
    try:
        tree.names("sys/class/kfd")
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


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
            # A sum without one bank would be a wrong figure, not a smaller card.
            return unknown(properties.reason)
        if properties.value.get("heap_type") in _FRAME_BUFFER_HEAPS:
            total += properties.value.get("size_in_bytes", 0)
    return known(total or None, f"/{where}: no frame-buffer bank")


def _gpu_node(tree: Tree, index: int, number: int, properties: Mapping[str, int], vram: int | None) -> GpuNode:
    version = properties["gfx_target_version"]
    location = properties.get("location_id")
    address = None
    if location is not None:  # bus in bits 8-15, device in 3-7, function in 0-2
        bus, device, function = (location >> 8) & 0xFF, (location >> 3) & 0x1F, location & 7
        address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
    return GpuNode(
        index=index,
        node=number,
        gfx_target_version=version,
        arch=decode_arch(version),
        simd_count=properties["simd_count"],
        vram_bytes=vram,
        pci_address=address,
        name=read_text(tree, f"{NODES}/{number}/name").value or "",
        has_cpu=properties.get("cpu_cores_count", 0) > 0,
    )


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
