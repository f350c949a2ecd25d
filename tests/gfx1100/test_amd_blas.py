"""The simulated card's products by AMD's own rocBLAS and hipBLASLt, executed; skipped where they were not fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gfx1100 import rocm_libs
from tests.gfx1100.test_kernels import on_card

BOUNDS = {"bfloat16": 2.0e-3, "float16": 2.5e-4, "float32": 3e-7}
"""Distances from float64, of norms: half a unit in the last place, spread evenly, is a relative 0.29 units."""
Products = Callable[..., tuple[dict[tuple[str, str, bool], dict[str, Any]], Counter[str]]]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Products:
    """Runs `amd_products`; its rows by case, dtype and preferred library, and the kernels that ran."""
    try:
        rocm_libs.directory()
    except rocm_libs.Missing as missing:
        pytest.skip(str(missing))

    def run(*dtypes: str, **env: str) -> Any:
        tmp: Path = tmp_path_factory.mktemp("products")
        rows, kernels = on_card(
            tmp,
            *dtypes,
            module="tests.gfx1100.amd_products",
            command=rocm_libs.command,
            **rocm_libs.environment(),
            **env,
        )
        return {(row["case"], row["dtype"], row["hipblaslt"]): row for row in rows}, Counter(kernels)

    return run


def test_products_of_torch_are_right_and_the_libraries_own(products: Products) -> None:
    """Every layout, batches, groups, in place, into columns, with biases: as float64 has them, up to rounding. Those of
    8-bit layers have no rounding."""
    rows, kernels = products("bfloat16", "float32", "int8")
    assert len(rows) == 2 * 18 + 17 + 2
    for (case, dtype, _), row in rows.items():
        if dtype == "int8":
            assert row["wrong"] == 0, row
        elif case == "checked":
            assert row["residual"] < 0.5, row
        else:
            assert row["distance"] < BOUNDS["float32" if case == "to float32" else dtype], row
    assert sum(kernels.values()) >= len(rows) and all(name.startswith("Cijk_") for name in kernels), kernels
    # rocBLAS by default; hipBLASLt for a bias in 16 bits, for int8, and where it is preferred: its kernels take a
    # struct. Two groups have rows.
    theirs = sum(count for name, count in kernels.items() if "UserArgs" in name)
    assert theirs == 18 + 1 + 1 + 2, kernels
    integers = [name for name in kernels if "_I8II_" in name]
    assert integers and all("_MI16x16x1" in name for name in integers), kernels
    assert all("_MI16x16x1" in name for name in kernels if "_BBS_" in name), "no matrix instructions"


@pytest.mark.long
def test_products_of_halves(products: Products) -> None:
    rows, _ = products("float16")
    for (case, dtype, _), row in rows.items():
        if case == "checked":
            assert row["residual"] < 0.5, row
            continue
        assert row["distance"] < BOUNDS["float32" if case == "to float32" else dtype], row


MUTANTS = {
    "forward": ("^Cijk_Alik_Bljk_BBS_BH_MT", "v_wmma", 3),
    "backward": ("^Cijk_Ailk_Bljk_BBS_BH_MT", "s_barrier", 1),
    "gradient": ("^Cijk_Ailk_Bjlk_BBS_BH_MT", "s_waitcnt", 1),
}
"""An instruction less in the kernels of each layout: of WMMA, a barrier, a wait."""


def test_a_kernel_of_the_library_without_one_instruction_is_found(products: Products) -> None:
    """By the comparison with float64, by the checks of a layer's product, and by the interpreter's own checks."""
    lines = "\n".join(f"{kernels}={instructions}={number}" for kernels, instructions, number in MUTANTS.values())
    rows, _ = products("bfloat16", SIMCARD_GFX1100_MUTANTS=lines)
    assert rows["forward", "bfloat16", False]["distance"] > 10 * BOUNDS["bfloat16"]
    assert rows["checked", "bfloat16", False]["residual"] > 10 and rows["checked", "bfloat16", True]["residual"] < 0.5
    assert "without a barrier between" in rows["backward", "bfloat16", False]["error"]
    assert "the program has not waited for the load into it" in rows["gradient", "bfloat16", False]["error"]
