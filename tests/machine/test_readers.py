"""What the kernel's files say is read in the right unit and of the right device; what they do not say is unknown.

Here are the forms and borders that no machine of ``tests/machines`` has; what those have is proved there, through the
doctor. That nonsense anywhere never ends in an exception is tried in ``test_survey``.
"""

from __future__ import annotations

import base64
import gzip
import re
import struct
from pathlib import Path

import pytest

from hf_rocm_tune.machine import gpus
from hf_rocm_tune.machine.gpus import Sensors, core_dumps, parse_throttle, read_sensors, read_upward, throttle_causes
from hf_rocm_tune.machine.survey import (
    CARDS,
    GIB,
    Gpu,
    Host,
    identify,
    parse_cmdline,
    parse_config,
    read_host,
    read_kernel,
    survey,
)
from hf_rocm_tune.machine.sysfs import LiveTree, RecordedTree
from tests.machine.trees import DEVICES, NODES, STRIX_HALO, XT, Built, Readings, Slot, metrics_v1_3, metrics_v2_1

CARD = "0000:03:00.0"


def first(built: Built) -> Gpu:
    return survey(built.tree()).gpus[0]


def host_of(built: Built) -> Host:
    return read_host(built.tree())


def sensors_of(built: Built) -> Sensors:
    return read_sensors(built.tree(), CARD)


# The compute driver's list.


@pytest.mark.parametrize(
    ("version", "arch"),
    [(110000, "gfx1100"), (90402, "gfx942"), (90010, "gfx90a"), (90012, "gfx90c"), (110501, "gfx1151")],
)
def test_architecture_is_spelled_as_llvm_spells_it(version: int, arch: str) -> None:
    assert gpus.decode_arch(version) == arch


def test_a_7900_xt_is_read_whole() -> None:
    built = Built("invented").card()
    built.files[f"{NODES}/1/properties"] += "location_id 1018\n"  # bus 3, device 31, function 2; the last one wins
    (node,) = gpus.read_topology(built.tree()).nodes
    assert (node.index, node.node, node.arch) == (0, 1, "gfx1100")
    assert (node.vram_bytes, node.pci_address, node.name) == (XT.vram_bytes, "0000:03:1f.2", "ip discovery")
    assert not node.has_cpu


def test_nodes_are_in_numeric_order_and_banks_of_video_memory_are_added() -> None:
    gpu = "simd_count 168\ngfx_target_version 110000\n"
    files = {f"{NODES}/{number}/properties": gpu for number in (2, 10, 1)}
    files[f"{NODES}/0/properties"] = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"
    banks = {0: (1, 1 << 28), 1: (2, (20 << 30) - (1 << 28)), 2: (0, 1 << 36)}  # visible, hidden, system memory
    for bank, (heap, size) in banks.items():
        files[f"{NODES}/2/mem_banks/{bank}/properties"] = f"heap_type {heap}\nsize_in_bytes {size}\n"
    topology = gpus.read_topology(RecordedTree({"schema": 1, "files": files}))
    assert [(node.index, node.node) for node in topology.nodes] == [(0, 1), (1, 2), (2, 10)]
    assert [node.vram_bytes for node in topology.nodes] == [None, 20 << 30, None]
    assert topology.complete


