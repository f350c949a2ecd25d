"""What the kernel says of direct copies and atomics is passed on, and what it does not say is unknown."""

from __future__ import annotations

import pytest

from hf_rocm_tune.machine.survey import Gpu, survey
from hf_rocm_tune.machine.sysfs import RecordedTree
from tests.hardware.parts import GIB, P2P_CONFIG
from tests.hardware.trees import NODES, Built


def gpus_of(built: Built) -> tuple[Gpu, ...]:
    return survey(built.tree()).gpus


def test_two_cards_with_everything_switched_on_reach_each_other_and_not_the_processor_s_gpu() -> None:
    one, two, igpu = gpus_of(Built("invented").card().card().igpu())
    assert (one.peers.value, two.peers.value) == ((two.address,), (one.address,))
    assert igpu.peers.value == ()
    assert (one.atomics.value, two.atomics.value) == (True, True)


@pytest.mark.parametrize(
    "built",
    [
        Built("no support in the kernel").kernel(config={**P2P_CONFIG, "CONFIG_HSA_AMD_P2P": "n"}).card().card(),
        Built("switched off").kernel(parameters={"pcie_p2p": "N"}).card().card(),
        Built("small BARs").card(bar_bytes=GIB // 4).card(bar_bytes=GIB // 4),
        Built("one card").card(),
    ],
    ids=lambda built: built.recording()["source"],
)
def test_cards_that_may_not_reach_each_other_have_no_peers(built: Built) -> None:
    assert all(gpu.peers.value == () for gpu in gpus_of(built))


@pytest.mark.parametrize(("flags", "passes"), [(1, True), (1 | 1 << 2, False), (1 | 1 << 3, False), (1 | 1 << 4, True)])
def test_atomics_are_told_by_the_flags_of_the_link_to_the_processor(flags: int, passes: bool) -> None:
    built = Built("invented").card()
    built.files[f"{NODES}/1/io_links/0/properties"] = f"type 2\nnode_from 1\nnode_to 0\nflags {flags}\n"
    assert gpus_of(built)[0].atomics.value is passes


@pytest.mark.parametrize("text", ["", "type 2\n", "node_to 1\nflags 1\n", "node_to 0\nflags x\n"])
def test_a_link_that_says_nothing_leaves_atomics_unknown(text: str) -> None:
    built = Built("invented").card()
    built.files[f"{NODES}/1/io_links/0/properties"] = text
    (gpu,) = gpus_of(built)
    assert gpu.atomics.value is None
    assert gpu.atomics.reason


def test_a_kernel_without_such_links_says_nothing() -> None:
    built = Built("invented").card()
    recording = built.recording()
    del recording["names"][f"{NODES}/1/p2p_links"]
    (gpu,) = survey(RecordedTree(recording)).gpus
    assert gpu.peers.value is None
    (unlisted,) = gpus_of(Built("invented").card(kfd=False))
    assert unlisted.peers.reason == unlisted.atomics.reason == "the compute driver (KFD) does not list the device"
