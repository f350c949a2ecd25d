"""Every sensor by its label, in its unit; what a card does not have is unknown, not zero."""

from __future__ import annotations

import struct

import pytest

from hf_rocm_tune.machine.sensors import Sensors, parse_throttle, read_sensors, throttle_causes
from tests.hardware.parts import Readings, metrics_v1_3, metrics_v2_1
from tests.hardware.trees import DEVICES, Built

CARD = "0000:03:00.0"


def sensors_of(built: Built) -> Sensors:
    return read_sensors(built.tree(), CARD)


def hwmon_of(built: Built) -> str:
    return next(path for path in built.files if path.startswith(f"{DEVICES}/{CARD}/hwmon/")).rpartition("/")[0]


def test_units_are_degrees_watts_shares_and_bytes() -> None:
    readings = Readings(edge=61.0, hotspot=83.5, memory=88.0, power=301.25, busy=97, vram_used=18 << 30, throttle=1)
    sensors = sensors_of(Built("invented").card(readings=readings))
    assert (sensors.edge_c.value, sensors.hotspot_c.value, sensors.memory_c.value) == (61.0, 83.5, 88.0)
    assert (sensors.power_w.value, sensors.power_cap_w.value) == (301.25, 315.0)
    assert (sensors.utilisation.value, sensors.vram_used_bytes.value) == (0.97, 18 << 30)
    assert sensors.vram_total_bytes.value == 20464 << 20
    assert sensors.throttle.value == 1


def test_a_sensor_is_told_by_its_label_not_by_its_number() -> None:
    built = Built("invented").card()
    place = hwmon_of(built)
    built.files[f"{place}/temp1_label"], built.files[f"{place}/temp2_label"] = "junction\n", "edge\n"
    sensors = sensors_of(built)
    assert (sensors.edge_c.value, sensors.hotspot_c.value) == (48.0, 42.0)
    del built.files[f"{place}/temp1_label"]
    assert sensors_of(built).hotspot_c.value is None


def test_momentary_power_stands_in_for_the_average() -> None:
    built = Built("invented").card(readings=Readings(power=None))
    assert sensors_of(built).power_w.reason.endswith("power1_average: No such file or directory")
    built.files[f"{hwmon_of(built)}/power1_input"] = "41000000\n"
    assert sensors_of(built).power_w.value == 41.0


@pytest.mark.parametrize("text", ["", "hot", "999999", "-99999", "1e3", "+42000", "4_2", "\u0664"])
def test_what_is_no_temperature_is_not_one(text: str) -> None:
    built = Built("invented").card()
    built.files[f"{hwmon_of(built)}/temp2_input"] = text
    assert sensors_of(built).hotspot_c.value is None
    assert sensors_of(built).edge_c.value == 42.0


def test_frost_is_a_temperature() -> None:
    built = Built("invented").card(readings=Readings(edge=-5.0))
    assert sensors_of(built).edge_c.value == -5.0


def test_a_share_above_one_is_not_one() -> None:
    assert sensors_of(Built("invented").card(readings=Readings(busy=255))).utilisation.value is None


def test_a_card_without_a_monitor_still_tells_its_memory() -> None:
    built = Built("invented").card()
    built.files = {path: text for path, text in built.files.items() if "/hwmon/" not in path}
    sensors = sensors_of(built)
    assert sensors.edge_c.value is None
    assert sensors.vram_total_bytes.value == 20464 << 20


@pytest.mark.parametrize(
    ("status", "causes"),
    [
        (0, ()),
        (1 << 0, ("power",)),
        (1 << 16, ("current",)),
        (1 << 33, ("temperature",)),
        (1 << 44, ("temperature",)),
        (1 << 0 | 1 << 34 | 1 << 57, ("power", "temperature", "other")),
        (1 << 63, ("other",)),
    ],
)
def test_the_causes_of_throttling_are_named(status: int, causes: tuple[str, ...]) -> None:
    assert throttle_causes(status) == causes
    assert parse_throttle(metrics_v1_3(status)).value == status


def test_the_hotspot_bit_is_left_out_because_an_idle_navi_31_sets_it_too() -> None:
    assert parse_throttle(metrics_v1_3(1 << 36)).value == 0
    assert parse_throttle(metrics_v1_3(1 << 36 | 1 << 0)).value == 1 << 0


@pytest.mark.parametrize(
    "metrics",
    [
        b"",
        b"\x78",
        metrics_v1_3(0)[:119],
        struct.pack("<HBB", 119, 1, 3) + bytes(116),
        struct.pack("<HBB", 120, 1, 4) + bytes(116),
        metrics_v1_3((1 << 64) - 1),
        metrics_v2_1(),
        b"\xff" * 120,
    ],
    ids=range(8),
)
def test_metrics_of_another_form_state_no_throttling(metrics: bytes) -> None:
    reading = parse_throttle(metrics)
    assert reading.value is None
    assert reading.reason.startswith("gpu_metrics: ")
