"""Read checks of GPUs and the access to them, of variables, the kernel, host memory and the cards' sensors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from hf_rocm_tune.doctor.findings import GIVEN_AWAY, Check, Evidence, Finding, Status, fail, note, ok, unknown, warn
from hf_rocm_tune.machine.gpus import throttle_causes
from hf_rocm_tune.machine.process import FILTERS, OURS, choose, describe, is_integrated
from hf_rocm_tune.machine.survey import PEER_OPTIONS, Gpu
from hf_rocm_tune.machine.sysfs import parse_hex, parse_int
from hf_rocm_tune.machine.variables import Decision, evaluate, within

_MIB, _GIB = 1 << 20, 1 << 30
_STATUS: dict[str, Status] = {"error": "fail", "warn": "warn", "info": "info", "set": "info"}
_OVERDRIVE_BIT = 1 << 14  # amdgpu's PP_OVERDRIVE_MASK (amd_shared.h)
_SEATED = "if a card should be here, check that it is seated and powered and that `lspci` lists it"
_GENERAL = "general knowledge, lower confidence"
_PREREQUISITES, _PCI = "ROCm docs: prerequisites", "kernel documentation: sysfs-bus-pci"
RING_MIB = 128
"""Slots times bytes of a slot of the transfer engine on an accelerator; a test keeps it equal to the engine's."""
HOTSPOT_C = 105.0
"""General knowledge, lower confidence: RDNA3 regulates on the hotspot, up to about 110 C."""
_IDS = re.compile(r"sys/bus/pci/devices(/[^/]+/(class|vendor|device))?")
# Integrated GPUs for which the wheels of ROCm 7.2 have code: uv#18730.
_IN_WHEELS = ("gfx1150", "gfx1151")


def in_wheels(gpu: Gpu) -> bool:
    """Whether wheels of torch have code for an integrated GPU; True for a card, whose check is `arch`."""
    return gpu.integrated is not True or gpu.arch in _IN_WHEELS


# ---- cards and access -------------------------------------------------------------------------------------------


def _driver(evidence: Evidence) -> Iterator[Finding]:
    machine, topology = evidence.machine, evidence.machine.topology
    if machine.host.process.platform != "linux":
        yield unknown(
            f"drivers are read from Linux files, and this is {machine.host.process.platform}: one GPU only, not tested "
            "by this project"
        )
    elif not machine.amd and not topology.nodes:
        yield _without_amd(evidence)
    else:
        if not topology.complete:
            yield unknown(
                "the kernel's list of GPUs is incomplete, so their indices are uncertain: "
                f"{'; '.join(topology.reasons)}"
            )
        if not machine.amd:
            yield unknown(f"the compute driver lists {len(topology.nodes)} GPU(s), and the PCI bus lists none of them")
        problems = [one for gpu in evidence.candidates for one in _of_gpu(evidence, gpu)]
        yield from problems
        for gpu in machine.amd:
            if gpu.driver == GIVEN_AWAY and gpu not in evidence.candidates:
                yield note(
                    "card_given_away", "a card is assigned to a virtual machine",
                    f"{gpu.address} is bound to vfio-pci, so this system cannot use it",
                    "nothing to do; to train on it, end the virtual machine and bind the card to amdgpu",
                    "kernel documentation: VFIO", subject=gpu.address,
                )  # fmt: skip
        if machine.amd and topology.nodes and not problems:
            listed = " and ".join(gpu.address for gpu in machine.amd if gpu.driver == "amdgpu")
            text = f"amdgpu drives {listed}, and the kernel lists {len(topology.nodes)} GPU(s) for computing"
            yield ok("driver_ok", "amdgpu", text, _PREREQUISITES)


