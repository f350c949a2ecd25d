"""Preference, reward and GRPO training through the real commands: TRL's own numbers, and all that `sft` promises.

Each command is compared with stock TRL, killed and started again, run with injected faults and with shortages of
memory, and on the simulated card, whose driver says what crossed beside the engine. Two toys show that something is
learned.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from trl.rewards import accuracy_reward

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.job.refusals import check_rewards
from tests import tiny
from tests.conftest import ROOT
from tests.e2e.command import TIMEOUT, CommandServer, log_rows
from tests.e2e.conftest import (
    ADAPTER,
    Job,
    MakeJob,
    assert_covered,
    assert_same_run,
    done,
    flags,
    report_of,
    sampled,
    settings_for_trl,
)
from tests.e2e.test_card_runs import FROM_CARD, SAVED, SCALAR_BYTES, TO_CARD, VERDICTS, VERDICTS_BYTES
from tests.e2e.test_faults import assert_recovered
from tests.simcard.log import Log

METHODS = ("dpo", "kto", "reward", "grpo", "orpo")
STOCK = METHODS[:-1]  # ORPO has no command of TRL's: it is experimental there
ROWS, STEPS = 32, 4  # an epoch: no batch is read ahead and never used, whose fault nobody would see
GENERATION = {"num_generations": 2, "max_completion_length": 6, "reward_funcs": "./rewards.early"}
REWARDS = """
def early(completions, **_):
    return [float(text.count("e") + text.count(" ")) for text in completions]
"""
COUNTED = """
from trl import GRPOTrainer

def note(*what):
    with open("counted.txt", "a") as file:
        print(*what, file=file)

def trained(self, model, inputs):
    note("trained on", len(inputs["completion_ids"]))
    return stock(self, model, inputs)

def reward(completions, **_):
    note("generated", len(completions))
    return [float(len(text)) for text in completions]

stock, GRPOTrainer._compute_loss = GRPOTrainer._compute_loss, trained
"""


def rows_of(method: str) -> list[dict[str, Any]]:
    """Toy rows: the wanted answers are about other words than the others."""
    rows = []
    for number, (question, answer) in enumerate(tiny._pairs(24 if method == "grpo" else ROWS, 3)):
        good, bad = f" yes {answer[:40]}", f" no {answer[-40:]}"
        wanted = bool(number % 2)
        more: dict[str, dict[str, Any]] = {
            "kto": {"completion": good if wanted else bad, "label": wanted},
            "grpo": {},
        }
        rows.append({"prompt": question, **more.get(method, {"chosen": good, "rejected": bad})})
    return rows


def jobs_of(make_job: MakeJob, name: str) -> dict[str, Job]:
    """The command of each method."""
    made = {}
    for method in METHODS:
        own = GENERATION if method == "grpo" else {"max_length": 96}
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": None}
        dropout = 0.0 if method == "grpo" else 0.1  # the others switch it off in the whole model
        job = make_job(f"{name}/{method}", max_steps=STEPS, lora_dropout=dropout, save_steps=2, **sizes | own)
        rows = "".join(json.dumps(row) + "\n" for row in rows_of(method))
        (job.root / "data" / "test.jsonl").unlink(missing_ok=True)
        (job.root / "data" / "train.jsonl").write_text(rows, encoding="utf-8")
        (job.root / "rewards.py").write_text(REWARDS)
        made[method] = replace(job, env={"METHOD": method}, cwd=job.root)
    return made


@pytest.fixture(scope="module")
def jobs(make_job: MakeJob) -> dict[str, Job]:
    return jobs_of(make_job, "methods")


def logged(output: Path) -> list[dict[str, float]]:
    """The rows of the newest checkpoint's log, without times and without ours."""
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    own = ("integrity/", "speed/", "memory/", "step_time")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in history]


@pytest.mark.parametrize("method", sampled(STOCK, "dpo"))
def test_the_run_is_that_of_stock_trl_bit_for_bit(jobs: dict[str, Job], method: str, tmp_path: Path) -> None:
    """A reward model without an adapter: TRL draws the adapter's start after the new head's, and here before it."""
    changed = {"use_peft": False, "learning_rate": 1e-3} if method == "reward" else {}
    printed = jobs[method].done(tmp_path / "ours", "--print_config", **changed)
    settings = settings_for_trl(printed.stdout, tmp_path / "trl")
    if method == "grpo":
        settings["reward_funcs"] = ["rewards.early"]  # TRL looks into the working directory
    recipe = tmp_path / "trl.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", f"trl.scripts.{method}", "--config", str(recipe)]
    stock = subprocess.run(command, capture_output=True, text=True, cwd=jobs[method].cwd, timeout=TIMEOUT, check=False)
    assert stock.returncode == 0, stock.stderr[-3000:]
    if changed:
        jobs[method].done(tmp_path / "ours", **changed)
    output = tmp_path / "ours" if changed else jobs[method].clean()
    ours, theirs = logged(output), logged(tmp_path / "trl")
    assert len(theirs) == STEPS and len({row["loss"] for row in theirs}) > 1
    assert ours == theirs
    file = "model.safetensors" if changed else ADAPTER
    weights = load_file(output / file)
    for name, tensor in load_file(tmp_path / "trl" / file).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("method", sampled(METHODS, "dpo"))
