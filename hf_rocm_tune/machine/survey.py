"""The whole machine in one frozen record, from the live machine or from a recording. Imports no torch.

A recording has only what was read; of the command line, the kernel's configuration, ``cpuinfo`` and the process status
only the lines that are used. The survey of a recording equals that of the machine. An unreadable item is a ``Reading``
without a value and with the reason.

The table of cards is ``cards.toml`` beside this file, where every row names its sources. A card is identified by its
PCI device and revision, by its name, or by architecture and memory; not by compute units, because the runtime
reports work-group processors (42 on a 7900 XT) where the data sheet says compute units (84).

A container is recognised by files of its engine (``/.dockerenv``, ``/run/.containerenv``, ``/run/systemd/container``,
``/.singularity.d``) or by the name of its control group. The memory limit is that of a container with cgroup v2
(``memory.max`` of its root group).

Not covered: cgroup v1, limits of systemd units; a driver that hangs inside a read hangs the survey.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hf_rocm_tune.machine import gpus
from hf_rocm_tune.machine.gpus import GpuNode, Sensors, Topology, Upward
from hf_rocm_tune.machine.process import is_integrated, visible_nodes
from hf_rocm_tune.machine.software import TorchDevice
from hf_rocm_tune.machine.sysfs import (
    MAX_BYTES,
    LiveTree,
    Reading,
    RecordingTree,
    Tree,
    derived,
    known,
    list_names,
    parse_int,
    read_bytes,
    read_text,
    table_rows,
    unknown,
)

# ---- models of cards --------------------------------------------------------------------------------------------

GIB = 1 << 30
# The driver's reserve differs; cards of one architecture in the table differ by 4 GiB or more.
VRAM_TOLERANCE_GIB = 1.5


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of card. None means unknown.

    Attributes:
        name: as it is sold.
        key: the distinguishing part of the name, in lower case.
        arch: LLVM's name of the architecture.
        pci: ``device`` or ``device:revision`` of AMD's PCI vendor id, in lower-case hexadecimal digits.
        vram_gib: of one device as the runtime lists it.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes a second, by data sheet.
        bf16_tflops: the lowest measured rate of large bf16 products, 10^12 operations a second.
        power_w: board power.
        pcie: generation and width of the card's own connector.
        matrix: instruction family of the matrix units.
        bf16, fp8: whether the matrix units support them.
        integrated: shares the CPU's memory.
        source: where the figures come from.
    """

    name: str
    key: str
    arch: str | None = None
    pci: tuple[str, ...] = ()
    vram_gib: int | None = None
    bandwidth_gb_s: int | None = None
    bf16_tflops: int | None = None
    power_w: int | None = None
    pcie: tuple[int, int] | None = None
    matrix: str | None = None
    bf16: bool | None = None
    fp8: bool | None = None
    integrated: bool = False
    source: str


CARDS = tuple(Card(**row) for row in table_rows(Path(__file__).with_name("cards.toml"), "card"))


class CardIdentity(NamedTuple):
    """A card, or None, and the reason."""

    card: Card | None
    reason: str


def identify(
    *,
    arch: str | None,
    vram_bytes: int | None,
    name: str = "",
    device_id: int | None = None,
    revision: int | None = None,
) -> CardIdentity:
    """The row of the table for a device: by PCI id first, then by name, else by architecture and memory.

    Args:
        arch: ``gfx1100`` and the like; feature suffixes (``:sramecc+``) are ignored.
        vram_bytes: total memory.
        name: of the kernel or the runtime; may be empty or a code name.
        device_id, revision: PCI ids under AMD's vendor id (0x1002).

    Returns:
        A card only if exactly one row fits and nothing contradicts it.
    """
    plain, told, why = (arch or "").split(":")[0], None, ""
    if device_id is not None:
        ids = {f"{device_id:04x}"} | (set() if revision is None else {f"{device_id:04x}:{revision:02x}"})
        told = next((card for card in CARDS if ids & set(card.pci)), None)
        why = f"PCI device 1002:{device_id:04x}" + ("" if revision is None else f" revision {revision:02x}")
    if told is None:
        words = " ".join(name.lower().split())
        # The longest key wins: "7900 xt" is also a part of "7900 xtx".
        told = max((card for card in CARDS if card.key in words), key=lambda card: len(card.key), default=None)
        why = f"the name {name!r}"
    if told is None:
        return _by_memory(plain, vram_bytes)
    wrong = _contradiction(told, plain, vram_bytes)
    return CardIdentity(None, f"{why} means {told.name}, but {wrong}") if wrong else CardIdentity(told, why)


