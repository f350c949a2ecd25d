"""Ten ways that a user takes from README and docs, through the real commands, with a small model and a file of chats.

Each goes from a command to what the user looks at afterwards; single properties are attacked in the other files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.torch import load_file

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer, Result, log_rows
from tests.e2e.conftest import ADAPTER, assert_covered, done, flags, losses_of, report_of

USUAL = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1}
USUAL |= {"lr_scheduler_type": "constant"}


class User:
    """Somebody with a model, a file of chats and a shell in ``place``; paths are relative to it."""

    def __init__(self, place: Path, server: CommandServer, model: Path, model_of: Callable[[str], Path]) -> None:
        self.place, self._server, self.model_of = place, server, model_of
        shutil.copytree(model, place / "base")
        tiny.write_messages_jsonl(place / "chats.jsonl", 24)

    def command(self, verb: str, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Result:
        """A command of ours, to its end."""
        return self._server.run(*argv, env={"VERB": verb, **(env or {})}, cwd=cwd or self.place)

    def train(self, output: str, *more: str, env: dict[str, str] | None = None, **changed: Any) -> Result:
        """``hf-rocm-tune METHOD`` without the launcher."""
        settings = {"model": "base", "dataset": "chats.jsonl", "output_dir": output, **USUAL, **changed}
        return self._server.run(*flags(**settings), *more, env=env, cwd=self.place)

    def answer(self, model: str, cwd: Path | None = None) -> str:
        """What a trained model answers to the first question of the chats, without chance."""
        argv = ("--prompt", "Question 0: what comes after?", "--temperature", "0", "--max_new_tokens", "8", "--json")
        answered = done(self.command("generate", model, *argv, cwd=cwd))
        return str(json.loads(answered.stdout.splitlines()[-1])["completion"])

    def page(self, *runs: str) -> str:
        """The report page of a run, or of several."""
        done(self.command("report", *runs, "--out", "page.html"))
        return (self.place / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def user(server: CommandServer, model_of: Callable[[str], Path], tmp_path: Path) -> User:
    return User(tmp_path, server, model_of("llama3"), model_of)


@pytest.fixture(scope="module")
def first(
    server: CommandServer, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[User, Result]:
    """The usual run, undisturbed."""
    user = User(tmp_path_factory.mktemp("whole"), server, model_of("llama3"), model_of)
    return user, done(user.train("out"))


@pytest.fixture(scope="module")
def whole(first: tuple[User, Result]) -> Path:
    """Its output."""
    return first[0].place / "out"


def test_first_run(first: tuple[User, Result]) -> None:
    user, run = first
    plan = done(user.command("plan", "--model", "base", "--seq", "64", "--method", "lora"))
    assert plan.stdout.startswith("FITS: ") and "--model_name_or_path base" in plan.stdout
    assert [row["step"] for row in log_rows(run.stdout)] == ["1/4", "2/4", "3/4", "4/4"]
    assert "100 % of the bytes on the device verified" in run.stdout
    assert "adapter and report are in out" in run.stdout
    page = user.page("out")
    assert "<h1>base on chats.jsonl</h1>" in page and "<svg" in page and "100 %" in page
    assert user.answer("out")


def test_own_data(user: User) -> None:
    """A file with a wrong row is refused by its line; the preview of the mended one shows what the run then trains."""
    lines = (user.place / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    (user.place / "chats.jsonl").write_text("\n".join([*lines[:4], lines[4][:-2], *lines[5:]]) + "\n")
    wrong = user.train("out")
    assert wrong.code == 2 and len(wrong.error_lines) == 1 and "line 5" in wrong.stderr
    assert not (user.place / "out").exists()
    (user.place / "chats.jsonl").write_text("\n".join(lines) + "\n")
    preview = done(user.train("out", "--assistant_only_loss", "--dry_run", "json"))
    assert not (user.place / "out").exists()
    (seen,) = json.loads(preview.stdout)["summaries"]  # nothing else on stdout
    done(user.train("out", "--assistant_only_loss"))
    (trained,) = report_of(user.place / "out")["data"]
    assert trained == seen and 0 < trained["trained"] < trained["tokens"]
    assert f"{trained['tokens']:,}" in (user.place / "out" / "README.md").read_text(encoding="utf-8")


def test_cut_rows(user: User) -> None:
    """Answers that a limit cuts away are told before the first step, and the length that is named keeps them."""
    short = done(user.train("short", "--assistant_only_loss", max_seq_length=44))
    (cut,) = report_of(user.place / "short")["data"]
    assert 0 < cut["dropped"] < cut["answers_cut"] <= cut["rows"] == 24
    before_the_first_step = short.stdout[: short.stdout.index(" 1/4 ")]
    assert f"{cut['dropped']} of 24 train rows are dropped" in before_the_first_step
    named = before_the_first_step.split("--max_length ")[1].split()[0]
    done(user.train("long", "--assistant_only_loss", max_length=named))
    (kept,) = report_of(user.place / "long")["data"]
    assert (kept["cut"], kept["dropped"], kept["lost"]) == (0, 0, 0)


def test_resume(user: User, whole: Path) -> None:
    assert user.train("out", env={"HF_ROCM_TUNE_CRASH": "step=3,kind=kill"}).code == -9
    again = done(user.train("out"))
    assert "continues from checkpoint-2 of 4 steps (verified)" in again.stdout
    assert (user.place / "out" / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    other = user.train("out", learning_rate=0.02)
    assert other.code == 2 and len(other.error_lines) == 1 and "learning_rate" in other.stderr


def test_moved_run(user: User, whole: Path) -> None:
    """Model, data and a run that was stopped move together: it goes on, and its result is found from anywhere."""
    assert user.train("out", env={"HF_ROCM_TUNE_CRASH": "step=3,kind=kill"}).code == -9
    old, user.place = user.place, user.place / "moved"
    user.place.mkdir()
    for name in ("base", "chats.jsonl", "out"):
        (old / name).rename(user.place / name)
    again = done(user.train("out"))
    assert "continues from checkpoint-2 of 4 steps (verified)" in again.stdout
    assert (user.place / "out" / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert user.answer(str(user.place / "out"), cwd=old)
    (user.place / "base").rename(old / "gone")
    lost = user.command("generate", "out", "--prompt", "Question")
    assert lost.code == 2 and "--base" in lost.error_lines[0]


def test_extended_run(user: User, whole: Path) -> None:
    """More steps, over the same data from another place: the bits of a run that was as long from the start."""
    done(user.train("out", max_steps=2))
    (user.place / "elsewhere").mkdir()
    (user.place / "chats.jsonl").rename(user.place / "elsewhere" / "chats.jsonl")
    extended = done(user.train("out", dataset="elsewhere/chats.jsonl"))
    assert "the run is extended: max_steps 2 -> 4" in extended.stdout
    assert "continues from checkpoint-2 of 2 steps (verified)" in extended.stdout
    assert (user.place / "out" / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert losses_of(user.place / "out") == losses_of(whole)
    assert manifest.verify(user.place / "out") == []


SCRIPT = """
import hf_rocm_tune
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig

