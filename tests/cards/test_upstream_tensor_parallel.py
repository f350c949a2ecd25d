"""What upstream's own tensor parallelism (transformers' plan, then PEFT) can do with LoRA, and what it cannot.

``--tensor_parallel`` follows transformers' plan and goes its own way from there (`hf_rocm_tune.cards.tensor_parallel`).
A test of a limit that turns red says that upstream can now: then ask whether ours is still needed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.cards.pair import Outcomes, run_pair


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Outcomes:
    """What each rank reports, by case."""
    folder = tmp_path_factory.mktemp("upstream-tp")
    model = tiny.build("llama3", folder / "models")
    return run_pair("tests.cards.upstream_tensor_parallel_rank", folder / "store", checkout, str(model))


def test_lora_on_layers_that_are_cut_by_rows_has_the_gradients_of_one_process(outcomes: Outcomes) -> None:
    for rank in outcomes:
        row = rank["colwise"]
        assert row["error"] is None
        assert row["losses"][0] == pytest.approx(row["losses"][1], rel=1e-6) and row["off"] < 1e-6


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("rowwise", "RuntimeError: shape '["),  # o_proj, down_proj: A is made with the input size of one rank
        ("4-bit", "AttributeError: 'DTensor' object has no attribute 'compress_statistics'"),
        ("8-bit", "AttributeError: 'DTensor' object has no attribute 'CB'"),
    ],
)
def test_upstream_fails_on_the_rest(outcomes: Outcomes, case: str, error: str) -> None:
    for rank in outcomes:
        assert rank[case]["error"] and rank[case]["error"].startswith(error)