def test_a_killed_run_goes_on_to_the_same_result(jobs: dict[str, Job], method: str, tmp_path: Path) -> None:
    killed = jobs[method].run(tmp_path / "out", crash="step=4,kind=kill")
    assert killed.code < 0 and (tmp_path / "out" / "checkpoint-2").is_dir()
    again = jobs[method].done(tmp_path / "out")
    assert len(log_rows(again.stdout)) == STEPS - 2 and "Warning" not in again.stderr
    assert_same_run(tmp_path / "out", jobs[method].clean())


@pytest.mark.parametrize("method", sampled(METHODS, "dpo", "orpo"))
def test_injected_faults_are_recovered_from(jobs: dict[str, Job], method: str, tmp_path: Path) -> None:
    jobs[method].done(tmp_path / "out", fault="kind=flip,rate=0.2,seed=7")
    assert_recovered(report_of(tmp_path / "out"), "flip")
    assert_same_run(tmp_path / "out", jobs[method].clean())


def test_orpo_evaluates_on_verified_batches(jobs: dict[str, Job], tmp_path: Path) -> None:
    found = []
    for name, fault in (("clean", ""), ("faults", "kind=zero,rate=0.5,stage=batches")):
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_split_size": 8}
        jobs["orpo"].done(tmp_path / name, fault=fault, **evaluated)
        found.append([row["eval_loss"] for row in logged(tmp_path / name) if "eval_loss" in row])
    assert found[0] == found[1] and len(found[0]) == STEPS / 2


@pytest.mark.parametrize("method", sampled(("dpo", "reward", "kto"), "dpo"))
def test_a_shortage_of_memory_cuts_between_pairs(jobs: dict[str, Job], method: str, tmp_path: Path) -> None:
    """KTO's loss without an estimate over the micro-batch, which has no parts."""
    same = {"optim": "sgd", "learning_rate": 1.0, **({"loss_type": "apo_zero_unpaired"} if method == "kto" else {})}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    jobs[method].done(whole, **same)
    jobs[method].done(cut, env={"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rows=1"}, **same)
    assert report_of(cut)["memory"]["micro_batch_divisor"] == 4 and report_of(cut)["memory"]["shortages"] >= 2
    for ours, theirs in zip(logged(cut), logged(whole), strict=True):
        for name in ("loss", "grad_norm", "num_tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    expected = load_file(whole / ADAPTER)
    for name, tensor in load_file(cut / ADAPTER).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "kto", "grpo"])
def test_a_reference_model_is_verified_and_watched(jobs: dict[str, Job], method: str, tmp_path: Path) -> None:
    beta = {"beta": 0.1} if method == "grpo" else {}
    jobs[method].done(tmp_path / "out", use_peft=False, learning_rate=1e-4, **beta)
    if method == "grpo":
        assert [row["kl"] > 0 for row in logged(tmp_path / "out") if "kl" in row][1:] == [True] * (STEPS - 1)
    report = report_of(tmp_path / "out")
    assert_covered(report_of(tmp_path / "out"))
    weights = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report["coverage"]["device_bytes"] >= 2 * weights  # both models
    assert report["frozen"]["tensors"] > 0  # of the reference alone: all others are trained


