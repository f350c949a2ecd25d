"""What a notebook user hands over for a card: a model on the host is moved, one on the card compared with its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer
from tests.e2e.conftest import done


@pytest.fixture(scope="module")
def cases(
    card_server: CommandServer, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What `handed_over.py` says on the simulated card."""
    script, out = Path(__file__).with_name("handed_over.py"), tmp_path_factory.mktemp("handed_over")
    ran = done(card_server.run(str(model_of("llama3")), str(out), env={"SCRIPT": str(script)}))
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"case"')]
    return {row.pop("case"): row for row in rows}


@pytest.mark.parametrize("name", ["host", "host, with a reference"])
def test_a_model_on_the_host_is_moved_and_verified(cases: dict[str, dict[str, Any]], name: str) -> None:
    found = cases[name]
    assert (found["device"], found["complete"], len(found["losses"])) == ("cuda", True, 1)
    assert "equal to its source on arrival" in found["verified_by"]
    assert not any("file" in how for how in found["verified_by"])


def test_a_reference_model_is_moved_too_and_counts(cases: dict[str, dict[str, Any]]) -> None:
    weights = 656_768  # of the model alone
    assert cases["host, with a reference"]["bytes"] == 2 * weights


def test_a_model_on_the_card_is_compared_with_its_files(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["card"]
    assert found["complete"] and found["verified_by"]["equal to its file"] > 600_000
    assert found["losses"] == cases["host"]["losses"]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_compared_with_their_file_quantised_again(cases: dict[str, Any], bits: int) -> None:
    found = cases[f"card, {bits} bit"]
    assert found["complete"] and found["verified_by"]["equal to its file, quantised again on the device"] > 60_000


def test_the_model_of_an_earlier_trainer_trains_on(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["card, trained before"]
    assert found["complete"] and "verified on arrival, and trained since" in found["verified_by"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("card, get_peft_model", "lora_A.default.weight and 3 more (was on the device before training; no file holds"),
        ("card, from_config", "(was on the device before training; its weight files are unknown)"),
        (
            "card, 4 bit, changed",
            "1.mlp.up_proj.weight.quant_state.state2.absmax (was on the device before training; diff",
        ),
        ("card, changed weight", "model.norm.weight (was on the device before training; differs from model.saf"),
        ("card, changed table", "rotary_emb.inv_freq (was on the device before training; no file holds"),
    ],
)
def test_what_its_files_do_not_explain_stops_before_step_1_in_one_line(
    cases: dict[str, dict[str, Any]], name: str, reason: str
) -> None:
    (line,) = cases[name]["refused"].splitlines()
    assert reason in line
    assert "or on the host (loaded without device_map and without .to())" in line and "consent_unverified=True" in line


def test_with_consent_it_trains_and_says_what_was_not_verified(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["card, from_config, consent"]
    assert not found["complete"] and len(found["losses"]) == 1
    assert not any("computed" in how for how in found["verified_by"])  # lm_head's copy, of an unverified one
