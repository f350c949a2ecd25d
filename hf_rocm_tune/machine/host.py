"""The kernel and the host around the cards: boot parameters, configuration, memory, container, device nodes.

A container shows by marks that its engine leaves (``/.dockerenv``, ``/run/.containerenv``, ``/run/systemd/container``,
``/.singularity.d``) or by the name of its control group. Limits of memory: kernel ``cgroup-v2`` (``memory.max``) and
``cgroup-v1/memory`` (``memory.limit_in_bytes``), of this group and of every one above it.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_rocm_tune.machine.sysfs import (
    MAX_BYTES,
    Reading,
    Tree,
    derived,
    known,
    list_names,
    parse_int,
    read_bytes,
    read_text,
    unknown,
)

PACKED_CONFIG = "proc/config.gz"

_MODULE = "sys/module/amdgpu"
_CMDLINE, _CPUINFO, _MEMINFO, _STATUS = "proc/cmdline", "proc/cpuinfo", "proc/meminfo", "proc/self/status"
_CGROUP = "proc/self/cgroup"
# Where distributions keep the configuration of a kernel: Debian, Fedora and others; Fedora's ostree variants.
_PLAIN_CONFIGS = ("boot/config-{}", "lib/modules/{}/config")
# Boot parameters that change how cards are reached. Everything else, such as the names of disks, is left alone.
_BOOT_PARAMETERS = re.compile(
    r"iommu(\..*)?|(amd|intel)_iommu|amd_iommu_\w+|amdgpu\..*|pci|pcie_\w+|pcie|pcieport\..*|nomodeset"
)
_CONFIG_NAMES = (
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
_PARAMETERS = (
    *("aspm", "gpu_recovery", "gttsize", "lockup_timeout", "noretry", "pcie_gen_cap", "pcie_lane_cap", "pcie_p2p"),
    *("ppfeaturemask", "runpm", "vis_vramlimit", "vramlimit"),
)
_CPU_NAME = r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$"
_ENGINES = {
    "docker": "docker",
    "libpod": "podman",
    "kubepods": "kubernetes",
    "crio-": "kubernetes",
    "containerd": "containerd",
    "lxc": "lxc",
}
_DEEPEST_GROUP = 32
_MEMORY_FILES = {
    "v2": (("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")),
    "v1": (("sys/fs/cgroup/memory", "memory.limit_in_bytes"),),
}


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


def read_kernel(tree: Tree) -> Kernel:
    """Everything about the kernel. Never raises."""
    stated = tree.process().release
    release = Reading(value=stated) if stated else read_text(tree, "proc/sys/kernel/osrelease")
    return Kernel(
        release=release,
        cmdline=derived(read_text(tree, _CMDLINE), parse_cmdline, ""),
        config=_read_config(tree, release),
        amdgpu_version=read_text(tree, f"{_MODULE}/version"),
        amdgpu_parameters={name: read_text(tree, f"{_MODULE}/parameters/{name}") for name in _PARAMETERS},
        iommu_present=_read_iommu_present(tree),
    )


def parse_cmdline(text: str) -> dict[str, str]:
    """The wanted parameters by name, dashes as underscores as the kernel has them; the last of a name wins."""
    pairs = (word.partition("=") for word in _wanted_words(text))
    return {name.replace("-", "_"): value.strip('"') for name, _, value in pairs}


def _wanted_words(text: str) -> list[str]:
    words = re.findall(r'(?:"[^"]*"|[^\s"])+', text)
    return [word for word in words if _BOOT_PARAMETERS.fullmatch(word.partition("=")[0].replace("-", "_"))]


def _read_config(tree: Tree, release: Reading[str]) -> Reading[Mapping[str, str]]:
    no_line = "no line of the form CONFIG_NAME=value"
    packed = read_bytes(tree, PACKED_CONFIG)
    text = None if packed.value is None else _unpack(packed.value)
    if text is not None:
        return known(parse_config(text) or None, f"/{PACKED_CONFIG}: {no_line}")
    if release.value is None or not re.fullmatch(r"[\w.+~-]{1,128}", release.value, re.ASCII):
        return unknown("the kernel's release is not known, so neither is the name of its configuration")
    places = [place.format(release.value) for place in _PLAIN_CONFIGS]
    readings = [read_text(tree, place) for place in places]
    plain = next((reading for reading in readings if reading.value is not None), readings[0])
    where = " and ".join(f"/{place}" for place in places)
    return derived(plain, lambda stated: parse_config(stated) or None, f"{where}: {no_line}")


def _unpack(packed: bytes) -> str | None:
    """The text in a gzip file, up to a bound; None where it is none."""
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed, MAX_BYTES).decode("ascii")
    except (zlib.error, UnicodeDecodeError):
        return None


def parse_config(text: str) -> dict[str, str]:
    """The wanted names that a configuration states, ``n`` for "is not set".

    A name that is not stated is left out: what it depends on is off, or the kernel is older than it.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        stated = re.fullmatch(r"(?:# )?(CONFIG_\w+)(?:=(\S+)| is not set)", line.strip(), re.ASCII)
        if stated and stated[1] in _CONFIG_NAMES:
            found[stated[1]] = stated[2] or "n"
    return found