def _by_memory(arch: str, vram_bytes: int | None) -> CardIdentity:
    if not arch:
        return CardIdentity(None, "the architecture could not be read, and neither PCI id nor name is in the table")
    own = [card for card in CARDS if card.arch == arch]
    if len(own) == 1 and own[0].integrated:
        # The memory of an integrated GPU is a BIOS setting.
        return CardIdentity(own[0], f"{arch}, which only this chip has")
    if vram_bytes is None:
        return CardIdentity(None, f"{arch}, but the memory could not be read, and no PCI id or name is known")
    fits = [card for card in own if card.vram_gib is not None and _same_vram(card.vram_gib, vram_bytes)]
    gib = vram_bytes / GIB
    if len(fits) == 1:
        return CardIdentity(fits[0], f"{arch} with {gib:.1f} GiB")
    shown = " or ".join(card.name for card in fits) or "no row of the card table"
    return CardIdentity(None, f"{arch} with {gib:.1f} GiB: {shown}")


def _same_vram(vram_gib: int, vram_bytes: int) -> bool:
    return abs(vram_bytes / GIB - vram_gib) <= VRAM_TOLERANCE_GIB


def _contradiction(card: Card, arch: str, vram_bytes: int | None) -> str:
    if arch and card.arch and arch != card.arch:
        return f"its architecture is {arch}, not {card.arch}"
    if vram_bytes is not None and card.vram_gib is not None and not _same_vram(card.vram_gib, vram_bytes):
        return f"its memory is {vram_bytes / GIB:.1f} GiB, not {card.vram_gib}"
    return ""


# ---- the kernel and the host ------------------------------------------------------------------------------------

PACKED_CONFIG = "proc/config.gz"

_MODULE = "sys/module/amdgpu"
_CMDLINE, _CPUINFO, _MEMINFO, _STATUS = "proc/cmdline", "proc/cpuinfo", "proc/meminfo", "proc/self/status"
_CGROUP = "proc/self/cgroup"
# Where distributions keep the configuration of a kernel: Debian, Fedora and others; Fedora's ostree variants.
_PLAIN_CONFIGS = ("boot/config-{}", "lib/modules/{}/config")
# Boot parameters that a check reads; others, such as the names of disks, are not recorded.
_BOOT_PARAMETERS = re.compile(r"iommu(\..*)?|(amd|intel)_iommu|amd_iommu_\w+|nomodeset")
# What copies between cards need, see ``doctor.system``.
PEER_OPTIONS = ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY")
_PARAMETERS = ("pcie_p2p", "ppfeaturemask")  # Documentation/gpu/amdgpu/module-parameters
_CPU_NAME = r"^model name[ \t]*:[ \t]*(\S.*?)[ \t]*$"
# How engines name the control groups of their containers.
ENGINES = {"docker": "docker", "libpod": "podman", "kubepods": "kubernetes", "crio-": "kubernetes"}
ENGINES |= {"containerd": "containerd", "lxc": "lxc"}
_MEMORY_LIMIT = "sys/fs/cgroup/memory.max"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The running kernel.

    Attributes:
        release: ``uname -r``.
        cmdline: boot parameters of the IOMMU and ``nomodeset``, by name; one without a value has "".
        config: ``PEER_OPTIONS`` of ``/boot/config-*`` or ``/proc/config.gz``.
        amdgpu_version: of an out-of-tree driver; in-tree drivers have none.
        amdgpu_parameters: ``pcie_p2p`` and ``ppfeaturemask`` of ``/sys/module/amdgpu/parameters``.
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
    """A device node such as ``/dev/kfd``; None means unknown.

    Attributes:
        usable: whether this process may read and write it.
        group: name of its group, ``render`` or ``video`` as a rule.
    """

    path: str
    exists: bool
    usable: bool | None
    group: str | None


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory, container, and permissions of this process.

    Attributes:
        platform: ``linux``, ``windows`` or ``darwin``.
        memory_bytes, available_bytes, swap_bytes: of the whole host.
        memory_limit_bytes: the container's limit where it is below the host's memory.
        shm_bytes: size of ``/dev/shm``.
        container: ``docker``, ``podman`` or the like.
        seccomp: mode of this process (0 off, 2 filter).
        nodes: ``/dev/kfd`` and every ``/dev/dri/renderD*``.
        groups: of the groups that own ``nodes``, those of this process.
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
    stated = tree.process().release
    release = Reading(value=stated) if stated else read_text(tree, "proc/sys/kernel/osrelease")
    classes = list_names(tree, "sys/class")
    has_iommu = derived(classes, lambda names: "iommu" in names, "")
    if has_iommu.value:
        has_iommu = derived(list_names(tree, "sys/class/iommu"), bool, "")
    return Kernel(
        release=release,
        cmdline=derived(read_text(tree, _CMDLINE), parse_cmdline, ""),
        config=_read_config(tree, release),
        amdgpu_version=read_text(tree, f"{_MODULE}/version"),
        amdgpu_parameters={name: read_text(tree, f"{_MODULE}/parameters/{name}") for name in _PARAMETERS},
        iommu_present=has_iommu,
    )


