"""What GPUs there are, whether the driver has them, and whether this process may use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import GIVEN_AWAY, Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.machine.host import Node
from hf_rocm_tune.machine.survey import Gpu, Machine

KFD = "/dev/kfd"
NO_DRIVER = "no driver is bound"


def _driver(evidence: Evidence) -> Iterator[Finding]:
    machine = evidence.machine
    nodes = machine.topology.nodes
    if machine.host.platform != "linux":
        yield unknown("driver", f"drivers are read from Linux's files, and this is {machine.host.platform}")
        return
    if not machine.amd and not nodes:
        yield _without_amd(evidence)
        return
    if not machine.topology.complete:
        yield from_row("driver", "topology_unread", reason="; ".join(machine.topology.reasons))
    if not machine.amd:
        yield from_row("driver", "pci_unread", count=len(nodes), evidence=machine.unlisted)
    troubles = [one for gpu in evidence.candidates for one in _of_gpu(gpu, machine)]
    yield from troubles
    for gpu in machine.amd:
        if gpu.driver.value == GIVEN_AWAY and gpu not in evidence.candidates:
            yield from_row("driver", "card_given_away", subject=gpu.address, address=gpu.address)
    if machine.amd and nodes and not troubles:
        listed = " and ".join(gpu.address for gpu in machine.amd if gpu.driver.value == "amdgpu")
        yield from_row("driver", "driver_ok", listed=listed, count=len(nodes))


def _without_amd(evidence: Evidence) -> Finding:
    reasons = (*evidence.machine.topology.reasons, *evidence.machine.unlisted)
    others = [gpu for gpu in evidence.machine.gpus if gpu.vendor in ("nvidia", "intel")]
    if evidence.devices:
        names = ", ".join(device.name for device in evidence.devices)
        of_rocm = evidence.software is not None and evidence.software.build == "rocm"
        row = "rocm_without_kfd" if of_rocm else "other_gpu"
        return from_row("driver", row, names=names, evidence=reasons)
    if evidence.machine.unlisted or not evidence.machine.topology.complete:
        return unknown("driver", f"whether there is a GPU could not be read: {'; '.join(reasons)}")
    if others:
        found = ", ".join(f"{gpu.vendor.upper()} {gpu.device_id:04x} at {gpu.address}" for gpu in others)
        return from_row("driver", "no_amd_gpu", found=found, evidence=reasons)
    return from_row("driver", "no_gpu", evidence=reasons)


def _of_gpu(gpu: Gpu, machine: Machine) -> Iterator[Finding]:
    if gpu.driver.value == "amdgpu":
        if gpu.node is None and machine.topology.complete:
            yield from_row("driver", "kfd_missing", subject=gpu.address, address=gpu.address)
    elif gpu.driver.value is None and NO_DRIVER not in gpu.driver.reason:
        yield unknown("driver", gpu.driver.reason, subject=gpu.address)
    else:
        driver = gpu.driver.value or "none"
        seen = ["boot parameter nomodeset"] if "nomodeset" in (machine.kernel.cmdline.value or {}) else []
        about = {"address": gpu.address, "driver": driver}
        yield from_row("driver", "driver_not_bound", subject=gpu.address, evidence=seen, **about)


def _permissions(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    count = len(evidence.machine.topology.nodes)
    if not count:
        return
    kfd = next((node for node in host.nodes if node.path.endswith("kfd")), None)
    render = [node for node in host.nodes if "renderD" in node.path]
    missing = [] if kfd is not None and kfd.exists else [KFD]
    missing += [] if any(node.exists for node in render) else ["/dev/dri/renderD*"]
    if missing:
        container = host.container.value
        row = "kfd_not_in_container" if container else "kfd_node_missing"
        where: dict[str, Any] = {"container": container} if container else {}
        yield from_row("permissions", row, nodes=" and ".join(missing), count=count, **where)
    there = [node for node in host.nodes if node.exists]
    refused = [node for node in there if node.usable is False]
    for group in dict.fromkeys(node.group for node in refused):
        yield _not_usable([node for node in refused if node.group == group], group, evidence)
    for node in there:
        if node.usable is None:
            yield unknown("permissions", f"whether this process may use {node.path} could not be read")
    if not missing and all(node.usable for node in there):
        names = ", ".join(f"{node.path} (group {node.group or 'unknown'})" for node in there)
        yield from_row("permissions", "permissions_ok", nodes=names)


def _not_usable(nodes: Sequence[Node], group: str | None, evidence: Evidence) -> Finding:
    groups = evidence.machine.host.groups
    # Only those groups are read that own a node.
    mine = ", ".join(groups.value) if groups.value else "none" if groups.value == () else "unknown"
    names = " and ".join(node.path for node in nodes)
    return from_row("permissions", "node_not_usable", nodes=names, group=group or "unknown", groups=mine)


def _container(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.container.value and host.seccomp.value == 2 and evidence.machine.topology.nodes:
        seen = [f"container: {host.container.value}", "Seccomp: 2 in /proc/self/status"]
        yield from_row("container", "seccomp_filter", container=host.container.value, evidence=seen)


CHECKS = (
    Check(name="driver", group="access", about="GPUs on the bus, and whether amdgpu and KFD have them", run=_driver),
    Check(name="permissions", group="access", about="/dev/kfd and the render nodes", run=_permissions),
    Check(name="container", group="access", about="what a container keeps from ROCm", run=_container),
)