def _read_iommu_present(tree: Tree) -> Reading[bool]:
    classes = list_names(tree, "sys/class")
    if classes.value is None:
        return unknown(classes.reason)
    return derived(list_names(tree, "sys/class/iommu"), bool, "") if "iommu" in classes.value else Reading(value=False)


def read_host(tree: Tree) -> Host:
    """Everything about the host. Never raises."""
    process = tree.process()
    names = list_names(tree, "dev/dri").value or []
    renders = [f"dev/dri/{name}" for name in names if re.fullmatch("renderD[0-9]{1,6}", name)]
    nodes = tuple(_read_node(tree, path) for path in ("dev/kfd", *renders))
    memory, cpu = _read_memory(tree, "MemTotal"), _read_line(tree, _CPUINFO, _CPU_NAME, "model name")
    groups = None if process.groups is None else tuple(g for g in process.groups if g in {node.group for node in nodes})
    return Host(
        platform=process.platform,
        cpu=cpu if cpu.value is not None else known(process.cpu, cpu.reason),
        memory_bytes=memory,
        available_bytes=_read_memory(tree, "MemAvailable"),
        swap_bytes=_read_memory(tree, "SwapTotal"),
        memory_limit_bytes=_read_memory_limit(tree, memory.value),
        shm_bytes=known(process.shm_bytes, "the size of /dev/shm is not known"),
        container=known(_engine(tree), "no mark of a container"),
        seccomp=derived(_read_line(tree, _STATUS, r"^Seccomp:[ \t]+([0-2])[ \t]*$", "Seccomp"), parse_int, ""),
        nodes=nodes,
        groups=known(groups, "the groups of this process are not known"),
    )


def _read_line(tree: Tree, path: str, pattern: str, name: str) -> Reading[str]:
    """What a pattern finds in a line of a file."""

    def find(text: str) -> str | None:
        found = re.search(pattern, text, re.MULTILINE | re.ASCII)
        return found[1] if found else None

    return derived(read_text(tree, path), find, f"/{path}: no {name}")


def _read_memory(tree: Tree, name: str) -> Reading[int]:
    kib = _read_line(tree, _MEMINFO, rf"^{name}:[ \t]+([0-9]{{1,16}}) kB[ \t]*$", name)
    return derived(kib, lambda digits: int(digits) << 10, "")


def _read_node(tree: Tree, path: str) -> Node:
    try:
        found = tree.node(path)
    except OSError as error:
        return Node(path=f"/{path}", exists=not isinstance(error, FileNotFoundError), usable=None, group=None)
    return Node(path=f"/{path}", exists=True, usable=found.usable, group=found.group)


