"""What one card's sensors say now, what limits its clocks, and whether the driver saw a GPU fail.

Files and units: kernel documentation ``gpu/amdgpu/thermal`` (hwmon: millidegrees, microwatts; ``gpu_busy_percent``;
``gpu_metrics``) and ``gpu/amdgpu/driver-misc`` (``mem_info_vram_*``: bytes). Which of ``temp1`` to ``temp3`` is which
is read from their labels (``edge``, ``junction``, ``mem``), because not every card has all three. Reading wakes a card
that sleeps.

``gpu_metrics`` is a structure behind a header of its size and of two revision numbers. Layout: kernel
``kgd_pp_interface.h``, ``struct metrics_table_header`` and ``gpu_metrics_v1_3``, which a 7900 XT gives
(``smu_v13_0_0_ppt.c``); its ``indep_throttle_status`` has one meaning on all chips: ``amdgpu_smu.h``,
``SMU_THROTTLER_*_BIT``. The hotspot bit is left out: the firmware of Navi 31 and 48 sets it nearly always, even on an
idle card at 40 C (libdrm-amdgpu-sys-rs#7, drm/amd#3251, rocm-systems#11781). The hotspot's temperature is in hwmon.

Not covered: cards of other drivers than amdgpu; the throttle status of older revisions and of Instinct cards and
integrated GPUs, which differs from chip to chip.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, fields
from pathlib import Path

from hf_rocm_tune.machine.pci import DEVICES
from hf_rocm_tune.machine.sysfs import (
    Reading,
    Tree,
    derived,
    list_names,
    read_bytes,
    read_int,
    read_link_name,
    read_parsed,
    read_text,
    unknown,
)

_HEADER = struct.Struct("<HBB")
_STATUS_OFFSET, _STATUS = 112, struct.Struct("<Q")
_UNFILLED = (1 << 64) - 1  # fields that a chip does not fill stay as the driver initialises them: all ones
_HOTSPOT = 1 << 36  # SMU_THROTTLER_TEMP_HOTSPOT_BIT
_CAUSES: tuple[tuple[range, str], ...] = (
    (range(8), "power"),
    (range(16, 24), "current"),
    (range(32, 48), "temperature"),
    (range(56, 58), "other"),
)


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """amdgpu's hwmon and load files of one card at one moment.

    Attributes:
        edge_c, hotspot_c, memory_c: temperatures in degrees Celsius.
        power_w: board power (average or momentary, as the driver has it) in watts.
        power_cap_w: limit in force in watts.
        utilisation: busy share of the card, 0 to 1.
        vram_used_bytes, vram_total_bytes: as the driver counts them, of all processes.
        throttle: bits of what limits the clocks at this moment, in the chip-independent form of ``gpu_metrics``;
            `throttle_causes` names them. A power limit is normal under load.
    """

    edge_c: Reading[float]
    hotspot_c: Reading[float]
    memory_c: Reading[float]
    power_w: Reading[float]
    power_cap_w: Reading[float]
    utilisation: Reading[float]
    vram_used_bytes: Reading[int]
    vram_total_bytes: Reading[int]
    throttle: Reading[int]


def read_sensors(tree: Tree, address: str) -> Sensors:
    """All sensors of the amdgpu card at a PCI address. Never raises."""
    device = f"{DEVICES}/{address}"
    hwmon = _read_hwmon(tree, f"{device}/hwmon")
    channels = ("temp1", "temp2", "temp3") if hwmon.value else ()
    labels = {read_text(tree, f"{hwmon.value}/{channel}_label").value or "": channel for channel in channels}
    busy = f"{device}/gpu_busy_percent"
    metrics = read_bytes(tree, f"{device}/gpu_metrics")
    return Sensors(
        edge_c=_read_temperature(tree, hwmon, labels, "edge"),
        hotspot_c=_read_temperature(tree, hwmon, labels, "junction"),
        memory_c=_read_temperature(tree, hwmon, labels, "mem"),
        power_w=_read_power(tree, hwmon),
        power_cap_w=_read_watts(tree, hwmon, "power1_cap"),
        utilisation=derived(read_int(tree, busy), lambda n: n / 100 if n <= 100 else None, f"/{busy}: more than 100 %"),
        vram_used_bytes=read_int(tree, f"{device}/mem_info_vram_used"),
        vram_total_bytes=read_int(tree, f"{device}/mem_info_vram_total"),
        throttle=unknown(metrics.reason) if metrics.value is None else parse_throttle(metrics.value),
    )


def no_sensors(reason: str) -> Sensors:
    """Sensors of which nothing is known, for one reason."""
    return Sensors(**{field.name: unknown(reason) for field in fields(Sensors)})


def _read_hwmon(tree: Tree, path: str) -> Reading[str]:
    def first(names: list[str]) -> str | None:
        return next((f"{path}/{name}" for name in names if re.fullmatch("hwmon[0-9]{1,6}", name)), None)

    return derived(list_names(tree, path), first, f"/{path}: no monitor in it")


def _read_temperature(tree: Tree, hwmon: Reading[str], labels: dict[str, str], label: str) -> Reading[float]:
    def parse(text: str) -> float | None:
        celsius = int(text) / 1000 if re.fullmatch("-?[0-9]{1,7}", text, re.ASCII) else -300.0
        # Outside of this a thermal sensor is not there or not awake.
        return celsius if -60.0 <= celsius <= 200.0 else None

    if hwmon.value is None:
        return unknown(hwmon.reason)
    if label not in labels:
        return unknown(f"/{hwmon.value}: no temperature is labelled {label!r}")
    return read_parsed(tree, f"{hwmon.value}/{labels[label]}_input", parse, "no temperature")


def _read_power(tree: Tree, hwmon: Reading[str]) -> Reading[float]:
    average = _read_watts(tree, hwmon, "power1_average")
    momentary = average if average.value is not None else _read_watts(tree, hwmon, "power1_input")
    return average if momentary.value is None else momentary


def _read_watts(tree: Tree, hwmon: Reading[str], file: str) -> Reading[float]:
    if hwmon.value is None:
        return unknown(hwmon.reason)
    return derived(read_int(tree, f"{hwmon.value}/{file}"), lambda microwatts: microwatts / 1_000_000, "")


def parse_throttle(metrics: bytes) -> Reading[int]:
    """The chip-independent throttle status in a ``gpu_metrics`` file, without the hotspot bit."""
    if len(metrics) < _HEADER.size:
        return unknown("gpu_metrics: shorter than its header")
    size, form, content = _HEADER.unpack_from(metrics)
    if (form, content) != (1, 3):
        return unknown(f"gpu_metrics: revision {form}.{content} has no throttle status of a known meaning")
    if min(size, len(metrics)) < _STATUS_OFFSET + _STATUS.size:
        return unknown(f"gpu_metrics: {len(metrics)} bytes, too short for revision {form}.{content}")
    (status,) = _STATUS.unpack_from(metrics, _STATUS_OFFSET)
    if status == _UNFILLED:
        return unknown("gpu_metrics: this chip states no throttle status")
    return Reading(value=status & ~_HOTSPOT)


def throttle_causes(status: int) -> tuple[str, ...]:
    """``power``, ``current``, ``temperature``, ``other``: the kinds of limits that a throttle status names.

    Bits without a name count as ``other``.
    """
    named = tuple(name for bits, name in _CAUSES if any(status >> bit & 1 for bit in bits))
    return named or (("other",) if status else ())


def core_dumps(root: Tree | Path = Path("/")) -> frozenset[str]:
    """The core dumps of amdgpu that are listed now, as "devcd1 of 0000:03:00.0"; empty where nothing can be read.

    They tell that the driver saw the GPU fail, and need no root, which the kernel's log mostly does. The kernel lists a
    dump as ``/sys/class/devcoredump/devcdN`` with a link to the device that failed and drops it after five minutes
    (Linux ``drivers/base/devcoredump.c``); amdgpu writes one when it resets a GPU, where the kernel has
    CONFIG_DEV_COREDUMP (``amdgpu_dev_coredump.c``). Nothing listed means nothing: not every fault leaves a dump.
    """
    where = "sys/class/devcoredump"
    found = set()
    for name in list_names(root, where).value or []:
        device = f"{where}/{name}/failing_device"
        if read_link_name(root, f"{device}/driver").value == "amdgpu":
            found.add(f"{name} of {read_link_name(root, device).value or 'an unnamed device'}")
    return frozenset(found)