@pytest.mark.parametrize(
    "text", ["", "\x00", "simd_count x\n", "simd_count 1e9\ngfx_target_version 11\u00b2\n", "EPERM"]
)
def test_a_node_that_cannot_be_read_makes_the_list_uncertain(text: str) -> None:
    built = Built("invented").card().card()
    built.files[f"{NODES}/1/mem_banks/0/properties"] = text
    topology = gpus.read_topology(built.tree())
    assert [node.vram_bytes for node in topology.nodes] == [None, XT.vram_bytes]
    assert topology.complete and topology.reasons
    built.files[f"{NODES}/1/properties"] = text
    if text == "EPERM":  # a container's device filter answers like this
        del built.files[f"{NODES}/1/properties"]
        built.errors[f"{NODES}/1/properties"] = text
    topology = gpus.read_topology(built.tree())
    assert [node.node for node in topology.nodes] == [2]
    assert not topology.complete
    assert text != "EPERM" or "Operation not permitted" in topology.reasons[0]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("node_to 0\nflags 1\n", True),
        (f"node_to 0\nflags {1 | 1 << 2}\n", False),
        (f"node_to 0\nflags {1 | 1 << 3}\n", False),
        (f"node_to 0\nflags {1 | 1 << 4}\n", True),
        ("", None),
        ("type 2\n", None),
        ("node_to 1\nflags 1\n", None),
        ("node_to 0\nflags x\n", None),
    ],
)
def test_atomics_are_told_by_the_flags_of_the_link_to_the_processor(text: str, passes: bool | None) -> None:
    built = Built("invented").card()
    built.files[f"{NODES}/1/io_links/0/properties"] = text
    assert first(built).atomics.value is passes


def test_a_kernel_without_links_to_peers_and_a_card_that_is_not_listed_say_nothing_of_them() -> None:
    recording = Built("invented").card().recording()
    del recording["names"][f"{NODES}/1/p2p_links"]
    (gpu,) = survey(RecordedTree(recording)).gpus
    assert gpu.peers.value is None
    unlisted = first(Built("invented").card(kfd=False))
    assert unlisted.peers.reason == unlisted.atomics.reason == "the compute driver (KFD) does not list the device"


# PCI.


def test_cards_of_the_chipset_share_its_uplink() -> None:
    slot = Slot(width=4, chipset=True)
    cpu, one, two = survey(Built("invented").card().card(slot=slot).card(slot=slot).tree()).gpus
    assert (cpu.upward.behind_chipset, one.upward.behind_chipset) == (False, True)
    assert [link.device for link in one.upward.links] == ["0000:06:00.0", "0000:04:00.0"]
    assert (cpu.upward.root_port, one.upward.root_port) == ("0000:00:01.1", "0000:00:02.1")
    assert one.upward.links[-1] == two.upward.links[-1] and one.upward.links[0] != two.upward.links[0]


def test_a_bridge_that_is_not_known_leaves_the_chipset_unknown() -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:00:01.1/vendor"] = "0x8086\n"
    assert first(built).upward.behind_chipset is None
    built = Built("invented").card(slot=Slot(chipset=True))
    built.files[f"{DEVICES}/0000:00:02.1/vendor"] = "0x8086\n"
    assert first(built).upward.behind_chipset is True


def test_a_card_without_a_switch_of_its_own_is_its_own_connector() -> None:
    gpu = first(Built("invented").nvidia(slot=Slot(width=8)))
    assert (gpu.vendor, gpu.driver.value, gpu.integrated) == ("nvidia", "nvidia", None)
    assert [(link.device, link.width.value) for link in gpu.upward.links] == [(gpu.address, 8)]
    assert gpu.sensors.edge_c.reason == f"{gpu.address}: its driver is nvidia, not amdgpu"
    assert gpu.identity.card is None


def test_a_device_on_the_root_bus_has_no_port_above() -> None:
    """As a virtual machine shows a card that was passed through without a bridge."""
    built = Built("invented").card()
    built.links[f"{DEVICES}/{CARD}"] = f"../../../devices/pci0000:00/{CARD}"
    gpu = first(built)
    (link,) = gpu.upward.links
    assert (gpu.upward.root_port, gpu.upward.behind_chipset, link.width.value, link.port_max_width.value) == (
        None,
        None,
        16,
        None,
    )