trainer = hf_rocm_tune.VerifiedSFTTrainer(
    model="base",
    args=SFTConfig(output_dir="out", max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=0.01,
                   lr_scheduler_type="constant", logging_steps=1, use_cpu=True, bf16=False, report_to="none"),
    train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
    eval_dataset=load_dataset("json", data_files="chats.jsonl", split="train[:2]"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.evaluate()
trainer.train()
trainer.save_model()
print(trainer.weight_coverage())
trainer
"""


def test_python_script(user: User, whole: Path) -> None:
    """What the README shows leaves what the command line leaves."""
    (user.place / "script.py").write_text(SCRIPT)
    ran = done(user.command("", env={"SCRIPT": "script.py"}))
    assert "100 % of" in ran.stdout and "FutureWarning" not in ran.stderr
    assert [row["step"] for row in log_rows(ran.stdout)] == ["1/4", "2/4", "3/4", "4/4"]
    assert_covered(report_of(user.place / "out"))
    assert manifest.verify(user.place / "out") == []
    page = user.page("out")
    assert (
        "<svg" in page and "<h1>base" in page and "Missing files" not in page and '<td data-name="split">train' in page
    )
    assert user.answer("out")


def test_notebook(user: User) -> None:
    """One live line in place of upstream's bars and tables, no warnings, and a report that is drawn."""
    cells = [nbformat.v4.new_code_cell(SCRIPT), nbformat.v4.new_code_cell("trainer.transfer_report")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(user.place)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Warning" not in text and "it/s" not in text, text
    tables = [found["text/html"] for output in outputs if "text/html" in (found := output.get("data", {}))]
    evaluated, drawn, _ = tables
    assert "<td>0</td>" in evaluated and "evaluation: loss" in evaluated
    assert drawn.count("<th>step</th>") == 1 and all(f"<td>{step}/4</td>" in drawn for step in range(1, 5))
    assert "<table" in notebook.cells[1].outputs[0].data["text/html"]
    assert_covered(report_of(user.place / "out"))


def test_dpo(user: User, whole: Path) -> None:
    chats = [json.loads(line)["messages"] for line in (user.place / "chats.jsonl").read_text().splitlines()]
    bad = {"role": "assistant", "content": "No."}
    rows = [{"prompt": chat[:1], "chosen": chat[1:], "rejected": [bad]} for chat in chats]
    (user.place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    missing = user.train("out", env={"METHOD": "dpo"})
    assert missing.code == 2 and len(missing.error_lines) == 1 and "chosen" in missing.stderr
    run = done(user.train("out", env={"METHOD": "dpo"}, dataset="pairs.jsonl", beta=0.5, max_steps=8))
    margins = [float(row["margin"]) for row in log_rows(run.stdout)]
    assert len(margins) == 8 and margins[-1] > margins[0]
    assert_covered(report_of(user.place / "out"))
    assert "<svg" in user.page("out", str(whole))


@pytest.mark.long
def test_mixture_of_experts(user: User) -> None:
    """Planned, trained with experts in 4 bit and adapters on them, merged, and asked."""
    shutil.copytree(user.model_of("qwen3_moe"), user.place / "mixture")
    adapters = ("--lora_target_parameters", "experts.gate_up_proj", "experts.down_proj")
    plan = done(user.command("plan", "--model", "mixture", "--seq", "64", "--method", "qlora"))
    assert plan.stdout.startswith("FITS: ") and "--load_in_4bit" in plan.stdout
    run = done(user.train("out", "--load_in_4bit", *adapters, model="mixture"))
    assert "100 % of the bytes on the device verified" in run.stdout
    assert any(".experts." in name for name in load_file(user.place / "out" / ADAPTER))
    done(user.command("merge", "out", "merged"))
    assert user.answer("merged")