def parse_cmdline(text: str) -> dict[str, str]:
    """The parameters by name, dashes as underscores; the last of a name wins."""
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
        return unknown("the kernel's release is unknown, so the name of its configuration is, too")
    places = [place.format(release.value) for place in _PLAIN_CONFIGS]
    readings = [read_text(tree, place) for place in places]
    plain = next((reading for reading in readings if reading.value is not None), readings[0])
    where = " and ".join(f"/{place}" for place in places)
    return derived(plain, lambda stated: parse_config(stated) or None, f"{where}: {no_line}")


def _unpack(packed: bytes) -> str | None:
    """The text in a gzip file, up to a limit; None if it is not gzip or not text."""
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed, MAX_BYTES).decode("ascii")
    except (zlib.error, UnicodeDecodeError):
        return None


def parse_config(text: str) -> dict[str, str]:
    """The options in a configuration, ``n`` for "is not set".

    A missing option depends on one that is off, or the kernel is too old.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        stated = re.fullmatch(r"(?:# )?(CONFIG_\w+)(?:=(\S+)| is not set)", line.strip(), re.ASCII)
        if stated and stated[1] in PEER_OPTIONS:
            found[stated[1]] = stated[2] or "n"
    return found


def read_host(tree: Tree) -> Host:
    process = tree.process()
    names = list_names(tree, "dev/dri").value or []
    renders = [f"dev/dri/{name}" for name in names if re.fullmatch("renderD[0-9]{1,6}", name)]
    nodes = tuple(_read_node(tree, path) for path in ("dev/kfd", *renders))
    meminfo = read_text(tree, _MEMINFO)  # once: it changes at any moment, and a recording holds one
    memory, cpu = _memory(meminfo, "MemTotal"), _read_line(tree, _CPUINFO, _CPU_NAME, "model name")
    groups = None if process.groups is None else tuple(g for g in process.groups if g in {node.group for node in nodes})
    return Host(
        platform=process.platform,
        cpu=cpu if cpu.value is not None else known(process.cpu, cpu.reason),
        memory_bytes=memory,
        available_bytes=_memory(meminfo, "MemAvailable"),
        swap_bytes=_memory(meminfo, "SwapTotal"),
        memory_limit_bytes=_read_memory_limit(tree, memory.value),
        shm_bytes=known(process.shm_bytes, "the size of /dev/shm is unknown"),
        container=known(_engine(tree), "no sign of a container"),
        seccomp=derived(_read_line(tree, _STATUS, r"^Seccomp:[ \t]+([0-2])[ \t]*$", "Seccomp"), parse_int, ""),
        nodes=nodes,
        groups=known(groups, "the groups of this process are unknown"),
    )


def _read_line(tree: Tree, path: str, pattern: str, name: str) -> Reading[str]:
    return _line(read_text(tree, path), path, pattern, name)


def _line(content: Reading[str], path: str, pattern: str, name: str) -> Reading[str]:

    def find(text: str) -> str | None:
        found = re.search(pattern, text, re.MULTILINE | re.ASCII)
        return found[1] if found else None

    return derived(content, find, f"/{path}: no {name}")


def _memory(meminfo: Reading[str], name: str) -> Reading[int]:
    kib = _line(meminfo, _MEMINFO, rf"^{name}:[ \t]+([0-9]{{1,16}}) kB[ \t]*$", name)
    return derived(kib, lambda digits: int(digits) << 10, "")


def _read_node(tree: Tree, path: str) -> Node:
    try:
        found = tree.node(path)
    except OSError as error:
        return Node(path=f"/{path}", exists=not isinstance(error, FileNotFoundError), usable=None, group=None)
    return Node(path=f"/{path}", exists=True, usable=found.usable, group=found.group)


def _engine(tree: Tree) -> str | None:
    # systemd's file comes first: it names any engine.
    noted = read_text(tree, "run/systemd/container").value
    if noted and re.fullmatch("[a-z-]{1,32}", noted):
        return noted
    marks = {"run/.containerenv": "podman", ".dockerenv": "docker", ".singularity.d/runscript": "apptainer"}
    cgroup = read_text(tree, _CGROUP).value or ""
    return next(
        (engine for mark, engine in marks.items() if _exists(tree, mark)),
        next((engine for part, engine in ENGINES.items() if part in cgroup), None),
    )


def _exists(tree: Tree, path: str) -> bool:
    try:
        tree.read(path, MAX_BYTES)
    except OSError as error:
        return isinstance(error, PermissionError | IsADirectoryError)
    return True


def _read_memory_limit(tree: Tree, memory_bytes: int | None) -> Reading[int]:
    """The container's limit where it is below the host's memory, or that is not known."""
    limit = parse_int(read_text(tree, _MEMORY_LIMIT).value or "")
    if limit is not None and (memory_bytes is None or limit < memory_bytes):
        return Reading(value=limit)
    return unknown("no control group limits the memory below the host's")


# Content of a recording. Other parts of these files are private and long. The kept part reads exactly like the whole,
# even if invalid: bytes that are neither text nor gzip, and a text without a used line, must not become "empty".
_BINARY, _NO_LINE = b"\0\0\0\0", b"-\n"
_PLAIN_CONFIG = re.compile("|".join(re.escape(place).replace(r"\{\}", "[^/]+") for place in _PLAIN_CONFIGS))


def keep(path: str, content: bytes) -> bytes:
    """The part of a file's content that is read; see ``RecordingTree``."""
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
    _CGROUP: lambda text: [engine for engine in ENGINES if engine in text],
    _CMDLINE: lambda text: [" ".join(_wanted_words(text))],
    _CPUINFO: lambda text: [found[0] for found in [re.search(_CPU_NAME, text, re.MULTILINE | re.ASCII)] if found],
    _MEMINFO: _starting_with("MemTotal:", "MemAvailable:", "SwapTotal:"),
    _STATUS: _starting_with("Seccomp:"),
}