@pytest.mark.parametrize(
    ("target", "chain"),
    [
        # A second hierarchy below Intel's VMD begins at its own root.
        ("../../../devices/pci0000:64/0000:64:00.5/pci10000:00/10000:00:02.0/" + CARD, ("10000:00:02.0", CARD)),
        ("", (CARD,)),
        ("..", (CARD,)),
        (f"{CARD}/..", (CARD,)),
        ("../../../devices/pci0000:00/0000:00:01.1", (CARD,)),
        (f"../../../devices/pci0000:00/{CARD}/{CARD}", (CARD,)),
        (f"../../../devices/pci0000:00/0000:00:01.1/nonsense/{CARD}", (CARD,)),
    ],
)
def test_a_path_that_makes_no_sense_ends_at_the_device(target: str, chain: tuple[str, ...]) -> None:
    upward = read_upward(RecordedTree({"schema": 1, "links": {f"{DEVICES}/{CARD}": target}}), CARD)
    assert (upward.chain, upward.root_port) == (chain, chain[0] if len(chain) > 1 else None)
    assert len(upward.links) == 1


@pytest.mark.parametrize(
    ("file", "text", "value"),
    [
        *(("width", text, None) for text in ("0", "63", "255", "3", "-4", "x16", "")),
        *(("speed", f"{number} GT/s{tail}", number) for number, tail in ((16.0, " PCIe"), (2.5, ""))),
        ("speed", "8 GT/s", 8.0),
        *(("speed", text, None) for text in ("Unknown", "Unknown speed", "1e9 GT/s")),
    ],
)
def test_links_are_read_in_every_form_of_the_kernel(file: str, text: str, value: float | None) -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:01:00.0/current_link_{file}"] = f"{text}\n"
    reading = getattr(first(built).upward.links[0], file)
    assert reading.value == value
    assert bool(reading.reason) == (value is None)


def test_errors_are_counted_over_the_card_and_the_bridges_above_it() -> None:
    built = Built("invented").card(aer={"correctable": 5, "fatal": 1})
    root = f"{DEVICES}/0000:00:01.1/aer_dev_correctable"
    built.files[root] = built.files[root].replace("COR 0", "COR 2")
    counted = {kind: reading.value for kind, reading in first(built).aer.items()}
    assert counted == {"correctable": 7, "nonfatal": 0, "fatal": 1}
    built.files = {path: text for path, text in built.files.items() if "aer_dev" not in path}
    assert all(reading.value is None and reading.reason for reading in first(built).aer.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0x0 0x0 0x0\n" * 13,
        "a b c",
        "0x10 0x5 0x200",
        "0x0 0xffffffffffffffffff 0x200",
        "0x0 0xff 0x101",
        "0x0 0xff",
    ],
)
def test_without_a_memory_bar_there_is_no_size(text: str) -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/{CARD}/resource"] = text
    assert first(built).bar_bytes.value is None


def test_the_rom_and_virtual_functions_are_no_bars() -> None:
    built = Built("invented").card(bar_bytes=256 << 20)
    lines = built.files[f"{DEVICES}/{CARD}/resource"].splitlines()
    lines[6] = "0x0000000000000000 0x0000000fffffffff 0x0000000000046200"
    built.files[f"{DEVICES}/{CARD}/resource"] = "\n".join(lines)
    assert first(built).bar_bytes.value == 256 << 20


def test_devices_are_in_numeric_order_and_other_classes_are_left_out() -> None:
    built = Built("invented")
    classes = {
        "0000:10:00.0": "0x038000",
        "ffff:9f:00.0": "0x120000",
        "0000:0a:00.0": "0x030200",
        "10000:01:00.0": "0x030000",
        "0000:02:00.0": "0x108000",
        "0000:03:00.0": "0x118000",
        "0000:04:00.0": "0x040300",
    }
    for address, kind in classes.items():
        values = {"class": kind, "vendor": "0x1002", "device": "0x74a1", "revision": "0x00"}
        built.files.update({f"{DEVICES}/{address}/{name}": value for name, value in values.items()})
    found = [gpu.address for gpu in survey(built.tree()).gpus]
    assert found == ["0000:0a:00.0", "0000:10:00.0", "ffff:9f:00.0", "10000:01:00.0"]


