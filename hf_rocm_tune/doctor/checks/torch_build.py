"""torch: whether its build fits the machine, what it sees, and which ROCm it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import Evidence, arch_of
from hf_rocm_tune.doctor.finding import Finding, from_row, skipped, unknown
from hf_rocm_tune.doctor.versions import known_versions, minor, numbers, torch_rocm, within
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import Gpu
from hf_rocm_tune.machine.visible import FILTERS

NO_SOFTWARE = "the recording holds nothing about software"
NO_ROCM_BUILD = "torch is no ROCm build"


def _torch(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None:
        yield unknown("torch", NO_SOFTWARE)
        return
    version, card = software.torch_version.value, _card(evidence)
    if version is None:
        row = "torch_missing" if software.packages.get("torch") is None else "torch_fails"
        yield from_row("torch", row, reason=software.torch_version.reason)
    elif software.build == "rocm":
        yield from _rocm_build(evidence, software, version)
    elif not card:
        yield from_row("torch", "torch_no_gpu_needed", version=version, build=_BUILDS[software.build or "cpu"])
    elif software.build == "cuda" and evidence.devices:
        seen = ", ".join(device.name for device in evidence.devices)
        yield from_row("torch", "torch_cuda_beside", version=version, seen=seen, card=card)
    elif software.build == "cuda":
        yield from_row("torch", "torch_cuda_build", version=version, cuda=software.cuda_version, card=card)
    else:
        yield from_row("torch", "torch_cpu_build", version=version, card=card)


_BUILDS = {"cpu": "processors", "cuda": "NVIDIA cards"}


def in_wheels(gpu: Gpu) -> bool:
    """Whether torch is known to hold code for a GPU of its kind; of a card, that is for the check of its build."""
    return gpu.integrated is not True or arch_of(gpu) in known_versions()["integrated"]["in_wheels"]


def _card(evidence: Evidence) -> str:
    """The AMD GPU or GPUs that torch should compute on; empty where there is none."""
    known = [(gpu.identity.card, gpu.arch or "GPU") for gpu in evidence.candidates if in_wheels(gpu)]
    return " and ".join(card.name if card else f"an AMD {arch}" for card, arch in known)


def _rocm_build(evidence: Evidence, software: Software, version: str) -> Iterator[Finding]:
    devices, count = software.devices, len(evidence.cards)
    if not devices.value:
        reason = devices.reason or "its list is empty"
        if evidence.candidates:
            about: dict[str, Any] = {"version": version, "count": len(evidence.candidates), "reason": reason}
            yield from_row("torch", "torch_sees_nothing", evidence=_filters(evidence), **about)
        else:
            yield unknown("torch", f"torch {version} is a ROCm build, and there is no card for it here: {reason}")
        return
    seen = ", ".join(f"{one.name} ({one.arch}, {one.total_bytes / (1 << 30):.1f} GiB)" for one in devices.value)
    yield from_row("torch", "torch_rocm", version=version, hip=software.hip_version, seen=seen)
    known = [one.gpu for one in evidence.joined if one.gpu is not None]
    cards = [gpu for gpu in known if gpu in evidence.cards]
    if len(cards) < count and len(known) == len(devices.value):
        shown = " and ".join(_filters(evidence))
        why = f": {shown} is set" if shown else ""
        yield from_row("torch", "torch_sees_fewer", seen=len(cards), count=count, why=why)


def _filters(evidence: Evidence) -> list[str]:
    return [f"{name}={evidence.variables[name]}" for name in FILTERS if name in evidence.variables]


def _architectures(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None or not evidence.candidates:
        return
    if software.build != "rocm":
        yield skipped("arch", NO_ROCM_BUILD)
        return
    true = {gpu.address: arch for gpu in evidence.candidates if (arch := arch_of(gpu))}
    if not true:
        yield unknown("arch", "the architecture of no GPU is known")
        return
    for one in evidence.joined:
        if one.spoofed and one.gpu is not None:
            place, true_arch, seen_arch = one.gpu.address, one.gpu.arch, one.device.arch
            found: dict[str, Any] = {"address": place, "true": true_arch, "seen": seen_arch}
            yield from_row("arch", "arch_spoofed", subject=place, evidence=[one.reason], **found)
    built = software.arch_list
    if not built.value:
        yield unknown("arch", built.reason or "torch names no architecture that it is built for")
        return
    missing = {address: arch for address, arch in true.items() if arch not in built.value}
    for address, arch in missing.items():
        values = {"address": address, "arch": arch, "built": " ".join(built.value)}
        yield from_row("arch", "arch_missing", subject=address, **values)
    if not missing:
        archs = " and ".join(sorted(set(true.values()))) + (" is" if len(set(true.values())) == 1 else " are")
        yield from_row("arch", "arch_ok", archs=archs, evidence=[f"built for: {' '.join(built.value)}"])
    yield from _device_wheels(software, sorted(set(true.values()) - set(missing.values())))


def _device_wheels(software: Software, archs: list[str]) -> Iterator[Finding]:
    """Multi-architecture wheels keep the kernels of each architecture in a wheel of its own."""
    rocm = torch_rocm(software)
    wheels = software.rocm_wheels
    if rocm is None or not within(rocm, known_versions()["rocm"]["device_wheels"], None) or not wheels:
        return
    by_device = any("device-" in name for name in wheels)
    if any("gfx" in name for name in wheels) and not by_device:
        return  # wheels of one family of architectures: nothing is kept apart
    for arch in archs:
        if not any(name.endswith(f"device-{arch}") for name in wheels):
            seen = [f"{name} {version}" for name, version in wheels.items()]
            yield from_row("arch", "device_wheel_missing", evidence=seen, arch=arch, rocm=rocm)


def _rocm(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None:
        return
    rocm = torch_rocm(software)
    if rocm is None:
        yield skipped("rocm", NO_ROCM_BUILD)
        return
    known, torch_version = known_versions(), software.torch_version.value or ""
    system, kernel = software.rocm_version, evidence.machine.kernel
    driver = f"amdgpu {kernel.amdgpu_version.value}" if kernel.amdgpu_version.value else "the kernel's own"
    bound = any(gpu.driver.value == "amdgpu" for gpu in evidence.machine.amd)
    driver = f"{driver}, kernel {kernel.release.value or 'unknown'}" if bound else "not known"
    values = {"torch_rocm": rocm, "system": system.value or "not installed, or not found"}
    yield from_row("rocm", "versions_of_rocm", driver=driver, **values)
    if system.value and minor(system.value) != minor(rocm):
        yield from_row("rocm", "rocm_system_differs", **values)
    if within(rocm, *known["rocm"]["preview"]):
        yield from_row("rocm", "rocm_preview", rocm=rocm)
    if within(rocm, *known["rocm"]["graph_memset"]):
        yield from_row("rocm", "rocm_graph_memset", rocm=rocm)
    if minor(torch_version) == "2.8" and minor(rocm) == "6.3" and _has(evidence, "gfx1100"):
        yield from_row("rocm", "torch28_bf16")
    pairs = known["pairs"].get(minor(torch_version))
    if pairs and minor(rocm) not in pairs:
        yield from_row("rocm", "pair_unknown", torch=minor(torch_version), rocm=minor(rocm), known=" and ".join(pairs))
    if _has(evidence, "gfx1100") and numbers(rocm) is not None:
        row = "hipblaslt_yes" if within(rocm, known["rocm"]["hipblaslt_gfx1100"], None) else "hipblaslt_no"
        yield from_row("rocm", row, rocm=rocm)


def _has(evidence: Evidence, arch: str) -> bool:
    return any(gpu.arch == arch for gpu in evidence.cards)


def _allocator(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None or software.torch_version.value is None or software.build == "cpu":
        return
    settings = software.allocator_settings
    if settings.value is None:
        yield unknown("allocator", settings.reason)
    else:
        yield from_row("allocator", "allocator", settings=settings.value or "the defaults")


CHECKS = (
    Check(name="torch", group="software", about="torch's build, and the devices that it sees", run=_torch),
    Check(name="arch", group="software", about="whether torch holds code for every card", run=_architectures),
    Check(name="rocm", group="software", about="the version of ROCm inside torch", run=_rocm),
    Check(name="allocator", group="software", about="the settings of torch's allocator in force", run=_allocator),
)
