"""Links are those between the card and the processor, not those inside the card; ids, BARs and counters are right."""

from __future__ import annotations

import pytest

from hf_rocm_tune.machine.pci import read_upward
from hf_rocm_tune.machine.survey import Gpu, survey
from hf_rocm_tune.machine.sysfs import RecordedTree
from tests.hardware.parts import STRIX_HALO, XT, XT_9070, Slot
from tests.hardware.trees import DEVICES, Built


def first(built: Built) -> Gpu:
    return survey(built.tree()).gpus[0]


def test_the_link_inside_the_card_does_not_hide_a_narrow_slot() -> None:
    """The GPU behind a Radeon's own switch always reads as x16; the slot shows at the switch's upstream port."""
    built = Built("invented").card(XT, slot=Slot(width=4))
    gpu = first(built)
    assert built.files[f"{DEVICES}/{gpu.address}/current_link_width"] == "16\n"
    (link,) = gpu.path
    assert (link.device, link.width.value, link.max_width.value) == ("0000:01:00.0", 4, 16)
    assert (link.port_max_width.value, link.speed.value) == (4, 16.0)


def test_an_idle_link_shows_what_it_can_do() -> None:
    (link,) = first(Built("invented").card(XT, slot=Slot(idle=True))).path
    assert (link.speed.value, link.max_speed.value, link.port_max_speed.value) == (2.5, 16.0, 16.0)


def test_an_older_slot_shows_at_the_upper_end() -> None:
    (link,) = first(Built("invented").card(XT_9070, slot=Slot(speed=8.0, idle=True))).path
    assert (link.max_speed.value, link.port_max_speed.value) == (32.0, 8.0)


def test_a_card_of_the_chipset_has_the_chipset_s_uplink_on_its_way() -> None:
    cpu, chipset = survey(Built("invented").card().card(slot=Slot(width=4, chipset=True)).tree()).gpus
    assert (cpu.behind_chipset, chipset.behind_chipset) == (False, True)
    assert [link.device for link in chipset.path] == ["0000:06:00.0", "0000:04:00.0"]
    assert (cpu.root_port, chipset.root_port) == ("0000:00:01.1", "0000:00:02.1")


def test_two_cards_of_the_chipset_share_its_uplink() -> None:
    slot = Slot(width=4, chipset=True)
    one, two = survey(Built("invented").card(slot=slot).card(slot=slot).tree()).gpus
    assert one.path[-1] == two.path[-1]
    assert one.path[0] != two.path[0]


def test_a_bridge_that_is_not_known_leaves_the_chipset_unknown() -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:00:01.1/vendor"] = "0x8086\n"
    assert first(built).behind_chipset is None
    built = Built("invented").card(slot=Slot(chipset=True))
    built.files[f"{DEVICES}/0000:00:02.1/vendor"] = "0x8086\n"
    assert first(built).behind_chipset is True


def test_a_card_without_a_switch_of_its_own_is_its_own_connector() -> None:
    gpu = first(Built("invented").nvidia(slot=Slot(width=8)))
    assert (gpu.vendor, gpu.driver.value, gpu.integrated) == ("nvidia", "nvidia", None)
    assert [(link.device, link.width.value) for link in gpu.path] == [(gpu.address, 8)]
    assert gpu.sensors.edge_c.reason == f"{gpu.address}: its driver is nvidia, not amdgpu"
    assert gpu.identity.card is None


def test_a_device_on_the_root_bus_has_no_port_above() -> None:
    """As a virtual machine shows a card that was passed through without a bridge."""
    built = Built("invented").card()
    built.links[f"{DEVICES}/0000:03:00.0"] = "../../../devices/pci0000:00/0000:03:00.0"
    gpu = first(built)
    assert (gpu.root_port, gpu.behind_chipset) == (None, None)
    (link,) = gpu.path
    assert link.width.value == 16
    assert link.port_max_width.value is None


def test_a_second_hierarchy_below_intel_s_vmd_begins_at_its_own_root() -> None:
    chain = "10000:00:02.0/10000:01:00.0"
    links = {f"{DEVICES}/10000:01:00.0": f"../../../devices/pci0000:64/0000:64:00.5/pci10000:00/{chain}"}
    upward = read_upward(RecordedTree({"schema": 1, "links": links}), "10000:01:00.0")
    assert upward.chain == ("10000:00:02.0", "10000:01:00.0")
    assert upward.root_port == "10000:00:02.0"


@pytest.mark.parametrize(
    "target",
    [
        "",
        "/",
        "..",
        "0000:03:00.0/..",
        "../../../devices/pci0000:00/0000:00:01.1",
        "../../../devices/pci0000:00/0000:03:00.0/0000:03:00.0",
        "../../../devices/pci0000:00/0000:00:01.1/nonsense/0000:03:00.0",
        "x" * 4000,
    ],
)
def test_a_way_that_makes_no_sense_ends_at_the_device(target: str) -> None:
    upward = read_upward(RecordedTree({"schema": 1, "links": {f"{DEVICES}/0000:03:00.0": target}}), "0000:03:00.0")
    assert upward.chain == ("0000:03:00.0",)
    assert upward.root_port is None
    assert len(upward.links) == 1