def _without_amd(evidence: Evidence) -> Finding:
    machine = evidence.machine
    reasons = machine.topology.reasons
    names = ", ".join(device.name for device in evidence.devices)
    if evidence.devices and evidence.software.build == "rocm":
        text = (
            f"a ROCm build of torch sees {names}, and the kernel lists no AMD GPU, as in a virtual machine whose host "
            "has the driver (WSL): links, error counters and sensors are unknown"
        )
        return note(
            "rocm_without_kfd", "torch computes on a card that this kernel does not list", text,
            "nothing to do; the measured checks apply here, too", _GENERAL, read=reasons,
        )  # fmt: skip
    if evidence.devices:
        text = (
            f"torch computes on {names}: training and its verification work through the same torch.cuda calls, but the "
            "checks of drivers, links and variables are for AMD cards"
        )
        return note(
            "other_gpu", "not an AMD machine", text, "nothing to do; the measured checks apply here, too",
            "pytorch hip.rst", read=reasons,
        )  # fmt: skip
    if not machine.topology.complete or any(_IDS.fullmatch(path) for path in machine.unread):
        return unknown(f"whether there is a GPU could not be read: {'; '.join([*reasons, machine.why('sys/bus/pci')])}")
    others = ", ".join(
        f"{gpu.vendor.upper()} {gpu.device_id:04x} at {gpu.address}"
        for gpu in machine.gpus
        if gpu.vendor in ("nvidia", "intel")
    )
    if others:
        text = (
            f"the only graphics devices are {others}, which torch does not use, so training would run on the "
            "processor, slowly"
        )
        return warn("no_amd_gpu", "No AMD GPU", text, _SEATED, _PCI, read=reasons)
    text = (
        "the PCI bus lists no AMD, NVIDIA or Intel display or compute device, so training would run on the processor, "
        "slowly"
    )
    return warn(
        "no_gpu", "No GPU", text, f"{_SEATED}; inside a virtual machine, that it is passed through", _PCI, read=reasons,
    )  # fmt: skip


def _of_gpu(evidence: Evidence, gpu: Gpu) -> Iterator[Finding]:
    machine, where = evidence.machine, f"{gpu.address}/driver"
    if gpu.driver == "amdgpu":
        if gpu.node is None and machine.topology.complete:
            yield fail(
                "kfd_missing", "The compute driver does not list the card",
                f"amdgpu drives {gpu.address}, but /sys/class/kfd does not list it, and ROCm computes only on listed "
                "GPUs",
                "use a kernel built with CONFIG_HSA_AMD (all common distributions have it), and read `sudo dmesg | "
                "grep -i kfd`", _PREREQUISITES, subject=gpu.address,
            )  # fmt: skip
    elif gpu.driver is None and any(where in path for path in machine.unread):
        yield unknown(machine.why(where), subject=gpu.address)
    else:
        seen = ["boot parameter nomodeset"] if "nomodeset" in machine.kernel.cmdline else []
        yield fail(
            "driver_not_bound", "amdgpu does not drive the card",
            f"{gpu.address} is an AMD device whose kernel driver is {gpu.driver or 'none'}",
            "load the driver with `sudo modprobe amdgpu` and read `sudo dmesg | grep amdgpu`; remove the boot "
            "parameter nomodeset if it is set; a card bound to vfio-pci is assigned to a virtual machine",
            _PREREQUISITES, subject=gpu.address, read=seen,
        )  # fmt: skip


def _permissions(evidence: Evidence) -> Iterator[Finding]:
    host, count = evidence.machine.host, len(evidence.machine.topology.nodes)
    if not count:
        return
    kinds = {"/dev/kfd": "/dev/kfd", "/dev/dri/renderD*": "/dev/dri/renderD"}
    missing = " and ".join(
        name for name, start in kinds.items() if not any(path.startswith(start) for path in host.nodes)
    )
    if missing and host.container:
        yield fail(
            "kfd_not_in_container", f"This container has no {missing}",
            f"the kernel has a compute driver and {count} GPU(s), but this {host.container} container was started "
            "without these device nodes", "start it with `--device /dev/kfd --device /dev/dri`", "ROCm docs: Docker",
        )  # fmt: skip
    elif missing:
        yield fail(
            "kfd_node_missing", f"{missing} does not exist",
            f"the kernel lists {count} GPU(s) for computing, but the device nodes that ROCm opens do not exist",
            "check that udev runs and that this is not a chroot or sandbox without device nodes", _PREREQUISITES,
        )  # fmt: skip
    refused = {path: group for path, (usable, group) in host.nodes.items() if not usable}
    if refused:
        group = next(iter(refused.values()))
        yield fail(
            "node_not_usable", f"No permission for {' and '.join(refused)}",
            f"this process has no read and write access to files of the group {group}; its own groups: "
            f"{', '.join(host.process.groups) or 'none'}",
            "`sudo usermod -aG render,video $USER`, then log out and in; in a container, start it with `--group-add "
            f"{group}` (by number if the image does not have the name)", "ROCm docs: prerequisites; ROCm docs: Docker",
        )  # fmt: skip
    elif not missing:
        yield ok(
            "permissions_ok", "access to /dev/kfd", f"read and write access to {', '.join(host.nodes)}", _PREREQUISITES,
        )  # fmt: skip


