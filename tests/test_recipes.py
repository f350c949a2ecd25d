"""Recipes: every one that ships is valid, fits the card it names by today's planner, and is found, shown and copied.

Whether they train is shown in ``tests/e2e/test_recipes.py``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.configs import RECIPES as recipes
from hf_rocm_tune.configs import planned_memory
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.settings import arguments
from hf_rocm_tune.settings import recipes as recipe_file

NAMES = [
    "gemma4_12b_qlora",
    "gemma_1b_lora",
    "glm47_flash_qlora",
    "gpt_oss_20b_lora",
    "llama_1b_lora",
    "llama_3b_lora",
    "ministral3_8b_qlora",
    "mistral_7b_qlora",
    "my_chats",
    "qwen35_9b_qlora",
    "qwen36_27b_qlora_streamed",
    "qwen3_vl_8b_qlora",
    "qwen_14b_lora_split",
    "qwen_14b_qlora",
    "qwen_30b_a3b_qlora",
    "qwen_32b_qlora_streamed",
    "qwen_4b_dpo_lora",
    "qwen_4b_grpo_lora",
    "qwen_4b_kto_lora",
    "qwen_4b_lora",
    "qwen_8b_dpo_qlora",
    "qwen_8b_lora_dual",
    "qwen_8b_qlora",
]
#: What a batch of a verb consists of; rows for all others.
UNITS = {"dpo": "pairs", "kto": "rows", "grpo": "answers"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``hf-rocm-tune recipes ...``: its exit code and what it printed."""

    def run_recipes(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["recipes", *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_recipes


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("learning_rat: 1", "did you mean learning_rate?"),
        ("report_to: nobody", "nobody"),
        ("optim: adam_of_nobody", "adam_of_nobody"),
        ("model_name_or_path: ./no-model", "model_name_or_path ./no-model"),
    ],
)
def test_validate_refuses_in_one_line_and_names_the_fault(setting: str, named: str, tmp_path: Path, run: Run) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("dataset_name: org/data\n" + "model_name_or_path: org/model\n" * ("model" not in setting) + setting)
    code, out, err = run("validate", str(mine))
    assert (code, out, err.count("\n")) == (2, "", 1) and named in err


@pytest.mark.parametrize(
    ("settings", "verb"),
    [
        ("learning_rate: 1.0e-5", "sft"),
        ("beta: 0.2\nloss_type: [ipo]", "dpo"),
        ("desirable_weight: 1.1", "kto"),
        ("num_generations: 4\nreward_funcs: [accuracy_reward]", "grpo"),
    ],
)
def test_a_recipe_of_the_users_own_is_checked_for_the_verb_that_has_its_keys(
    settings: str, verb: str, tmp_path: Path, run: Run
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"dataset_name: org/data\nmodel_name_or_path: org/model\n{settings}\n")
    code, out, err = run("validate", str(mine))
    assert (code, err) == (0, "") and f"all valid for {verb};" in out


def test_a_copy_is_checked_for_the_verb_that_its_comment_names(tmp_path: Path, run: Run) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(recipes.path("qwen_8b_dpo_qlora").read_text() + "beta: 0.3\n")
    assert "all valid for dpo;" in run("validate", str(mine))[1]
    mine.write_text(recipes.path("qwen_8b_dpo_qlora").read_text() + "desirable_weight: 0.3\n")
    code, _, err = run("validate", str(mine))
    assert code == 2 and "unknown key desirable_weight" in err


def test_all_are_listed_and_nothing_else() -> None:
    assert recipes.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_ships_is_valid_and_says_what_a_reader_needs(name: str, run: Run) -> None:
    code, out, _ = run("validate", name)
    assert code == 0 and "all valid" in out
    comment = recipes.path(name).read_text().split("\n\n")[0]
    dual = " --accelerate_config dual_rx7900xt" if "dual" in name else ""
    verb: Any = next((each for each in UNITS if f"_{each}_" in name), "sft")
    assert f"# Start:   hf-rocm-tune {verb} --config {name}{dual}\n" in comment
    for part in ("# Data: ", "# Needs: ", "# Memory: ", "Effective batch:"):
        assert part in comment
    job = arguments.parse(["--config", name], accelerator=False, method=verb)
    training, cards = job.training, 2 if dual else 1
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * cards
    assert f"= {rows} {UNITS.get(verb, 'rows')}" in comment
    assert job.tune.verify == "full"