def test_a_device_whose_ids_cannot_be_read_is_said_to_be_missing() -> None:
    built = Built("invented").card().igpu(STRIX_HALO)
    del built.files[f"{DEVICES}/{CARD}/device"]
    built.errors[f"{DEVICES}/{CARD}/device"] = "EACCES"
    machine = survey(built.tree())
    assert [gpu.address for gpu in machine.gpus] == ["0000:04:00.0"]
    assert machine.unlisted == (f"/{DEVICES}/{CARD}/device: Permission denied",)


# The kernel and the host.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ro quiet root=/dev/sda1", {}),
        ("amd_iommu=off intel_iommu=on", {"amd_iommu": "off", "intel_iommu": "on"}),
        ("amd-iommu=off amdgpu.runpm=0", {"amd_iommu": "off"}),
        ("iommu=pt iommu=off", {"iommu": "off"}),
        ("pci=realloc,nommconf amd_iommu=off nomodeset", {"amd_iommu": "off", "nomodeset": ""}),
        ('iommu="a b" x="iommu=pt"', {"iommu": "a b"}),
        ('iommu="pt', {"iommu": ""}),
        ("myiommu=pt iommux=1 amdgpu=1 -- pcix", {}),
    ],
)
def test_boot_parameters_are_read_as_the_kernel_reads_them(text: str, found: dict[str, str]) -> None:
    assert parse_cmdline(text) == found


def test_a_configuration_states_yes_module_and_no() -> None:
    text = (
        "CONFIG_HSA_AMD_P2P=y\n# CONFIG_PCI_P2PDMA is not set\nCONFIG_DMABUF_MOVE_NOTIFY=m\nCONFIG_OTHER=y\nHSA_AMD=y\n"
    )
    assert parse_config(text) == {"CONFIG_HSA_AMD_P2P": "y", "CONFIG_PCI_P2PDMA": "n", "CONFIG_DMABUF_MOVE_NOTIFY": "m"}


def test_the_running_kernel_s_own_configuration_comes_first_and_a_bomb_is_not_unpacked_whole() -> None:
    built = Built("invented")
    assert (read_kernel(built.tree()).config.value or {})["CONFIG_HSA_AMD_P2P"] == "y"
    for content, stated in (
        (gzip.compress(b"# CONFIG_HSA_AMD_P2P is not set\n" * 2), "n"),
        (b"no gzip", "y"),
        (gzip.compress(b"#" * (1 << 24) + b"\nCONFIG_HSA_AMD_P2P=y\n"), None),
    ):
        built.binary["proc/config.gz"] = base64.b64encode(content).decode()
        assert (read_kernel(built.tree()).config.value or {}).get("CONFIG_HSA_AMD_P2P") == stated


@pytest.mark.parametrize("release", ["../../etc/passwd", "a b", "", "x" * 200])
def test_a_release_that_is_none_names_no_file(release: str) -> None:
    built = Built("invented")
    built.process["release"] = release
    assert read_kernel(built.tree()).config.value is None


def test_amdgpu_is_read_with_its_parameters_and_a_directory_has_its_release_in_a_file() -> None:
    built = Built("invented").kernel(amdgpu_version="6.16.13", parameters={"pcie_p2p": "N"}).card()
    del built.process["release"]
    built.files["proc/sys/kernel/osrelease"] = "7.0.0-28-generic\n"
    kernel = read_kernel(built.tree())
    assert (kernel.release.value, kernel.amdgpu_version.value) == ("7.0.0-28-generic", "6.16.13")
    assert kernel.amdgpu_parameters["pcie_p2p"].value == "N"


def test_memory_is_in_bytes() -> None:
    host = host_of(Built("invented").memory(16, available_gib=9, swap_gib=0))
    assert (host.memory_bytes.value, host.available_bytes.value, host.swap_bytes.value) == (16 * GIB, 9 * GIB, 0)
    assert host.memory_limit_bytes.value is None


@pytest.mark.parametrize(("stated", "limit"), [(8 * GIB, 8 * GIB), ("max", None), (999 * GIB, None), ("-1", None)])
def test_the_limit_of_a_container_counts_where_it_is_below_the_hosts_memory(stated: object, limit: int | None) -> None:
    built = Built("invented").memory(64)
    built.files["sys/fs/cgroup/memory.max"] = f"{stated}\n"
    assert host_of(built).memory_limit_bytes.value == limit


