"""What a run leaves for people: a card whose code gives the training's logits, a log, a picture; all in the seal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from hf_rocm_tune import cli
from hf_rocm_tune.publish.history import collect
from hf_rocm_tune.publish.readme import is_ours
from hf_rocm_tune.survive import manifest
from tests.e2e.conftest import Job, MakeJob, sampled
from tests.e2e.probe import logits
from tests.e2e.test_methods import METHODS, jobs_of

KINDS: dict[str, list[str]] = {
    "lora": [],
    "qlora": ["--load_in_4bit", "--use_bnb_nested_quant"],
    "full": ["--use_peft", "false"],
}
SAMPLE = ("dpo True", "grpo True", "reward True", "reward False")
OF_METHODS = [*(f"{method} True" for method in METHODS), "reward False"]
"""Each method, and whether it trains an adapter."""


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """A command of two steps with a checkpoint after each."""
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    made = make_job("cards", train=48, test=9, max_steps=2, max_length=48, lora_dropout=0.0, **each)
    return replace(made, env={"USER": "gudrun"})


@pytest.fixture(scope="module")
def trained(job: Job, make_job: MakeJob) -> Callable[[str], Path]:
    """The output of a kind, or of a method and whether it trains an adapter; the training's logits are beside it."""
    methods = jobs_of(make_job, "cards of methods")

    @cache
    def output(name: str) -> Path:
        method, _, peft = name.partition(" ")
        ours, out = methods.get(method, job), (methods[method].root if peft else job.root) / name.replace(" ", "-")
        settings = {"max_steps": 1, "use_peft": peft} if peft else {}
        ours.done(out, *KINDS.get(name, []), env={"DUMP_LOGITS": f"{out}.logits"}, **settings)
        return out

    return output


@pytest.fixture(scope="module")
def of_sft(trained: Callable[[str], Path]) -> dict[str, Path]:
    return {kind: trained(kind) for kind in KINDS}


def cards_of(output: Path) -> dict[str, str]:
    """Every card below a directory, by the name of its folder."""
    return {file.parent.name: file.read_text() for file in output.rglob("README.md")}


@pytest.fixture(scope="module")
def answers(trained: Callable[[str], Path], job: Job) -> dict[str, dict[str, Any]]:
    """What the code of each card gives, in one process that does not have this package."""
    jobs, model = [], Path(job.settings["model_name_or_path"])
    names = [*KINDS, *SAMPLE]
    for kind, output in zip(names, map(trained, names), strict=True):
        there = job.root / "copies" / kind
        shutil.copytree(output, there, ignore=shutil.ignore_patterns("checkpoint-*"))
        if kind != "full":  # the card names the directory of the base model, not where it lies
            (there / model.name).symlink_to(model)
        text = (there / "README.md").read_text()
        jobs.append({"card": text, "directory": str(there), "logits": f"{output}.logits"})
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.card_snippets"],
        input="".join(json.dumps(each) + "\n" for each in jobs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(names, found, strict=True))


def test_the_cards_code_gives_the_logits_of_the_training(answers: dict[str, dict[str, Any]]) -> None:
    for kind, answer in answers.items():
        assert answer["equal"], (kind, answer["difference"])
        assert (answer["blocks"], answer["our_modules"]) == (2, [])
        assert isinstance(float(answer["said"]), float) if "reward" in kind else answer["said"].endswith("\n")


