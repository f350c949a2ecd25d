"""``--auto_fit`` through the real command line.

A run whose way was chosen ends, bit for bit, where the run ends to which the same way was given, dropout included. What
the user set stays, the effective batch never changes, whoever continues a run continues with its choice, and what
cannot be fitted ends in one line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import chunked_logprob

from hf_rocm_tune.errors import OutOfMemoryError, TuneError, UsageError
from hf_rocm_tune.job.fit import before_loading
from hf_rocm_tune.models import loss
from hf_rocm_tune.settings.arguments import parse
from hf_rocm_tune.train.faults import STEP_VARIABLE as VARIABLE
from tests import tiny
from tests.e2e.command import CommandServer
from tests.e2e.conftest import ADAPTER, Job, MakeJob, report_of

PLENTY = 4.0
PACKED: dict[str, Any] = {"max_length": 224, "packing": True}


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """Dropout is on, so that the random state counts."""
    settings = {"lora_dropout": 0.1, "save_steps": 2, "eval_strategy": "no", "doctor": "off"}
    return make_job("auto_fit", train=64, max_steps=4, per_device_train_batch_size=None, **settings)


def given(job: Job, micro_batch: int, steps: int, checkpointing: bool, **changed: object) -> Path:
    """A run to which the way was given."""
    way = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": steps}
    return job.clean(**(way | {"gradient_checkpointing": checkpointing, "one_pass_loss": True} | changed))


def adapter_of(output: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(output / ADAPTER)
    return tensors


def assert_same(one: Path, other: Path) -> None:
    """Same adapter and same log, bit for bit."""
    mine, theirs = adapter_of(one), adapter_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert logged(one) == logged(other)


def logged(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    names = ("loss", "grad_norm", "entropy", "num_tokens", "epoch")
    return [{name: row[name] for name in names} for row in history if "loss" in row]


def way_of(output: Path) -> tuple[int, int, bool]:
    chosen = report_of(output)["auto_fit"]
    return chosen["micro_batch"], chosen["accumulation"], chosen["checkpointing"]


def test_the_plan_chooses_and_the_run_is_the_one_to_which_that_was_given(job: Job, tmp_path: Path) -> None:
    done = job.done(tmp_path / "out", auto_fit="plan", auto_fit_gib=0.11, effective_batch=8)
    micro_batch, steps, checkpointing = way_of(tmp_path / "out")
    assert micro_batch * steps == 8
    assert steps > 1, "0.11 GiB less the allocator's slack are not enough for 8 rows"
    chosen = report_of(tmp_path / "out")["auto_fit"]
    assert chosen["predicted_bytes"] < chosen["budget_bytes"]
    assert (chosen["free_bytes"] < chosen["budget_bytes"] / 8) == ("are preferred until" in done.stdout)
    assert f"batch {micro_batch} x {steps} accumulated x 1 = 8 effective" in done.stdout
    assert "predicted peak" in done.stdout
    assert_same(tmp_path / "out", given(job, micro_batch, steps, checkpointing))


def test_the_loss_in_one_pass_trains_as_that_of_trl(job: Job) -> None:
    """To rounding; a recipe and a flag can have it without a fit."""
    way = (2, 4, False)
    one_pass, stock = given(job, *way), given(job, *way, one_pass_loss=False)
    for mine, theirs in zip(logged(one_pass), logged(stock), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    mine, theirs = adapter_of(one_pass), adapter_of(stock)
    assert any(not torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-4)


def test_a_mix_of_recomputation_trains_as_without_any(job: Job, tmp_path: Path) -> None:
    """Dropout included: what is not computed again draws no random numbers."""
    asked = {"per_device_train_batch_size": 8, "recompute_layers": "1,1", "one_pass_loss": True}
    assert job.run(tmp_path / "out", crash="step=4,kind=kill", **asked).code == -9
    job.done(tmp_path / "out", **asked)
    assert report_of(tmp_path / "out")["memory"]["recompute_layers"] == [1, 1]
    mine, whole = adapter_of(tmp_path / "out"), adapter_of(given(job, 8, 1, False))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in mine.items())


@pytest.mark.parametrize(
    "way",
    [
        {"recompute_layers": "0,1", "load_in_4bit": True},
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in (
                {"recompute_layers": "1,1"},
                {"recompute_layers": "0,2", **PACKED},
                {"recompute_layers": "1,1", "split_layers": "1,1"},
                {"recompute_layers": "1,1", "bf16": True},
                {"recompute_layers": "0,2", "use_dora": True, "bf16": True},
            )
        ),
    ],
    ids=lambda way: "-".join(f"{name}={value}" for name, value in way.items()),
)
def test_layers_that_are_recomputed_change_nothing(job: Job, tmp_path: Path, way: dict[str, Any]) -> None:
    rest = {name: value for name, value in way.items() if name != "recompute_layers"}
    job.done(tmp_path / "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, **way)
    told = report_of(tmp_path / "out")["memory"]["recompute_layers"]
    assert ",".join(map(str, told)) == way["recompute_layers"]
    assert_same(tmp_path / "out", given(job, 4, 2, False, one_pass_loss=False, **rest))


@pytest.mark.long
def test_a_step_down_goes_on_with_the_same_mix(job: Job, tmp_path: Path) -> None:
    asked = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "on_oom": "step_down"}
    short = {VARIABLE: "kind=oom,rows=2,count=1"}
    job.done(tmp_path / "out", env=short, recompute_layers="1,1", **asked)
    assert report_of(tmp_path / "out")["memory"]["shortages"] == 1
    job.done(tmp_path / "given", env=short, gradient_checkpointing=False, **asked)
    assert_same(tmp_path / "out", tmp_path / "given")


@pytest.mark.long
def test_a_run_that_goes_on_keeps_its_choice_whatever_is_free_by_then(job: Job, tmp_path: Path) -> None:
    asked = {"auto_fit": "plan", "effective_batch": 8}
    assert job.run(tmp_path / "out", crash="step=4,kind=kill", auto_fit_gib=PLENTY, **asked).code == -9
    chosen = json.loads((tmp_path / "out" / "run.json").read_text())["auto_fit"]
    done = job.done(tmp_path / "out", auto_fit_gib=0.11, **asked)
    assert "as this run began" in done.stdout and report_of(tmp_path / "out")["auto_fit"] == chosen
    other = job.run(tmp_path / "out", auto_fit="off", per_device_train_batch_size=8)
    assert other.code == 2 and "auto_fit 'plan' -> 'off'" in other.stderr


def test_without_a_card_nothing_is_chosen_and_the_effective_batch_stands(job: Job, tmp_path: Path) -> None:
    done = job.done(tmp_path / "out", auto_fit="plan", effective_batch=12)
    assert done.stdout.count("there is no card, so nothing is chosen") == 1
    assert "batch 6 x 2 accumulated x 1 = 12 effective" in done.stdout
    assert report_of(tmp_path / "out")["auto_fit"] is None


@pytest.mark.parametrize(
    "size", [pytest.param(None, id="planned"), pytest.param(256, id="given", marks=pytest.mark.long)]
)
def test_an_evaluation_never_ends_a_run_that_trains(
    job: Job, card_server: CommandServer, scratch: Path, tmp_path: Path, size: int | None
) -> None:
    """The plan keeps its batch below a training step; a larger one is halved on a card that has too little memory."""
    tokenizer = tiny.build_tokenizer()
    # a row of 128 tokens needs 4 MB in each of three matrices between the layers' products
    wide = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 8192, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**wide, num_attention_heads=2)).save_pretrained(scratch / "wide")
    tokenizer.save_pretrained(scratch / "wide")
    asked: dict[str, Any] = {"model_name_or_path": scratch / "wide", "max_steps": 1, "report_to": "none"}
    asked |= {"dataset_name": tiny.write_dataset_dir(scratch / f"evaluated{size}", train=8, test=size or 16)}
    asked |= {"eval_strategy": "steps", "eval_steps": 1, "bf16": False, "dtype": "float32"}
    asked |= {"auto_fit": "plan"} if size is None else {"per_device_eval_batch_size": size}
    on_card = replace(job, server=card_server, env={"SIMCARD_CAPACITY": "1400000000"})
    done = on_card.done(tmp_path / "out", per_device_train_batch_size=1, **asked)
    report = report_of(tmp_path / "out")
    kinds = [each["kind"] for each in report["incidents"]]
    if size is None:
        assert 1 <= report["auto_fit"]["eval_batch"] <= 8 and kinds == []
    else:
        assert kinds and set(kinds) == {"out of memory in evaluation"} and "rows at a time" in done.stderr
    history = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert sum("eval_loss" in row for row in history) == 1


def test_a_head_that_is_not_known_falls_back_to_the_loss_of_trl(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = job.argv(tmp_path, use_cpu=True, auto_fit="plan", auto_fit_gib=PLENTY)
    assert parse(argv).one_pass_loss
    monkeypatch.delattr(chunked_logprob, "_addmm_fp32")
    said: list[str] = []
    arguments = parse(argv)
    assert not arguments.one_pass_loss and before_loading(
        arguments, None, libraries=0, say=lambda *words: said.extend(words)
    )
    assert any("TRL's own loss" in line for line in said)
    with pytest.raises(UsageError, match="--one_pass_loss does not know the fused head"):
        loss.install()  # what --one_pass_loss true does


def test_a_way_that_leaves_little_is_taken_where_nothing_leaves_more_and_said(job: Job, tmp_path: Path) -> None:
    """A given micro-batch that fits a limit, an eighth of which it does not leave."""
    way = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}

    def chosen(gib: float) -> tuple[Any, str]:
        said: list[str] = []
        arguments = parse(job.argv(tmp_path, use_cpu=True, auto_fit="plan", auto_fit_gib=gib, **way))
        return before_loading(arguments, None, libraries=0, say=lambda *lines: said.extend(lines)), "\n".join(said)

    plenty, said = chosen(PLENTY)
    assert "preferred" not in said
    needed = (plenty.budget_bytes - plenty.free_bytes) / (1 << 30)
    close, said = chosen(needed * 1.05)
    assert (close.micro_batch, close.checkpointing) == (8, False)
    assert "are preferred until an AMD card has run what is planned, and no choice that fits leaves as much" in said


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"auto_fit": "plan", "auto_fit_gib": 0.101}, OutOfMemoryError, "nothing fits by estimate"),
        ({"auto_fit": "plan", "effective_batch": 0}, UsageError, "--effective_batch must be 1 or more"),
        ({"auto_fit": "plan", "auto_fit_gib": "nan"}, UsageError, "--auto_fit_gib must be more than 0"),
        (
            {"auto_fit": "plan", "effective_batch": 8, "per_device_train_batch_size": 3},
            UsageError,
            "cannot be made with --per_device_train_batch_size 3",
        ),
        ({"auto_fit": "plan", "auto_fit_gib": PLENTY, "optim": "adafactor"}, UsageError, "not known to the planner"),
    ],
)
def test_what_cannot_be_fitted_is_said_before_the_model_is_loaded(
    job: Job, tmp_path: Path, asked: dict[str, object], error: type[TuneError], said: str
) -> None:
    argv = job.argv(tmp_path, use_cpu=True, **asked)
    with pytest.raises(error) as caught:
        before_loading(parse(argv), None, libraries=0, say=lambda *lines: None)
    assert said in str(caught.value) and "\n" not in str(caught.value)
