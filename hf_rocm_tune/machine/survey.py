"""The whole machine in one frozen record, from the live machine or from a recording of one. Imports no torch.

A recording holds what was read and no more, and of files that say much (the command line, the kernel's configuration,
the CPUs, the state of the process) only the lines that are read. Surveying a recording gives the same record as the
machine did. Whatever could not be read is a ``Reading`` without a value and with the reason.

The table of cards is ``cards.toml`` beside this file, where every row names its sources. A card is told by its PCI
device and revision, by its name, or by architecture and memory; never by a count of compute units, because the runtime
reports work-group processors (42 on a 7900 XT) where the data sheet says compute units (84).

A container shows by marks that its engine leaves (``/.dockerenv``, ``/run/.containerenv``, ``/run/systemd/container``,
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
# What the driver keeps for itself differs; no two cards of one architecture in the table are closer than 4 GiB.
VRAM_TOLERANCE_GIB = 1.5


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of card. None means: not known here.

    Attributes:
        name: as it is sold.
        key: the part of the name that tells it from its siblings, in lower case.
        arch: LLVM's name of the architecture.
        pci: ``device`` or ``device:revision`` of AMD's PCI vendor id, in lower-case hexadecimal digits.
        vram_gib: of one device as the runtime lists it.
        bandwidth_gb_s: memory bandwidth in 10^9 bytes a second, by data sheet.
        bf16_tflops: the lowest of the rates that were measured for large bf16 products, 10^12 operations a second.
        power_w: board power.
        pcie: generation and width of the card's own connector.
        matrix: instruction family of the matrix units; whether they take ``bf16`` and ``fp8``.
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
    """A card, or None, and what decided."""

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
    """The row of the table that a device is: by PCI id first, then by name, else by architecture and memory.

    Args:
        arch: ``gfx1100`` and the like; feature suffixes (``:sramecc+``) are ignored.
        vram_bytes: total memory.
        name: any name that the kernel or the runtime gives; may be empty or a code name.
        device_id, revision: PCI ids under AMD's vendor id (0x1002).

    Returns:
        A card only where exactly one row fits and nothing that was read contradicts it.
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
    return CardIdentity(None, f"{why} says {told.name}, but {wrong}") if wrong else CardIdentity(told, why)


def _by_memory(arch: str, vram_bytes: int | None) -> CardIdentity:
    if not arch:
        return CardIdentity(None, "the architecture could not be read, and neither PCI id nor name is known")
    own = [card for card in CARDS if card.arch == arch]
    if len(own) == 1 and own[0].integrated:
        # An integrated GPU has as much memory as its owner gave it.
        return CardIdentity(own[0], f"{arch}, which is in this chip only")
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
    """A device node such as ``/dev/kfd``, and what this process may do with it; None means: not known.

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
    """Memory, container, and what this process may do.

    Attributes:
        platform: ``linux``, ``windows`` or ``darwin``.
        memory_bytes, available_bytes, swap_bytes: of the whole host.
        memory_limit_bytes: the container's limit where it is below the host's memory.
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
        if stated and stated[1] in PEER_OPTIONS:
            found[stated[1]] = stated[2] or "n"
    return found


def read_host(tree: Tree) -> Host:
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
    # systemd's own note comes first: it names the engine, whichever it is.
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
        node: its KFD node, which holds the true architecture; None where KFD does not list it.
        identity: the row of the card table, or why there is none.
        integrated: shares the CPU's memory (None: not known).
        upward: its path to the processor.
        bar_bytes: of the largest memory BAR; as large as the VRAM where ReBAR is on.
        iommu_type: of its IOMMU group: ``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translating).
        mes_firmware: version of the firmware that schedules its queues.
        display: whether a display is connected to it.
        aer: error counters by name (``correctable``, ``nonfatal``, ``fatal``), see `read_aer`.
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
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The discrete AMD cards."""
        return tuple(gpu for gpu in self.amd if gpu.integrated is False)


def survey(tree: Tree | None = None) -> Machine:
    """Read the machine, the live one unless another is given. Never raises; what could not be read has the reason."""
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
    """Read the machine, and make a recording of what was read, for `RecordedTree` and ready for JSON."""
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
    # A node without memory figures may still be an integrated GPU of an architecture that is not listed here.
    return False if node and node.vram_bytes is not None else None


@dataclass(frozen=True, kw_only=True)
class JoinedDevice:
    """A device of torch, the card that it is (None where it could not be told), and how that was told."""

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
