"""Wrong products under real command lines, put in below our code: a recovered run ends where a clean one without checks
ends, and what cannot be recovered ends the run before anything is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer, error_lines
from tests.e2e.conftest import ADAPTER, Job, MakeJob, done, report_of, sampled

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "bf16": False},
    "bf16": {"bf16": True, "gradient_checkpointing": True, "packing": True},
    "nf4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
    "streamed": {"stream_weights": 2},
}
RARE, SEED = 1 / 2000, 423  # of the products; the seed harms one before the kill and one after it
HARMS = {"float32": "swapped columns", "bf16": "zero tile", "nf4": "dropped k-block", "int8": "NaN", "streamed": "NaN"}


def wrong(**options: Any) -> dict[str, str]:
    """Variables of a run with wrong products, see `faulty_products.Faults`."""
    return {"WRONG_PRODUCTS": json.dumps(options)}


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """16 micro-batches, 28 products with frozen weights each."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": 8, "save_steps": 4, "check_arithmetic": "every"}
    return make_job("arithmetic", lora_dropout=0.1, **settings)


def assert_recovered(output: Path, clean: Path) -> None:
    """Something was wrong, all of it was recovered, and no trace is left."""
    counted = report_of(output)["arithmetic"]
    assert counted["disagreements"] == counted["recovered"] > 0
    assert (output / ADAPTER).read_bytes() == (clean / ADAPTER).read_bytes()


@pytest.mark.parametrize("way", sampled(WAYS, "nf4"))
def test_rare_wrong_products_leave_no_trace_in_the_adapter_a_kill_among_them(
    job: Job, way: str, tmp_path: Path
) -> None:
    clean = job.clean(check_arithmetic="off", **WAYS[way])
    env, out = wrong(kind=HARMS[way], rate=RARE, seed=SEED), tmp_path / "out"
    for code in (-9, 0):
        assert job.run(out, env=env, crash="step=6,kind=kill", **WAYS[way]).code == code
    assert_recovered(out, clean)


@pytest.mark.parametrize("way", sampled(WAYS, "bf16"))
@pytest.mark.parametrize("first", [0, 14])  # the first forward or backward product
def test_products_that_are_wrong_for_good_end_the_run_before_its_first_update(
    job: Job, way: str, first: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = {"kind": HARMS[way], "shape": [64, 128] if first else None, "first": first}
    result = job.run(out, env=wrong(**options), check_arithmetic="sampled", **WAYS[way])
    (line,) = error_lines([result.stderr])
    assert result.code == 3 and "step 1: the" in line and "is wrong" in line
    assert not (out / ADAPTER).exists() and not list(out.glob("checkpoint-*"))


@pytest.mark.long
def test_a_rank_with_a_wrong_product_has_both_compute_the_step_again(job: Job, tmp_path: Path) -> None:
    clean = job.clean(ranks=2, check_arithmetic="off", max_steps=4)
    for rank in job.ranks(tmp_path / "out", each=[{}, wrong(kind="zero tile", count=1, first=40)], max_steps=4):
        done(rank)
    assert_recovered(tmp_path / "out", clean)


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
SHARDED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "fsdp2": (FSDP2, {}),
    "fsdp2, bf16": (FSDP2, {"bf16": True, "dtype": "bfloat16"}),
    "tensor parallel": ({}, {"tensor_parallel": True, "lora_dropout": 0.0}),
}
"""Variables and settings of two ranks that share the weights."""


@pytest.mark.parametrize("way", sampled(SHARDED, "fsdp2"))
def test_a_wrong_product_with_a_sharded_weight_is_not_used(job: Job, way: str, tmp_path: Path) -> None:
    """Its step is skipped; one that stays ends the run."""
    env, settings = SHARDED[way]
    once = env | wrong(kind="zero tile", count=1, first=90)
    for rank in job.ranks(tmp_path / "once", each=[env, once], max_steps=3, **settings):
        done(rank)
    counted = report_of(tmp_path / "once")["arithmetic"]
    assert counted["residuals"] > counted["checked"] > 0 == counted["cleared"] == counted["never_seen"]
    assert counted["disagreements"] >= 1
    always = env | wrong(kind="zero tile")
    results = job.ranks(tmp_path / "always", each=[env, always], max_steps=3, check_arithmetic="sampled", **settings)
    assert [rank.code for rank in results] == [3, 3]
    assert "no library computes it right" in results[1].stderr and not (tmp_path / "always" / ADAPTER).exists()


@pytest.mark.long
@pytest.mark.parametrize("way", SHARDED)
def test_checks_of_sharded_weights_change_nothing(job: Job, way: str, tmp_path: Path) -> None:
    env, settings = SHARDED[way]
    for mode in ("off", "every"):
        for rank in job.ranks(tmp_path / mode, each=[env, env], max_steps=4, check_arithmetic=mode, **settings):
            done(rank)
    assert (tmp_path / "every" / ADAPTER).read_bytes() == (tmp_path / "off" / ADAPTER).read_bytes()
    assert report_of(tmp_path / "every")["arithmetic"]["disagreements"] == 0


def test_products_in_4_bits_that_autocast_computes_in_a_coarser_dtype_are_no_faults(job: Job, tmp_path: Path) -> None:
    """bitsandbytes gives a result in the dtype of its input, and does not show that autocast has rounded it."""
    job.done(tmp_path / "out", load_in_4bit=True, dtype="float32", bf16=True, max_steps=2)
    counted = report_of(tmp_path / "out")["arithmetic"]
    assert counted["disagreements"] == 0 < counted["checked"]


CARDS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({"bf16": True}, 1),
    "split": ({"dtype": "float32", "bf16": False, "split_layers": "auto"}, 2),
    "nf4": ({"load_in_4bit": True}, 1),
}


@pytest.mark.parametrize("case", sampled(CARDS, "split"))
def test_kernels_of_the_card_that_are_wrong_now_and_then_or_for_good(
    make_job: MakeJob, card_server: CommandServer, case: str, tmp_path: Path
) -> None:
    settings, cards = CARDS[case]
    job = make_job("arithmetic-card", server=card_server, max_steps=6, save_steps=6, doctor="off", **settings)
    job.env["SIMCARD_DEVICES"] = str(cards)
    clean = job.clean(check_arithmetic="off", **settings)
    out = tmp_path / "out"
    job.done(out, env={"SIMCARD_WRONG": "0.003,3"}, check_arithmetic="every")
    assert_recovered(out, clean)
    result = job.run(tmp_path / "stopped", env={"SIMCARD_WRONG": "1,3"})
    assert result.code == 3 and "no library computes it right" in result.stderr
    assert not (tmp_path / "stopped" / ADAPTER).exists()
