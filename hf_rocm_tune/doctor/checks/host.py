"""Host memory, shared memory, what others have of the card's memory, temperatures and throttling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.doctor.finding import Finding, from_row, unknown
from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.machine.sensors import Sensors, throttle_causes
from hf_rocm_tune.machine.survey import Gpu

_MIB, _GIB = 1 << 20, 1 << 30


def _memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.memory_bytes.value is None:
        yield unknown("host_memory", host.memory_bytes.reason)
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
        yield from_row("host_memory", "host_memory_small", ring_mib=bounds["ring_mib"], **values)
    else:
        yield from_row("host_memory", "host_memory", **values)
    limit = host.memory_limit_bytes.value
    if limit is not None and limit < host.memory_bytes.value:
        yield from_row("host_memory", "memory_limit", limit_gib=limit / _GIB, gib=gib)


def _shared_memory(evidence: Evidence) -> Iterator[Finding]:
    host = evidence.machine.host
    if host.platform != "linux":
        return
    if host.shm_bytes.value is None:
        yield unknown("shared_memory", host.shm_bytes.reason)
    elif host.shm_bytes.value < knowledge_data("thresholds.toml")["shm_bytes"]["warn"]:
        where = f" in this {host.container.value} container" if host.container.value else ""
        yield from_row("shared_memory", "shm_small", mib=host.shm_bytes.value / _MIB, where=where)
    else:
        yield from_row("shared_memory", "shm_ok", gib=host.shm_bytes.value / _GIB)


def _vram(evidence: Evidence) -> Iterator[Finding]:
    bounds = knowledge_data("thresholds.toml")["vram_used_share"]
    for gpu in evidence.cards:
        used, total = gpu.sensors.vram_used_bytes, gpu.sensors.vram_total_bytes
        if used.value is None or not total.value:
            yield unknown(
                "vram", used.reason or total.reason or "the driver says that it has none", subject=gpu.address
            )
            continue
        share = used.value / total.value
        seen = [f"mem_info_vram_used: {used.value:,} bytes of {total.value:,}"]
        sizes = {"address": gpu.address, "total_gib": total.value / _GIB}
        if share < bounds["info"]:
            values = {"used_mib": used.value / _MIB, **sizes}
            yield from_row("vram", "vram_free", subject=gpu.address, evidence=seen, **values)
        else:
            row = "vram_scarce" if share >= bounds["warn"] else "vram_taken"
            values = {"used_gib": used.value / _GIB, **sizes}
            yield from_row("vram", row, subject=gpu.address, evidence=seen, **values)


def _temperature(evidence: Evidence) -> Iterator[Finding]:
    for gpu in evidence.cards:
        yield from _of_card(gpu)


def _of_card(gpu: Gpu) -> Iterator[Finding]:
    sensors, address = gpu.sensors, gpu.address
    hottest = knowledge_data("thresholds.toml")["hotspot_c"]["warn"]
    readings = ", ".join(_readings(sensors))
    seen = [readings]
    if not readings:
        yield unknown("temperature", sensors.hotspot_c.reason or "nothing was read", subject=address)
        return
    fine = True
    if sensors.hotspot_c.value is not None and sensors.hotspot_c.value >= hottest:
        fine = False
        celsius = sensors.hotspot_c.value
        yield from_row("temperature", "hotspot", subject=address, evidence=seen, address=address, celsius=celsius)
    if sensors.throttle.value:
        fine = False
        seen = [*seen, f"throttle status {sensors.throttle.value:#x}"]
        causes = " and ".join(throttle_causes(sensors.throttle.value))
        yield from_row("temperature", "throttled", subject=address, evidence=seen, address=address, causes=causes)
    if fine:
        yield from_row("temperature", "sensors_ok", subject=address, address=address, readings=readings)


def _readings(sensors: Sensors) -> list[str]:
    known = {
        "hotspot {:.0f} C": sensors.hotspot_c,
        "edge {:.0f} C": sensors.edge_c,
        "memory {:.0f} C": sensors.memory_c,
        "{:.0f} W": sensors.power_w,
        "power limit {:.0f} W": sensors.power_cap_w,
    }
    return [form.format(reading.value) for form, reading in known.items() if reading.value is not None]


CHECKS = (
    Check(name="host_memory", group="host", about="memory and swap, and what they mean for loading", run=_memory),
    Check(name="shared_memory", group="host", about="/dev/shm, which loader workers need", run=_shared_memory),
    Check(name="vram", group="host", about="what others have of the card's memory", run=_vram),
    Check(name="temperature", group="host", about="hotspot, power and throttling", run=_temperature),
)
