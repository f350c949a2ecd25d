"""Read checks of GPUs and the access to them, of variables, the kernel, host memory and the cards' sensors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hf_rocm_tune.doctor.findings import (
    GIVEN_AWAY,
    NO_VARIABLES,
    Check,
    Evidence,
    Finding,
    Status,
    arch_of,
    from_row,
    in_wheels,
    knowledge_data,
    unknown,
)
from hf_rocm_tune.machine.gpus import throttle_causes
from hf_rocm_tune.machine.process import FILTERS, OURS, choose, describe, is_integrated
from hf_rocm_tune.machine.survey import PEER_OPTIONS, Gpu, Machine
from hf_rocm_tune.machine.sysfs import parse_int
from hf_rocm_tune.machine.variables import Decision, evaluate, within

_MIB, _GIB = 1 << 20, 1 << 30
_STATUS: dict[str, Status] = {"error": "fail", "warn": "warn", "info": "info", "set": "info"}
# amdgpu's PP_OVERDRIVE_MASK (amd_shared.h).
OVERDRIVE_BIT = 1 << 14
# RDNA3 and newer: their queues are scheduled by firmware (MES) and not by the driver.
_SCHEDULED_BY_MES = ("gfx11", "gfx12")


# ---- cards and access -------------------------------------------------------------------------------------------


def _driver(evidence: Evidence) -> Iterator[Finding]:
    machine, topology = evidence.machine, evidence.machine.topology
    if machine.host.platform != "linux":
        yield unknown(f"drivers are read from Linux files, and this is {machine.host.platform}")
        return
    if not machine.amd and not topology.nodes:
        yield _without_amd(evidence)
        return
    if not topology.complete:
        yield from_row("topology_unread", reason="; ".join(topology.reasons))
    if not machine.amd:
        yield from_row("pci_unread", count=len(topology.nodes), evidence=machine.unlisted)
    problems = [one for gpu in evidence.candidates for one in _of_gpu(gpu, machine)]
    yield from problems
    for gpu in machine.amd:
        if gpu.driver.value == GIVEN_AWAY and gpu not in evidence.candidates:
            yield from_row("card_given_away", subject=gpu.address)
    if machine.amd and topology.nodes and not problems:
        listed = " and ".join(gpu.address for gpu in machine.amd if gpu.driver.value == "amdgpu")
        yield from_row("driver_ok", listed=listed, count=len(topology.nodes))


def _without_amd(evidence: Evidence) -> Finding:
    reasons = (*evidence.machine.topology.reasons, *evidence.machine.unlisted)
    if evidence.devices:
        row = "rocm_without_kfd" if evidence.build == "rocm" else "other_gpu"
        return from_row(row, names=", ".join(device.name for device in evidence.devices), evidence=reasons)
    if evidence.machine.unlisted or not evidence.machine.topology.complete:
        return unknown(f"whether there is a GPU could not be read: {'; '.join(reasons)}")
    others = [gpu for gpu in evidence.machine.gpus if gpu.vendor in ("nvidia", "intel")]
    if others:
        found = ", ".join(f"{gpu.vendor.upper()} {gpu.device_id:04x} at {gpu.address}" for gpu in others)
        return from_row("no_amd_gpu", found=found, evidence=reasons)
    return from_row("no_gpu", evidence=reasons)


def _of_gpu(gpu: Gpu, machine: Machine) -> Iterator[Finding]:
    if gpu.driver.value == "amdgpu":
        if gpu.node is None and machine.topology.complete:
            yield from_row("kfd_missing", subject=gpu.address)
    elif gpu.driver.value is None and "no driver is bound" not in gpu.driver.reason:
        yield unknown(gpu.driver.reason, subject=gpu.address)
    else:
        seen = ["boot parameter nomodeset"] if "nomodeset" in (machine.kernel.cmdline.value or {}) else []
        yield from_row("driver_not_bound", subject=gpu.address, evidence=seen, driver=gpu.driver.value or "none")


def _permissions(evidence: Evidence) -> Iterator[Finding]:
    host, count = evidence.machine.host, len(evidence.machine.topology.nodes)
    if not count:
        return
    there = [node for node in host.nodes if node.exists]
    kinds = {"/dev/kfd": "kfd", "/dev/dri/renderD*": "renderD"}
    missing = [name for name, part in kinds.items() if not any(part in node.path for node in there)]
    if missing:
        where: dict[str, Any] = {"container": host.container.value} if host.container.value else {}
        row = "kfd_not_in_container" if where else "kfd_node_missing"
        yield from_row(row, nodes=" and ".join(missing), count=count, **where)
    refused = [node for node in there if node.usable is False]
    # Only groups that own a node are read.
    own = "unknown" if host.groups.value is None else ", ".join(host.groups.value) or "none"
    for group in dict.fromkeys(node.group for node in refused):
        names = " and ".join(node.path for node in refused if node.group == group)
        yield from_row("node_not_usable", nodes=names, group=group or "unknown", groups=own)
    for node in there:
        if node.usable is None:
            yield unknown(f"the permissions of {node.path} could not be read")
    if not missing and all(node.usable for node in there):
        names = ", ".join(f"{node.path} (group {node.group or 'unknown'})" for node in there)
        yield from_row("permissions_ok", nodes=names)


def _container(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.container.value and host.seccomp.value == 2 and evidence.machine.topology.nodes:
        seen = [f"container: {host.container.value}", "Seccomp: 2 in /proc/self/status"]
        yield from_row("seccomp_filter", container=host.container.value, evidence=seen)


def _cards(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.machine.amd:
        if gpu.integrated is not True:
            yield _card(gpu)
    models = {gpu.address: gpu.identity.card.name for gpu in evidence.cards if gpu.identity.card}
    if len(set(models.values())) > 1:
        yield from_row("cards_unequal", listed=", ".join(f"{name} at {place}" for place, name in models.items()))


def _card(gpu: Gpu) -> Finding:
    card, arch = gpu.identity.card, arch_of(gpu) or "architecture unknown"
    if card is None:
        what = f"PCI device {gpu.vendor_id:04x}:{gpu.device_id:04x}, {arch}"
        return from_row("card_unknown", subject=gpu.address, what=what, reason=gpu.identity.reason)
    known = {
        f"{card.bandwidth_gb_s} GB/s": card.bandwidth_gb_s,
        f"{card.power_w} W": card.power_w,
        "PCIe {}.0 x{}".format(*card.pcie or ("", "")): card.pcie,
        f"{card.matrix} with bf16" if card.bf16 else f"{card.matrix}": card.matrix,
        "no FP8": card.fp8 is False,
    }
    facts = ", ".join(text for text, there in known.items() if there)
    seen = [
        f"identified by: {gpu.identity.reason}",
        *([f"data of this model: {facts} ({card.source})"] if facts else []),
    ]
    vram = gpu.node.vram_bytes if gpu.node else None
    memory = "memory unknown" if vram is None else f"{vram / _GIB:.1f} GiB"
    return from_row("card_known", subject=gpu.address, evidence=seen, name=card.name, arch=arch, memory=memory)


def _integrated(evidence: Evidence) -> Iterator[Finding]:
    topology = evidence.machine.topology
    igpus = [node for node in topology.nodes if is_integrated(node)]
    cards = [node for node in topology.nodes if not is_integrated(node)]
    if not igpus or not cards:
        return
    choice = choose(topology.nodes, {}, complete=topology.complete, split=len(cards) > 1)
    line = f"{OURS}={choice.variables.get(OURS, '')}"
    igpu, card = ", ".join(map(describe, igpus)), ", ".join(map(describe, cards))
    filters = {name: evidence.variables[name] for name in FILTERS if name in evidence.variables}
    shown, seen = " ".join(f"{name}={shlex.quote(value)}" for name, value in filters.items()), evidence.visible
    if evidence.environ is None:
        yield unknown(f"it is unknown which of {igpu} and {card} are visible: {NO_VARIABLES}")
    elif not choice.variables:
        yield unknown(choice.reason)
    elif not filters:
        yield from_row("igpu_hidden", igpu=igpu, card=card, line=line)
    elif seen is None:
        yield unknown(f"{shown} is not a plain list of indices, so the visible GPUs are unknown")
    elif any(node in seen for node in igpus):
        left = ", ".join(describe(node) for node in igpus if node in seen)
        row = "igpu_visible" if any(node in seen for node in cards) else "igpu_instead"
        yield from_row(row, shown=shown, igpu=left, card=card, line=line)
    else:
        yield from_row("igpu_filtered", igpu=igpu, line=shown)


def _platform(evidence: Evidence) -> Iterator[Finding]:
    if evidence.machine.host.platform == "windows":
        yield from_row("windows")
    release = evidence.machine.kernel.release.value or ""
    if "microsoft" in release.lower():
        yield from_row("wsl", release=release)
    for gpu in () if evidence.cards else evidence.machine.amd:
        if gpu.integrated:
            arch = arch_of(gpu)
            row = "only_integrated" if in_wheels(gpu) else "no_card"
            yield from_row(row, subject=gpu.address, arch=arch or "unknown")
            if arch == "gfx1151":
                yield from_row("strix_halo", subject=gpu.address)


def of_decision(decision: Decision, *, found: bool = False) -> Finding:
    """A decision of the policy of variables as a finding of the check ``variables``; `found`: it depends on a
    measurement of the doctor, which a run does not have."""
    names = decision.variable.split(", ")
    value = "" if decision.value is None else f"={shlex.quote(decision.value)}"
    seen = [f"{name}={given}" for name, given in zip(names, (decision.value or "").split(" | "), strict=False)]
    cure = decision.cure
    if decision.action == "set":
        who = "a run does not set it" if found else "this package sets it for its own processes"
        cure = f"`export {decision.variable}{value}`; {who}"
    return Finding(
        check="variables",
        row=f"environ:{decision.variable}",
        status=_STATUS.get(decision.action, "info"),
        title=f"{decision.variable}{value}" if len(names) == 1 else f"{decision.variable} together",
        text=decision.reason,
        evidence=tuple(seen) if len(names) > 1 else (),
        cure=cure,
        sources=tuple(name.strip() for name in decision.source.split(";")),
        subject=decision.variable,
    )


def _variables(evidence: Evidence) -> Iterator[Finding]:
    if evidence.environ is None:
        yield unknown(NO_VARIABLES)
        return
    decisions = evaluate(evidence.environ, evidence.facts())
    reported = [decision for decision in decisions if decision.action in _STATUS]
    yield from map(of_decision, reported)
    if not reported:
        kept = [f"{decision.variable}={decision.value}: {decision.reason}" for decision in decisions]
        yield from_row("variables_ok", evidence=kept)


# ---- kernel and firmware settings -------------------------------------------------------------------------------


def _release(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.machine.amd and not evidence.machine.topology.nodes:
        return
    release = evidence.machine.kernel.release
    if release.value is None:
        yield unknown(release.reason)
        return
    archs = {gpu.arch for gpu in evidence.machine.amd if gpu.arch and gpu.integrated is not True}
    rows = [entry["row"] for entry in knowledge_data("kernels.toml").values() if _is_of(entry, release.value, archs)]
    for row in rows or ["kernel_ok"]:
        yield from_row(row, release=release.value)


def _is_of(entry: dict[str, Any], release: str, archs: set[str]) -> bool:
    wanted, exact = entry.get("archs"), entry.get("exact")
    if wanted and not any(arch.startswith(tuple(wanted)) for arch in archs):
        return False
    if exact is None:
        return within(release, entry.get("from"), entry.get("below"))
    rest, word = release.removeprefix(exact), entry.get("of")
    # 7.0.12 is not 7.0.120, and 7.0.0-28 is not 7.0.0-280.
    begins = release.startswith(exact) and not rest[:1].isdigit()
    return begins and (word is None or word in re.split("[^a-z0-9]", rest))


def _firmware(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.candidates:
        arch = arch_of(gpu) or ""
        if gpu.driver.value != "amdgpu" or not arch.startswith(_SCHEDULED_BY_MES):
            continue
        version = gpu.mes_firmware.value
        if version is None:
            yield unknown(gpu.mes_firmware.reason, subject=gpu.address)
        else:
            bad = version in knowledge_data("versions.toml")["mes_firmware"].get(arch, ())
            row = "mes_firmware_withdrawn" if bad else "mes_firmware_ok"
            yield from_row(row, subject=gpu.address, arch=arch, version=f"{version:#x}")
        if gpu.display.value and gpu.integrated is False:
            yield from_row("display_beside_compute", subject=gpu.address)


def _peer_support(evidence: Evidence) -> Iterator[Finding]:
    config = evidence.machine.kernel.config
    if config.value is None:
        yield unknown(config.reason)
    else:
        lacking = [name for name in PEER_OPTIONS if config.value.get(name) not in ("y", "m")]
        seen = [f"{name}={config.value.get(name, 'not set')}" for name in PEER_OPTIONS]
        if lacking:
            yield from_row("peer_config_missing", missing=" and ".join(lacking), evidence=seen)
        else:
            yield from_row("peer_config_ok", evidence=seen)
    listed = {gpu.address: gpu.peers.value for gpu in evidence.cards if gpu.peers.value is not None}
    apart = [f"{one} and {other}" for one, other in combinations(listed, 2) if other not in listed[one]]
    if apart:
        yield from_row("no_direct_link", pairs=", ".join(apart))
    switch = evidence.machine.kernel.amdgpu_parameters["pcie_p2p"].value
    if switch in ("N", "0"):
        yield from_row("pcie_p2p_off", evidence=[f"amdgpu parameter pcie_p2p: {switch}"])


def _iommu(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    types = {gpu.address: gpu.iommu_type for gpu in evidence.cards}
    known = {address: kind.value for address, kind in types.items() if kind.value}
    seen = [f"{address}: group type {kind}" for address, kind in known.items()]
    boot = {name: value for name, value in (kernel.cmdline.value or {}).items() if "iommu" in name}
    seen += [f"boot parameter {name}={value}" if value else f"boot parameter {name}" for name, value in boot.items()]
    translated = ", ".join(address for address, kind in known.items() if kind.startswith("DMA"))
    if kernel.iommu_present.value is False:
        state, detail = "off", "the kernel lists no IOMMU"
    elif translated:
        state, detail = "translating", f"the addresses of {translated} are translated"
    elif known:
        state, detail = "passthrough", "the cards' addresses are not translated"
    else:
        reasons = {kind.reason for kind in types.values()} | {kernel.iommu_present.reason}
        yield unknown("; ".join(sorted(reasons - {""})) or "no card is in an IOMMU group", evidence=seen)
        return
    yield from_row("iommu_state", state=state, detail=detail, evidence=seen)


def _overdrive(evidence: Evidence) -> Iterator[Finding]:
    reading = evidence.machine.kernel.amdgpu_parameters["ppfeaturemask"]
    mask = _mask(reading.value or "")
    if mask is not None:
        yield from_row("overdrive" if mask & OVERDRIVE_BIT else "clocks_stock", mask=f"{mask:#x}")
    elif evidence.cards:
        yield unknown(reading.reason or "ppfeaturemask is not a number")


def _mask(text: str) -> int | None:
    """The kernel writes this parameter in decimal or hexadecimal, by version; as a signed number, 0xffffffff is -1."""
    if re.fullmatch("0[xX][0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    return (1 << 32) - 1 if text == "-1" else parse_int(text)


# ---- memory and temperature -------------------------------------------------------------------------------------


def _memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.memory_bytes.value is None:
        yield unknown(host.memory_bytes.reason)
        return
    gib = host.memory_bytes.value / _GIB
    free, swap = host.available_bytes.value, host.swap_bytes.value
    values: dict[str, Any] = {
        "gib": gib,
        "available": "free memory unknown" if free is None else f"{free / _GIB:.1f} GiB available",
        "swap": "swap unknown" if swap is None else f"{swap / _GIB:.1f} GiB of swap" if swap else "no swap",
    }
    bounds = knowledge_data("thresholds.toml")["host_memory"]
    if gib < bounds["small_gib"]:
        yield from_row("host_memory_small", ring_mib=bounds["ring_mib"], **values)
    else:
        yield from_row("host_memory", **values)
    if host.memory_limit_bytes.value is not None:
        yield from_row("memory_limit", limit_gib=host.memory_limit_bytes.value / _GIB, gib=gib)


def _shared_memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.platform != "linux":
        return
    if host.shm_bytes.value is None:
        yield unknown(host.shm_bytes.reason)
    elif host.shm_bytes.value < knowledge_data("thresholds.toml")["shm_bytes"]["warn"]:
        where = f" in this {host.container.value} container" if host.container.value else ""
        yield from_row("shm_small", mib=host.shm_bytes.value / _MIB, where=where)
    else:
        yield from_row("shm_ok", gib=host.shm_bytes.value / _GIB)


def _vram(evidence: Evidence) -> Iterator[Finding]:
    bounds = knowledge_data("thresholds.toml")["vram_used_share"]
    for gpu in evidence.cards:
        used, total = gpu.sensors.vram_used_bytes, gpu.sensors.vram_total_bytes
        if used.value is None or not total.value:
            reason = used.reason or total.reason or "the driver reports none"
            yield unknown(reason, subject=gpu.address)
            continue
        seen = [f"mem_info_vram_used: {used.value:,} bytes of {total.value:,}"]
        values: dict[str, Any] = {"subject": gpu.address, "evidence": seen, "total_gib": total.value / _GIB}
        share = used.value / total.value
        if share < bounds["info"]:
            yield from_row("vram_free", used_mib=used.value / _MIB, **values)
        else:
            row = "vram_scarce" if share >= bounds["warn"] else "vram_taken"
            yield from_row(row, used_gib=used.value / _GIB, **values)


def _temperature(evidence: Evidence) -> Iterator[Finding]:
    hottest = knowledge_data("thresholds.toml")["hotspot_c"]["warn"]
    for gpu in evidence.cards:
        sensors = gpu.sensors
        known = {
            "hotspot {:.0f} C": sensors.hotspot_c,
            "edge {:.0f} C": sensors.edge_c,
            "memory {:.0f} C": sensors.memory_c,
            "{:.0f} W": sensors.power_w,
            "power limit {:.0f} W": sensors.power_cap_w,
        }
        readings = ", ".join(form.format(one.value) for form, one in known.items() if one.value is not None)
        hot = sensors.hotspot_c.value is not None and sensors.hotspot_c.value >= hottest
        if not readings:
            yield unknown(sensors.hotspot_c.reason, subject=gpu.address)
            continue
        if hot:
            yield from_row("hotspot", subject=gpu.address, evidence=[readings], celsius=sensors.hotspot_c.value)
        if sensors.throttle.value:
            seen = [readings, f"throttle status {sensors.throttle.value:#x}"]
            causes = " and ".join(throttle_causes(sensors.throttle.value))
            yield from_row("throttled", subject=gpu.address, evidence=seen, causes=causes)
        elif not hot:
            yield from_row("sensors_ok", subject=gpu.address, readings=readings)


CHECKS = (
    Check("driver", "access", "GPUs on the bus, and their drivers amdgpu and KFD", _driver),
    Check("permissions", "access", "/dev/kfd and the render nodes", _permissions),
    Check("container", "access", "restrictions of a container", _container),
    Check("cards", "access", "the model of each card", _cards),
    Check("integrated", "access", "an integrated GPU beside the card", _integrated),
    Check("platform", "access", "Windows and Strix Halo, not tested here", _platform),
    Check("variables", "variables", "variables that are harmful, ignored or missing", _variables),
    Check("kernel_release", "kernel", "kernels with known problems", _release),
    Check("firmware", "kernel", "firmware of the scheduler (MES), and a display on the card", _firmware),
    Check("peer_support", "kernel", "kernel options for copies between cards", _peer_support, needs_cards=2),
    Check("iommu", "kernel", "state of the IOMMU, without advice", _iommu, needs_cards=2),
    Check("overdrive", "kernel", "unlocked clock and voltage tables", _overdrive),
    Check("host_memory", "host", "host memory and swap", _memory),
    Check("shared_memory", "host", "/dev/shm for loader workers", _shared_memory),
    Check("vram", "host", "card memory in use by others", _vram),
    Check("temperature", "host", "hotspot, power and throttling", _temperature),
)