#: One of each way to plan a recipe; with `make test-long` all of them.
PLANNED = ("gpt_oss_20b_lora", "qwen_14b_lora_split", "qwen_32b_qlora_streamed", "qwen_8b_dpo_qlora")


@pytest.mark.parametrize("names", [PLANNED, pytest.param(NAMES, marks=pytest.mark.long)], ids=["sample", "all"])
def test_batch_and_memory_of_recipes_are_what_the_planner_says_today(names: Sequence[str], checkout: Path) -> None:
    spec = importlib.util.spec_from_file_location("recipe_memory", checkout / "scripts/recipe_memory.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    card = script.card_memory(name="rx7900xt", desktop_gib=script.DESKTOP_GIB)
    told = {name: recipes.path(name).read_text() for name in names}
    today = {name: script.updated(text, *script.planned(name, card)) for name, text in told.items()}
    assert told == today, "run scripts/recipe_memory.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_leaves_2_gib_or_says_that_none_of_its_choices_does(name: str) -> None:
    told = planned_memory(name)
    used = [float(number) for number in re.findall(r"[\d.]+(?=(?: and [\d.]+)? of 19\.9 GiB)", told)]
    used += [float(number) for number in re.findall(r"(?<= and )[\d.]+(?= of 19\.9)", told)]
    assert used and (max(used) > 17.9) == ("nothing leaves 2 GiB free" in told)


def test_listed_with_purpose_and_memory(run: Run) -> None:
    code, out, _ = run("ls")
    assert (code, out) == run()[:2] and code == 0
    for name in NAMES:
        assert f"{name}\n  {recipes.describe(name)}\n  memory: {planned_memory(name)}\n  start: hf-rocm-tune " in out
    assert "  start: hf-rocm-tune dpo --config qwen_8b_dpo_qlora\n" in out


def test_shown_as_it_stands_and_copied_once(run: Run, tmp_path: Path) -> None:
    text = recipes.path("llama_1b_lora").read_text()
    assert run("show", "llama_1b_lora") == (0, text, "")
    target = tmp_path / "mine.yaml"
    assert run("cp", "llama_1b_lora", str(target)) == (0, f"{target}\n", "")
    assert run("show", str(target)) == (0, text, "")
    target.write_text("edited: true\n")
    assert run("cp", "llama_1b_lora", str(target))[0] == 2
    assert target.read_text() == "edited: true\n"
    assert run("cp", "llama_1b_lora", str(target), "--force")[0] == 0
    assert target.read_text() == text


def test_command_line_wins_over_a_recipe_given_by_name() -> None:
    job = arguments.parse(["--config=llama_1b_lora", "--max_length", "64", "--lora_r", "4"], accelerator=False)
    assert (job.training.max_length, job.model.lora_r, job.model.lora_alpha) == (64, 4, 32)
    assert job.model.model_name_or_path == "meta-llama/Llama-3.2-1B-Instruct"


def test_a_file_of_that_path_wins_over_a_name_and_a_directory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "llama_3b_lora"
    folder.mkdir()  # a run's output, say
    assert recipe_file.read_recipe("llama_3b_lora").path == recipes.path("llama_3b_lora")
    (tmp_path / "llama_1b_lora").write_text("max_steps: 3\n")
    assert recipe_file.read_recipe("llama_1b_lora").values == {"max_steps": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("lama_1b_lora", "did you mean llama_1b_lora?"),
        ("qwen_8b_qlora.yml", "did you mean qwen_8b_qlora?"),
        ("some/where/llama_1b_lora.yaml", "does not exist: give --config the path"),
        ("xyz", "does not exist: give --config the path"),
    ],
)
def test_unknown_recipe_is_one_line_with_the_nearest_name(
    given: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        arguments.parse(["--config", given], accelerator=False)
    assert given in str(caught.value) and named in str(caught.value)
    assert "hf-rocm-tune recipes ls" in str(caught.value)
