"""The running kernel: release, boot parameters, build configuration, amdgpu and its parameters, IOMMU."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from hf_rocm_tune.machine.machine import Kernel
from hf_rocm_tune.machine.sysfs import MAX_BYTES, Reading, derived, known, list_names, read_bytes, read_text, unknown
from hf_rocm_tune.machine.sysfs_tree import Tree

MODULE = "sys/module/amdgpu"
CMDLINE = "proc/cmdline"
PACKED_CONFIG = "proc/config.gz"
# Where distributions keep the configuration of a kernel: Debian, Fedora and others; Fedora's ostree variants.
PLAIN_CONFIGS = ("boot/config-{}", "lib/modules/{}/config")

# Boot parameters that change how cards are reached. Everything else, such as the names of disks, is left alone.
_WANTED = re.compile(
    r"iommu(\..*)?|(amd|intel)_iommu|amd_iommu_\w+|amdgpu\..*|pci|pcie_\w+|pcie|pcieport\..*|nomodeset"
)
CONFIG_NAMES = (
    "CONFIG_AMD_IOMMU",
    "CONFIG_DMABUF_MOVE_NOTIFY",
    "CONFIG_DRM_AMDGPU",
    "CONFIG_HSA_AMD",
    "CONFIG_HSA_AMD_P2P",
    "CONFIG_INTEL_IOMMU",
    "CONFIG_IOMMU_DEFAULT_DMA_LAZY",
    "CONFIG_IOMMU_DEFAULT_DMA_STRICT",
    "CONFIG_IOMMU_DEFAULT_PASSTHROUGH",
    "CONFIG_PCIEAER",
    "CONFIG_PCI_P2PDMA",
    "CONFIG_ZONE_DEVICE",
)
# Documentation/gpu/amdgpu/module-parameters: peer copies, overdrive bits, power saving, link limits, memory, recovery.
PARAMETERS = (
    "aspm",
    "gpu_recovery",
    "gttsize",
    "lockup_timeout",
    "noretry",
    "pcie_gen_cap",
    "pcie_lane_cap",
    "pcie_p2p",
    "ppfeaturemask",
    "runpm",
    "vis_vramlimit",
    "vramlimit",
)


def read_kernel(tree: Tree) -> Kernel:
    """Everything about the kernel. Never raises."""
    release = _read_release(tree)
    return Kernel(
        release=release,
        cmdline=_read_cmdline(tree),
        config=_read_config(tree, release),
        amdgpu_version=read_text(tree, f"{MODULE}/version"),
        amdgpu_parameters={name: read_text(tree, f"{MODULE}/parameters/{name}") for name in PARAMETERS},
        iommu_present=_read_iommu_present(tree),
    )


def _read_release(tree: Tree) -> Reading[str]:
    stated = tree.process().release
    return Reading(value=stated) if stated else read_text(tree, "proc/sys/kernel/osrelease")


def _read_cmdline(tree: Tree) -> Reading[Mapping[str, str]]:
    return derived(read_text(tree, CMDLINE), parse_cmdline, "")


def parse_cmdline(text: str) -> dict[str, str]:
    """The wanted parameters by name, dashes as underscores as the kernel has them; the last of a name wins."""
    found: dict[str, str] = {}
    for word in wanted_words(text):
        name, _, value = word.partition("=")
        found[name.replace("-", "_")] = value.strip('"')
    return found


def wanted_words(text: str) -> list[str]:
    """The words of a command line that concern this project, as they stand there."""
    words = re.findall(r'(?:"[^"]*"|[^\s"])+', text)
    return [word for word in words if _WANTED.fullmatch(word.partition("=")[0].replace("-", "_"))]


def _read_config(tree: Tree, release: Reading[str]) -> Reading[Mapping[str, str]]:
    packed = read_bytes(tree, PACKED_CONFIG)
    if packed.value is not None:
        text = unpack(packed.value)
        if text is not None:
            return known(parse_config(text) or None, f"/{PACKED_CONFIG}: no line of the form CONFIG_NAME=value")
    if release.value is None or not re.fullmatch(r"[\w.+~-]{1,128}", release.value, re.ASCII):
        return unknown("the kernel's release is not known, so neither is the name of its configuration")
    readings = [read_text(tree, place.format(release.value)) for place in PLAIN_CONFIGS]
    plain = next((reading for reading in readings if reading.value is not None), readings[0])
    where = " and ".join(f"/{place.format(release.value)}" for place in PLAIN_CONFIGS)
    return derived(plain, lambda text: parse_config(text) or None, f"{where}: no line of the form CONFIG_NAME=value")


def unpack(packed: bytes) -> str | None:
    """The text in a gzip file, up to a bound; None where it is none."""
    try:
        raw = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed, MAX_BYTES)
        return raw.decode("ascii")
    except (zlib.error, UnicodeDecodeError):
        return None


def parse_config(text: str) -> dict[str, str]:
    """The wanted names that a configuration states, ``n`` for "is not set".

    A name that is not stated is left out: what it depends on is off, or the kernel is older than it.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        stated = re.fullmatch(r"(?:# )?(CONFIG_\w+)(?:=(\S+)| is not set)", line.strip(), re.ASCII)
        if stated and stated[1] in CONFIG_NAMES:
            found[stated[1]] = stated[2] or "n"
    return found


def _read_iommu_present(tree: Tree) -> Reading[bool]:
    classes = list_names(tree, "sys/class")
    if classes.value is None:
        return unknown(classes.reason)
    if "iommu" not in classes.value:
        return Reading(value=False)
    return derived(list_names(tree, "sys/class/iommu"), bool, "")
