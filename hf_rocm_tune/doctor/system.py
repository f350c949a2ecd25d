"""Read checks of GPUs and the access to them, of variables, the kernel, host memory and the cards' sensors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, Status, fail, note, ok, unknown, warn
from hf_rocm_tune.machine.gpus import HOTSPOT_C
from hf_rocm_tune.machine.process import FILTERS, OURS, choose, describe, is_integrated, visible_archs, visible_nodes
from hf_rocm_tune.machine.survey import Gpu
from hf_rocm_tune.machine.variables import Decision, MachineFacts, evaluate

_GIB = 1 << 30
_STATUS: dict[str, Status] = {"error": "fail", "warn": "warn", "info": "info", "set": "info"}
_SEATED = "if a card should be here, check that it is seated and powered and that `lspci` lists it"
_PREREQUISITES = "ROCm docs: prerequisites"
_PCI = "kernel documentation: sysfs-bus-pci"
_MODELS = "ROCm docs: GPU architecture specifications"
_VRAM = "kernel documentation: amdgpu memory"
_IDS = re.compile(r"sys/bus/pci/devices(/[^/]+/(class|vendor|device))?")
# Integrated GPUs for which the wheels of ROCm 7.2 have code: uv#18730.
_IN_WHEELS = ("gfx1150", "gfx1151")
_UNMAPPED = frozenset({"nogroup", "nobody", "65534"})
"""Groups as which a container shows those of the host that it does not map."""
_UNMAPPED_WAYS = {
    "podman": "Podman: start it with `--group-add keep-groups`, as a user of the host's group render (distrobox: "
    '`--additional-flags "--group-add keep-groups"`)',
    "lxc": "LXC: pass the device with a group of the container (Proxmox: `dev0: /dev/kfd,gid=GID` with GID of `getent "
    "group render`; LXD and Incus: `gid=GID` of the device)",
    "docker": "Rootless Docker: use rootful Docker or podman",
}
_PASSED = {
    "docker": "start a container with `--device /dev/kfd --device /dev/dri`",
    "podman": "start a container with `--device /dev/kfd --device /dev/dri`",
    "apptainer": "start it with `--rocm`, which passes them and ROCm's libraries",
    "lxc": "pass both. Proxmox: `dev0: /dev/kfd,gid=GID` and `dev1: /dev/dri/renderD128,gid=GID` with the container's "
    "GID of `getent group render`; LXD and Incus: a device of type `gpu`, and /dev/kfd as one of type `unix-char`",
    "systemd-nspawn": "start it with `--bind /dev/kfd --bind /dev/dri`, and allow char-kfd and char-drm with "
    "`DeviceAllow=` of its unit",
    "kubernetes": "request `amd.com/gpu: 1` under the container's `resources.limits`; AMD's device plugin passes them",
}
"""How a container tool passes the device nodes."""
_SHARED = {
    "docker": "start the container with `--ipc=host` or `--shm-size 8g`",
    "kubernetes": "mount an `emptyDir` with `medium: Memory` at /dev/shm",
    "lxc": "mount a larger tmpfs at /dev/shm (`lxc.mount.entry`, or /etc/fstab in it)",
}
_OVERDRIVE = 1 << 14  # PP_OVERDRIVE_MASK (amd_shared.h)


def in_wheels(gpu: Gpu, built: Sequence[str] | None = None) -> bool:
    """Whether wheels of torch, or the one that is installed with code for these architectures, have code for an
    integrated GPU; True for a card, whose check is `arch`."""
    return gpu.integrated is not True or gpu.arch in _IN_WHEELS or gpu.arch in (built or ())


# ---- cards and access -------------------------------------------------------------------------------------------


def _driver(evidence: Evidence) -> Iterator[Finding]:
    machine = evidence.machine
    topology = machine.topology
    if machine.platform != "linux":
        yield unknown(f"drivers are read from Linux files, and this is {machine.platform}: one GPU only, not tested by "
                      "this project")  # fmt: skip
        return
    if not machine.amd and not topology.nodes:
        yield _without_amd(evidence)
        return
    if not topology.complete:
        reasons = "; ".join(topology.reasons)
        yield unknown(f"the kernel's list of GPUs is incomplete, so their indices are uncertain: {reasons}")
    if not machine.amd:
        yield unknown(f"the compute driver lists {len(topology.nodes)} GPU(s), and the PCI bus lists none of them")
    problems: list[Finding] = []
    for gpu in evidence.candidates:
        problems += _of_gpu(evidence, gpu)
    yield from problems
    if machine.amd and topology.nodes and not problems:
        listed = " and ".join(gpu.address for gpu in machine.amd if gpu.driver == "amdgpu")
        text = f"amdgpu drives {listed}, and the kernel lists {len(topology.nodes)} GPU(s) for computing"
        yield ok("driver_ok", "amdgpu", text, _PREREQUISITES)
    if evidence.cards:
        return
    for gpu in machine.amd:
        if gpu.integrated:
            status, text = warn, "the wheels of pytorch.org have no code for it"
            if in_wheels(gpu, evidence.software.arch_list):
                status, text = note, "not tested by this project"
            yield status(
                "no_card", "No card, only the processor's own GPU",
                f"{gpu.address} ({gpu.arch}) is the only AMD GPU and shares the processor's memory; {text}",
                f"{_SEATED}; leave HSA_OVERRIDE_GFX_VERSION unset", "uv#18730; unsloth install.sh",
                gpu.address)  # fmt: skip


def _without_amd(evidence: Evidence) -> Finding:
    machine = evidence.machine
    reasons = machine.topology.reasons
    if machine.is_wsl and not evidence.devices:
        return _in_wsl(evidence)
    if evidence.devices:
        what = "the checks of drivers, links and variables are for AMD"
        if evidence.software.build == "rocm":
            what = "this kernel does not list it (WSL), so links, error counters and sensors are unknown"
        return note("other_gpu", "no AMD card that this kernel lists",
                    f"torch computes on {', '.join(device.name for device in evidence.devices)}; {what}",
                    "nothing to do; the measured checks apply here, too", "pytorch hip.rst", read=reasons)  # fmt: skip
    if not machine.topology.complete or any(_IDS.fullmatch(path) for path in machine.unread):
        return unknown(f"whether there is a GPU could not be read: {'; '.join([*reasons, machine.why('sys/bus/pci')])}")
    listed = [gpu for gpu in machine.gpus if gpu.vendor in ("nvidia", "intel")]
    others = ", ".join(f"{gpu.vendor.upper()} {gpu.device_id:04x} at {gpu.address}" for gpu in listed)
    row = "no_gpu"
    title = "No GPU"
    state = "the PCI bus lists no AMD, NVIDIA or Intel display or compute device"
    if others:
        row = "no_amd_gpu"
        title = "No AMD GPU"
        state = f"the only graphics devices are {others}, unused by this torch"
    text = f"{state}, so training would run on the processor, slowly"
    return warn(row, title, text, f"{_SEATED}, or is passed through", _PCI, read=reasons)


def _in_wsl(evidence: Evidence) -> Finding:
    """In WSL the kernel lists no card: only torch can tell whether there is one."""
    source = "ROCm docs: WSL"
    card = "/dev/dxg is there, so Windows passes a card"
    if not evidence.machine.dxg and evidence.machine.container:
        return warn("wsl_container", "This container has no /dev/dxg",
                    f"in WSL a card is reached through /dev/dxg, which was not passed to this container "
                    f"({evidence.machine.container})",
                    "start it with `--device /dev/dxg` and WSL's libraries, as AMD's page says; if /dev/dxg is missing "
                    "outside of it too, Windows shares no GPU with WSL", source)  # fmt: skip
    if not evidence.machine.dxg:
        return warn("wsl_no_card", "WSL passes no card", "/dev/dxg does not exist: Windows shares no GPU with WSL",
                    "install AMD's driver for WSL in Windows, run `wsl --update` and `wsl --shutdown`, and start it "
                    "again", source)  # fmt: skip
    if evidence.software.build != "rocm":
        return warn("wsl_torch_build", "torch is not a ROCm build",
                    f"{card} to WSL, and torch {evidence.software.torch_version} computes on the processor",
                    "install a ROCm build of torch for WSL as AMD's page says", source)  # fmt: skip
    return fail("wsl_torch_sees_nothing", "torch sees no GPU in WSL",
                f"{card} to WSL, but torch does not use it: {evidence.software.problems.get('devices', 'no device')}",
                "install AMD's driver for WSL in Windows and ROCm for WSL (librocdxg) here; torch's own "
                "libhsa-runtime64.so may have to be replaced by it, see AMD's page", source)  # fmt: skip


def _of_gpu(evidence: Evidence, gpu: Gpu) -> Iterator[Finding]:
    machine = evidence.machine
    where = f"{gpu.address}/driver"
    if gpu.driver == "amdgpu":
        if gpu.node is None and machine.topology.complete:
            yield fail("kfd_missing", "The compute driver does not list the card",
                       f"amdgpu drives {gpu.address}, but /sys/class/kfd does not list it: ROCm cannot compute on it",
                       "use a kernel built with CONFIG_HSA_AMD (all common distributions have it), and read "
                       "`sudo dmesg | grep -i kfd`", _PREREQUISITES, subject=gpu.address)  # fmt: skip
    elif gpu.driver is None and any(where in path for path in machine.unread):
        yield unknown(machine.why(where), subject=gpu.address)
    else:
        yield fail("driver_not_bound", "amdgpu does not drive the card",
                   f"{gpu.address} is an AMD device whose kernel driver is {gpu.driver or 'none'}",
                   "`sudo modprobe amdgpu`, and read `sudo dmesg | grep amdgpu`; remove the boot parameter nomodeset "
                   "if it is set; a card bound to vfio-pci is assigned to a virtual machine", _PREREQUISITES,
                   subject=gpu.address,
                   read=["boot parameter nomodeset"] if "nomodeset" in machine.cmdline else [])  # fmt: skip


def _permissions(evidence: Evidence) -> Iterator[Finding]:
    there = list(evidence.machine.device_nodes)
    count = len(evidence.machine.topology.nodes)
    if not count:
        return
    container = evidence.machine.container
    where = f", in a container ({container})" if container else ""
    missing = []
    if "/dev/kfd" not in there:
        missing.append("/dev/kfd")
    if not any(path.startswith("/dev/dri/renderD") for path in there):
        missing.append("/dev/dri/renderD*")
    refused = {path: group for path, (usable, group) in evidence.machine.device_nodes.items() if not usable}
    if missing:
        verb = "do" if len(missing) > 1 else "does"
        fix = _PASSED.get(container or "", f"outside of a container, check that udev runs; {_PASSED['docker']}")
        yield fail("device_nodes_missing", f"{' and '.join(missing)} {verb} not exist",
                   f"the kernel lists {count} GPU(s) for computing, and the device nodes that ROCm opens are not "
                   f"here{where}", fix, "ROCm docs: Docker; ROCm docs: prerequisites")  # fmt: skip
    if refused:
        groups = list(dict.fromkeys(refused.values()))
        yield fail("node_not_usable", f"No permission for {' and '.join(refused)}",
                   f"this process has no read and write access to these files of the group {' and '.join(groups)}"
                   f"{where}", _fix_of_permissions(groups, container),
                   "ROCm docs: prerequisites; ROCm docs: Docker")  # fmt: skip
    elif not missing:
        yield ok("permissions_ok", "access to /dev/kfd", f"read and write access to {', '.join(there)}", _PREREQUISITES)


def _fix_of_permissions(groups: Sequence[str], container: str | None) -> str:
    """How this process gets access to device nodes of these groups, by what it is contained in."""
    if container == "apptainer" and "root" not in groups:
        return (
            "Apptainer keeps your rights on the host: there, `sudo usermod -aG render,video $USER`, log in again, and "
            "start it with `--rocm`"
        )
    if _UNMAPPED & set(groups):
        known = [text for tool, text in _UNMAPPED_WAYS.items() if container in (tool, None)]
        ways = ". ".join(known or _UNMAPPED_WAYS.values())
        return f"the host's group does not exist in this container, so that adding it by name has no effect. {ways}"
    if container == "kubernetes":
        ids = ", ".join(group for group in groups if group.isdecimal()) or "the GID of the host's group render"
        return f"add `supplementalGroups: [{ids}]` to the pod's `securityContext`, or run it as root"
    if set(groups) <= {"root"}:
        if container in (None, "docker", "podman", "apptainer"):
            where = "on the host" if container else "here"
            rule = 'KERNEL=="kfd", GROUP="render", MODE="0660"'
            return (
                f"no group but root has access: {where}, add the line `{rule}` to /etc/udev/rules.d/70-amdgpu.rules "
                "and restart, which ROCm's packages do"
            )
        return (
            "no group but root has access, so that no group helps: pass the device with a group of the container "
            "(Proxmox: `dev0: /dev/kfd,gid=GID` with GID of `getent group render`; LXD and Incus: `gid=GID` of the "
            "device), or run as root"
        )
    names = " ".join(f"--group-add {group}" for group in groups if group != "root")
    if container in ("docker", "podman"):
        return f"start the container with `{names}`; rootless podman: `--group-add keep-groups`"
    named = [group for group in groups if not group.isdecimal()]
    if "render" in named or "video" in named:
        named = ["render", "video", *named]
    wanted = ",".join(dict.fromkeys(named))
    usermod = "ask the owner of the machine"
    if wanted:
        usermod = f"`sudo usermod -aG {wanted} $USER`, then log in again"
    return f"{usermod}; a container: `{names}`, rootless podman: `--group-add keep-groups`"


def _cards(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.machine.amd:
        if gpu.integrated is True:
            continue
        arch = gpu.arch or "architecture unknown"
        card = gpu.card
        if card is None:
            yield unknown(f"PCI device 1002:{gpu.device_id:04x}, {arch}, is not in this project's table of cards",
                          subject=gpu.address)  # fmt: skip
        else:
            memory = f"{gpu.vram_bytes / _GIB:.1f} GiB" if gpu.vram_bytes else "memory unknown"
            yield ok("card_known", card.name, f"{gpu.address}, {arch}, {memory}", _MODELS, subject=gpu.address)
    models = {gpu.address: gpu.card.name for gpu in evidence.cards if gpu.card}
    if len(set(models.values())) > 1:
        listed = ", ".join(f"{name} at {address}" for address, name in models.items())
        yield warn("cards_unequal", "The cards differ",
                   f"{listed}: in joint training the faster one waits in every step",
                   "choose the batch for the card with the least memory, or train on the larger card alone",
                   _MODELS)  # fmt: skip


def _integrated(evidence: Evidence) -> Iterator[Finding]:
    topology = evidence.machine.topology
    seen = visible_nodes(topology.nodes, evidence.environ)
    igpus = [node for node in topology.nodes if is_integrated(node)]
    cards = [node for node in topology.nodes if not is_integrated(node)]
    if not igpus or not cards:
        return
    choice = choose(topology.nodes, {}, complete=topology.complete, split=len(cards) > 1)
    fix = f"`export {OURS}={choice.variables.get(OURS, '')}`"
    igpu = ", ".join(map(describe, igpus))
    card = ", ".join(map(describe, cards))
    shown = " ".join(f"{name}={shlex.quote(evidence.environ[name])}" for name in FILTERS if name in evidence.environ)
    source = "TheRock#5543; HIP environment variables page"
    harm = "code for the card does not run on it"
    left = ", ".join(describe(node) for node in igpus if node in (seen or ()))
    if not choice.variables:
        yield unknown(choice.reason)
    elif not shown:
        yield note("igpu_hidden", "an integrated GPU besides the card, hidden",
                   f"{igpu} is listed besides {card}. HIP may number it first, and {harm}. This package hides it from "
                   "its own processes; other programs see it",
                   f"for other programs: {fix}, or disable the integrated GPU in the BIOS", source)  # fmt: skip
    elif seen is None:
        yield unknown(f"{shown} is not a plain list of indices, so the visible GPUs are unknown")
    elif left:
        status, text = fail, "instead of"
        if any(node in seen for node in cards):
            status, text = warn, "besides"
        yield status("igpu_visible", f"The variables show the integrated GPU {text} the card",
                     f"{shown} shows {left} to HIP {text} {card}; {harm}", fix, source)  # fmt: skip
    else:
        yield ok("igpu_filtered", "integrated GPU hidden", f"{igpu} is besides the card; {shown} hides it", source)


# ---- variables --------------------------------------------------------------------------------------------------


def of_decision(decision: Decision) -> Finding:
    """A decision of the policy of variables as a finding of the check ``variables``."""
    variable = decision.variable
    value = decision.value
    names = variable.split(", ")
    read = []
    if len(names) > 1:
        title = f"{variable} together"
        read = [f"{name}={given}" for name, given in zip(names, (value or "").split(" | "), strict=False)]
    elif value is not None:
        title = f"{variable}={shlex.quote(value)}"
    else:
        title = variable
    status = _STATUS.get(decision.action, "info")
    row = f"environ:{variable}"
    return Finding(status, row, title, decision.reason, decision.fix, decision.source, variable, read, "variables")


def _variables(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    archs, why = visible_archs(evidence.machine.topology, evidence.environ)
    is_rocm = None
    if software.torch_version is not None:
        is_rocm = software.build == "rocm"
    else:
        reason = software.problems.get("torch_version", "torch's version is unknown")
        why = "; ".join(filter(None, [reason, why]))
    decisions = evaluate(evidence.environ, MachineFacts(is_rocm, archs, why))
    yield from map(of_decision, decisions)
    if not decisions:
        text = "a working card with a matching wheel needs no variable, and no harmful one is set"
        yield ok("variables_ok", "none needs a change", text, "libhsakmt topology.c")


# ---- kernel and firmware settings -------------------------------------------------------------------------------


def _release(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.machine.amd and not evidence.machine.topology.nodes:
        return
    release = evidence.machine.release
    number = _numbers(release)
    driver = number
    named = f"kernel {release}"
    own = evidence.machine.driver_version
    if own is not None:  # DKMS installs a driver with a version of its own
        driver = _numbers(own)
        named = f"amdgpu {own} (DKMS) on kernel {release}"
    archs = {(gpu.arch or "")[:5] for gpu in evidence.cards}
    known = False
    stalls = re.match(r"7\.0\.0-28(?![0-9])|7\.0\.12(?![0-9]).*fc44", release)
    if stalls:
        yield warn("kernel_mmap_stall", "This kernel stalls copies from mapped files",
                   f"on kernel {release}, moving a mapped tensor of 8 MiB to the card was reported to take 5 seconds",
                   "use a kernel with commit 342981fff328, or an older one (7.0.0-14, 6.17); in other programs than "
                   "this one, clone mapped tensors before moving them",
                   "ROCm/ROCm#6523; ROCm/ROCm#5952; ROCm/ROCm#6606; ROCm/ROCm#6358")  # fmt: skip
    if (6, 18) <= driver <= (7, 0) and "gfx11" in archs:
        known = True
        yield warn("kernel_sdma_faults", "Page faults of the copy engine were reported on this kernel",
                   f"this is {named}; with kernels 6.18 to 7.0, owners of RDNA3 cards report page faults of SDMA "
                   "engine 0 that reset the GPU; silent corruption was not reported with them",
                   "if `sudo dmesg` shows such faults: kernels 6.12 LTS and 6.17 worked for the reporters",
                   "ROCm/amdgpu#225; ROCm/amdgpu#204")  # fmt: skip
    if driver >= (6, 18) and "gfx12" in archs:
        known = True
        yield warn("kernel_rdna4_hangs", "Hangs and resets of RDNA4 cards were reported on this kernel",
                   f"this is {named}; owners of RX 9070 and R9700 cards report hangs under load since kernel 6.18, "
                   "which a later patch of the driver mends for some",
                   "if `sudo dmesg` shows a ring timeout or a GPU reset: kernel 6.17 worked for the reporters",
                   "getsolus/packages#7986; legacy-rocm-build#5848; legacy-rocm-build#5990")  # fmt: skip
    if number < (5, 16):
        known = True
        yield warn("kernel_too_old", "This kernel is old for this card",
                   f"kernel {release}: NaN after copies to the card were reported on 5.15 (ROCm 6.4, RX 6900 XT)",
                   "use the kernel of a current distribution (Ubuntu 24.04 or newer)", "ROCm/ROCm#6123")  # fmt: skip
    if not stalls and not known:
        text = "this project knows no report against it"
        yield ok("kernel_ok", named, text, "ROCm/ROCm#6523; ROCm/amdgpu#225")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]{1,9}", version)[:2]))


def _parameters(evidence: Evidence) -> Iterator[Finding]:
    """Parameters of amdgpu that owners set, and that matter for training."""
    amdgpu = evidence.machine.amdgpu
    source = "kernel documentation: amdgpu module parameters"
    if not evidence.machine.amd:
        return
    is_changed = False
    if amdgpu.get("cwsr_enable") == "0":
        is_changed = True
        yield note("cwsr_off", "amdgpu.cwsr_enable=0",
                   "waves of a kernel are not saved when the card changes between programs: a workaround for hangs of "
                   "RDNA3, with which a desktop on the same card may stall while a long kernel runs",
                   "keep it if the card hung without it; else remove the parameter",
                   f"{source}; ROCm/ROCm#5051")  # fmt: skip
    mask = amdgpu.get("ppfeaturemask", "")
    value = _mask(mask)
    if value is not None and value & _OVERDRIVE:
        is_changed = True
        yield note("overdrive_on", f"amdgpu.ppfeaturemask={mask}",
                   "OverDrive is on, so that clocks and voltages may differ from the maker's: an unstable card "
                   "computes wrong without an error",
                   "train at stock clocks and voltages; lowering the power limit is harmless", source)  # fmt: skip
    if not is_changed:
        yield ok("parameters_ok", "amdgpu's parameters", "none that matters for training is changed", source)


def _mask(text: str) -> int | None:
    """A bit mask as the kernel prints it, in hexadecimal or decimal, or as it was given at boot."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def _iommu(evidence: Evidence) -> Iterator[Finding]:
    machine = evidence.machine
    known = {gpu.address: gpu.iommu_type for gpu in evidence.cards if gpu.iommu_type}
    seen = [f"{address}: group type {kind}" for address, kind in known.items()]
    seen += [f"boot parameter {word}" for word in machine.cmdline if "iommu" in word]
    if "pcie_p2p" in machine.amdgpu:
        seen.append(f"amdgpu parameter pcie_p2p={machine.amdgpu['pcie_p2p']}")
    if machine.iommu is not False and not known:
        yield unknown(f"no card is in an IOMMU group: {machine.why('iommu')}", read=seen)
        return
    state = "passthrough"
    if machine.iommu is False:
        state = "off"
    elif any(kind.startswith("DMA") for kind in known.values()):
        state = "translating"
    yield ok("iommu_state", f"IOMMU {state}",
             "AMD documents two contradictory settings for several cards (RCCL: iommu=pt; ROCm's IOMMU page: "
             "translation enabled for Radeon peer-to-peer), so the pair test decides: while it passes, change nothing",
             "ROCm docs: IOMMU; rccl init.cc; rccl#1129", read=seen)  # fmt: skip


