"""``hf-rocm-tune plan --split``: what it prints, the recipe that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hf_rocm_tune import arguments, cli
from hf_rocm_tune.memory.plan import GIB
from tests import tiny


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the command sets it; so it is taken back


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model of two layers."""
    return str(tiny.build("llama3", tmp_path_factory.mktemp("models")))


SMALL = ("--seq", "32", "--effective_batch", "2", "--method", "lora", "--gpu", "rx7900xt", "--desktop_gib", "0")


def test_each_card_is_shown_and_the_recipe_splits_alike(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "split.yaml"
    given = ["plan", "--model", model, "--cards", "2", "--split", *SMALL]
    assert cli.main([*given, "--emit", str(recipe), "--dataset_name", "org/data"]) == 0
    shown = capsys.readouterr().out
    assert "card 0: layers 0 to 0, embeddings, head and loss:" in shown and "card 1: layers 1 to 1:" in shown
    assert "--split_layers 1,1" in shown and f"recipe: {recipe}" in shown
    assert yaml.safe_load(recipe.read_text())["split_layers"] == "1,1"
    job = arguments.parse(["--config", str(recipe)], accelerator=False)
    assert job.ranks.split_layers == "1,1"
    assert cli.main([*given, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and [row["layers"] for row in values["cards"]] == [1, 1]
    assert all(row["total"] + row["spare"] == pytest.approx(row["usable"]) for row in values["cards"])
    assert values["cards"][0]["usable"] == pytest.approx(19.9 * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--split", "half"], "give auto, or layers of each card"),
        (["--split", "2"], "does not fit a model of 2 layers"),
        (["--split", "--cards", "3"], "2 layers cannot be shared out over 3 cards"),
        (["--split", "1", "--cards", "3"], "is for 2 cards, --cards says 3"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", model, *flags, *SMALL]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1


def test_what_fits_nowhere_is_shown_and_ends_with_code_5(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq", "32", "--effective_batch", "1", "--method", "lora", "--vram", "1", "--desktop_gib", "1"]
    assert cli.main(["plan", "--model", model, "--split", *small]) == 5
    printed = capsys.readouterr()
    assert "nothing fits; nearest: lora" in printed.out
    assert "GiB are missing on the fullest of 2 cards" in printed.err
