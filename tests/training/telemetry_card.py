"""A card as amdgpu shows it in files, for tests of telemetry."""

from __future__ import annotations

import struct
from pathlib import Path

ADDRESS = "0000:03:00.0"
POWER_BIT, CURRENT_BIT, VR_BIT, HOTSPOT_BIT, FIT_BIT = 1 << 0, 1 << 16, 1 << 38, 1 << 36, 1 << 57


class Card:
    """The files that amdgpu shows of one card, rewritten at will."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.device = root / "sys/bus/pci/devices" / ADDRESS
        self.hwmon = self.device / "hwmon/hwmon3"
        self.hwmon.mkdir(parents=True)
        for number, label in ((1, "edge"), (2, "junction"), (3, "mem")):
            (self.hwmon / f"temp{number}_label").write_text(f"{label}\n")
        (self.hwmon / "name").write_text("amdgpu\n")
        (self.hwmon / "power1_cap").write_text("315000000\n")
        (self.device / "mem_info_vram_total").write_text(f"{20 << 30}\n")
        self.say()

    def say(
        self,
        *,
        edge: int = 60,
        hotspot: int = 80,
        memory: int = 70,
        watts: int = 300,
        busy: int = 99,
        throttle: int = 0,
    ) -> None:
        """What all files say from now on."""
        for number, degrees in ((1, edge), (2, hotspot), (3, memory)):
            (self.hwmon / f"temp{number}_input").write_text(f"{degrees * 1000}\n")
        (self.hwmon / "power1_average").write_text(f"{watts * 1_000_000}\n")
        (self.device / "gpu_busy_percent").write_text(f"{busy}\n")
        (self.device / "mem_info_vram_used").write_text(f"{5 << 30}\n")
        (self.device / "gpu_metrics").write_bytes(gpu_metrics(throttle))

    @property
    def files(self) -> list[Path]:
        return [path for path in self.device.rglob("*") if path.is_file()]


def gpu_metrics(throttle: int) -> bytes:
    """gpu_metrics_v1_3 of the kernel's kgd_pp_interface.h, with all but the independent throttle status left empty."""
    return (
        struct.pack("<HBB", 120, 1, 3)
        + b"\xff" * 64
        + struct.pack("<I", 0)
        + b"\xff" * 40
        + struct.pack("<Q", throttle)
    )
