"""FSDP2 with two processes trains like one process with twice the batch, resumes exactly, and lets nothing wrong pass.

Tolerances. LoRA in float32 differs in the order of float sums: losses within 1e-5 of each other, gradient norms within
1e-4, over 50 steps; Adam turns a last bit into more where a gradient is near zero, so adapters are compared at 1e-3.
QLoRA is in `test_trajectories`.

The full matrix is `long`: accumulation with packing, a tied head with evaluation, a run that is killed and goes
on (through the real launcher and its configuration), and injected faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_covered, done, losses_of, report_of

BATCH, STEPS = 2, 50
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job(
        "fsdp",
        train=4 * BATCH * STEPS,
        test=5,
        max_steps=STEPS,
        save_steps=25,
        per_device_train_batch_size=BATCH,
        learning_rate=0.005,
        lora_dropout=0.0,
    )


def rows_of(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "loss" in row]


@pytest.fixture(scope="module")
def outputs(job: Job) -> tuple[Path, Path]:
    """Output directories of one process with batch 2B, and of two with FSDP2 and batch B."""
    two = job.root / "two"
    for each in job.ranks(two, each=[FSDP2, FSDP2]):
        done(each)
    return job.clean(per_device_train_batch_size=2 * BATCH), two


def test_the_trajectory_is_that_of_one_process_with_twice_the_batch(outputs: tuple[Path, Path]) -> None:
    one, two = (rows_of(output) for output in outputs)
    assert len(one) == len(two) == STEPS
    assert one[0]["loss"] - one[-1]["loss"] > 0.1  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        assert theirs["num_tokens"] == ours["num_tokens"]


# PEFT 0.21 asks for a property that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapter_is_a_plain_one_that_peft_loads(
    outputs: tuple[Path, Path], model_of: Callable[[str], Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    one, two = (load_file(output / ADAPTER) for output in outputs)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-3)
    tokens = torch.arange(24)[None]
    logits = []
    for output in outputs:
        base = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
        model = PeftModel.from_pretrained(base, output)
        assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)
        logits.append(model(input_ids=tokens).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_the_report_covers_shards_and_what_crossed_between_the_ranks(outputs: tuple[Path, Path]) -> None:
    one, two = (report_of(output) for output in outputs)
    assert two["ranks"] == 2 and two["grad_sync"]["way"] == "fsdp2"
    assert_covered(two)
    assert two["weights"]["bytes"] == pytest.approx(one["weights"]["bytes"], rel=0.05)  # each weight once, not twice
    assert two["gathered"]["checked"] > two["gradients"]["buckets"] >= 2 * STEPS
    assert two["gathered"]["mismatches"] == two["gradients"]["mismatches"] == two["frozen"]["mismatches"] == 0
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]
    assert two["memory"]["steps_down"] is False  # stated: a step that runs out of memory is not done again


def test_a_checkpoint_has_the_form_of_a_single_process(outputs: tuple[Path, Path]) -> None:
    one, two = (output / "checkpoint-25" for output in outputs)
    ours, theirs = ({file.name for file in each.iterdir()} for each in (one, two))
    assert {name for name in ours ^ theirs if not name.startswith("rng_state")} == set()
    optimizers = [torch.load(each / "optimizer.pt", weights_only=True) for each in (one, two)]
    shapes = [{key: value["exp_avg"].shape for key, value in each["state"].items()} for each in optimizers]
    assert shapes[0] == shapes[1]
    assert json.loads((two / "integrity.json").read_text())["extra"] == {"compared": True}


# ---- the full matrix --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_is_killed_continues_to_the_same_adapter(
    outputs: tuple[Path, Path], job: Job, tmp_path: Path
) -> None:
    killed = job.launched("cpu_dual_fsdp2", tmp_path / "out", {"HF_ROCM_TUNE_CRASH": "step=38,kind=kill,rank=1"})
    assert killed.returncode not in (0, 2, 3)
    assert not (tmp_path / "out" / ADAPTER).exists()
    again = job.launched("cpu_dual_fsdp2", tmp_path / "out")
    assert again.returncode == 0, again.stderr[-3000:]
    whole, continued = (load_file(each / ADAPTER) for each in (outputs[1], tmp_path / "out"))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert losses_of(tmp_path / "out") == losses_of(outputs[1])


@pytest.mark.long
def test_a_checkpoint_of_ddp_is_continued_with_fsdp2(job: Job, outputs: tuple[Path, Path], tmp_path: Path) -> None:
    assert job.launched("cpu_dual", tmp_path / "out", {"HF_ROCM_TUNE_CRASH": "step=30,kind=kill"}).returncode != 0
    again = job.launched("cpu_dual_fsdp2", tmp_path / "out")
    assert again.returncode == 0, again.stderr[-3000:]
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(outputs[1]), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "window", [{}, {"one_pass_loss": True}, {"gradient_accumulation_steps": 2, "packing": True, "lora_r": 3}]
)
def test_lora_like_one_process(
    arch: str, window: dict[str, object], job: Job, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 25, "per_device_eval_batch_size": 1, "save_steps": STEPS}
    more |= {"activation_checkpointing": True, "model_name_or_path": model_of(arch), **window}
    one, two = tmp_path / "one", tmp_path / "two"
    job.done(one, **more | {"per_device_train_batch_size": 2 * BATCH})
    for each in job.ranks(two, each=[FSDP2, FSDP2], **more):
        done(each)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert report_of(two)["coverage"]["unverified"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("kind=after,stage=weights,tensor=*embed_tokens*,count=1", 0, ""),
        ("kind=after,stage=weights,tensor=*embed_tokens*", 3, "embed_tokens.weight do not make the tensor"),
        ("kind=flip,stage=gathered,first=20,count=1", 3, "gathered from the other cards arrived wrong"),
        ("kind=zero,stage=gradients,first=3,count=2", 0, ""),
        ("kind=zero,stage=gradients,first=3,persist=1", 3, "averaging it again through the host failed too"),
    ],
)
def test_faults_between_the_ranks(fault: str, code: int, says: str, job: Job, tmp_path: Path) -> None:
    output, injected = tmp_path / "out", {**FSDP2, "HF_ROCM_TUNE_FAULT": fault}
    ended = job.ranks(output, each=[injected, injected], max_steps=4, save_strategy="no")
    assert [each.code for each in ended] == [code, code], [each.stderr[-1500:] for each in ended]
    assert any(says in each.stderr for each in ended)
    if code == 0:
        found = report_of(output)
        assert found["incidents"] and all(row["outcome"] == "recovered" for row in found["incidents"])
