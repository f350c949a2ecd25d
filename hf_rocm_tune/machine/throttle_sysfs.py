"""What limits a card's clocks: the throttle status in amdgpu's ``gpu_metrics``.

The file is a structure behind a header of its size and of two revision numbers. Layout: kernel ``kgd_pp_interface.h``,
``struct metrics_table_header`` and ``gpu_metrics_v1_3``, which a 7900 XT gives (``smu_v13_0_0_ppt.c``); its
``indep_throttle_status`` has one meaning on all chips: ``amdgpu_smu.h``, ``SMU_THROTTLER_*_BIT``.

The hotspot bit is left out: the firmware of Navi 31 and 48 sets it nearly always, even on an idle card at 40 C
(libdrm-amdgpu-sys-rs#7, drm/amd#3251, rocm-systems#11781). The hotspot's temperature itself is in hwmon.

Not covered: older revisions and those of Instinct cards and integrated GPUs, whose status differs from chip to chip.
"""

from __future__ import annotations

import struct

from hf_rocm_tune.machine.sysfs import Reading, unknown

_HEADER = struct.Struct("<HBB")
_REVISION = (1, 3)
_STATUS_OFFSET = 112
_STATUS = struct.Struct("<Q")
# Fields that a chip does not fill stay as the driver initialises them: all ones.
_UNFILLED = (1 << 64) - 1

_HOTSPOT = 1 << 36  # SMU_THROTTLER_TEMP_HOTSPOT_BIT

_CAUSES: tuple[tuple[range, str], ...] = (
    (range(8), "power"),
    (range(16, 24), "current"),
    (range(32, 48), "temperature"),
    (range(56, 58), "other"),
)


def parse_throttle(metrics: bytes) -> Reading[int]:
    """The chip-independent throttle status in a ``gpu_metrics`` file, without the hotspot bit."""
    if len(metrics) < _HEADER.size:
        return unknown("gpu_metrics: shorter than its header")
    size, form, content = _HEADER.unpack_from(metrics)
    if (form, content) != _REVISION:
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
