"""The HIP runtime's stand-in, asked as AMD's libraries ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gfx1100.test_kernels import on_card


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process with two cards found."""
    tmp: Path = tmp_path_factory.mktemp("hip")
    return on_card(tmp, module="tests.gfx1100.own_kernels", SIMCARD_DEVICES="2", SIMCARD_DELAYS="1000,2000,0,0")[0]


def test_hidden_arguments_are_the_runtimes_however_the_others_come(said: list[dict[str, Any]]) -> None:
    """rocBLAS packs its arguments itself, and leaves the hidden ones out or to the runtime."""
    rows = [each for each in said if "stored" in each]
    assert len(rows) == 12
    for row in rows:
        # The number given, 3 by 2 workgroups of 32 lanes, two dimensions, and no heap.
        assert row["stored"] == [77, 3, 2, 32, 2, 0], row
    assert {"uneven": 1} in said  # a launch in lanes that are no whole workgroups


def test_memory_is_the_cards_until_it_is_freed(said: list[dict[str, Any]]) -> None:
    found = {name: value for each in said for name, value in each.items()}
    assert (found["devices"], found["set"], found["beyond"] != 0) == (2, 1, True)
    expected = [8 * (at // 16) + at % 16 if at % 16 < 8 else 0xAB for at in range(64)]
    assert found["copied"] == expected
    assert (found["known"], found["gone"], found["twice"] != 0) == (0, "hipErrorInvalidValue", True)
    assert "kernel told" in found["freed"] and "lane 0 writes 4 bytes" in found["freed"]
