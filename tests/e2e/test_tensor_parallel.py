"""Two processes that compute each layer together train like one, resume exactly, and let nothing wrong pass.

Both ranks get the same batches, so the batch is that of one process. Sums of two halves are rounded otherwise than one
sum: in float32 losses are within 1e-5 of each other and gradient norms within 1e-4, over 50 steps; adapters, in which
Adam turns a last bit into more where a gradient is near zero, within 1e-3.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import simcard
from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_covered, done, losses_of, report_of

BATCH, STEPS = 4, 50


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job(
        "tensor-parallel",
        train=BATCH * STEPS,
        test=5,
        max_steps=STEPS,
        save_steps=25,
        per_device_train_batch_size=BATCH,
        learning_rate=0.005,
        lora_dropout=0.0,
    )


@pytest.fixture(scope="module")
def together(job: Job) -> Job:
    """Two ranks that compute each layer together."""
    return replace(job, settings=job.settings | {"tensor_parallel": True})


@pytest.fixture(scope="module")
def outputs(job: Job, together: Job) -> tuple[Path, Path]:
    """Output directories of one process and of two that compute each layer together."""
    return job.clean(), together.clean(ranks=2)


def _rows(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "loss" in row]


def test_the_trajectory_is_that_of_one_process(outputs: tuple[Path, Path]) -> None:
    one, two = (_rows(output) for output in outputs)
    assert len(one) == len(two) == STEPS
    assert one[0]["loss"] - one[-1]["loss"] > 0.1  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        assert theirs["num_tokens"] == ours["num_tokens"]
    adapters = [load_file(output / ADAPTER) for output in outputs]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-3, atol=1e-3)


def test_the_report_covers_parts_and_counts_what_crossed(outputs: tuple[Path, Path], model_of: Any) -> None:
    one, two = (report_of(output) for output in outputs)
    assert two["ranks"] == 2 and two["grad_sync"]["way"] == "tensor_parallel"
    assert_covered(two)
    weights = load_file(model_of("llama3") / "model.safetensors")
    cut = sum(each.nbytes for name, each in weights.items() if "_proj" in name)
    # a half on each rank; what each has whole does not cross on the CPU
    halves = [
        (out, into // 2) if "o_proj" in name or "down_proj" in name else (out // 2, into)
        for name, (out, into) in ((name, each.shape) for name, each in weights.items() if "_proj" in name)
    ]
    sizes = {size for half in halves for size in half}
    checksums = 2 * 12 * (sum(out + into + 1 for out, into in halves) + sum(sizes))  # three float32 each, on each rank
    assert two["weights"]["bytes"] == pytest.approx(cut + checksums, abs=1024) and cut < one["weights"]["bytes"]
    assert two["gathered"]["checked"] > 0
    assert two["gathered"]["mismatches"] == two["frozen"]["mismatches"] == two["replicas"]["mismatches"] == 0
    assert two["replicas"]["checks"] > 0
    assert two["frozen"]["tensors"] == 2 * one["frozen"]["tensors"]


def test_a_checkpoint_has_the_form_of_a_single_process(outputs: tuple[Path, Path]) -> None:
    optimizers = [torch.load(each / "checkpoint-25" / "optimizer.pt", weights_only=True) for each in outputs]
    shapes = [{key: value["exp_avg"].shape for key, value in each["state"].items()} for each in optimizers]
    assert shapes[0] == shapes[1]


def test_a_run_that_is_killed_continues_to_the_same_adapter(
    outputs: tuple[Path, Path], together: Job, tmp_path: Path
) -> None:
    killed = together.ranks(tmp_path / "out", crash="step=28,kind=kill,rank=1")
    assert [each.code for each in killed] == [4, -signal.SIGKILL]
    assert not (tmp_path / "out" / ADAPTER).exists()
    for each in together.ranks(tmp_path / "out"):
        done(each)
    whole, continued = (load_file(each / ADAPTER) for each in (outputs[1], tmp_path / "out"))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert losses_of(tmp_path / "out") == losses_of(outputs[1])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"load_in_4bit": True}, "--load_in_4bit: packed weights cannot be cut"),
        pytest.param({"use_peft": False}, "it is for adapters", marks=pytest.mark.long),
        pytest.param({"use_dora": True}, "DoRA computes with whole weights", marks=pytest.mark.long),
        pytest.param({"split_layers": "auto"}, "it does not work with --split_layers", marks=pytest.mark.long),
        ({"lora_modules_to_save": "lm_head"}, "lm_head.modules_to_save.default.weight is trained but is not a LoRA"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    more: dict[str, object], says: str, together: Job, tmp_path: Path
) -> None:
    ended = together.ranks(tmp_path / "out", **more)
    assert [each.code for each in ended] == [2, 2], [each.stderr[-1500:] for each in ended]
    line = max((each.stderr for each in ended), key=len)  # the first rank to refuse says it
    assert "--tensor_parallel: " in line and says in line


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("kind=after,stage=weights,tensor=*o_proj*,count=1", 0, ""),
        ("kind=flip,stage=gathered,first=9,count=1", 3, "partial sums of model.layers.1.self_attn.o_proj"),
        pytest.param(
            "kind=zero,stage=gathered,tensor=*gradient of its input,count=1",
            3,
            "gradient of its input from the other card arrived wrong",
            marks=pytest.mark.long,
        ),
        pytest.param("kind=after,stage=weights,tensor=*o_proj*", 3, "do not make the tensor", marks=pytest.mark.long),
    ],
)
def test_faults_on_loading_and_on_sums(fault: str, code: int, says: str, together: Job, tmp_path: Path) -> None:
    ended = together.ranks(tmp_path / "out", fault=fault, max_steps=4, save_strategy="no")
    assert [each.code for each in ended] == [code, code], [each.stderr[-1500:] for each in ended]
    assert any(says in each.stderr for each in ended)
    if code == 0:
        found = report_of(tmp_path / "out")
        assert [(row["kind"], row["outcome"]) for row in found["incidents"]] == [("wrong shard", "recovered")]


# ---- the full matrix --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize("window", [{}, {"gradient_accumulation_steps": 2, "packing": True, "one_pass_loss": True}])
def test_with_evaluation_like_one_process(
    arch: str, window: dict[str, object], job: Job, together: Job, model_of: Any, tmp_path: Path
) -> None:
    """The last batch of the evaluation's 5 rows is short."""
    more = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2, "max_steps": 8, "save_steps": 8}
    more |= {"model_name_or_path": model_of(arch), **window}
    for each in together.ranks(tmp_path / "two", **more):
        done(each)
    job.done(tmp_path / "one", **more)
    logs = []
    for output in ("one", "two"):
        history = json.loads((tmp_path / output / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
        logs.append([row[name] for row in history for name in ("loss", "eval_loss") if name in row])
    assert len(logs[0]) == 10 and logs[1] == pytest.approx(logs[0], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "host"])
def test_the_launcher_on_two_cards(way: str, job: Job, together: Job, tmp_path: Path) -> None:
    """On simulated cards, by the stand-in for RCCL and through the host: the losses of one process; killed and resumed;
    a wrong summand."""
    try:
        card = {**simcard.environment(), "SIMCARD_DEVICES": "2"}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    short = {"max_steps": 6, "save_steps": 3, "dtype": "float32", "bf16": False}
    job.done(tmp_path / "one", **short)

    def launch(name: str, **env: str) -> tuple[int, str]:
        more = {**short, "grad_sync": way, "preflight": "off"}
        ended = together.launched("dual_rx7900xt", tmp_path / name, {**card, **env}, **more)
        return ended.returncode, ended.stderr[-3000:]

    assert launch("two")[0] == 0
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
    report = report_of(tmp_path / "two")
    assert report["coverage"]["unverified"] == [] and report["gathered"]["mismatches"] == 0
    assert report["grad_sync"]["process_group"] == ("gloo" if way == "host" else "nccl")
    crossed = report["activations"]
    assert crossed["verified_bytes"] == crossed["bytes"] and (crossed["bytes"] > 0) == (way == "host")
    assert launch("again", HF_ROCM_TUNE_CRASH="step=5,kind=kill,rank=1")[0] == 137
    assert not (tmp_path / "again" / ADAPTER).exists()
    assert launch("again")[0] == 0
    whole, continued = (load_file(tmp_path / each / ADAPTER) for each in ("two", "again"))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "two")
    code, said = launch("wrong", HF_ROCM_TUNE_FAULT="kind=flip,stage=gathered,first=9,count=1")
    assert code == 3 and "partial sums of model.layers" in said