@pytest.mark.parametrize(
    ("path", "text", "engine"),
    [
        ("run/systemd/container", "lxc\n", "lxc"),
        ("run/systemd/container", "\x1b[2J", None),
        (".singularity.d/runscript", "#!/bin/sh", "apptainer"),
        ("proc/self/cgroup", "0::/kubepods.slice/x\n", "kubernetes"),
        ("proc/self/cgroup", "3:cpu:/docker/4f\n", "docker"),
        ("proc/self/cgroup", "0::/machine.slice/libpod-4f.scope\n", "podman"),
    ],
)
def test_containers_are_known_by_their_marks(path: str, text: str, engine: str | None) -> None:
    built = Built("invented")
    built.files[path] = text
    assert host_of(built).container.value == engine


def test_the_cpu_is_named_by_the_system_where_no_file_does() -> None:
    built = Built("invented")
    built.files["proc/cpuinfo"] = "processor : 0\nBogoMIPS : 50\n"
    assert host_of(built).cpu.value is None
    built.process["cpu"] = "aarch64"
    assert host_of(built).cpu.value == "aarch64"


# Sensors.


def hwmon_of(built: Built) -> str:
    return next(path for path in built.files if path.startswith(f"{DEVICES}/{CARD}/hwmon/")).rpartition("/")[0]


def test_units_are_degrees_watts_shares_and_bytes() -> None:
    readings = Readings(edge=-5.0, hotspot=83.5, memory=88.0, power=301.25, busy=97, vram_used=18 << 30, throttle=1)
    sensors = sensors_of(Built("invented").card(readings=readings))
    assert (sensors.edge_c.value, sensors.hotspot_c.value, sensors.memory_c.value) == (-5.0, 83.5, 88.0)
    assert (sensors.power_w.value, sensors.power_cap_w.value) == (301.25, 315.0)
    assert (sensors.utilisation.value, sensors.vram_used_bytes.value) == (0.97, 18 << 30)
    assert (sensors.vram_total_bytes.value, sensors.throttle.value) == (20464 << 20, 1)
    assert sensors_of(Built("invented").card(readings=Readings(busy=255))).utilisation.value is None


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
    assert (sensors_of(built).hotspot_c.value, sensors_of(built).edge_c.value) == (None, 42.0)


def test_a_card_without_a_monitor_still_tells_its_memory() -> None:
    built = Built("invented").card()
    built.files = {path: text for path, text in built.files.items() if "/hwmon/" not in path}
    assert (sensors_of(built).edge_c.value, sensors_of(built).vram_total_bytes.value) == (None, 20464 << 20)


@pytest.mark.parametrize(
    ("status", "causes"),
    [
        (0, ()),
        (1 << 16, ("current",)),
        (1 << 44, ("temperature",)),
        (1 << 0 | 1 << 34 | 1 << 57, ("power", "temperature", "other")),
        (1 << 63, ("other",)),
    ],
)
def test_the_causes_of_throttling_are_named(status: int, causes: tuple[str, ...]) -> None:
    assert throttle_causes(status) == causes
    assert parse_throttle(metrics_v1_3(status)).value == status
    # An idle Navi 31 sets the bit of the hotspot too.
    assert parse_throttle(metrics_v1_3(status | 1 << 36)).value == status


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