def _engine(tree: Tree) -> str | None:
    """What runs the container that this process is in."""
    # systemd's own note comes first: it names the engine, whichever it is.
    noted = read_text(tree, "run/systemd/container").value
    if noted and re.fullmatch("[a-z-]{1,32}", noted):
        return noted
    marks = {"run/.containerenv": "podman", ".dockerenv": "docker", ".singularity.d/runscript": "apptainer"}
    cgroup = read_text(tree, _CGROUP).value or ""
    return next(
        (engine for mark, engine in marks.items() if _exists(tree, mark)),
        next((engine for part, engine in _ENGINES.items() if part in cgroup), None),
    )


def _exists(tree: Tree, path: str) -> bool:
    try:
        tree.read(path, MAX_BYTES)
    except OSError as error:
        return isinstance(error, PermissionError | IsADirectoryError)
    return True


def _read_memory_limit(tree: Tree, memory_bytes: int | None) -> Reading[int]:
    """The lowest limit in bytes of this process's control groups, where it is below the host's memory.

    Where the host's memory is not known, every limit counts.
    """
    places = _memory_groups(read_text(tree, _CGROUP).value or "") or {("v2", "")}
    limits = [
        limit
        for version, group in sorted(places)
        for mount, file in _MEMORY_FILES[version]
        for directory in _upward(group)
        if (limit := parse_int(read_text(tree, f"{mount}{directory}/{file}").value or "")) is not None
    ]
    lowest = min(limits, default=None)
    if lowest is not None and (memory_bytes is None or lowest < memory_bytes):
        return Reading(value=lowest)
    return unknown("no control group limits the memory below the host's")


def _memory_groups(cgroup: str) -> set[tuple[str, str]]:
    """Version and path of the groups that count memory, from ``hierarchy:controllers:path`` lines."""
    found: set[tuple[str, str]] = set()
    for line in cgroup.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and fields[:2] == ["0", ""]:
            found.add(("v2", fields[2]))
        elif len(fields) == 3 and "memory" in fields[1].split(","):
            found.add(("v1", fields[2]))
    return found


def _upward(group: str) -> list[str]:
    """``/a/b``, ``/a`` and ``""``. Above its own root a group's path begins with ``..``, which leads nowhere here."""
    parts = [part for part in group.split("/") if part not in {"", ".", ".."}][:_DEEPEST_GROUP]
    return [f"/{'/'.join(parts[:depth])}".rstrip("/") for depth in range(len(parts), -1, -1)]


# What goes into a recording. The disks on the command line, the thousands of options of a kernel and the details of a
# process are nobody's business and would make a recording long. What is kept reads exactly as the whole does, nonsense
# included: bytes that are neither text nor gzip, and a text of which no line is read, must not become "empty".
_BINARY, _NO_LINE = b"\0\0\0\0", b"-\n"
_PLAIN_CONFIG = re.compile("|".join(re.escape(place).replace(r"\{\}", "[^/]+") for place in _PLAIN_CONFIGS))


def keep(path: str, content: bytes) -> bytes:
    """The part of a file's content that the readers of this package read; see ``RecordingTree``."""
    if not content:
        return content
    if path == PACKED_CONFIG:
        unpacked = _unpack(content)
        return _BINARY if unpacked is None else gzip.compress("\n".join(_config_lines(unpacked)).encode(), mtime=0)
    lines = _config_lines if _PLAIN_CONFIG.fullmatch(path) else _LINES.get(path)
    if lines is None:
        return content
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        return _BINARY
    if "\0" in text:
        return _BINARY
    return "\n".join(lines(text)).encode() or _NO_LINE if text else b""


def _config_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if parse_config(line)]


def _starting_with(*names: str) -> Callable[[str], list[str]]:
    return lambda text: [line for line in text.split("\n") if line.startswith(names)]


_LINES: dict[str, Callable[[str], list[str]]] = {
    _CMDLINE: lambda text: [" ".join(_wanted_words(text))],
    _CPUINFO: lambda text: [found[0] for found in [re.search(_CPU_NAME, text, re.MULTILINE | re.ASCII)] if found],
    _MEMINFO: _starting_with("MemTotal:", "MemAvailable:", "SwapTotal:"),
    _STATUS: _starting_with("Seccomp:"),
}