# ---- memory and temperature -------------------------------------------------------------------------------------


def _memory(evidence: Evidence) -> Iterator[Finding]:
    machine = evidence.machine
    total = machine.memory_bytes
    free = machine.available_bytes
    limit = machine.memory_limit_bytes
    shm = machine.shm_bytes
    if total is None:
        yield unknown(machine.why("proc/meminfo"))
    else:
        text = "free memory unknown" if free is None else f"{free / _GIB:.1f} GiB available"
        text += "; weights pass through a small page-locked ring, so a model may be larger than this memory"
        yield ok("host_memory", f"{total / _GIB:.0f} GiB of host memory", text, "kernel: /proc/meminfo")
    if limit is not None:
        yield note("memory_limit", f"the container may use {limit / _GIB:.1f} GiB",
                   f"a memory limit of {limit / _GIB:.1f} GiB is set for this process; the kernel kills a process that "
                   "exceeds it without a message",
                   "raise it with `--memory` when a run is killed", "kernel documentation: cgroup v2")  # fmt: skip
    source = "PyTorch README: Docker image"
    if shm is not None and shm < _GIB:  # our own bound; Docker's default of 64 MiB is too little for loader workers
        yield warn("shm_small", "Little shared memory",
                   f"/dev/shm holds {shm >> 20} MiB; loader workers die of a bus error when it is full",
                   f"{_SHARED.get(machine.container or '', _SHARED['docker'])}, or keep `--dataloader_num_workers 0`",
                   source)  # fmt: skip
    elif shm is not None:
        yield ok("shm_ok", f"{shm / _GIB:.0f} GiB of /dev/shm", "enough for loader workers", source)


