"""What the card that this process trains on says of itself at one moment: sensors of amdgpu, and torch's allocator.

Only AMD cards have sensors here (sysfs). On a CUDA card torch tells of its own memory and nothing else is claimed; on
the CPU there is nothing to tell. A figure that could not be read is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_rocm_tune.machine.sensors import Sensors, read_sensors, throttle_causes
from hf_rocm_tune.machine.software import pci_address
from hf_rocm_tune.machine.sysfs import Reading, Tree

GIB = 1 << 30
# Field of the sensors' record: name of the metric, and the factor to its unit.
_METRICS = {
    "edge_c": ("edge_c", 1.0),
    "hotspot_c": ("hotspot_c", 1.0),
    "memory_c": ("memory_c", 1.0),
    "power_w": ("power_w", 1.0),
    "utilisation": ("utilisation_percent", 100.0),
    "vram_used_bytes": ("vram_used_gib", 1 / GIB),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The sensors at one moment.

    Attributes:
        metrics: by name, with the unit in the name: ``hotspot_c`` and the like in degrees Celsius, ``power_w``,
            ``utilisation_percent``, ``vram_used_gib`` (2^30 bytes, of all processes).
        limits: what holds the clocks down, of ``power``, ``current``, ``temperature`` and ``other``; None where that
            could not be read. The driver's bit for the hotspot does not count: see ``_TEMP_HOTSPOT``.
        missing: metric to the reason why it is not in ``metrics``.
    """

    metrics: Mapping[str, float]
    limits: frozenset[str] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def sample(tree: Tree, address: str) -> Sample:
    """Read the sensors of one card.

    Args:
        tree: whose ``sys`` is read.
        address: PCI address, ``domain:bus:device.function``.
    """
    sensors = read_sensors(tree, address)
    metrics: dict[str, float] = {}
    missing: dict[str, str] = {}
    for field_name, (name, factor) in _METRICS.items():
        reading: Reading[float] = getattr(sensors, field_name)
        if reading.value is None:
            missing[name] = reading.reason
        else:
            metrics[name] = reading.value * factor
    if sensors.throttle.value is None:
        missing["limits"] = sensors.throttle.reason
    return Sample(metrics=metrics, limits=_limits(sensors), missing=missing)


def _limits(sensors: Sensors) -> frozenset[str] | None:
    if sensors.throttle.value is None:
        return None
    return frozenset(throttle_causes(sensors.throttle.value))


def card_of(device: torch.device) -> tuple[str | None, str]:
    """PCI address of the card behind ``device`` whose sensors can be read, or None and the reason."""
    if device.type != "cuda":
        return None, f"training on {device.type}: there are no sensors to read"
    if torch.version.hip is None:
        return None, "not an AMD card: its sensors are not read, only torch's own memory"
    index = torch.cuda.current_device() if device.index is None else device.index
    address = pci_address(index)
    return address, "" if address else "this torch does not tell the PCI address of its devices"


def torch_memory(device: torch.device) -> dict[str, float]:
    """Memory that torch's allocator holds in this process, in GiB: now, and the peak since the run began."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {
        "torch_allocated_gib": "allocated_bytes.all.current",
        "torch_reserved_gib": "reserved_bytes.all.current",
        "torch_peak_allocated_gib": "allocated_bytes.all.peak",
        "torch_peak_reserved_gib": "reserved_bytes.all.peak",
    }
    # Empty before the first allocation, and under a backend that keeps no counts.
    return {ours: stats[theirs] / GIB for ours, theirs in names.items() if theirs in stats}
