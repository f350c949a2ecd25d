"""Names of flags are known before TRL is imported, and they are exactly those that the real parsers have."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

import hf_rocm_tune  # noqa: F401 - prepares the process
from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle import launcher_flags
from hf_rocm_tune.plan.command import main as plan
from hf_rocm_tune.settings import arguments, flags
from hf_rocm_tune.settings.arguments import build_parser, parse
from hf_rocm_tune.settings.screen import screen
from hf_rocm_tune.settings.start import check
from hf_rocm_tune.settings.verbs import VERBS, Verb
from tests import tiny

TYPED = {
    "model": "org/model",
    "dataset": "org/data",
    "lr": "0.003",
    "epochs": "2",
    "batch_size": "3",
    "max_seq_length": "77",
    "lora_rank": "8",
    "checkpointing": "false",
}


SECOND = {"seq": "max_length", "micro_batch": "per_device_train_batch_size"}
"""Further names of flags that have a short one."""
FULL = [f"--{flags.ALIASES[name]}={value}" for name, value in TYPED.items()]


def read(*argv: str) -> dict[str, Any]:
    return parse(argv, accelerator=False).resolved()


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_those_of_the_real_parser(verb: Method) -> None:
    assert flags.flags(verb) == {action.dest for action in build_parser(verb)._actions} - {"help"}


def test_the_launchers_flags_are_those_of_its_real_parser() -> None:
    real = {
        option.removeprefix("--").replace("-", "_"): action.nargs != 0
        for action in launch_command_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    not_the_launchers = launcher_flags.SHARED_WITH_THE_JOB | {"help", "module", "no_python"}
    found = launcher_flags.launcher_flags()
    assert found == {name: valued for name, valued in real.items() if name not in not_the_launchers}
    assert "num_processes" in found and "debug" not in found


@pytest.mark.parametrize("verb", VERBS)
def test_the_screen_shows_what_a_run_on_a_card_would_use(verb: Method) -> None:
    shown = dict(re.findall(r"^  --(\w+)\b.*\[(.+)\]$", screen(verb), flags=re.MULTILINE))
    asked: Any = {"method": verb, "accelerator": True, "bf16_supported": True}
    defaults = arguments._flags(verb).defaults
    ours = {each.name: each.ours for each in arguments.differences({}, **asked)}
    real = {**defaults, **ours}
    assert {"lr", "lora_r", "use_peft", "verify", *(["batch_size"] if verb != "grpo" else [])} <= shown.keys()
    for name, text in shown.items():
        value = real[flags.ALIASES.get(name, name)]
        value = value[0] if isinstance(value, list) else getattr(value, "value", value)
        assert text.partition(";")[0] == (f"{value:g}" if isinstance(value, float) else str(value)).lower(), name
    without = {each.name for each in arguments.differences({"use_peft": False}, **asked)}
    assert "learning_rate" not in without and f"{defaults['learning_rate']:g} without LoRA" in shown["lr"]


def test_aliases_are_the_flags_that_they_stand_for(tmp_path: Path) -> None:
    assert TYPED.keys() | SECOND.keys() == flags.ALIASES.keys()
    assert read(*FULL, "--seq", "33", "--micro_batch=3") == read(*FULL, "--max_length", "33", "--batch_size", "3")
    assert not flags.ALIASES.keys() & flags.flags("sft")
    assert not flags.ALIASES.keys() & launcher_flags.launcher_flags().keys()
    short = [part for name, value in TYPED.items() for part in (f"--{name.replace('_', '-')}", value)]
    full = [f"--{flags.ALIASES[name]}={value}" for name, value in TYPED.items()]
    expected = read(*full)
    assert read(*short) == read(*[f"--{name}={value}" for name, value in TYPED.items()]) == expected
    assert (expected["learning_rate"], expected["max_length"], expected["num_train_epochs"]) == (0.003, 77, 2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in TYPED.items()))
    assert read("--config", str(recipe)) == expected
    assert read("--config", str(recipe), "--lr", "0.5")["learning_rate"] == 0.5


@pytest.mark.parametrize("knows", [True, False])
def test_both_names_of_checkpointing_work_whichever_transformers_has(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, older = "activation_checkpointing", "gradient_checkpointing"
    monkeypatch.setattr(flags, "flags", lambda verb: frozenset({older, *([newer] if knows else [])}))
    assert flags.canonical([f"--{newer}", "false"]) == [f"--{newer if knows else older}", "false"]
    assert flags.canonical([f"--{newer}_kwargs={{}}"]) == [
        f"--{older}_kwargs={{}}" if not knows else f"--{newer}_kwargs={{}}"
    ]
    assert flags.canonical([f"--{older}", "false"]) == [f"--{older}", "false"]


def test_an_alias_and_its_flag_in_one_recipe_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lr: 1\nmodel: x\ndataset: y\nlearning_rate: 2\n")
    for refuse in (lambda: check("sft", ["--config", str(recipe)]), lambda: read("--config", str(recipe))):
        with pytest.raises(UsageError, match="learning_rate and another key are the same flag"):
            refuse()


def _no_rows(*_: object) -> tuple[list[int], dict[str, object]]:
    raise AssertionError("no dataset was given")


def test_the_planner_knows_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    typed = TYPED | {"batch_size": "0"}
    typed_flags = [part for name, value in typed.items() for part in (f"--{name}", value)]
    with pytest.raises(UsageError, match="--batch_size 0 does not divide"):
        plan(typed_flags, prepare=lambda: None, read_rows=_no_rows)
    full = [f"--{flags.ALIASES[name]}={value}" for name, value in typed.items()]
    with pytest.raises(UsageError, match="--batch_size 0 does not divide"):
        plan(full, prepare=lambda: None, read_rows=_no_rows)


def test_what_is_no_flag_is_left_to_the_real_parser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    needed = ["--model", str(tiny.build("llama3", tmp_path)), "--dataset", str(tmp_path / "rows.jsonl")]
    check("sft", [*needed, "--eos_token", "--two words", "-v", "--", "--nothing"])
    with pytest.raises(UsageError, match="--nothing"):
        check("sft", ["--nothing"])
    monkeypatch.setitem(VERBS, "newer", Verb(config="ConfigThatNobodyHas", what="", rate=1.0))
    check("newer", ["--nothing"])  # a source that cannot be read refuses nothing
    assert "--model NAME" in screen("newer")


def test_one_line_of_bitsandbytes_is_dropped_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure", "no kernels")
    logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]
