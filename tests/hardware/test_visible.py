"""One process sees exactly one card, whoever started it, and the user's own filter wins."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hf_rocm_tune.hardware import kfd, visible

HIP = "HIP_VISIBLE_DEVICES"


def nodes_of(root: Path, machines: ModuleType, *gpus: tuple[int, int]) -> tuple[kfd.GpuNode, ...]:
    """GPUs of (gfx_target_version, VRAM in MiB) beside a CPU."""
    machines.write_cpu(root)
    for number, (version, mib) in enumerate(gpus, start=1):
        machines.write_gpu(root, number, version=version, vram=mib << 20, location=number << 8)
    return kfd.read_topology(root).nodes


XT = (110000, 20464)
XTX = (110000, 24560)
IGPU = (100306, 512)


def test_without_an_amd_gpu_nothing_is_set_whatever_the_launcher_says() -> None:
    for rank in (None, 0, 1):
        choice = visible.choose((), {"CUDA_VISIBLE_DEVICES": "0,1"}, local_rank=rank, local_world_size=2)
        assert choice.variables == {}
        assert not choice.troubled


def test_a_card_on_its_own_needs_no_variable(tmp_path: Path, machines: ModuleType) -> None:
    choice = visible.choose(nodes_of(tmp_path, machines, XT), {})
    assert choice.variables == {}
    assert choice.node is not None
    assert choice.node.arch == "gfx1100"


def test_an_integrated_gpu_that_comes_first_is_hidden(tmp_path: Path, machines: ModuleType) -> None:
    choice = visible.choose(nodes_of(tmp_path, machines, IGPU, XT), {})
    assert choice.variables == {HIP: "1"}
    assert "gfx1036" in choice.reason


@pytest.mark.parametrize("version", [90012, 100306, 110003, 110500, 110501])
def test_an_integrated_gpu_with_much_memory_is_hidden_too(tmp_path: Path, machines: ModuleType, version: int) -> None:
    assert visible.choose(nodes_of(tmp_path, machines, (version, 65536), XT), {}).variables == {HIP: "1"}


def test_an_integrated_gpu_alone_is_left_visible(tmp_path: Path, machines: ModuleType) -> None:
    choice = visible.choose(nodes_of(tmp_path, machines, (110501, 65536)), {})
    assert choice.variables == {}
    assert choice.node is not None


def test_a_node_with_cpu_cores_is_integrated_whatever_its_architecture(tmp_path: Path, machines: ModuleType) -> None:
    apu = {"cpu_cores_count": 16, "simd_count": 24, "gfx_target_version": 119900}
    machines.write_node(tmp_path, 0, apu, banks=[(1, 32 << 30)])
    machines.write_gpu(tmp_path, 1)
    assert visible.choose(kfd.read_topology(tmp_path).nodes, {}).variables == {HIP: "1"}


def test_of_two_unlike_cards_the_larger_one_is_taken_not_the_first(tmp_path: Path, machines: ModuleType) -> None:
    assert visible.choose(nodes_of(tmp_path, machines, XT, XTX), {}).variables == {HIP: "1"}


def test_two_ranks_never_share_a_card(tmp_path: Path, machines: ModuleType) -> None:
    nodes = nodes_of(tmp_path, machines, XT, IGPU, XT)
    seen = [visible.choose(nodes, {}, local_rank=rank, local_world_size=2).variables[HIP] for rank in (0, 1)]
    assert seen == ["0", "2"]


def test_more_ranks_than_cards_sets_nothing_and_says_so(tmp_path: Path, machines: ModuleType) -> None:
    nodes = nodes_of(tmp_path, machines, XT, IGPU)
    for rank in (0, 1):
        choice = visible.choose(nodes, {}, local_rank=rank, local_world_size=2)
        assert choice.variables == {}
        assert choice.troubled


def test_a_split_sees_all_cards_but_no_integrated_gpu(tmp_path: Path, machines: ModuleType) -> None:
    assert visible.choose(nodes_of(tmp_path, machines, XT, IGPU, XTX), {}, split=True).variables == {HIP: "2,0"}


def test_a_split_over_discrete_cards_needs_no_variable(tmp_path: Path, machines: ModuleType) -> None:
    assert visible.choose(nodes_of(tmp_path, machines, XT, XT), {}, split=True).variables == {}


def test_indices_that_are_not_certain_are_not_used(tmp_path: Path, machines: ModuleType) -> None:
    choice = visible.choose(nodes_of(tmp_path, machines, XT, XT), {}, complete=False)
    assert choice.variables == {}
    assert choice.troubled


@pytest.mark.parametrize("name", visible.FILTERS)
@pytest.mark.parametrize("value", ["0", "1,0", "", "-1", "GPU-abc,GPU-def"])
def test_the_user_s_filter_is_kept_in_a_process_of_its_own(
    tmp_path: Path, machines: ModuleType, name: str, value: str
) -> None:
    nodes = nodes_of(tmp_path, machines, XT, XT)
    environ = {name: value}
    visible.enact(visible.choose(nodes, environ), environ)
    assert environ == {name: value}


@pytest.mark.parametrize("name", visible.FILTERS)
def test_each_rank_gets_its_entry_of_the_user_s_list(tmp_path: Path, machines: ModuleType, name: str) -> None:
    nodes = nodes_of(tmp_path, machines, XT, XT, XT)
    environ = {name: " 2, 0"}
    choices = [visible.choose(nodes, environ, local_rank=rank, local_world_size=2) for rank in (0, 1)]
    assert [dict(choice.variables) for choice in choices] == [{name: "2"}, {name: "0"}]
    assert all("user" in choice.reason for choice in choices)


def test_a_user_s_list_that_is_too_short_or_nested_is_kept(tmp_path: Path, machines: ModuleType) -> None:
    nodes = nodes_of(tmp_path, machines, XT, XT, XT)
    short = visible.choose(nodes, {HIP: "0,1"}, local_rank=0, local_world_size=3)
    assert (dict(short.variables), short.troubled) == ({}, True)
    nested = {HIP: "0,1", "ROCR_VISIBLE_DEVICES": "1,2"}
    assert visible.choose(nodes, nested, local_rank=1, local_world_size=2).variables == {}


def test_a_rank_does_not_take_its_parent_s_choice_for_the_user_s(tmp_path: Path, machines: ModuleType) -> None:
    """A launcher that imports the package narrows itself to one card; its ranks inherit that variable."""
    nodes = nodes_of(tmp_path, machines, XT, XT)
    parent: dict[str, str] = {}
    visible.enact(visible.choose(nodes, parent), parent)
    assert parent[HIP] == "0"
    child = dict(parent)
    visible.enact(visible.choose(nodes, child, local_rank=1, local_world_size=2), child)
    assert child[HIP] == "1"
    worker = dict(child)
    visible.enact(visible.choose(nodes, worker, local_rank=1, local_world_size=2), worker)
    assert worker == child


def test_narrowing_the_user_s_list_twice_is_narrowing_it_once(tmp_path: Path, machines: ModuleType) -> None:
    nodes = nodes_of(tmp_path, machines, XT, XT, XT)
    rank = {"CUDA_VISIBLE_DEVICES": "2,1"}
    for _ in range(3):
        visible.enact(visible.choose(nodes, rank, local_rank=1, local_world_size=2), rank)
        assert rank["CUDA_VISIBLE_DEVICES"] == "1"
    rank["CUDA_VISIBLE_DEVICES"] = "0"  # changed by the user below us: no longer ours
    visible.enact(visible.choose(nodes, rank, local_rank=1, local_world_size=2), rank)
    assert rank == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, [0, 1, 2]),
        ({HIP: "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({HIP: "2", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({HIP: "", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", HIP: "0"}, [2]),
        ({HIP: "0,7,1"}, [0]),
        ({HIP: "-1"}, []),
        ({HIP: "GPU-123"}, None),
        ({HIP: "--1"}, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_what_the_filters_leave_visible(
    tmp_path: Path, machines: ModuleType, environ: dict[str, str], seen: list[int] | None
) -> None:
    left = visible.visible_nodes(nodes_of(tmp_path, machines, XT, IGPU, XTX), environ)
    assert (None if left is None else [node.index for node in left]) == seen


@pytest.mark.parametrize("text", ["", "-1", "x", "1.0", "\u0661", "9" * 30])
def test_a_rank_that_is_no_number_is_no_rank(text: str) -> None:
    assert visible.local_int({"LOCAL_RANK": text}, "LOCAL_RANK") is None
    assert visible.local_int({"LOCAL_RANK": " 3 "}, "LOCAL_RANK") == 3