@pytest.mark.parametrize("name", sampled(OF_METHODS, *SAMPLE))
def test_the_card_of_every_method_names_its_trainer(
    trained: Callable[[str], Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, (method, peft) = trained(name), name.split()
    text = (output / "README.md").read_text()
    trainer = "RewardTrainer" if method == "reward" else f"{method.upper()}Trainer"
    assert f"`{trainer}`" in text and "SFT" not in text and "columns `prompt`" in text
    if method != "reward":
        return
    # The same adapter (or model) through our own commands.
    capsys.readouterr()
    assert cli.main(["generate", str(output), "--prompt", "x"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "a reward model" in line and "README.md" in line and "--base" not in line
    if peft == "True":
        assert cli.main(["merge", str(output), str(tmp_path / "merged")]) == 0, capsys.readouterr().err
        assert "AutoModelForSequenceClassification" in (tmp_path / "merged" / "README.md").read_text()
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
        wanted = torch.load(f"{output}.logits")
        assert model.config.num_labels == 1 and float((logits(model) - wanted).abs().max()) < 1e-4


def test_each_save_has_a_card_of_ours_and_none_of_trl_or_peft(of_sft: dict[str, Path]) -> None:
    for kind, output in of_sft.items():
        found = cards_of(output)
        assert set(found) == {output.name, "checkpoint-1", "checkpoint-2"}, kind
        for folder, text in found.items():
            assert is_ours(text)
            assert ("a checkpoint, not the result" in text) == (folder != output.name)
            assert "More Information Needed" not in text and "Quick start" not in text
            assert ("![Loss" in text) == (folder == output.name)
            assert ("vLLM serves it as it is: --enable-lora --lora-modules NAME=." in text) == (kind != "full")
            metadata = ModelCard(text).data.to_dict()
            assert not {"base_model", "datasets"} & metadata.keys()  # both are directories here


def test_everything_is_in_the_seal(of_sft: dict[str, Path]) -> None:
    for output in of_sft.values():
        found = manifest.inspect(output)
        assert found.manifest is not None and found.problems == []
        assert {"README.md", "loss.png", "training_log.json", "transfer_report.json"} <= set(found.manifest.files)
        assert "README.md" in (manifest.inspect(output / "checkpoint-1").manifest or found.manifest).files


def test_the_log_is_the_trainers_and_names_no_file(trained: Callable[[str], Path], scratch: Path) -> None:
    output = trained("qlora")
    log = json.loads((output / "training_log.json").read_text())
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    assert log["log"][: len(state["log_history"])] == state["log_history"]
    assert "train_runtime" in log["log"][-1]
    assert (log["step"], log["max_steps"]) == (2, 2)
    assert log["trained"]["adapter_dtype"] == "bfloat16" and log["trained"]["quantization"]["load_in_4bit"] is True
    assert str(scratch) not in (output / "training_log.json").read_text()


def test_no_path_and_no_user_is_in_a_card(of_sft: dict[str, Path], scratch: Path) -> None:
    for output in of_sft.values():
        for text in cards_of(output).values():
            assert str(scratch) not in text and "gudrun" not in text and str(Path.home()) not in text


def test_an_edited_card_is_kept(job: Job, trained: Callable[[str], Path], tmp_path: Path) -> None:
    """What counts as edited, and that others are replaced: test_card.py of publish."""
    output = shutil.copytree(trained("lora"), tmp_path / "out")
    (output / "README.md").write_text("# edited by hand\n")
    result = job.done(output, "--overwrite_output_dir")
    assert "was written or edited by hand and is kept" in result.stdout
    assert set(cards_of(output).values()) == {"# edited by hand\n"}
    assert manifest.inspect(output).problems == []


def test_a_run_that_fails_leaves_its_log_and_a_report_that_says_so(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    result = job.run(output, max_steps=8, fault="kind=zero,persist=1,stage=batches,first=20")
    assert result.code == 3, result.stderr[-2000:]
    left = collect(output)
    assert left.rows and left.trained
    assert left.verdict.level == "bad" and "The run has not finished: these are its files so far." in left.verdict.notes
    assert cli.main(["report", str(output)]) == 0
    assert "bad: Wrong bytes were found" in capsys.readouterr().err


def test_samples_and_data_are_in_log_and_page_and_change_nothing(
    job: Job, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    result = job.done(output, "--sample_every", "1", "--sample_prompts", "Hello there", "What is a <sum>?")
    assert "step 1, 'Hello there': " in result.stdout and "step 2, 'What is a <sum>?': " in result.stdout
    adapters = [(each / "adapter_model.safetensors").read_bytes() for each in (output, trained("lora"))]
    assert adapters[0] == adapters[1]
    log = json.loads((output / "training_log.json").read_text())["log"]
    assert [row["step"] for row in log if "samples" in row] == [1, 2]
    assert cli.main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert "<h3>What is a &lt;sum&gt;?</h3>" in page and "95 % up to" in page
    recorded = json.loads((output / "run.json").read_text())["data"]
    assert recorded == json.loads((output / "transfer_report.json").read_text())["data"]
    assert [each["split"] for each in recorded] == ["train", "eval"]