@pytest.mark.parametrize("width", ["0", "63", "255", "3", "-4", "x16", ""])
def test_what_a_sleeping_device_reads_as_is_no_width(width: str) -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:01:00.0/current_link_width"] = width
    (link,) = first(built).path
    assert link.width.value is None
    assert link.width.reason


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("16.0 GT/s PCIe", 16.0),
        ("8 GT/s", 8.0),
        ("2.5 GT/s", 2.5),
        ("Unknown", None),
        ("Unknown speed", None),
        ("1e9 GT/s", None),
    ],
)
def test_speeds_are_read_in_every_form_of_the_kernel(text: str, speed: float | None) -> None:
    built = Built("invented").card()
    built.files[f"{DEVICES}/0000:01:00.0/current_link_speed"] = f"{text}\n"
    assert first(built).path[0].speed.value == speed


def test_errors_are_counted_over_the_card_and_the_bridges_above_it() -> None:
    built = Built("invented").card(aer={"correctable": 5, "fatal": 1})
    root = f"{DEVICES}/0000:00:01.1"
    built.files[f"{root}/aer_dev_correctable"] = built.files[f"{root}/aer_dev_correctable"].replace("COR 0", "COR 2")
    assert {kind: reading.value for kind, reading in first(built).aer.items()} == {
        "correctable": 7,
        "nonfatal": 0,
        "fatal": 1,
    }


def test_a_machine_without_counters_has_none() -> None:
    built = Built("invented").card()
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
    built.files[f"{DEVICES}/0000:03:00.0/resource"] = text
    assert first(built).bar_bytes.value is None


def test_the_rom_and_virtual_functions_are_no_bars() -> None:
    built = Built("invented").card(bar_bytes=256 << 20)
    lines = built.files[f"{DEVICES}/0000:03:00.0/resource"].splitlines()
    lines[6] = "0x0000000000000000 0x0000000fffffffff 0x0000000000046200"
    built.files[f"{DEVICES}/0000:03:00.0/resource"] = "\n".join(lines)
    assert first(built).bar_bytes.value == 256 << 20


def test_a_card_of_another_driver_or_of_none_is_listed() -> None:
    passed, bare = survey(Built("invented").card(driver="vfio-pci").card(driver=None).tree()).gpus
    assert (passed.driver.value, bare.driver.reason) == ("vfio-pci", "no driver is bound")
    assert passed.identity.card == bare.identity.card
    assert passed.identity.card is not None
    assert (passed.integrated, bare.integrated) == (False, False)


def test_devices_are_in_numeric_order_and_other_classes_are_left_out() -> None:
    built = Built("invented")
    for address, kind in (
        ("0000:10:00.0", "0x038000"),
        ("ffff:9f:00.0", "0x120000"),
        ("0000:0a:00.0", "0x030200"),
        ("10000:01:00.0", "0x030000"),
        ("0000:02:00.0", "0x108000"),
        ("0000:03:00.0", "0x118000"),
        ("0000:04:00.0", "0x040300"),
    ):
        values = {"class": kind, "vendor": "0x1002", "device": "0x74a1", "revision": "0x00"}
        built.files.update({f"{DEVICES}/{address}/{name}": value for name, value in values.items()})
    found = [gpu.address for gpu in survey(built.tree()).gpus]
    assert found == ["0000:0a:00.0", "0000:10:00.0", "ffff:9f:00.0", "10000:01:00.0"]


def test_a_device_whose_ids_cannot_be_read_is_said_to_be_missing() -> None:
    built = Built("invented").card().igpu(STRIX_HALO)
    del built.files[f"{DEVICES}/0000:03:00.0/device"]
    built.errors[f"{DEVICES}/0000:03:00.0/device"] = "EACCES"
    machine = survey(built.tree())
    assert [gpu.address for gpu in machine.gpus] == ["0000:04:00.0"]
    assert machine.unlisted == (f"/{DEVICES}/0000:03:00.0/device: Permission denied",)


@pytest.mark.parametrize(("kind", "group"), [("DMA-FQ", True), ("identity", True), (None, False)])
def test_the_mode_of_the_iommu_is_read_of_the_card_s_group(kind: str | None, group: bool) -> None:
    machine = survey(Built("invented").iommu(kind).card().tree())
    (gpu,) = machine.gpus
    assert gpu.iommu_type.value == kind
    assert (gpu.iommu_group.value is not None) is group
    assert machine.kernel.iommu_present.value is (kind is not None)
    assert group or gpu.iommu_type.reason == "the device is in no IOMMU group"