def _cards(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.machine.amd:
        if gpu.integrated is not True:
            yield _card(gpu)
    models = {gpu.address: gpu.identity.card.name for gpu in evidence.cards if gpu.identity.card}
    if len(set(models.values())) > 1:
        listed = ", ".join(f"{name} at {place}" for place, name in models.items())
        yield warn(
            "cards_unequal", "The cards differ",
            f"{listed}: in joint training the faster one waits for the slower in every step, and a batch must fit the "
            "one with the least memory",
            "choose the batch for the card with the least memory, or train on the larger card alone",
            "ROCm docs: GPU architecture specifications",
        )  # fmt: skip


def _card(gpu: Gpu) -> Finding:
    card, arch = gpu.identity.card, gpu.arch or "architecture unknown"
    if card is None:
        text = (
            f"{gpu.address} is PCI device 1002:{gpu.device_id:04x}, {arch}: {gpu.identity.reason}; the facts on cards "
            "do not apply to it"
        )
        return note(
            "card_unknown", "a GPU that is not in this project's table", text, "nothing to do",
            "ROCm docs: GPU architecture specifications", subject=gpu.address,
        )  # fmt: skip
    known = {
        f"{card.bandwidth_gb_s} GB/s": card.bandwidth_gb_s,
        f"{card.power_w} W": card.power_w,
        "no FP8": not card.fp8,
    }
    facts = ", ".join(text for text, there in known.items() if there)
    memory = f"{gpu.vram_bytes / _GIB:.1f} GiB" if gpu.vram_bytes else "memory unknown"
    seen = [f"identified by: {gpu.identity.reason}", f"data of this model: {facts} ({card.source or 'ROCm docs'})"]
    return ok(
        "card_known", card.name, f"{gpu.address}, {arch}, {memory}", "ROCm docs: GPU architecture specifications",
        subject=gpu.address, read=seen,
    )  # fmt: skip


def _integrated(evidence: Evidence) -> Iterator[Finding]:
    topology = evidence.machine.topology
    igpus = [node for node in topology.nodes if is_integrated(node)]
    cards = [node for node in topology.nodes if not is_integrated(node)]
    if not igpus or not cards:
        return
    choice = choose(topology.nodes, {}, complete=topology.complete, split=len(cards) > 1)
    line = f"{OURS}={choice.variables.get(OURS, '')}"
    igpu, card = ", ".join(map(describe, igpus)), ", ".join(map(describe, cards))
    filters = {name: evidence.environ[name] for name in FILTERS if name in evidence.environ}
    shown, seen = " ".join(f"{name}={shlex.quote(value)}" for name, value in filters.items()), evidence.visible
    fails, source = (
        "code for the card does not run on it (hipErrorInvalidImage, or a crash)",
        ("TheRock#5543; HIP environment variables page"),
    )
    left = ", ".join(describe(node) for node in igpus if node in (seen or ()))
    if not choice.variables:
        yield unknown(choice.reason)
    elif not filters:
        text = (
            f"{igpu} is listed besides {card}. HIP may number it first, and {fails}. This package hides it from its "
            "own processes; other programs see it"
        )
        yield note(
            "igpu_hidden", "an integrated GPU besides the card, hidden", text,
            f"for other programs: `export {line}`, or disable the integrated GPU in the BIOS", source,
        )  # fmt: skip
    elif seen is None:
        yield unknown(f"{shown} is not a plain list of indices, so the visible GPUs are unknown")
    elif left and any(node in seen for node in cards):
        yield warn(
            "igpu_visible", "The variables make the integrated GPU visible",
            f"{shown} shows {left} to HIP besides {card}; {fails}", f"`export {line}`", source,
        )  # fmt: skip
    elif left:
        yield fail(
            "igpu_instead", "The variables show the integrated GPU instead of the card",
            f"{shown} shows {left} to HIP and hides {card}; {fails}", f"`export {line}`", source,
        )  # fmt: skip
    else:
        yield ok(
            "igpu_filtered", "integrated GPU hidden", f"{igpu} is listed besides the card, and {shown} hides it",
            source,
        )  # fmt: skip


def _platform(evidence: Evidence) -> Iterator[Finding]:
    release = evidence.machine.kernel.release or ""
    if "microsoft" in release.lower():
        yield note(
            "wsl", "WSL2",
            f"the kernel is {release}: after Windows had slept, the first copy to an RX 7900 XTX hung until Windows "
            "was restarted (ROCm 6.2.3); not tested by this project",
            "keep Windows awake during a run; if a first copy hangs, restart Windows, not only WSL; compare card and "
            "driver with AMD's list for WSL", "ROCm/ROCm#4145; ROCm/ROCm#3371",
        )  # fmt: skip
    for gpu in () if evidence.cards else evidence.machine.amd:
        if gpu.integrated and in_wheels(gpu):
            text = (
                f"{gpu.address} ({gpu.arch}) shares the processor's memory and is the only AMD GPU here; not tested by "
                "this project"
            )
            fix = "leave HSA_OVERRIDE_GFX_VERSION unset, and run `hf-rocm-tune doctor --drill` before training"
            yield note(
                "only_integrated", "only an integrated GPU", text, fix, "uv#18730; unsloth install.sh",
                subject=gpu.address,
            )  # fmt: skip
        elif gpu.integrated:
            text = (
                f"{gpu.address} ({gpu.arch}) is the only AMD GPU here, and the wheels of pytorch.org have no code for "
                "it, so training would run on the processor, slowly"
            )
            yield warn(
                "no_card", "No card, only the processor's own GPU", text, _SEATED, "uv#18730", subject=gpu.address,
            )  # fmt: skip


def of_decision(decision: Decision) -> Finding:
    """A decision of the policy of variables as a finding of the check ``variables``."""
    names = decision.variable.split(", ")
    value = "" if decision.value is None else f"={shlex.quote(decision.value)}"
    seen = [f"{name}={given}" for name, given in zip(names, (decision.value or "").split(" | "), strict=False)]
    fix = decision.fix
    if decision.action == "set":
        fix = (
            "nothing for this package, which sets it for its own processes; for others `export "
            f"{decision.variable}{value}`"
        )
    return Finding(
        check="variables",
        row=f"environ:{decision.variable}",
        status=_STATUS.get(decision.action, "info"),
        title=f"{decision.variable}{value}" if len(names) == 1 else f"{decision.variable} together",
        text=decision.reason,
        read=tuple(seen) if len(names) > 1 else (),
        fix=fix,
        source=decision.source,
        subject=decision.variable,
    )


def _variables(evidence: Evidence) -> Iterator[Finding]:
    decisions = evaluate(evidence.environ, evidence.facts)
    yield from (of_decision(one) for one in decisions if one.action in _STATUS)
    if not any(one.action in _STATUS for one in decisions):
        text = "a working card with a matching wheel needs no variable, and no harmful one is set"
        kept = [f"{one.variable}={one.value}: {one.reason}" for one in decisions]
        yield ok("variables_ok", "none needs a change", text, "libhsakmt topology.c", read=kept)


# ---- kernel and firmware settings -------------------------------------------------------------------------------


def _release(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.machine.amd and not evidence.machine.topology.nodes:
        return
    release = evidence.machine.kernel.release
    if release is None:
        yield unknown("the kernel's release could not be read")
        return
    rdna3 = any((gpu.arch or "").startswith("gfx11") for gpu in evidence.cards)
    stalls = _is_build(release, "7.0.0-28") or (_is_build(release, "7.0.12") and "fc44" in release)
    if stalls:
        yield warn(
            "kernel_mmap_stall", "This kernel stalls copies from mapped files",
            f"on kernel {release}, moving a tensor of a mapped safetensors file to the card was reported to take "
            "about 5 seconds for 8 MiB, while a copy on the heap takes 4 ms (gfx1100 among the reporters)",
            "use a kernel with commit 342981fff328, or an older one without the stall (7.0.0-14, 6.17); in other "
            "programs, clone mapped tensors before moving them",
            "ROCm/ROCm#6523; ROCm/ROCm#5952; ROCm/ROCm#6606; ROCm/ROCm#6358",
        )  # fmt: skip
    if rdna3 and within(release, "6.18", "7.1"):
        yield warn(
            "kernel_sdma_faults", "Page faults of the copy engine were reported on this kernel",
            "with kernels 6.18 to 7.0, owners of RDNA3 cards report page faults of SDMA engine 0 that reset the GPU; "
            f"this is {release}. They appear in dmesg; silent corruption was not reported with them",
            "if `sudo dmesg` shows such faults: kernels 6.12 LTS and 6.17 worked for the reporters",
            "ROCm/amdgpu#225; ROCm/amdgpu#204",
        )  # fmt: skip
    elif within(release, None, "5.16"):
        yield warn(
            "kernel_too_old", "This kernel is old for this card",
            f"kernel {release}: NaN after copies to the card were reported on 5.15 with a ROCm 6.4 wheel (RX 6900 "
            "XT), and a newer kernel was not tried there",
            "use the kernel of a current distribution (Ubuntu 24.04 or newer)", "ROCm/ROCm#6123",
        )  # fmt: skip
    elif not stalls:
        yield ok(
            "kernel_ok", f"kernel {release}", "this project knows no report against it",
            "ROCm/ROCm#6523; ROCm/amdgpu#225",
        )  # fmt: skip


def _is_build(release: str, build: str) -> bool:
    """7.0.12 is not 7.0.120, and 7.0.0-28 is not 7.0.0-280."""
    return release.startswith(build) and not release.removeprefix(build)[:1].isdigit()


def _display(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        if gpu.display and (gpu.arch or "").startswith(("gfx11", "gfx12")):
            yield note(
                "display_beside_compute", "a display on the card that computes",
                f"{gpu.address} drives a display: owners of such cards report hangs of the scheduler's firmware "
                "(MES), timeouts of ring gfx_0.0.0 and page faults that reset the card or freeze the computer",
                "for a long run, use the processor's GPU or another card for the display, or train without a "
                "graphical session; `hf-rocm-tune run -- COMMAND` restarts a run after a reset",
                "TheRock#2655; ROCm/ROCm#5933; ROCm/ROCm#3166; ROCm/ROCm#5997", subject=gpu.address,
            )  # fmt: skip


def _peer_support(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    if kernel.config is None:
        yield unknown(evidence.machine.why("config"))
    else:
        config = kernel.config
        lacking = [name for name in PEER_OPTIONS if config.get(name) not in ("y", "m")]
        seen = [f"{name}={config.get(name, 'not set')}" for name in PEER_OPTIONS]
        if lacking:
            yield warn(
                "peer_config_missing", "The kernel is built without peer-to-peer between cards",
                f"{' and '.join(lacking)} not set in the configuration of this kernel, so copies between cards go "
                "through the host, or fail in software that assumes direct copies",
                f"use a kernel with {', '.join(PEER_OPTIONS)}, or keep copies off the direct path with the module "
                "parameter amdgpu.pcie_p2p=0; test the pairs after each change", "llama.cpp#12012; ROCm docs: IOMMU",
                read=seen,
            )  # fmt: skip
        else:
            yield ok(
                "peer_config_ok", "peer-to-peer built in", "all options for copies between cards are set",
                "ROCm docs: IOMMU", read=seen,
            )  # fmt: skip
    if kernel.pcie_p2p in ("N", "0"):
        yield note(
            "pcie_p2p_off", "amdgpu.pcie_p2p is off",
            "the driver sends copies between cards through host memory: slower, and a known fix for wrong direct "
            "copies", "keep it if the pair test failed without it; else remove `pcie_p2p=0` and test the pairs again",
            "kernel documentation: amdgpu module parameters; ROCm/ROCm#6342",
            read=[f"amdgpu parameter pcie_p2p: {kernel.pcie_p2p}"],
        )  # fmt: skip


def _iommu(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    known = {gpu.address: gpu.iommu_type for gpu in evidence.cards if gpu.iommu_type}
    seen = [f"{address}: group type {kind}" for address, kind in known.items()]
    boot = {name: value for name, value in kernel.cmdline.items() if "iommu" in name}
    seen += [f"boot parameter {name}={value}" if value else f"boot parameter {name}" for name, value in boot.items()]
    translated = ", ".join(address for address, kind in known.items() if kind.startswith("DMA"))
    if kernel.iommu is False:
        state, detail = "off", "the kernel lists no IOMMU"
    elif known:
        state = "translating" if translated else "passthrough"
        detail = (
            f"the addresses of {translated} are translated"
            if translated
            else ("the cards' addresses are not translated")
        )
    else:
        yield unknown(f"no card is in an IOMMU group: {evidence.machine.why('iommu')}", read=seen)
        return
    text = (
        f"{detail}. AMD documents two contradictory settings for several cards (RCCL: iommu=pt; ROCm's IOMMU page: "
        "translation enabled for Radeon peer-to-peer), so the pair test decides: while it passes, change nothing"
    )
    yield ok("iommu_state", f"IOMMU {state}", text, "ROCm docs: IOMMU; rccl init.cc; rccl#1129", read=seen)


def _overdrive(evidence: Evidence) -> Iterator[Finding]:
    text = evidence.machine.kernel.ppfeaturemask or ""
    # Decimal or hexadecimal, by the kernel's version; as a signed number, 0xffffffff is -1.
    mask = (1 << 32) - 1 if text == "-1" else parse_hex(text) if text.startswith("0x") else parse_int(text)
    source = "kernel documentation: amdgpu module parameters"
    if mask is None and evidence.cards:
        yield unknown(evidence.machine.why("ppfeaturemask") if not text else "ppfeaturemask is not a number")
    elif mask is not None and mask & _OVERDRIVE_BIT:
        yield note(
            "overdrive", "OverDrive is unlocked",
            f"amdgpu.ppfeaturemask is {mask:#x}, which unlocks OverDrive (clock and voltage tables) and may enable "
            "features that were not validated; computing does not need it",
            "while you look for wrong results: remove amdgpu.ppfeaturemask, run stock clocks, and test again",
            f"{source}; rocm-libraries#12344",
        )  # fmt: skip
    elif mask is not None:
        yield ok("clocks_stock", "stock clocks", f"amdgpu.ppfeaturemask is {mask:#x}: OverDrive is locked", source)


# ---- memory and temperature -------------------------------------------------------------------------------------


def _memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.memory_bytes is None:
        yield unknown(evidence.machine.why("proc/meminfo"))
        return
    gib, free, swap = host.memory_bytes / _GIB, host.available_bytes, host.swap_bytes
    text = "free memory unknown" if free is None else f"{free / _GIB:.1f} GiB available"
    text += ", swap unknown" if swap is None else f", {swap / _GIB:.1f} GiB of swap" if swap else ", no swap"
    if gib < 33:  # hosts of 16 and 32 GB
        text += (
            f". Weights are loaded through a ring of {RING_MIB} MiB of page-locked memory without a second copy of the "
            "model, so a model larger than this memory loads, too; its files are then read from the disk each time"
        )
        yield note(
            "host_memory_small", f"{gib:.0f} GiB of host memory", text,
            "nothing to do for training on the card; do not page-lock large buffers yourself",
            "this project: hf_rocm_tune/transfer/copies.py",
        )  # fmt: skip
    else:
        yield ok("host_memory", f"{gib:.0f} GiB of host memory", text, "kernel: /proc/meminfo")
    limit = host.memory_limit_bytes
    if limit is not None:
        text = (
            f"a memory limit of {limit / _GIB:.1f} GiB is set for this process, of {gib:.0f} GiB in the machine; the "
            "kernel kills a process that exceeds it without a message"
        )
        yield note(
            "memory_limit", f"the container may use {limit / _GIB:.1f} GiB", text,
            "raise it with `--memory` when a run is killed", "kernel documentation: cgroup v2",
        )  # fmt: skip


def _shared_memory(evidence: Evidence) -> Iterator[Finding]:
    host, shm = evidence.machine.host, evidence.machine.host.process.shm_bytes
    if host.process.platform != "linux":
        return
    source = "PyTorch README: Docker image"
    if shm is None:
        yield unknown("the size of /dev/shm is unknown")
    elif shm < _GIB:  # our own bound; Docker's default of 64 MiB is too little for loader workers
        where = f" in this {host.container} container" if host.container else ""
        yield warn(
            "shm_small", "Little shared memory",
            f"/dev/shm holds {shm / _MIB:.0f} MiB{where}; loader workers pass batches through it and die of a bus "
            "error when it is full",
            "start the container with `--ipc=host` or `--shm-size 8g`, or keep `--dataloader_num_workers 0`", source,
        )  # fmt: skip
    else:
        yield ok("shm_ok", f"{shm / _GIB:.0f} GiB of /dev/shm", "enough for loader workers", source)


def _vram(evidence: Evidence) -> Iterator[Finding]:
    source = "kernel documentation: amdgpu memory"
    for gpu in evidence.cards:
        used, total = gpu.sensors.vram_used_bytes, gpu.sensors.vram_total_bytes
        if used is None or not total:
            yield unknown(
                "; ".join(gpu.sensors.missing.values()) or "the driver reports no memory", subject=gpu.address
            )
            continue
        text = f"{gpu.address}: {used / _GIB:.1f} of {total / _GIB:.1f} GiB are used before training"
        fix = "log out of the desktop, or plug the display into the integrated GPU"
        if used / total < 0.02:
            yield ok(
                "vram_free", f"{(total - used) / _GIB:.1f} GiB free on the card",
                f"{gpu.address}: {used / _MIB:,.0f} MiB of {total / _GIB:.1f} GiB are used", source,
                subject=gpu.address,
            )  # fmt: skip
        elif used / total < 0.15:  # 3 GiB of 20 that training cannot have
            yield note(
                "vram_taken", f"{used / _GIB:.1f} GiB of the card in use",
                f"{text}, for example by a desktop on this card", f"nothing if the run fits; else {fix}", source,
                subject=gpu.address,
            )  # fmt: skip
        else:
            yield warn(
                "vram_scarce", "Other programs use much of the card's memory", text,
                f"end the other programs on the card (`amd-smi process` lists them), {fix}", source,
                subject=gpu.address,
            )  # fmt: skip


def _temperature(evidence: Evidence) -> Iterator[Finding]:
    source = "kernel documentation: amdgpu thermal controls"
    for gpu in evidence.cards:
        sensors = gpu.sensors
        known = {
            "hotspot {:.0f} C": sensors.hotspot_c,
            "edge {:.0f} C": sensors.edge_c,
            "memory {:.0f} C": sensors.memory_c,
            "{:.0f} W": sensors.power_w,
            "power limit {:.0f} W": sensors.power_cap_w,
        }
        readings = ", ".join(form.format(value) for form, value in known.items() if value is not None)
        if not readings:
            yield unknown("; ".join(dict.fromkeys(sensors.missing.values())), subject=gpu.address)
            continue
        hot = sensors.hotspot_c is not None and sensors.hotspot_c >= HOTSPOT_C
        if hot:
            yield warn(
                "hotspot", f"The hotspot is at {sensors.hotspot_c:.0f} C",
                f"{gpu.address}: RDNA3 lowers its clocks by this temperature (limit about 110 C), not by the edge "
                "temperature",
                "clean the cooler, improve the airflow, or lower the power limit; watch `amd-smi metric` under load",
                f"{source}; {_GENERAL}", subject=gpu.address, read=[readings],
            )  # fmt: skip
        if sensors.throttle:
            causes = " and ".join(throttle_causes(sensors.throttle))
            yield warn(
                "throttled", "The card's clocks are limited now",
                f"{gpu.address}: the driver reports that {causes} limits the clocks",
                "a power limit under load is normal; for another cause, or at idle, read `amd-smi metric`, and check "
                "cooling and power supply", source, subject=gpu.address,
                read=[readings, f"throttle status {sensors.throttle:#x}"],
            )  # fmt: skip
        elif not hot:
            yield ok(
                "sensors_ok", f"{(sensors.hotspot_c or sensors.edge_c or 0):.0f} C", f"{gpu.address}: {readings}",
                source, subject=gpu.address,
            )  # fmt: skip


CHECKS = (
    Check("driver", "access", "GPUs on the bus, and their drivers amdgpu and KFD", _driver),
    Check("permissions", "access", "/dev/kfd and the render nodes", _permissions),
    Check("cards", "access", "the model of each card", _cards),
    Check("integrated", "access", "an integrated GPU beside the card", _integrated),
    Check("platform", "access", "WSL, and integrated GPUs alone", _platform),
    Check("variables", "variables", "variables that are harmful, ignored or missing", _variables),
    Check("kernel_release", "kernel", "kernels with known problems", _release),
    Check("display", "kernel", "a display on the card that computes", _display),
    Check("peer_support", "kernel", "kernel options for copies between cards", _peer_support, needs_cards=2),
    Check("iommu", "kernel", "state of the IOMMU, without advice", _iommu, needs_cards=2),
    Check("overdrive", "kernel", "unlocked clock and voltage tables", _overdrive),
    Check("host_memory", "host", "host memory and swap", _memory),
    Check("shared_memory", "host", "/dev/shm for loader workers", _shared_memory),
    Check("vram", "host", "card memory in use by others", _vram),
    Check("temperature", "host", "hotspot, power and throttling", _temperature),
)
