"""What GPUs there are, whether the driver has them and this process may use them, and which the variables show."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
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
    unknown,
)
from hf_rocm_tune.machine.survey import Gpu, Machine
from hf_rocm_tune.machine.variables import Decision, evaluate
from hf_rocm_tune.machine.visible import FILTERS, OURS, choose, describe, is_integrated

_GIB = 1 << 30
_STATUS: dict[str, Status] = {"error": "fail", "warn": "warn", "info": "info", "set": "info"}


def _driver(evidence: Evidence) -> Iterator[Finding]:
    machine, nodes = evidence.machine, evidence.machine.topology.nodes
    if machine.host.platform != "linux":
        yield unknown(f"drivers are read from Linux's files, and this is {machine.host.platform}")
        return
    if not machine.amd and not nodes:
        yield _without_amd(evidence)
        return
    if not machine.topology.complete:
        yield from_row("topology_unread", reason="; ".join(machine.topology.reasons))
    if not machine.amd:
        yield from_row("pci_unread", count=len(nodes), evidence=machine.unlisted)
    troubles = [one for gpu in evidence.candidates for one in _of_gpu(gpu, machine)]
    yield from troubles
    for gpu in machine.amd:
        if gpu.driver.value == GIVEN_AWAY and gpu not in evidence.candidates:
            yield from_row("card_given_away", subject=gpu.address)
    if machine.amd and nodes and not troubles:
        listed = " and ".join(gpu.address for gpu in machine.amd if gpu.driver.value == "amdgpu")
        yield from_row("driver_ok", listed=listed, count=len(nodes))


def _without_amd(evidence: Evidence) -> Finding:
    reasons = (*evidence.machine.topology.reasons, *evidence.machine.unlisted)
    if evidence.devices:
        names = ", ".join(device.name for device in evidence.devices)
        of_rocm = evidence.software is not None and evidence.software.build == "rocm"
        return from_row("rocm_without_kfd" if of_rocm else "other_gpu", names=names, evidence=reasons)
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
    kfd = next((node for node in host.nodes if node.path.endswith("kfd")), None)
    missing = [] if kfd is not None and kfd.exists else ["/dev/kfd"]
    missing += [] if any(node.exists for node in host.nodes if "renderD" in node.path) else ["/dev/dri/renderD*"]
    if missing:
        where: dict[str, Any] = {"container": host.container.value} if host.container.value else {}
        row = "kfd_not_in_container" if where else "kfd_node_missing"
        yield from_row(row, nodes=" and ".join(missing), count=count, **where)
    there = [node for node in host.nodes if node.exists]
    refused = [node for node in there if node.usable is False]
    # Only those groups are read that own a node.
    groups = host.groups.value
    mine = "unknown" if groups is None else ", ".join(groups) or "none"
    for group in dict.fromkeys(node.group for node in refused):
        names = " and ".join(node.path for node in refused if node.group == group)
        yield from_row("node_not_usable", nodes=names, group=group or "unknown", groups=mine)
    for node in there:
        if node.usable is None:
            yield unknown(f"whether this process may use {node.path} could not be read")
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
    pcie = card.pcie
    known = {
        f"{card.bandwidth_gb_s} GB/s": card.bandwidth_gb_s,
        f"{card.power_w} W": card.power_w,
        f"PCIe {pcie[0]}.0 x{pcie[1]}" if pcie else "": pcie,
        f"{card.matrix} with bf16" if card.bf16 else f"{card.matrix}": card.matrix,
        "no FP8": card.fp8 is False,
    }
    told = ", ".join(text for text, there in known.items() if there)
    seen = [f"told by: {gpu.identity.reason}", *([f"known of this model: {told} ({card.source})"] if told else [])]
    vram = gpu.node.vram_bytes if gpu.node else None
    memory = "its memory is not known" if vram is None else f"{vram / _GIB:.1f} GiB"
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
        yield unknown(f"which of {igpu} and {card} are visible is not known: {NO_VARIABLES}")
    elif not choice.variables:
        yield unknown(choice.reason)
    elif not filters:
        yield from_row("igpu_hidden", igpu=igpu, card=card, line=line)
    elif seen is None:
        yield unknown(f"{shown} is not a plain list of indices, so what it leaves is not known")
    elif any(node in seen for node in igpus):
        left = ", ".join(describe(node) for node in igpus if node in seen)
        row = "igpu_visible" if any(node in seen for node in cards) else "igpu_instead"
        yield from_row(row, shown=shown, igpu=left, card=card, line=line)
    else:
        yield from_row("igpu_filtered", igpu=igpu, line=shown)


def _platform(evidence: Evidence) -> Iterator[Finding]:
    if evidence.machine.host.platform == "windows":
        yield from_row("windows")
    for gpu in () if evidence.cards else evidence.machine.amd:
        if gpu.integrated:
            arch = arch_of(gpu)
            row = "only_integrated" if in_wheels(gpu) else "no_card"
            yield from_row(row, subject=gpu.address, arch=arch or "unknown")
            if arch == "gfx1151":
                yield from_row("strix_halo", subject=gpu.address)


def of_decision(decision: Decision, *, found: bool = False) -> Finding:
    """A decision of the policy of variables as a finding of the check ``variables``; `found` where it rests on what the
    doctor has measured, of which a run knows nothing."""
    names = decision.variable.split(", ")
    value = "" if decision.value is None else f"={shlex.quote(decision.value)}"
    seen = [f"{name}={given}" for name, given in zip(names, (decision.value or "").split(" | "), strict=False)]
    cure = decision.cure
    if decision.action == "set":
        who = "no run sets it by itself" if found else "this package sets it for its own processes"
        cure = f"`export {decision.variable}{value}`; {who}"
    return Finding(
        check="variables",
        row=f"environ:{decision.variable}",
        status=_STATUS.get(decision.action, "info"),
        title=f"{decision.variable}{value}" if len(names) == 1 else f"{decision.variable} at once",
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
    spoken = [decision for decision in decisions if decision.action in _STATUS]
    yield from map(of_decision, spoken)
    if not spoken:
        kept = [f"{decision.variable}={decision.value}: {decision.reason}" for decision in decisions]
        yield from_row("variables_ok", evidence=kept)


CHECKS = (
    Check(name="driver", group="access", about="GPUs on the bus, and whether amdgpu and KFD have them", run=_driver),
    Check(name="permissions", group="access", about="/dev/kfd and the render nodes", run=_permissions),
    Check(name="container", group="access", about="what a container keeps from ROCm", run=_container),
    Check(name="cards", group="access", about="which model each card is", run=_cards),
    Check(name="integrated", group="access", about="an integrated GPU beside the card", run=_integrated),
    Check(name="platform", group="access", about="Windows and Strix Halo, not tested here", run=_platform),
    Check(name="variables", group="variables", about="variables that are harmful, ignored or missing", run=_variables),
)
