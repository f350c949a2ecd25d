"""Checks of torch, ROCm and bitsandbytes: builds for this machine and for each other, and tested versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hf_rocm_tune.doctor.findings import (
    Check,
    Evidence,
    Finding,
    arch_of,
    from_row,
    in_wheels,
    knowledge_data,
    skipped,
    unknown,
)
from hf_rocm_tune.machine.process import FILTERS
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.variables import version_numbers, within

NO_ROCM_BUILD = "torch is not a ROCm build"
_BUILDS = {"cpu": "processors", "cuda": "NVIDIA cards"}
_FORCING = "BNB_ROCM_VERSION"  # read by bitsandbytes, cextension.py
_LIBRARY = re.compile(r"libbitsandbytes_rocm([0-9])([0-9]{1,2})\.(?:so|dll)")
# RDNA: old versions had wrong results with its wavefronts.
_WAVE32 = ("gfx10", "gfx11", "gfx12")
_ROCM_INDEX = " --index-url https://download.pytorch.org/whl/rocm7.2"


def minor(version: str) -> str:
    """``7.2.26015`` as ``7.2``."""
    value = version_numbers(version)
    return version if value is None else f"{value[0]}.{value[1]}"


def torch_rocm(software: Software) -> str | None:
    """The version of ROCm inside torch; None where it is no ROCm build.

    From ROCm 10 on, HIP's version is another number (10.0 comes with HIP 7.15), so it is only the last resort.
    """
    if not software.hip_version:
        return None
    named = re.search(r"\+rocm([0-9]+(?:\.[0-9]+)*)", software.torch_version.value or "")
    return software.torch_rocm_version or (named[1] if named else software.hip_version)


def _of_software(
    look: Callable[[Evidence, Software], Iterator[Finding]],
) -> Callable[[Evidence], Iterable[Finding]]:
    """A check that is skipped if the software is unknown, which `_torch` reports."""
    return lambda evidence: look(evidence, evidence.software) if evidence.software else ()


def _torch(evidence: Evidence) -> Iterator[Finding]:
    software = evidence.software
    if software is None:
        yield unknown("the recording has no software")
        return
    version = software.torch_version.value
    # The AMD GPUs that torch should compute on.
    known = [(gpu.identity.card, gpu.arch or "GPU") for gpu in evidence.candidates if in_wheels(gpu)]
    card = " and ".join(card.name if card else f"an AMD {arch}" for card, arch in known)
    if version is None:
        row = "torch_missing" if software.packages.get("torch") is None else "torch_fails"
        yield from_row(row, reason=software.torch_version.reason)
    elif software.build == "rocm":
        yield from _rocm_build(evidence, software, version)
    elif not card:
        yield from_row("torch_no_gpu_needed", version=version, build=_BUILDS[software.build or "cpu"])
    elif software.build == "cuda" and evidence.devices:
        seen = ", ".join(device.name for device in evidence.devices)
        yield from_row("torch_cuda_beside", version=version, seen=seen, card=card)
    elif software.build == "cuda":
        yield from_row("torch_cuda_build", version=version, cuda=software.cuda_version, card=card)
    else:
        yield from_row("torch_cpu_build", version=version, card=card)


def _rocm_build(evidence: Evidence, software: Software, version: str) -> Iterator[Finding]:
    devices, count = software.devices, len(evidence.cards)
    filters = [f"{name}={evidence.variables[name]}" for name in FILTERS if name in evidence.variables]
    if not devices.value:
        reason = devices.reason or "its list is empty"
        if evidence.candidates:
            values: dict[str, Any] = {"version": version, "count": len(evidence.candidates), "reason": reason}
            yield from_row("torch_sees_nothing", evidence=filters, **values)
        else:
            yield unknown(f"torch {version} is a ROCm build, and there is no card: {reason}")
        return
    seen = ", ".join(f"{one.name} ({one.arch}, {one.total_bytes / (1 << 30):.1f} GiB)" for one in devices.value)
    yield from_row("torch_rocm", version=version, hip=software.hip_version, seen=seen)
    known = [one.gpu for one in evidence.joined if one.gpu is not None]
    cards = [gpu for gpu in known if gpu in evidence.cards]
    if len(cards) < count and len(known) == len(devices.value):
        why = f": {' and '.join(filters)} is set" if filters else ""
        yield from_row("torch_sees_fewer", seen=len(cards), count=count, why=why)


@_of_software
def _architectures(evidence: Evidence, software: Software) -> Iterator[Finding]:
    if not evidence.candidates:
        return
    if software.build != "rocm":
        yield skipped(NO_ROCM_BUILD)
        return
    true = {gpu.address: arch for gpu in evidence.candidates if (arch := arch_of(gpu))}
    if not true:
        yield unknown("the architecture of the GPUs is unknown")
        return
    for one in evidence.joined:
        if one.spoofed and one.gpu is not None:
            values: dict[str, Any] = {"true": one.gpu.arch, "seen": one.device.arch}
            yield from_row("arch_spoofed", subject=one.gpu.address, evidence=[one.reason], **values)
    built = software.arch_list
    if not built.value:
        yield unknown(built.reason or "torch lists no architectures")
        return
    missing = {address: arch for address, arch in true.items() if arch not in built.value}
    for address, arch in missing.items():
        yield from_row("arch_missing", subject=address, arch=arch, built=" ".join(built.value))
    archs = sorted(set(true.values()))
    if not missing:
        listed = " and ".join(archs) + (" is" if len(archs) == 1 else " are")
        yield from_row("arch_ok", archs=listed, evidence=[f"built for: {' '.join(built.value)}"])
    yield from _device_wheels(software, [arch for arch in archs if arch not in missing.values()])


def _device_wheels(software: Software, archs: list[str]) -> Iterator[Finding]:
    """Multi-architecture wheels have the kernels of each architecture in a separate wheel."""
    rocm, wheels = torch_rocm(software), software.rocm_wheels
    if rocm is None or not within(rocm, _versions("rocm")["device_wheels"], None) or not wheels:
        return
    if any("gfx" in name for name in wheels) and not any("device-" in name for name in wheels):
        return  # wheels of one family of architectures contain all kernels
    for arch in archs:
        if not any(name.endswith(f"device-{arch}") for name in wheels):
            seen = [f"{name} {version}" for name, version in wheels.items()]
            yield from_row("device_wheel_missing", evidence=seen, arch=arch, rocm=rocm)


@_of_software
def _rocm(evidence: Evidence, software: Software) -> Iterator[Finding]:
    rocm = torch_rocm(software)
    if rocm is None:
        yield skipped(NO_ROCM_BUILD)
        return
    known, torch_version = _versions("rocm"), software.torch_version.value or ""
    system, kernel = software.rocm_version, evidence.machine.kernel
    driver = f"amdgpu {kernel.amdgpu_version.value}" if kernel.amdgpu_version.value else "the kernel's own"
    bound = any(gpu.driver.value == "amdgpu" for gpu in evidence.machine.amd)
    driver = f"{driver}, kernel {kernel.release.value or 'unknown'}" if bound else "not known"
    gfx1100 = any(gpu.arch == "gfx1100" for gpu in evidence.cards)
    values = {"torch_rocm": rocm, "system": system.value or "not installed, or not found"}
    yield from_row("versions_of_rocm", driver=driver, **values)
    if system.value and minor(system.value) != minor(rocm):
        yield from_row("rocm_system_differs", **values)
    if within(rocm, *known["preview"]):
        yield from_row("rocm_preview", rocm=rocm)
    if within(rocm, *known["graph_memset"]):
        yield from_row("rocm_graph_memset", rocm=rocm)
    if within(rocm, *known["ring_timeouts"]) and gfx1100:
        yield from_row("rocm_ring_timeouts", rocm=rocm)
    if torch_version.startswith("2.13.0+rocm7.2") and system.value is None and not software.rocm_wheels:
        yield from_row("torch213_cpu_compile", version=torch_version, evidence=[system.reason])
    if minor(torch_version) == "2.8" and minor(rocm) == "6.3" and gfx1100:
        yield from_row("torch28_bf16")
    if within(rocm, known["rccl_faults"], None) and gfx1100:
        yield from_row("rccl_faults", rocm=rocm)


@_of_software
def _allocator(evidence: Evidence, software: Software) -> Iterator[Finding]:
    if software.torch_version.value is None or software.build == "cpu":
        return
    settings = software.allocator_settings
    if settings.value is None:
        yield unknown(settings.reason)
    else:
        yield from_row("allocator", settings=settings.value or "the defaults")


@_of_software
def _bitsandbytes(evidence: Evidence, software: Software) -> Iterator[Finding]:
    least, version = _versions("bitsandbytes")["least"], software.packages.get("bitsandbytes")
    files, forced = software.bitsandbytes_libraries, evidence.variables.get(_FORCING)
    if version is None:
        problem = software.package_problems.get("bitsandbytes")
        yield from_row("bnb_unread", reason=problem, least=least) if problem else from_row("bnb_missing", least=least)
        return
    if software.build != "rocm":
        yield skipped(NO_ROCM_BUILD)
        return
    if within(version, None, least) and any((gpu.arch or "").startswith(_WAVE32) for gpu in evidence.candidates):
        yield from_row("bnb_old", version=version, least=least)
    if forced is not None:
        yield unknown(f"{_FORCING}={forced} chooses the library, whatever torch's build; only a measurement tells")
    elif files.value is None:
        yield from_row("bnb_unread", reason=files.reason, least=least)
    else:
        # Version of HIP to file; ``rocm715`` is 7.15 (its cextension.py).
        found = {(int(match[1]), int(match[2])): name for name in files.value if (match := _LIBRARY.fullmatch(name))}
        available = dict(sorted(found.items()))
        yield from _library(evidence, software, version, available)


def _library(
    evidence: Evidence, software: Software, version: str, available: dict[tuple[int, int], str]
) -> Iterator[Finding]:
    hip = software.hip_version or ""
    wanted = version_numbers(hip)
    if wanted is None:
        yield unknown(f"torch's version of HIP is {hip!r}, which is not a version")
        return
    # The loader of bitsandbytes 0.50: the exact one, the nearest older, the nearest newer, never of another major.
    same = [one for one in available if one[0] == wanted[0]]
    older, newer = [one for one in same if one <= wanted[:2]], [one for one in same if one > wanted[:2]]
    taken = older[-1] if older else newer[0] if newer else None
    listed = ", ".join(f"{major}.{small}" for major, small in available) or "no ROCm at all"
    seen = [f"torch.version.hip: {hip}", f"ROCm libraries: {', '.join(available.values()) or 'none'}"]
    values = {"version": version, "hip": minor(hip)}
    if taken is None:
        yield from_row("bnb_no_library", evidence=seen, available=listed, **values)
        return
    library, known = available[taken], _versions("bitsandbytes")
    if taken == wanted[:2]:
        yield from_row("bnb_library", evidence=seen, library=library, **values)
    else:
        yield from_row("bnb_nearest", evidence=seen, library=library, available=listed, **values)
    # Its kernel came with the least version.
    wrong = [*taken] == known["wrong_on_gfx1100"] and not within(version, None, known["least"])
    if wrong and any(gpu.arch == "gfx1100" for gpu in evidence.candidates):
        yield from_row("bnb_rocm64", version=version, library=library)


@_of_software
def _tested(evidence: Evidence, software: Software) -> Iterator[Finding]:
    found = [_version(evidence, software, *one) for one in _versions("tested").items()]
    yield from (finding for finding in found if finding is not None)
    if not any(found):
        have = {package: software.packages.get(package) for package in _versions("tested")}
        seen = [f"{package} {version}" for package, version in have.items() if version]
        yield from_row("versions_tested", evidence=[", ".join(seen)])


def _version(evidence: Evidence, software: Software, package: str, tested: str) -> Finding | None:
    version, problem = software.packages.get(package), software.package_problems.get(package)
    if version is None:
        if problem:
            return unknown(problem, subject=package)
        if package in ("bitsandbytes", "torch"):
            return None  # has its own check
        return from_row("version_missing", subject=package, package=package, tested=tested)
    values = {"package": package, "version": version, "tested": tested}
    have, want = version_numbers(version), version_numbers(tested)
    assert want is not None
    if have is None:
        return unknown(f"the version of {package} is {version!r}, which is not a version", subject=package)
    if have < want:
        index = ""
        if package == "torch" and (torch_rocm(software) or evidence.cards):
            # Without it, pip would replace the ROCm build by one for another vendor.
            linux = evidence.machine.host.platform == "linux"
            index = _ROCM_INDEX if linux else " --index-url ADDRESS_OF_YOUR_WHEELS" if torch_rocm(software) else ""
        return from_row("version_older", subject=package, index=index, **values)
    return from_row("version_newer", subject=package, **values) if have[0] > want[0] else None


def _versions(table: str) -> Any:
    return knowledge_data("versions.toml")[table]


CHECKS = (
    Check("torch", "software", "torch's build and its devices", _torch),
    Check("arch", "software", "torch's code for every card", _architectures),
    Check("rocm", "software", "the version of ROCm inside torch", _rocm),
    Check("allocator", "software", "the settings of torch's allocator", _allocator),
    Check("bitsandbytes", "software", "bitsandbytes' library for this ROCm", _bitsandbytes),
    Check("versions", "software", "installed and tested versions of the libraries", _tested),
)
