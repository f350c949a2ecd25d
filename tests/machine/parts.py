"""Parts of invented machines: models of cards, slots, what sensors say, a kernel's options.

``trees`` puts them together, and names their sources.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

GIB, MIB = 1 << 30, 1 << 20

# A kernel's configuration with everything that peer copies need.
P2P_CONFIG = {
    "CONFIG_AMD_IOMMU": "y",
    "CONFIG_DMABUF_MOVE_NOTIFY": "y",
    "CONFIG_DRM_AMDGPU": "m",
    "CONFIG_HSA_AMD": "y",
    "CONFIG_HSA_AMD_P2P": "y",
    "CONFIG_IOMMU_DEFAULT_DMA_LAZY": "y",
    "CONFIG_IOMMU_DEFAULT_PASSTHROUGH": "n",
    "CONFIG_PCIEAER": "y",
    "CONFIG_PCI_P2PDMA": "y",
    "CONFIG_ZONE_DEVICE": "y",
}
PARAMETERS = {
    "aspm": "-1",
    "gpu_recovery": "-1",
    "gttsize": "-1",
    "noretry": "-1",
    "pcie_p2p": "Y",
    "ppfeaturemask": "0xfff7bfff",
    "runpm": "-1",
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What a model of card says of itself."""

    device: int
    revision: int
    gfx_target_version: int
    simd_count: int
    vram_bytes: int
    cap_w: int = 0
    pcie: tuple[float, int] = (16.0, 16)
    kfd_name: str = "ip discovery"


XT = Chip(device=0x744C, revision=0xCC, gfx_target_version=110000, simd_count=168, vram_bytes=20464 * MIB, cap_w=315)
XTX = Chip(device=0x744C, revision=0xC8, gfx_target_version=110000, simd_count=192, vram_bytes=24560 * MIB, cap_w=355)
GRE = Chip(device=0x744C, revision=0xCE, gfx_target_version=110000, simd_count=160, vram_bytes=16368 * MIB, cap_w=260)
XT_9070 = Chip(
    device=0x7550,
    revision=0xC0,
    gfx_target_version=120001,
    simd_count=128,
    vram_bytes=16304 * MIB,
    cap_w=304,
    pcie=(32.0, 16),
)
RAPHAEL = Chip(device=0x164E, revision=0xC8, gfx_target_version=100306, simd_count=4, vram_bytes=512 * MIB)
STRIX_HALO = Chip(device=0x1586, revision=0xC1, gfx_target_version=110501, simd_count=80, vram_bytes=512 * MIB)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a card sits: lanes and generation that the slot gives it, and what is between it and the processor.

    Attributes:
        width: lanes.
        speed: 10^9 transfers a second and lane, at most.
        chipset: the slot is the chipset's.
        idle: nothing is running, so the link has slowed down to 2.5.
    """

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
    correctable = counts.get("correctable", 0)
    names = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF")
    lines = [f"{name} {correctable if name == 'BadTLP' else 0}\n" for name in names]
    files = {f"{place}/aer_dev_correctable": "".join([*lines, f"TOTAL_ERR_COR {correctable}\n"])}
    for kind in ("fatal", "nonfatal"):
        total = f"TOTAL_ERR_{kind.upper()} {counts.get(kind, 0)}\n"
        files[f"{place}/aer_dev_{kind}"] = f"Undefined 0\nDLP 0\nSDES 0\nTLP 0\n{total}"
    return files


def rebar_bytes(vram_bytes: int) -> int:
    """A resizable BAR is a power of two (PCI Express: Resizable BAR capability)."""
    return 1 << (vram_bytes - 1).bit_length()