def _sensors(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        sensors = gpu.sensors
        hotspot = sensors.hotspot_c
        degrees = hotspot or sensors.edge_c
        used = sensors.vram_used_bytes
        total = sensors.vram_total_bytes
        if None in (used, total, degrees):
            yield unknown("; ".join(dict.fromkeys(sensors.missing.values())), subject=gpu.address)
        if used is not None and total:
            text = f"{gpu.address}: {used / _GIB:.1f} of {total / _GIB:.1f} GiB are used before training"
            if used / total < 0.02:
                yield ok("vram_free", f"{(total - used) / _GIB:.1f} GiB free on the card", text, _VRAM)
            else:
                status = note if used / total < 0.15 else warn  # 3 GiB of 20 that training cannot have
                yield status("vram_taken", f"{used / _GIB:.1f} GiB of the card in use",
                             f"{text}, for example by a desktop", "nothing if the run fits; else end what `amd-smi "
                             "process` lists, or log out of the desktop", _VRAM, gpu.address)  # fmt: skip
        known = {
            "hotspot {:.0f} C": hotspot,
            "edge {:.0f} C": sensors.edge_c,
            "memory {:.0f} C": sensors.memory_c,
            "{:.0f} W": sensors.power_w,
            "power limit {:.0f} W": sensors.power_cap_w,
        }
        readings = ", ".join(form.format(value) for form, value in known.items() if value is not None)
        source = "kernel documentation: amdgpu thermal controls"
        if hotspot is not None and hotspot >= HOTSPOT_C:
            yield warn("hotspot", f"The hotspot is at {hotspot:.0f} C",
                       f"{gpu.address}: RDNA3 lowers its clocks by this temperature (limit about 110 C)",
                       "clean the cooler, improve the airflow, or lower the power limit; watch `amd-smi metric`",
                       f"{source}; general knowledge, lower confidence", gpu.address, [readings])  # fmt: skip
        elif degrees is not None:
            yield ok("sensors_ok", f"{degrees:.0f} C", f"{gpu.address}: {readings}", source, subject=gpu.address)


CHECKS = (
    Check("driver", "access", "GPUs on the bus, and their drivers amdgpu and KFD", _driver),
    Check("permissions", "access", "/dev/kfd and the render nodes", _permissions),
    Check("cards", "access", "the model of each card", _cards),
    Check("integrated", "access", "an integrated GPU beside the card", _integrated),
    Check("variables", "variables", "variables that are harmful or ignored", _variables),
    Check("kernel_release", "kernel", "kernels with known problems", _release),
    Check("parameters", "kernel", "parameters of amdgpu that were changed", _parameters),
    Check("iommu", "kernel", "state of the IOMMU, without advice", _iommu, needs_cards=2),
    Check("host_memory", "host", "host memory and its limit, and /dev/shm for loader workers", _memory),
    Check("sensors", "host", "the card's memory in use by others, its hotspot and power", _sensors),
)
