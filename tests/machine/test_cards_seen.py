"""A process on its own sees one card, several ranks all see the same ones, and the user's own filter wins."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.machine import process
from hf_rocm_tune.machine.gpus import GpuNode, decode_arch

HIP = "HIP_VISIBLE_DEVICES"


def nodes_of(*gpus: tuple[int, int], has_cpu: bool = False) -> tuple[GpuNode, ...]:
    """GPUs of (gfx_target_version, VRAM in MiB); ``has_cpu`` is of the first."""
    return tuple(
        GpuNode(
            index=index,
            arch=decode_arch(version),
            vram_bytes=mib << 20,
            pci_address=f"0000:{index + 1:02x}:00.0",
            has_cpu=has_cpu and index == 0,
        )
        for index, (version, mib) in enumerate(gpus)
    )


XT = (110000, 20464)
XTX = (110000, 24560)
IGPU = (100306, 512)


@pytest.mark.parametrize(
    ("gpus", "options", "shown"),
    [
        ((), {}, None),
        ((), {"processes": 2}, None),
        ((XT,), {}, None),
        ((IGPU, XT), {}, "1"),
        # However much memory firmware gives them.
        *((((version, 65536), XT), {}, "1") for version in (90012, 100306, 110003, 110500, 110501)),
        (((110501, 65536),), {}, None),
        ((XT, XTX), {}, "1"),  # the larger one, not the first
        # A rank that sees one card alone fails in Accelerate, which takes LOCAL_RANK as the device index.
        ((XT, IGPU, XT), {"processes": 2}, "0,2"),
        ((XT, XT), {"processes": 2}, None),
        ((XT, IGPU, XTX), {"split": True}, "2,0"),
        ((XT, XT), {"split": True}, None),
    ],
)
def test_integrated_gpus_are_hidden_and_a_process_on_its_own_sees_one_card(
    gpus: tuple[tuple[int, int], ...], options: dict[str, Any], shown: str | None
) -> None:
    choice = process.choose(nodes_of(*gpus), {}, **options)
    assert choice.variables == ({} if shown is None else {HIP: shown})
    assert choice.reason and not choice.troubled


@pytest.mark.parametrize(("gpus", "options"), [((XT, IGPU), {"processes": 2}), ((XT, XT), {"complete": False})])
def test_too_few_cards_and_indices_that_are_not_certain_set_nothing_and_say_so(
    gpus: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    choice = process.choose(nodes_of(*gpus), {}, **options)
    assert choice.variables == {} and choice.troubled


def test_a_node_with_cpu_cores_is_integrated_whatever_its_architecture() -> None:
    nodes = nodes_of((119900, 32 << 10), XT, has_cpu=True)
    assert process.choose(nodes, {}).variables == {HIP: "1"}


@pytest.mark.parametrize("name", process.FILTERS)
@pytest.mark.parametrize("value", ["1,0", "", "-1", "GPU-abc,GPU-def"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_user_s_filter_is_kept(name: str, value: str, processes: int) -> None:
    nodes = nodes_of(XT, XT)
    environ = {name: value}
    process.enact(process.choose(nodes, environ, processes=processes), environ)
    assert environ == {name: value}


def test_a_user_s_filter_with_too_few_cards_is_warned_about() -> None:
    nodes = nodes_of(XT, XT, XT)
    assert process.choose(nodes, {HIP: "0,1"}, processes=3).troubled
    assert not process.choose(nodes, {HIP: "0,1"}, processes=2).troubled
    nested = {HIP: "0,1", "ROCR_VISIBLE_DEVICES": "1"}
    assert process.choose(nodes, nested, processes=2).troubled
    assert not process.choose(nodes, {"ROCR_VISIBLE_DEVICES": "GPU-abc"}, processes=2).troubled  # cannot be known


def test_a_rank_does_not_take_its_parent_s_choice_for_the_user_s() -> None:
    """A launcher that imports the package sees one card; its ranks inherit that variable and must see both."""
    nodes = nodes_of(XT, XT)
    parent: dict[str, str] = {}
    process.enact(process.choose(nodes, parent), parent)
    assert parent[HIP] == "0"
    rank = dict(parent)
    process.enact(process.choose(nodes, rank, processes=2), rank)
    assert rank == {}


def test_a_loader_s_worker_comes_to_the_choice_of_its_rank() -> None:
    nodes = nodes_of(XT, IGPU, XT)
    rank: dict[str, str] = {}
    for _ in range(3):
        process.enact(process.choose(nodes, rank, processes=2), rank)
        assert rank[HIP] == "0,2"
    rank[HIP] = "0"  # changed by the user below us: no longer ours
    process.enact(process.choose(nodes, rank, processes=2), rank)
    assert rank == {HIP: "0"}


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
def test_what_the_filters_leave_visible(environ: dict[str, str], seen: list[int] | None) -> None:
    left = process.visible_nodes(nodes_of(XT, IGPU, XTX), environ)
    assert (None if left is None else [node.index for node in left]) == seen


def test_nonsense_from_a_launcher_means_one_process() -> None:
    for text, count in {"": 1, "-1": 1, "0": 1, "x": 1, "1.0": 1, "\u0661": 1, "9" * 30: 1, " 3 ": 3}.items():
        assert process.local_processes({"LOCAL_WORLD_SIZE": text}) == count
