"""The AMD GPUs that the kernel's compute driver (KFD) lists, in its order, read without root and without torch.

``gfx_target_version`` is written by the kernel, so HSA_OVERRIDE_GFX_VERSION does not reach it: it is the card's true
architecture even where a user has it spoofed (unsloth install.sh, comment).

Not covered: NVIDIA and Intel GPUs, Windows. Field meanings: kernel ``kfd_topology.c`` and ``hsakmttypes.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_rocm_tune.machine.sysfs import Reading, list_numbered, read_properties, read_text
from hf_rocm_tune.machine.sysfs_tree import Tree, as_tree

NODES = "sys/class/kfd/kfd/topology/nodes"
# hsakmttypes.h HSA_HEAPTYPE: frame buffer that the CPU can map (1) and that it cannot (2). Small BAR splits VRAM so.
FRAME_BUFFER_HEAPS = (1, 2)


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


def decode_location(location_id: int, domain: int) -> str:
    """PCI address of KFD's ``location_id`` (bus in bits 8-15, device in 3-7, function in 0-2) and ``domain``."""
    bus, devfn = (location_id >> 8) & 0xFF, location_id & 0xFF
    return f"{domain:04x}:{bus:02x}:{devfn >> 3:02x}.{devfn & 7}"


def read_vram_bytes(root: Tree | Path, node: int) -> Reading[int]:
    """Sum of the frame-buffer banks of one node in bytes; system memory and shared apertures do not count."""
    where = f"{NODES}/{node}/mem_banks"
    banks = list_numbered(root, where)
    if banks.value is None:
        return Reading(value=None, reason=banks.reason)
    total = 0
    for bank in banks.value:
        properties = read_properties(root, f"{where}/{bank}/properties")
        if properties.value is None:
            # A sum without one bank would be a wrong figure, not a smaller card.
            return Reading(value=None, reason=properties.reason)
        if properties.value.get("heap_type") in FRAME_BUFFER_HEAPS:
            total += properties.value.get("size_in_bytes", 0)
    return Reading(value=total) if total else Reading(value=None, reason=f"/{where}: no frame-buffer bank")


def _gpu_node(root: Tree | Path, index: int, number: int, properties: dict[str, int], vram: int | None) -> GpuNode:
    version = properties["gfx_target_version"]
    location = properties.get("location_id")
    return GpuNode(
        index=index,
        node=number,
        gfx_target_version=version,
        arch=decode_arch(version),
        simd_count=properties["simd_count"],
        vram_bytes=vram,
        pci_address=None if location is None else decode_location(location, properties.get("domain", 0)),
        name=read_text(root, f"{NODES}/{number}/name").value or "",
        has_cpu=properties.get("cpu_cores_count", 0) > 0,
    )


def _has_no_driver(tree: Tree) -> bool:
    try:
        tree.names("sys/class/kfd")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def read_topology(root: Tree | Path = Path("/")) -> Topology:
    """Every GPU node that KFD lists. Never raises; see ``Topology.reasons`` for what could not be read."""
    root = as_tree(root)
    numbers = list_numbered(root, NODES)
    if numbers.value is None:
        reason = f"no AMD GPU is listed by the kernel ({numbers.reason})"
        # A missing directory is an answer (no driver, no GPU); one that may not be read is not.
        return Topology(nodes=(), reasons=(reason,), complete=_has_no_driver(root))
    nodes: list[GpuNode] = []
    reasons: list[str] = []
    complete = True
    for number in numbers.value:
        properties = read_properties(root, f"{NODES}/{number}/properties")
        if properties.value is None:
            complete = False
            reasons.append(properties.reason)
        elif not {"simd_count", "gfx_target_version"} <= properties.value.keys():
            complete = False
            reasons.append(f"/{NODES}/{number}/properties: no simd_count or no gfx_target_version")
        elif properties.value["simd_count"] and properties.value["gfx_target_version"]:
            vram = read_vram_bytes(root, number)
            if vram.reason:
                reasons.append(vram.reason)
            nodes.append(_gpu_node(root, len(nodes), number, properties.value, vram.value))
    if not nodes and complete:
        reasons.append("KFD lists no GPU node")
    return Topology(nodes=tuple(nodes), reasons=tuple(reasons), complete=complete)
