"""The kernel's list of GPUs: right on real forms, silent on nonsense, never an exception."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hf_rocm_tune.machine import kfd, sysfs
from hf_rocm_tune.machine.sysfs import LiveTree, RecordedTree, RecordingTree

NODES = "sys/class/kfd/kfd/topology/nodes"
NONSENSE = [
    b"",
    b"\n\n",
    b"\x00\x01\xff\xfe",
    b"\xff\xfe",
    b"simd_count\n",
    b"simd_count x\n",
    b"a b c d\n",
    b"-1\n",
    b"simd_count 1e9\ngfx_target_version 11\xc2\xb2\n",
    b"9" * 5000,
    b"simd_count 99999999999999999999\n",
]


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (110000, "gfx1100"),
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (100306, "gfx1036"),
        (110003, "gfx1103"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (90006, "gfx906"),
    ],
)
def test_architecture_is_spelled_as_llvm_spells_it(version: int, arch: str) -> None:
    assert kfd.decode_arch(version) == arch


def test_a_7900_xt_is_read_whole(tmp_path: Path, machines: ModuleType) -> None:
    machines.write_cpu(tmp_path)
    machines.write_gpu(tmp_path, 1, location=0x03FA, name="navi31")
    (node,) = kfd.read_topology(tmp_path).nodes
    assert (node.index, node.node, node.arch, node.gfx_target_version) == (0, 1, "gfx1100", 110000)
    assert (node.vram_bytes, node.pci_address, node.name) == (20 << 30, "0000:03:1f.2", "navi31")
    assert not node.has_cpu


def test_nodes_are_in_numeric_not_in_lexical_order(tmp_path: Path, machines: ModuleType) -> None:
    machines.write_cpu(tmp_path)
    for number, version in ((2, 110000), (10, 120001), (1, 100306)):
        machines.write_gpu(tmp_path, number, version=version)
    topology = kfd.read_topology(tmp_path)
    assert [(node.index, node.node, node.arch) for node in topology.nodes] == [
        (0, 1, "gfx1036"),
        (1, 2, "gfx1100"),
        (2, 10, "gfx1201"),
    ]
    assert topology.complete
    assert topology.reasons == ()


def test_vram_split_by_a_small_bar_is_added_and_system_memory_is_not(tmp_path: Path, machines: ModuleType) -> None:
    properties = {"simd_count": 168, "gfx_target_version": 110000}
    machines.write_node(tmp_path, 0, properties, banks=[(1, 1 << 28), (2, (20 << 30) - (1 << 28)), (0, 1 << 36)])
    (node,) = kfd.read_topology(tmp_path).nodes
    assert node.vram_bytes == 20 << 30
    assert node.pci_address is None


def test_a_machine_without_the_driver_has_no_gpu_and_is_completely_known(tmp_path: Path) -> None:
    topology = kfd.read_topology(tmp_path)
    assert (topology.nodes, topology.complete) == ((), True)
    assert "no AMD GPU" in topology.reasons[0]


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_in_any_file_makes_the_reading_uncertain_never_an_error(
    tmp_path: Path, machines: ModuleType, content: bytes
) -> None:
    machines.write_cpu(tmp_path)
    machines.write_gpu(tmp_path, 1)
    machines.write_gpu(tmp_path, 2)
    broken = tmp_path / NODES / "1"
    for file in ("name", "mem_banks/0/properties"):
        (broken / file).write_bytes(content)
    topology = kfd.read_topology(tmp_path)
    assert [node.vram_bytes for node in topology.nodes] == [None, 20 << 30]
    assert topology.complete
    assert topology.reasons
    (broken / "properties").write_bytes(content)
    topology = kfd.read_topology(tmp_path)
    assert [node.node for node in topology.nodes] == [2]
    assert not topology.complete


def test_a_directory_where_a_file_belongs_is_unreadable(tmp_path: Path, machines: ModuleType) -> None:
    machines.write_gpu(tmp_path, 1)
    file = tmp_path / NODES / "1/properties"
    file.unlink()
    file.mkdir()
    assert not kfd.read_topology(tmp_path).complete


def test_a_forbidden_node_is_reported_with_the_system_s_words(tmp_path: Path, machines: ModuleType) -> None:
    machines.write_gpu(tmp_path, 1)
    machines.write_gpu(tmp_path, 2)
    tree = RecordingTree(LiveTree(tmp_path))
    kfd.read_topology(tree)
    recording = tree.recording()
    # chmod does not keep root out; a container's device filter answers like this.
    del recording["files"][f"{NODES}/1/properties"]
    recording["errors"][f"{NODES}/1/properties"] = "EPERM"
    topology = kfd.read_topology(RecordedTree(recording))
    assert [node.node for node in topology.nodes] == [2]
    assert not topology.complete
    assert "Operation not permitted" in topology.reasons[0]


def test_an_oversized_file_is_not_taken_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    reading = sysfs.read_text(tmp_path, "/huge")
    assert reading.value is None
    assert "more than" in reading.reason


@pytest.mark.parametrize("text", ["+1", "-1", "1_0", " ", "0x10", "\u00b2", "\u0661", "18446744073709551616"])
def test_only_plain_decimal_numbers_of_64_bits_are_numbers(tmp_path: Path, text: str) -> None:
    assert sysfs.parse_int(text) is None
    (tmp_path / "number").write_text(text)
    reading = sysfs.read_int(tmp_path, "number")
    assert reading.value is None
    assert reading.reason


def test_a_number_is_read_and_its_white_space_is_not(tmp_path: Path) -> None:
    (tmp_path / "number").write_text(" 42\n")
    assert sysfs.read_int(tmp_path, "number").value == 42
