"""What one card's sensors say now: a dozen small reads, cheap enough for every logging step.

Files and units: kernel documentation ``gpu/amdgpu/thermal`` (hwmon: millidegrees, microwatts; ``gpu_busy_percent``;
``gpu_metrics``) and ``gpu/amdgpu/driver-misc`` (``mem_info_vram_*``: bytes). Which of ``temp1`` to ``temp3`` is which
is read from their labels (``edge``, ``junction``, ``mem``), because not every card has all three.

Reading wakes a card that sleeps. Not covered: cards of other drivers than amdgpu.
"""

from __future__ import annotations

import re

from hf_rocm_tune.machine.machine import Sensors
from hf_rocm_tune.machine.pci_sysfs import DEVICES
from hf_rocm_tune.machine.sysfs import Reading, derived, list_names, read_bytes, read_int, read_text, unknown
from hf_rocm_tune.machine.sysfs_tree import Tree
from hf_rocm_tune.machine.throttle_sysfs import parse_throttle

_CHANNELS = (1, 2, 3)
# Outside of this a thermal sensor is not there or not awake.
_COLDEST_C, _HOTTEST_C = -60.0, 200.0


def read_sensors(tree: Tree, address: str) -> Sensors:
    """All sensors of the amdgpu card at a PCI address. Never raises."""
    device = f"{DEVICES}/{address}"
    hwmon = _read_hwmon(tree, device)
    labels = _read_labels(tree, hwmon)
    metrics = read_bytes(tree, f"{device}/gpu_metrics")
    return Sensors(
        edge_c=_read_temperature(tree, hwmon, labels, "edge"),
        hotspot_c=_read_temperature(tree, hwmon, labels, "junction"),
        memory_c=_read_temperature(tree, hwmon, labels, "mem"),
        power_w=_read_power(tree, hwmon),
        power_cap_w=_read_watts(tree, hwmon, "power1_cap"),
        utilisation=_read_utilisation(tree, f"{device}/gpu_busy_percent"),
        vram_used_bytes=read_int(tree, f"{device}/mem_info_vram_used"),
        vram_total_bytes=read_int(tree, f"{device}/mem_info_vram_total"),
        throttle=unknown(metrics.reason) if metrics.value is None else parse_throttle(metrics.value),
    )


def no_sensors(reason: str) -> Sensors:
    """Sensors of which nothing is known, for one reason."""
    return Sensors(
        edge_c=unknown(reason),
        hotspot_c=unknown(reason),
        memory_c=unknown(reason),
        power_w=unknown(reason),
        power_cap_w=unknown(reason),
        utilisation=unknown(reason),
        vram_used_bytes=unknown(reason),
        vram_total_bytes=unknown(reason),
        throttle=unknown(reason),
    )


def _read_hwmon(tree: Tree, device: str) -> Reading[str]:
    path = f"{device}/hwmon"
    names = list_names(tree, path)
    return derived(names, lambda found: _first_hwmon(path, found), f"/{path}: no monitor in it")


def _first_hwmon(path: str, names: list[str]) -> str | None:
    found = next((name for name in names if re.fullmatch("hwmon[0-9]{1,6}", name)), None)
    return None if found is None else f"{path}/{found}"


def _read_labels(tree: Tree, hwmon: Reading[str]) -> dict[str, int]:
    if hwmon.value is None:
        return {}
    labels = {channel: read_text(tree, f"{hwmon.value}/temp{channel}_label").value for channel in _CHANNELS}
    return {label: channel for channel, label in labels.items() if label is not None}


def _read_temperature(tree: Tree, hwmon: Reading[str], labels: dict[str, int], label: str) -> Reading[float]:
    if hwmon.value is None:
        return unknown(hwmon.reason)
    if label not in labels:
        return unknown(f"/{hwmon.value}: no temperature is labelled {label!r}")
    path = f"{hwmon.value}/temp{labels[label]}_input"
    text = read_text(tree, path)
    return derived(text, _parse_celsius, f"/{path}: no temperature: {(text.value or '')[:40]!r}")


def _parse_celsius(text: str) -> float | None:
    if not re.fullmatch("-?[0-9]{1,7}", text, re.ASCII):
        return None
    celsius = int(text) / 1000
    return celsius if _COLDEST_C <= celsius <= _HOTTEST_C else None


def _read_power(tree: Tree, hwmon: Reading[str]) -> Reading[float]:
    average = _read_watts(tree, hwmon, "power1_average")
    if average.value is not None:
        return average
    momentary = _read_watts(tree, hwmon, "power1_input")
    return momentary if momentary.value is not None else average


def _read_watts(tree: Tree, hwmon: Reading[str], file: str) -> Reading[float]:
    if hwmon.value is None:
        return unknown(hwmon.reason)
    microwatts = read_int(tree, f"{hwmon.value}/{file}")
    return derived(microwatts, lambda number: number / 1_000_000, "")


def _read_utilisation(tree: Tree, path: str) -> Reading[float]:
    percent = read_int(tree, path)
    return derived(percent, lambda number: number / 100 if number <= 100 else None, f"/{path}: more than 100 %")