def test_what_does_not_go_together_is_one_line(jobs: dict[str, Job], tmp_path: Path) -> None:
    adapter = jobs["dpo"].clean()
    cases: dict[str, tuple[str, dict[str, Any], str]] = {
        "moved reference": ("dpo", {"sync_ref_model": True, "use_peft": False}, "--sync_ref_model"),
        "buffer": ("grpo", {"num_iterations": 2, "save_steps": 1}, "--num_iterations"),
        "batch": ("dpo", {"auto_fit": "plan", "effective_batch": 64}, "cannot be made with"),
        "adapter": ("reward", {"adapter_name_or_path": adapter, "lora_dropout": None}, "its task_type is CAUSAL_LM"),
        "loss": ("dpo", {"loss_type": "nonsense"}, "Unknown loss type: nonsense"),
        "no rows": ("dpo", {"max_length": 4}, "no training rows remain: with --max_length 4"),
        "no solution": ("grpo", {"reward_funcs": "accuracy_reward"}, "missing a required argument: 'solution'"),
        "no reward": ("grpo", {"reward_funcs": "rewards.early"}, "begin with ./"),
    }
    for name, (method, changed, said) in cases.items():
        result = jobs[method].run(tmp_path / name, **changed)
        assert result.code == 2 and "Traceback" not in result.stderr, result.stderr[-2000:]
        assert len(result.error_lines) == 1 and said in result.error_lines[0], result.error_lines


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="the package is there")
def test_a_reward_whose_package_is_missing_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"accuracy_reward needs the package math_verify: `pip install"):
        check_rewards([accuracy_reward], ["prompt", "solution"])


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "trainers").glob("*.md")), ids=lambda page: page.stem)
def test_the_command_of_a_trainer_s_page_runs_on_its_data(
    page: Path, server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    command, rows = re.findall(r"```(?:bash|json)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)[:2]
    program, verb, *words = shlex.split(command)
    lines, data = rows.splitlines(), words[words.index("--dataset") + 1]
    columns = json.loads(lines[0]).keys()
    (tmp_path / data).write_text("".join(row + "\n" for row in lines * 4 if json.loads(row).keys() == columns))
    (tmp_path / "rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(c[0]['content']) for c in completions]\n"
    )
    words[words.index("--model") + 1] = str(model_of("llama3"))
    words += flags(max_steps=1, per_device_train_batch_size=4)
    words += flags(num_generations=4, max_completion_length=8) if verb == "grpo" else []
    result = done(server.run(*words, env={"METHOD": verb}, cwd=tmp_path))
    assert program == "hf-rocm-tune" and "100 % of the bytes on the device verified" in result.stdout


# ---- something is learned -------------------------------------------------------------------------------------


def test_a_reward_model_learns_which_answer_is_wanted(jobs: dict[str, Job], tmp_path: Path) -> None:
    jobs["reward"].done(tmp_path / "out", max_steps=12, gradient_accumulation_steps=1, learning_rate=0.02)
    history = [row["accuracy"] for row in logged(tmp_path / "out")]
    assert sum(history[-3:]) / 3 > max(0.9, sum(history[:3]) / 3)


def test_grpo_raises_its_reward(jobs: dict[str, Job], tmp_path: Path) -> None:
    """All weights are trained: an adapter hardly moves the head of so small a model."""
    batch = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "num_generations": 8}
    jobs["grpo"].done(tmp_path / "out", use_peft=False, max_steps=16, save_steps=16, **batch)
    history = [row["reward"] for row in logged(tmp_path / "out") if "reward" in row]
    assert len(history) == 16 and sum(history[-4:]) > 1.5 * sum(history[:4])


def test_grpo_generates_all_answers_of_a_prompt_at_once_and_trains_on_two_at_a_time(
    jobs: dict[str, Job], tmp_path: Path
) -> None:
    """By default: generating is faster with many rows, and backward has memory for few."""
    (jobs["grpo"].root / "counted.py").write_text(COUNTED)
    batch = {"per_device_train_batch_size": None, "gradient_accumulation_steps": None, "num_generations": None}
    jobs["grpo"].done(tmp_path / "out", reward_funcs="./counted.reward", max_steps=2, save_steps=2, **batch)
    counted = (jobs["grpo"].root / "counted.txt").read_text().splitlines()
    assert counted == ["generated 8", *["trained on 2"] * 4] * 2


# ---- on the simulated card ------------------------------------------------------------------------------------

SCALARS = {
    "trainer/dpo_trainer.py:DPOTrainer._compute_loss": "rewards, entropy and tokens, to be logged",
    "trainer/kto_trainer.py:KTOTrainer._compute_loss": "likewise",
    "trainer/reward_trainer.py:RewardTrainer.compute_loss": "likewise",
    "trainer/grpo_trainer.py:GRPOTrainer._compute_loss": "likewise",
    "trainer/grpo_trainer.py:GRPOTrainer._compute_loss.<locals>.global_masked_mean": "likewise",
    "orpo/orpo_trainer.py:ORPOTrainer.get_batch_loss_metrics": "metrics, to be logged",
    "trainer/utils.py:nanmin": "how many ratios were clipped, to be logged",
    "trainer/utils.py:nanmax": "likewise",
}


LIMITS = {"train/metrics.py:evaluate_deferred": 512}  # bytes: a double for each figure since the last log, in one read


@pytest.mark.parametrize("method", sampled(METHODS, "dpo"))
def test_on_the_card_nothing_of_a_batch_goes_round_the_engine(
    jobs: dict[str, Job], card_server: CommandServer, method: str, tmp_path: Path
) -> None:
    log = tmp_path / "copies.log"
    replace(jobs[method], server=card_server).done(tmp_path / "out", env={"SIMCARD_LOG": str(log)}, max_steps=2)
    assert_covered(report_of(tmp_path / "out"))
    allowed = {*TO_CARD, *FROM_CARD, *SCALARS}
    strays = {
        (event.kind, event.caller, event.nbytes)
        for event in Log(log).events
        if event.kind in ("to_card", "to_host") and not event.engine
        if not (
            event.caller in allowed
            and event.nbytes <= {VERDICTS: VERDICTS_BYTES, **LIMITS}.get(event.caller, SCALAR_BYTES)
        )
        and event.caller not in SAVED
    }
    assert strays == set()
