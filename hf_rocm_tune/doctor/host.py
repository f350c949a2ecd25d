"""The kernel and the host: known-bad releases, the IOMMU, clocks, memory, shared memory and temperatures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hf_rocm_tune.doctor.findings import Check, Evidence, Finding, from_row, knowledge_data, unknown
from hf_rocm_tune.machine.gpus import throttle_causes
from hf_rocm_tune.machine.sysfs import parse_int
from hf_rocm_tune.machine.variables import within

PEER_OPTIONS = ("CONFIG_HSA_AMD_P2P", "CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY")
# amdgpu's PP_OVERDRIVE_MASK (amd_shared.h).
OVERDRIVE_BIT = 1 << 14
_MIB, _GIB = 1 << 20, 1 << 30


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
    # 7.0.12 is not 7.0.120, nor is 7.0.0-28 the same as 7.0.0-280.
    begins = release.startswith(exact) and not rest[:1].isdigit()
    return begins and (word is None or word in re.split("[^a-z0-9]", rest))


def _peer_support(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    config = kernel.config
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
    switch = kernel.amdgpu_parameters.get("pcie_p2p")
    if switch is not None and switch.value in ("N", "0"):
        yield from_row("pcie_p2p_off", evidence=[f"amdgpu parameter pcie_p2p: {switch.value}"])


def _iommu(evidence: Evidence) -> Iterator[Finding]:
    kernel = evidence.machine.kernel
    types = {gpu.address: gpu.iommu_type for gpu in evidence.cards}
    known = {address: kind.value for address, kind in types.items() if kind.value}
    seen = [f"{address}: group type {kind}" for address, kind in known.items()]
    boot = {name: value for name, value in (kernel.cmdline.value or {}).items() if "iommu" in name}
    seen += [f"boot parameter {name}={value}" if value else f"boot parameter {name}" for name, value in boot.items()]
    translated = ", ".join(address for address, kind in known.items() if kind.startswith("DMA"))
    if kernel.iommu_present.value is False:
        yield from_row("iommu_state", state="off", detail="the kernel lists no IOMMU", evidence=seen)
    elif translated:
        detail = f"the addresses of {translated} are translated"
        yield from_row("iommu_state", state="translating", detail=detail, evidence=seen)
    elif known:
        detail = "the cards' addresses pass through unchanged"
        yield from_row("iommu_state", state="passthrough", detail=detail, evidence=seen)
    else:
        reasons = {kind.reason for kind in types.values()} | {kernel.iommu_present.reason}
        yield unknown("; ".join(sorted(reasons - {""})) or "no card is in an IOMMU group", evidence=seen)


def _overdrive(evidence: Evidence) -> Iterator[Finding]:
    reading = evidence.machine.kernel.amdgpu_parameters.get("ppfeaturemask")
    mask = _mask(reading.value) if reading is not None and reading.value else None
    if mask is not None:
        yield from_row("overdrive" if mask & OVERDRIVE_BIT else "clocks_stock", mask=f"{mask:#x}")
    elif evidence.cards:
        yield unknown(reading.reason if reading and reading.reason else "ppfeaturemask is no number")


def _mask(text: str) -> int | None:
    """The kernel writes this parameter in decimal or hexadecimal, by version; as a signed number, 0xffffffff is -1."""
    if re.fullmatch("0[xX][0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    return (1 << 32) - 1 if text == "-1" else parse_int(text)


def _memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.memory_bytes.value is None:
        yield unknown(host.memory_bytes.reason)
        return
    gib = host.memory_bytes.value / _GIB
    free, swap = host.available_bytes.value, host.swap_bytes.value
    values: dict[str, Any] = {
        "gib": gib,
        "available": "how much is free is not known" if free is None else f"{free / _GIB:.1f} GiB available",
        "swap": "swap not known" if swap is None else f"{swap / _GIB:.1f} GiB of swap" if swap else "no swap",
    }
    bounds = knowledge_data("thresholds.toml")["host_memory"]
    if gib < bounds["small_gib"]:
        yield from_row("host_memory_small", ring_mib=bounds["ring_mib"], **values)
    else:
        yield from_row("host_memory", **values)
    limit = host.memory_limit_bytes.value
    if limit is not None and limit < host.memory_bytes.value:
        yield from_row("memory_limit", limit_gib=limit / _GIB, gib=gib)


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
            reason = used.reason or total.reason or "the driver says that it has none"
            yield unknown(reason, subject=gpu.address)
            continue
        share, total_gib = used.value / total.value, total.value / _GIB
        seen = [f"mem_info_vram_used: {used.value:,} bytes of {total.value:,}"]
        told: dict[str, Any] = {"subject": gpu.address, "evidence": seen, "total_gib": total_gib}
        if share < bounds["info"]:
            yield from_row("vram_free", used_mib=used.value / _MIB, **told)
        else:
            row = "vram_scarce" if share >= bounds["warn"] else "vram_taken"
            yield from_row(row, used_gib=used.value / _GIB, **told)


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
            yield unknown(sensors.hotspot_c.reason or "nothing was read", subject=gpu.address)
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
    Check(name="host_memory", group="host", about="memory and swap, and what they mean for loading", run=_memory),
    Check(name="shared_memory", group="host", about="/dev/shm, which loader workers need", run=_shared_memory),
    Check(name="vram", group="host", about="what others have of the card's memory", run=_vram),
    Check(name="temperature", group="host", about="hotspot, power and throttling", run=_temperature),
)
