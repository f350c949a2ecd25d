"""The kernel: known-bad releases, what copies between cards need of it, the IOMMU, and unlocked clocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.doctor.versions import within
from hf_rocm_tune.machine.sysfs import parse_int

PEER_OPTIONS = ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY")
# amdgpu's PP_OVERDRIVE_MASK (amd_shared.h).
OVERDRIVE_BIT = 1 << 14


def _release(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.machine.amd and not evidence.machine.topology.nodes:
        return
    release = evidence.machine.kernel.release
    if release.value is None:
        yield unknown("kernel_release", release.reason)
        return
    archs = {gpu.arch for gpu in evidence.machine.amd if gpu.arch and gpu.integrated is not True}
    rows = [entry["row"] for entry in knowledge_data("kernels.toml").values() if _is_of(entry, release.value, archs)]
    for row in rows:
        yield from_row("kernel_release", row, release=release.value)
    if not rows:
        yield from_row("kernel_release", "kernel_ok", release=release.value)


def _is_of(entry: dict[str, Any], release: str, archs: set[str]) -> bool:
    wanted = entry.get("archs")
    if wanted and not any(arch.startswith(tuple(wanted)) for arch in archs):
        return False
    exact = entry.get("exact")
    if exact is not None:
        rest, word = release.removeprefix(exact), entry.get("of")
        # 7.0.12 is not 7.0.120, nor is 7.0.0-28 the same as 7.0.0-280.
        begins = release.startswith(exact) and not rest[:1].isdigit()
        return begins and (word is None or word in re.split("[^a-z0-9]", rest))
    return within(release, entry.get("from"), entry.get("below"))


def _peer_support(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    config = kernel.config
    if config.value is None:
        yield unknown("peer_support", config.reason)
    else:
        lacking = [name for name in PEER_OPTIONS if config.value.get(name) not in ("y", "m")]
        seen = [f"{name}={config.value.get(name, 'not set')}" for name in PEER_OPTIONS]
        if lacking:
            yield from_row("peer_support", "peer_config_missing", missing=" and ".join(lacking), evidence=seen)
        else:
            yield from_row("peer_support", "peer_config_ok", evidence=seen)
    listed = {gpu.address: gpu.peers.value for gpu in evidence.cards if gpu.peers.value is not None}
    apart = [f"{one} and {other}" for one, other in combinations(listed, 2) if other not in listed[one]]
    if apart:
        yield from_row("peer_support", "no_direct_link", pairs=", ".join(apart))
    switch = kernel.amdgpu_parameters.get("pcie_p2p")
    if switch is not None and switch.value in ("N", "0"):
        yield from_row("peer_support", "pcie_p2p_off", evidence=[f"amdgpu parameter pcie_p2p: {switch.value}"])


def _iommu(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    types = {gpu.address: gpu.iommu_type for gpu in evidence.cards}
    known = {address: kind.value for address, kind in types.items() if kind.value}
    seen = [f"{address}: group type {kind}" for address, kind in known.items()]
    boot = {name: value for name, value in (kernel.cmdline.value or {}).items() if "iommu" in name}
    seen += [f"boot parameter {name}={value}" if value else f"boot parameter {name}" for name, value in boot.items()]
    if kernel.iommu_present.value is False:
        yield _iommu_finding("off", "the kernel lists no IOMMU", seen)
    elif any(kind.startswith("DMA") for kind in known.values()):
        translated = ", ".join(address for address, kind in known.items() if kind.startswith("DMA"))
        yield _iommu_finding("translating", f"the addresses of {translated} are translated", seen)
    elif known:
        yield _iommu_finding("passthrough", "the cards' addresses pass through unchanged", seen)
    else:
        reasons = {kind.reason for kind in types.values()} | {kernel.iommu_present.reason}
        yield unknown("iommu", "; ".join(sorted(reasons - {""})) or "no card is in an IOMMU group", evidence=seen)


def _iommu_finding(state: str, detail: str, seen: list[str]) -> Finding:
    return from_row("iommu", "iommu_state", state=state, detail=detail, evidence=seen)


def _overdrive(evidence: Evidence) -> Iterator[Finding]:
    reading = evidence.machine.kernel.amdgpu_parameters.get("ppfeaturemask")
    mask = _number(reading.value) if reading is not None and reading.value else None
    if mask is not None:
        row = "overdrive" if mask & OVERDRIVE_BIT else "clocks_stock"
        yield from_row("overdrive", row, mask=f"{mask:#x}")
    elif evidence.cards:
        yield unknown("overdrive", reading.reason if reading and reading.reason else "ppfeaturemask is no number")


def _number(text: str) -> int | None:
    """The kernel writes this parameter in decimal or hexadecimal, by version."""
    if text.lower().startswith("0x"):
        digits = text[2:]
        return int(digits, 16) if 0 < len(digits) <= 16 and all(c in "0123456789abcdefABCDEF" for c in digits) else None
    number = parse_int(text)
    # As a signed number, 0xffffffff is -1.
    return (1 << 32) - 1 if text == "-1" else number


CHECKS = (
    Check(name="kernel_release", group="kernel", about="kernels with a report against them", run=_release),
    Check(
        name="peer_support",
        group="kernel",
        about="what copies between cards need of the kernel",
        run=_peer_support,
        needs_cards=2,
    ),
    Check(
        name="iommu", group="kernel", about="what the IOMMU does, as a fact and no advice", run=_iommu, needs_cards=2
    ),
    Check(name="overdrive", group="kernel", about="clock and voltage tables that are unlocked", run=_overdrive),
)