def test_only_core_dumps_of_amdgpu_count(tmp_path: Path) -> None:
    assert core_dumps(LiveTree(tmp_path)) == frozenset()
    for name, driver, device in (("devcd1", "amdgpu", CARD), ("devcd2", "iwlwifi", "b"), ("devcd3", None, "c")):
        there = tmp_path / "sys/devices/pci0000:00" / device
        there.mkdir(parents=True)
        if driver is not None:
            (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
            (there / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
        (tmp_path / "sys/class/devcoredump" / name).mkdir(parents=True)
        (tmp_path / "sys/class/devcoredump" / name / "failing_device").symlink_to(there)
    (tmp_path / "sys/class/devcoredump/disabled").write_text("0\n")
    assert core_dumps(LiveTree(tmp_path)) == {f"devcd1 of {CARD}"}
    assert isinstance(core_dumps(), frozenset)  # this machine, whatever it is


# The table of cards.


def test_every_row_is_sound_has_a_source_and_finds_itself_by_name() -> None:
    ids = [one for card in CARDS for one in card.pci]
    assert len(ids) == len(set(ids))
    assert len({card.key for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card.source and card.key in card.name.lower()
        assert all(re.fullmatch("[0-9a-f]{4}(:[0-9a-f]{2})?", one) for one in card.pci)
        assert card.matrix in {"WMMA", "MFMA", None}
        vram = None if card.vram_gib is None else card.vram_gib * GIB
        assert identify(arch=card.arch, vram_bytes=vram, name=f"AMD {card.name} ").card is card


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (19.98, "7900 xt"),
        (24.0, "7900 xtx"),
        (16.0, "7900 gre"),
        (32.0, "w7800"),
        (48.0, None),  # W7900 or W7800 48GB
        (0.5, None),
    ],
)
def test_gfx1100_cards_are_told_apart_by_memory(gib: float, name: str | None) -> None:
    card = identify(arch="gfx1100:sramecc-:xnack-", vram_bytes=int(gib * GIB), name="ip discovery").card
    assert (card.key if card else None) == name


@pytest.mark.parametrize(
    ("device", "revision", "gib", "key"),
    [
        (0x744C, 0xCC, 20, "7900 xt"),
        (0x744C, 0xC8, 24, "7900 xtx"),
        (0x7550, 0xC3, 16, "9070"),
        (0x7449, 0x00, 48, "w7800 48gb"),
        (0x7408, 0x00, 64, "mi250x"),
        (0x164E, 0xC8, 1, "raphael"),
    ],
)
def test_one_chip_s_cards_are_told_apart_by_revision(device: int, revision: int, gib: int, key: str) -> None:
    card = identify(arch=None, vram_bytes=gib * GIB, device_id=device, revision=revision).card
    assert card is not None and card.key == key


def test_a_pci_id_wins_over_a_name_and_a_contradiction_is_no_identity() -> None:
    known = {"device_id": 0x744C, "revision": 0xCC}
    assert identify(arch="gfx1100", vram_bytes=20 * GIB, name="Radeon RX 7900 XTX", **known).reason.startswith("PCI")
    for identity in (
        identify(arch="gfx1100", vram_bytes=24 * GIB, **known),
        identify(arch="gfx1100", vram_bytes=24 * GIB, name="AMD Radeon RX 7900 XT"),
    ):
        assert identity.card is None and "24.0 GiB" in identity.reason
    assert identify(arch="gfx1036", vram_bytes=None, name="AMD Radeon RX 7900 XT").card is None
    other = identify(arch="gfx1100", vram_bytes=20 * GIB, device_id=0x744C, revision=0x01).card
    assert other is not None and other.key == "7900 xt"


def test_unknown_stays_unknown_with_a_reason_but_an_integrated_gpu_needs_no_memory() -> None:
    for arch, vram in ((None, 20 * GIB), ("gfx1100", None), ("gfx1234", 20 * GIB), ("", 0)):
        identity = identify(arch=arch, vram_bytes=vram)
        assert identity.card is None and identity.reason
    card = identify(arch="gfx1151", vram_bytes=None).card
    assert card is not None and card.integrated


def test_the_figures_of_the_main_card() -> None:
    card = identify(arch="gfx1100", vram_bytes=20 * GIB).card
    assert card is not None
    assert (card.bandwidth_gb_s, card.power_w, card.pcie) == (800, 315, (4, 16))
    assert (card.bf16, card.fp8, card.matrix) == (True, False, "WMMA")
