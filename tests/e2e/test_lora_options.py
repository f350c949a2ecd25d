"""How an adapter begins, goes on and learns: the result is plain PEFT whatever the way, each refusal one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_covered, losses_of, report_of
from tests.e2e.probe import logits

OWN = {"lora_r": None, "lora_dropout": None}  # an adapter brings them


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("lora-options", train=48, test=9, max_steps=4, learning_rate=5e-3, save_steps=2, lora_r=4)


def assert_clean(output: Path) -> None:
    report = report_of(output)
    assert report["incidents"] == [] and report["frozen"]["mismatches"] == 0 < report["frozen"]["passes"]
    assert_covered(report)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use of it
@pytest.mark.parametrize("scheme", ["pissa", pytest.param("olora", marks=pytest.mark.long)])
def test_what_begins_with_a_part_of_the_weights_ends_as_plain_lora_for_the_original_ones(
    job: Job, model_of: Callable[[str], Path], tmp_path: Path, scheme: str
) -> None:
    job.done(tmp_path / "out", init_lora_weights=scheme, env={"DUMP_LOGITS": str(tmp_path / "logits")})
    assert_clean(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["init_lora_weights"], config["r"], config["lora_alpha"]) == (True, 8, 64)
    base = AutoModelForCausalLM.from_pretrained(model_of("llama3"), dtype=torch.float32)
    original = logits(base)
    found = logits(PeftModel.from_pretrained(base, tmp_path / "out"))
    trained = torch.load(tmp_path / "logits", weights_only=True)
    assert (found - trained).abs().max() < 1e-4 < 1e-2 < (found - original).abs().max()

    killed = job.run(tmp_path / "again", init_lora_weights=scheme, crash="step=4,kind=kill")
    assert killed.code < 0 and (tmp_path / "again" / "checkpoint-2").is_dir()
    job.done(tmp_path / "again", init_lora_weights=scheme)
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "out")
    assert (tmp_path / "again" / ADAPTER).read_bytes() == (tmp_path / "out" / ADAPTER).read_bytes()


def rates(output: Path) -> dict[int, float]:
    """The learning rate with which each trained parameter began, by its number."""
    state = torch.load(output / "checkpoint-4" / "optimizer.pt", weights_only=False)
    return {number: group["initial_lr"] for group in state["param_groups"] for number in group["params"]}


def test_matrices_and_embeddings_learn_at_rates_of_their_own(job: Job, tmp_path: Path) -> None:
    own = {"loraplus_lr_ratio": 16, "embedding_learning_rate": 1e-4}
    settings = {"lora_modules_to_save": "embed_tokens", "lora_target_modules": "q_proj"}
    job.done(tmp_path / "own", **own, **settings)
    job.done(tmp_path / "same", **settings)
    assert_clean(tmp_path / "own")
    found = sorted(rates(tmp_path / "own").values())
    assert found == pytest.approx([1e-4, 5e-3, 5e-3, 8e-2, 8e-2])
    assert set(rates(tmp_path / "same").values()) == {5e-3}
    first, second = (load_file(tmp_path / each / ADAPTER) for each in ("own", "same"))
    moved = {name: (tensor - second[name]).abs().max() > 0 for name, tensor in first.items()}
    assert all(moved.values()) and len(moved) >= 5


def test_an_adapter_is_trained_on_from_where_it_was(job: Job, tmp_path: Path) -> None:
    job.done(tmp_path / "first", lora_target_modules="q_proj")
    again = job.done(tmp_path / "second", **OWN, adapter_name_or_path=tmp_path / "first", learning_rate=0.0)
    assert_clean(tmp_path / "second")
    kept, begun = (load_file(tmp_path / each / ADAPTER) for each in ("first", "second"))
    assert kept.keys() == begun.keys() and all(torch.equal(kept[name], begun[name]) for name in kept)
    assert "LoRA, r=4" in again.stdout
    job.done(tmp_path / "third", **OWN, adapter_name_or_path=tmp_path / "first")
    further = load_file(tmp_path / "third" / ADAPTER)
    assert all(not torch.equal(kept[name], further[name]) for name in kept)

    shutil.copytree(tmp_path / "first", tmp_path / "harmed")
    weights = load_file(tmp_path / "harmed" / ADAPTER)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, tmp_path / "harmed" / ADAPTER)
    refused = job.run(tmp_path / "fourth", **OWN, adapter_name_or_path=tmp_path / "harmed")
    assert refused.code == 2 and "differs from what its run wrote" in refused.stderr


def test_magnitudes_are_trained_on_in_float32_on_a_quantised_base(job: Job, tmp_path: Path) -> None:
    job.done(tmp_path / "first", use_dora=True, load_in_4bit=True)
    job.done(tmp_path / "second", **OWN, adapter_name_or_path=tmp_path / "first", load_in_4bit=True, learning_rate=1e-5)
    kept, further = (load_file(tmp_path / each / ADAPTER) for each in ("first", "second"))
    magnitudes = [name for name in kept if "magnitude" in name]
    assert magnitudes and {further[name].dtype for name in magnitudes} == {torch.float32}
    moved = [(further[name] - kept[name]).abs().max() for name in magnitudes]
    assert all(0 < each < 1e-3 for each in moved)
