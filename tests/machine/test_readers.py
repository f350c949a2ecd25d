"""What the kernel's files say is read in the right unit and of the right device; what they do not say is unknown.

Here are the forms and borders that no machine of ``tests/machines`` has; what those have is proved there, through the
doctor, and that nonsense anywhere never ends in an exception.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.machine import gpus
from hf_rocm_tune.machine.cards import CARDS, GIB, identify
from hf_rocm_tune.machine.gpus import Sensors, read_sensors, read_throttle
from hf_rocm_tune.machine.survey import Gpu
from hf_rocm_tune.machine.sysfs import Files, parse_int
from tests.machine.trees import DEVICES, NODES, XT, XTX, Built, Readings, Slot, metrics_v1_3, metrics_v2_1
from tests.machines.case import case, device, stack

CARD = "0000:03:00.0"


def first(built: Built, root: Path) -> Gpu:
    return built.survey(root).gpus[0]


def sensors_of(built: Built, root: Path) -> Sensors:
    built.write(root)
    return read_sensors(Files(root), CARD)


# Files.


def test_what_cannot_be_read_is_none_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("link")
    contents = {"empty": b"", "blank": b" \n", "binary": b"a\0b", "no text": b"\xff\xfe"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = Files(tmp_path)
    for name in (*contents, "directory", "link", "missing", "missing/below", "empty/below", "null\0byte"):
        assert files.text(name) is None
        assert files.unread[name].startswith(f"/{name}: ")


def test_only_plain_decimal_numbers_of_64_bits_are_numbers() -> None:
    assert not any(map(parse_int, ("1_0", "+1", "-1", "1e3", "\u0661", "9" * 30, "0x10", "1 2", str(1 << 64))))
    assert parse_int(str((1 << 64) - 1)) == (1 << 64) - 1


# The compute driver's list.


def test_nodes_are_in_numeric_order_and_banks_of_video_memory_are_added(tmp_path: Path) -> None:
    built = Built("invented")
    gpu = "simd_count 168\ngfx_target_version 110000\n"
    built.files |= {f"{NODES}/{number}/properties": gpu for number in (2, 10, 1)}
    built.files[f"{NODES}/10/properties"] += "location_id 1018\n"  # bus 3, device 31, function 2
    built.files[f"{NODES}/0/properties"] = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"
    banks = {0: (1, 1 << 28), 1: (2, (20 << 30) - (1 << 28)), 2: (0, 1 << 36)}  # visible, hidden, system memory
    for bank, (heap, size) in banks.items():
        built.files[f"{NODES}/2/mem_banks/{bank}/properties"] = f"heap_type {heap}\nsize_in_bytes {size}\n"
    topology = built.survey(tmp_path).topology
    assert [node.index for node in topology.nodes] == [0, 1, 2]
    assert [node.vram_bytes for node in topology.nodes] == [None, 20 << 30, None]
    assert topology.nodes[2].pci_address == "0000:03:1f.2" and topology.complete
    spelled = {90402: "gfx942", 90010: "gfx90a", 110501: "gfx1151"}  # as LLVM spells them
    assert {version: gpus.decode_arch(version) for version in spelled} == spelled


@pytest.mark.parametrize("text", ["", "simd_count 1e9\ngfx_target_version 11\u00b2\n"])
def test_a_node_that_cannot_be_read_makes_the_list_uncertain(text: str, tmp_path: Path) -> None:
    built = Built("invented").card().card()
    built.files[f"{NODES}/1/mem_banks/0/properties"] = text
    topology = built.survey(tmp_path).topology
    assert [node.vram_bytes for node in topology.nodes] == [None, XT.vram_bytes]
    assert topology.complete
    built.files[f"{NODES}/1/properties"] = text
    topology = built.survey(tmp_path).topology
    assert [node.pci_address for node in topology.nodes] == ["0000:06:00.0"] and not topology.complete


# PCI.


def test_cards_of_the_chipset_share_its_uplink(tmp_path: Path) -> None:
    slot = Slot(width=4, chipset=True)
    cpu, one, two = Built("invented").card().card(slot=slot).card(slot=slot).survey(tmp_path).gpus
    assert (cpu.upward.behind_chipset, one.upward.behind_chipset) == (False, True)
    assert [link.device for link in one.upward.links] == ["0000:06:00.0", "0000:04:00.0"]
    assert one.upward.links[-1] == two.upward.links[-1] and one.upward.links[0] != two.upward.links[0]


def test_a_card_without_a_switch_and_one_on_the_root_bus(tmp_path: Path) -> None:
    gpu = first(Built("invented").nvidia(slot=Slot(width=8)), tmp_path / "nvidia")
    assert (gpu.vendor, gpu.driver, gpu.integrated, gpu.card) == ("nvidia", "nvidia", None, None)
    assert [(link.device, link.width) for link in gpu.upward.links] == [(gpu.address, 8)]
    assert "its driver is nvidia" in gpu.sensors.missing["all"]
    built = Built("as a virtual machine shows a card that was passed through without a bridge").card()
    built.links[f"{DEVICES}/{CARD}"] = f"../../../devices/pci0000:00/{CARD}"
    gpu = first(built, tmp_path / "passed")
    (link,) = gpu.upward.links
    assert (gpu.upward.chain, gpu.upward.behind_chipset, link.width, link.able) == ((CARD,), False, 16, 16.0)


@pytest.mark.parametrize(
    ("file", "text", "value"),
    [
        *(("width", text, None) for text in ("0", "63", "255", "x16")),
        *(("speed", text, float(text.split()[0])) for text in ("16.0 GT/s PCIe", "2.5 GT/s", "8 GT/s")),
        *(("speed", text, None) for text in ("Unknown speed", "1e9 GT/s")),
    ],
)
def test_links_are_read_in_every_form_of_the_kernel(file: str, text: str, value: float | None, tmp_path: Path) -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:01:00.0/current_link_{file}"] = f"{text}\n"
    machine = built.survey(tmp_path)
    assert getattr(machine.gpus[0].upward.links[0], file) == value
    assert ("/" in machine.why("0000:01:00.0", f"current_link_{file}")) == (value is None)


def test_errors_are_counted_over_the_card_and_the_bridges_above_it(tmp_path: Path) -> None:
    built = Built("invented").card(aer={"correctable": 5, "fatal": 1})
    root = f"{DEVICES}/0000:00:01.1/aer_dev_correctable"
    built.files[root] = built.files[root].replace("COR 0", "COR 2")
    assert first(built, tmp_path).aer == {"correctable": 7, "nonfatal": 0, "fatal": 1}


def test_without_a_memory_bar_there_is_no_size_and_the_rom_is_none(tmp_path: Path) -> None:
    built = Built("invented").card(bar_bytes=256 << 20)
    path = f"{DEVICES}/{CARD}/resource"
    lines = built.files[path].splitlines()
    lines[6] = "0x0000000000000000 0x0000000fffffffff 0x0000000000046200"
    built.files[path] = "\n".join(lines)
    assert first(built, tmp_path / "rom").bar_bytes == 256 << 20
    built.files[path] = "0x0 0x0 0x0\na b c\n0x10 0x5 0x200\n0x0 0xff 0x101"
    assert first(built, tmp_path / "none").bar_bytes is None


# The kernel and the host.


@pytest.mark.parametrize(("stated", "limit"), [(8 * GIB, 8 * GIB), ("max", None), (999 * GIB, None), ("-1", None)])
def test_memory_is_in_bytes_and_a_limit_counts_below_the_hosts(stated: Any, limit: int | None, tmp_path: Path) -> None:
    built = Built("invented").memory(16, available_gib=9)
    built.files["sys/fs/cgroup/memory.max"] = f"{stated}\n"
    host = built.survey(tmp_path)
    assert (host.memory_bytes, host.available_bytes) == (16 * GIB, 9 * GIB)
    assert host.memory_limit_bytes == limit


# Sensors.


def hwmon_of(built: Built) -> str:
    return next(path for path in built.files if path.startswith(f"{DEVICES}/{CARD}/hwmon/")).rpartition("/")[0]


def test_units_are_degrees_watts_shares_and_bytes(tmp_path: Path) -> None:
    readings = Readings(edge=-5.0, hotspot=83.5, memory=88.0, power=301.25, busy=97, vram_used=18 << 30, throttle=1)
    assert sensors_of(Built("invented").card(readings=readings), tmp_path) == Sensors(
        edge_c=-5.0,
        hotspot_c=83.5,
        memory_c=88.0,
        power_w=301.25,
        power_cap_w=315.0,
        utilisation=0.97,
        vram_used_bytes=18 << 30,
        vram_total_bytes=20464 << 20,
        throttle=frozenset({"power"}),
    )


def test_a_sensor_is_told_by_its_label_and_momentary_power_stands_in(tmp_path: Path) -> None:
    built = Built("invented").card(readings=Readings(power=None, busy=255))
    place = hwmon_of(built)
    built.files[f"{place}/temp1_label"], built.files[f"{place}/temp2_label"] = "junction\n", "edge\n"
    built.files[f"{place}/power1_input"] = "41000000\n"
    sensors = sensors_of(built, tmp_path / "swapped")
    assert (sensors.edge_c, sensors.hotspot_c, sensors.power_w, sensors.utilisation) == (48.0, 42.0, 41.0, None)
    del built.files[f"{place}/temp1_label"]
    sensors = sensors_of(built, tmp_path / "unlabelled")
    assert sensors.hotspot_c is None and "labelled junction" in sensors.missing["hotspot_c"]


@pytest.mark.parametrize(
    ("status", "causes"),
    [
        (0, set()),
        (1 << 16, {"current"}),
        (1 << 44, {"temperature"}),
        (1 << 0 | 1 << 34 | 1 << 57, {"power", "temperature"}),
    ],
)
def test_the_causes_of_throttling_are_named_and_the_hotspot_s_bit_is_none(status: int, causes: set[str]) -> None:
    assert read_throttle(metrics_v1_3(status | 1 << 36)) == causes


@pytest.mark.parametrize(
    "metrics",
    [
        b"",
        metrics_v2_1(),
        metrics_v1_3((1 << 64) - 1),
        metrics_v1_3(1)[:119],
        struct.pack("<HBB", 90, 1, 3) + bytes(116),
    ],
)
def test_metrics_of_another_form_state_no_throttling(metrics: bytes) -> None:
    assert read_throttle(metrics) is None


# Which card it is.


def test_every_row_finds_itself_and_main_figures_stand() -> None:
    assert len({card.key for card in CARDS}) == len(CARDS)
    for card in CARDS:
        for pci in card.pci:
            device, _, revision = pci.partition(":")
            assert identify(arch=None, vram_bytes=None, pci=(int(device, 16), int(revision or "0", 16))) == card
    xt = CARDS[0]
    assert (xt.name, xt.vram_gib, xt.bandwidth_gb_s) == ("Radeon RX 7900 XT", 20, 800)


@pytest.mark.parametrize(
    ("arch", "gib", "name"),
    [
        ("gfx1100:sramecc+", 19.98, "Radeon RX 7900 XT"),
        ("gfx1100", 23.98, "Radeon RX 7900 XTX"),
        ("gfx1100", 47.9, None),
        ("gfx1100", 12, None),
        ("gfx1151", 96, "Strix Halo integrated GPU"),  # the memory of an integrated GPU is a setting
        (None, 20, None),
    ],
)
def test_without_a_pci_id_cards_are_told_apart_by_memory(arch: str | None, gib: float, name: str | None) -> None:
    found = identify(arch=arch, vram_bytes=int(gib * GIB), pci=(0x9999, 0))
    assert (found.name if found else None) == name


def test_a_device_is_told_by_its_address_not_by_its_index(tmp_path: Path) -> None:
    addresses = ("0000:06:00.0", None, "0000:7f:00.0", CARD)
    devices = [device(address, index=index) for index, address in enumerate(addresses)]
    evidence = case(Built("invented").card(XT).card(XTX), software=stack(devices=devices)).evidence(tmp_path)
    joined = [gpu.address if gpu else None for _, gpu in evidence.joined]
    assert joined == ["0000:06:00.0", None, None, CARD]