# ---- all of it --------------------------------------------------------------------------------------------------

Vendor = Literal["amd", "nvidia", "intel", "other"]
_VENDORS: dict[int, Vendor] = {gpus.AMD: "amd", gpus.NVIDIA: "nvidia", gpus.INTEL: "intel"}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One display or compute device on the PCI bus.

    Attributes:
        address: PCI address, ``domain:bus:device.function``.
        driver: name of the bound kernel driver.
        node: its KFD node, with the true architecture; None if KFD does not list it.
        identity: the row of the card table, or why there is none.
        integrated: shares the CPU's memory (None: unknown).
        upward: its path to the processor.
        bar_bytes: of the largest memory BAR; as large as the VRAM with ReBAR.
        iommu_type: of its IOMMU group: ``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating).
        mes_firmware: version of the firmware that schedules its queues.
        display: whether a display is connected to it.
        aer: error counters by name (``correctable``, ``nonfatal``, ``fatal``), see `read_aer`.
        peers: PCI addresses of the GPUs to which the kernel lists a direct link. This does not say
            that copies are correct.
        atomics: whether PCIe atomics work between it and the processor, from the compute driver.
        sensors: of amdgpu cards.
    """

    address: str
    vendor: Vendor
    vendor_id: int
    device_id: int
    driver: Reading[str]
    node: GpuNode | None
    identity: CardIdentity
    integrated: bool | None
    upward: Upward
    bar_bytes: Reading[int]
    iommu_type: Reading[str]
    aer: Mapping[str, Reading[int]]
    mes_firmware: Reading[int]
    display: Reading[bool]
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
        topology: KFD's own list.
        unlisted: one line for each PCI device that could not be read.
    """

    kernel: Kernel
    host: Host
    topology: Topology
    gpus: tuple[Gpu, ...]
    unlisted: tuple[str, ...] = ()

    @property
    def amd(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards."""
        return tuple(gpu for gpu in self.amd if gpu.integrated is False)


def survey(tree: Tree | None = None) -> Machine:
    """Read the machine, the live one unless another is given. Never raises."""
    tree = LiveTree() if tree is None else tree
    topology = gpus.read_topology(tree)
    devices, unlisted = gpus.list_display_devices(tree)
    return Machine(
        kernel=read_kernel(tree),
        host=read_host(tree),
        topology=topology,
        gpus=tuple(_read_gpu(tree, device, topology) for device in devices),
        unlisted=unlisted,
    )


def record(tree: Tree | None = None, *, source: str = "") -> tuple[Machine, dict[str, Any]]:
    """Read the machine and record what was read, for `RecordedTree`, as JSON values."""
    recorder = RecordingTree(LiveTree() if tree is None else tree, keep=keep)
    machine = survey(recorder)
    return machine, recorder.recording(source)


def _read_gpu(tree: Tree, device: gpus.DisplayDevice, topology: Topology) -> Gpu:
    address = device.address
    vendor = _VENDORS.get(device.vendor_id, "other")
    driver = gpus.read_driver(tree, address)
    sensors = (
        gpus.read_sensors(tree, address)
        if driver.value == "amdgpu"
        else gpus.no_sensors(f"{address}: its driver is {driver.value}, not amdgpu" if driver.value else driver.reason)
    )
    node = next((node for node in topology.nodes if node.pci_address == address), None)
    identity = _identify(device, node, sensors)
    upward = gpus.read_upward(tree, address)
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
        upward=upward,
        bar_bytes=gpus.read_bar_bytes(tree, address),
        iommu_type=gpus.read_iommu_type(tree, address),
        aer=gpus.read_aer(tree, upward.chain[::-1]),
        mes_firmware=gpus.read_mes_firmware(tree, address),
        display=gpus.read_display(tree, address),
        peers=gpus.read_peers(tree, node, topology) if node else unknown(no_node),
        atomics=gpus.read_atomics(tree, node, topology) if node else unknown(no_node),
        sensors=sensors,
    )


def _identify(device: gpus.DisplayDevice, node: GpuNode | None, sensors: Sensors) -> CardIdentity:
    if device.vendor_id != gpus.AMD:
        return CardIdentity(None, "not an AMD device")
    return identify(
        arch=node.arch if node else None,
        vram_bytes=node.vram_bytes if node and node.vram_bytes is not None else sensors.vram_total_bytes.value,
        name=node.name if node else "",
        device_id=device.device_id,
        revision=device.revision,
    )


def _integrated(node: GpuNode | None, identity: CardIdentity) -> bool | None:
    if identity.card:
        return identity.card.integrated
    if node and is_integrated(node):
        return True
    # A node without a memory size may be an integrated GPU of an unlisted architecture.
    return False if node and node.vram_bytes is not None else None


@dataclass(frozen=True, kw_only=True)
class JoinedDevice:
    """A device of torch, its card (None if unknown), and how that was decided."""

    device: TorchDevice
    gpu: Gpu | None
    reason: str

    @property
    def spoofed(self) -> bool:
        """torch reports another architecture than the kernel: an override variable is set."""
        return self.gpu is not None and self.gpu.arch is not None and self.gpu.arch != self.device.arch


def join(machine: Machine, devices: Sequence[TorchDevice], environ: Mapping[str, str]) -> tuple[JoinedDevice, ...]:
    """The card of each device of torch, in torch's order: by PCI address, or by order if torch gives none.

    Torch counts the devices that pass the filters in `environ`; the kernel lists all cards.
    """
    found = {gpu.address: gpu for gpu in machine.gpus}
    nodes = visible_nodes(machine.topology.nodes, environ)

    def of(device: TorchDevice) -> tuple[Gpu | None, str]:
        if device.pci_address is not None:
            gpu, why = found.get(device.pci_address.lower()), f"PCI address {device.pci_address}"
            return gpu, why if gpu else f"{why} is not among the kernel's devices"
        if not machine.topology.complete:
            return None, "torch gives no PCI address, and the kernel's list is incomplete"
        if nodes is None or len(nodes) != len(devices) or device.index >= len(nodes):
            return None, "torch gives no PCI address, and its number of devices differs from the kernel's"
        gpu = found.get(nodes[device.index].pci_address or "")
        if gpu is None:
            return None, "neither torch nor the kernel gives a PCI address"
        return gpu, "its position in the kernel's order, because torch gives no address"

    joined = [(device, *of(device)) for device in devices]
    return tuple(JoinedDevice(device=device, gpu=gpu, reason=reason) for device, gpu, reason in joined)
