"""Two processes over DDP, FSDP2 or tensor parallelism train like one, resume exactly, and let nothing wrong pass.

Accelerate deals batches out in turn, so the two batches of a step on two processes are together the batch of 2B rows of
that step on one (with tensor parallelism both get all of it). What differs is the order of float sums and how far a
batch is padded: losses in float32 are within 1e-5 of each other and gradient norms within 1e-4; Adam turns a last bit
into more where a gradient is near zero, so adapters are compared at 1e-3. QLoRA is in `test_trajectories`.

TRL's evaluation loss is the mean over rows of the mean of each row's batch, so it compares at batch size 1 only. Nine
rows on two processes make Accelerate repeat one: the loss is equal only where the repeated row is dropped again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import simcard
from tests.e2e.command import TIMEOUT, error_lines
from tests.e2e.conftest import ADAPTER, Job, MakeJob, assert_covered, done, losses_of, report_of
from tests.two_ranks import environments

BATCH, STEPS, EVAL_ROWS = 2, 16, 9
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
WHOLE = {"tensor_parallel": True, "per_device_train_batch_size": 2 * BATCH}
WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {"ddp": ({}, {}), "fsdp2": (FSDP2, {}), "tensor": ({}, WHOLE)}
"""Variables and flags."""
COMPARED = ("loss", "learning_rate", "num_tokens", "eval_loss", "epoch")


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    sizes = {"max_steps": STEPS, "save_steps": STEPS // 2, "eval_strategy": "steps", "eval_steps": STEPS // 2}
    sizes |= {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 1,
        "lora_dropout": 0.0,
        "sentinel_every": 8,
    }
    return make_job("ranks", train=2 * BATCH * STEPS, test=EVAL_ROWS, **sizes)


@pytest.fixture(scope="module")
def one(job: Job) -> Path:
    """The output directory of one process with batch 2B."""
    return job.clean(per_device_train_batch_size=2 * BATCH)


@pytest.fixture(scope="module")
def two(job: Job) -> Callable[[str], Path]:
    """The output directory of two processes, made once for each way."""

    def make(way: str) -> Path:
        output, (env, settings) = job.root / way, WAYS[way]
        if not output.exists():
            for each in job.ranks(output, each=[env, env], **settings):
                done(each)
        return output

    return make


def rows_of(output: Path, steps: int = STEPS) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    return list(history)


@pytest.mark.parametrize("way", WAYS)
def test_the_trajectory_is_that_of_one_process(way: str, one: Path, two: Callable[[str], Path]) -> None:
    alone, together = rows_of(one), rows_of(two(way))
    losses = [row["loss"] for row in alone if "loss" in row]
    assert len(losses) == STEPS and sum("eval_loss" in row for row in alone) == 2
    assert losses[0] - losses[-1] > 0.1  # it learned: a frozen trajectory would agree as well
    for ours, theirs in zip(alone, together, strict=True):
        for name in (name for name in COMPARED if name in ours):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-5), name
        assert "loss" not in ours or theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    adapters = [load_file(output / ADAPTER) for output in (one, two(way))]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_the_report_covers_and_compares_both_ranks(
    way: str, one: Path, two: Callable[[str], Path], model_of: Any
) -> None:
    alone, report = report_of(one), report_of(two(way))
    assert report["ranks"] == 2
    assert_covered(report)
    assert report["frozen"]["tensors"] == 2 * alone["frozen"]["tensors"] and report["frozen"]["mismatches"] == 0
    assert report["replicas"]["mismatches"] == report["gathered"]["mismatches"] == 0
    assert report["gradients"]["mismatches"] == 0
    if way == "ddp":
        assert report["weights"]["tensors"] == 2 * alone["weights"]["tensors"]  # each rank loads its own
        assert report["replicas"]["checks"] > 0
    elif way == "fsdp2":
        assert report["grad_sync"]["method"] == "fsdp2"
        assert report["weights"]["bytes"] == pytest.approx(alone["weights"]["bytes"], rel=0.05)  # once, not twice
        assert report["gathered"]["checked"] > report["gradients"]["buckets"] >= 2 * STEPS
        assert report["memory"]["steps_down"] is False  # stated: a step that runs out of memory is not done again
    else:
        assert report["grad_sync"]["method"] == "tensor_parallel"
        assert report["gathered"]["checked"] > 0 < report["replicas"]["checks"]
        weights = load_file(model_of("llama3") / "model.safetensors")
        shapes = {name: each.shape for name, each in weights.items() if "_proj" in name}
        cut = sum(weights[name].nbytes for name in shapes)
        # a half on each rank; what each has whole does not cross on the CPU
        halves = [
            (out, into // 2) if "o_proj" in name or "down_proj" in name else (out // 2, into)
            for name, (out, into) in shapes.items()
        ]
        sizes = {size for half in halves for size in half}
        checksums = 2 * 12 * (sum(out + into + 1 for out, into in halves) + sum(sizes))  # three float32 each, a rank
        assert report["weights"]["bytes"] == pytest.approx(cut + checksums, abs=1024)
        assert cut < alone["weights"]["bytes"]


@pytest.mark.parametrize("way", ["fsdp2", "tensor"])
def test_a_checkpoint_has_the_form_of_a_single_process(way: str, one: Path, two: Callable[[str], Path]) -> None:
    saved = [output / f"checkpoint-{STEPS // 2}" for output in (one, two(way))]
    ours, theirs = ({file.name for file in each.iterdir()} for each in saved)
    assert {name for name in ours ^ theirs if not name.startswith("rng_state")} == set()
    optimizers = [torch.load(each / "optimizer.pt", weights_only=True) for each in saved]
    shapes = [{key: value["exp_avg"].shape for key, value in each["state"].items()} for each in optimizers]
    assert shapes[0] == shapes[1]
    assert json.loads((saved[1] / "integrity.json").read_text())["extra"]["compared"] is True


# PEFT 0.21 asks for a property that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapter_of_shards_is_a_plain_one_that_peft_loads(
    one: Path, two: Callable[[str], Path], model_of: Callable[[str], Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(24)[None]
    logits = []
    for output in (one, two("fsdp2")):
        base = AutoModelForCausalLM.from_pretrained(model_of("llama3"))
        model = PeftModel.from_pretrained(base, output)
        assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)
        logits.append(model(input_ids=tokens).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def assert_same(output: Path, whole: Path) -> None:
    first, second = (load_file(each / ADAPTER) for each in (whole, output))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses_of(output) == losses_of(whole)


def test_a_run_that_is_killed_continues_to_the_same_adapter(
    job: Job, two: Callable[[str], Path], tmp_path: Path
) -> None:
    killed = job.ranks(tmp_path / "out", crash="step=10,kind=kill,rank=1", **WHOLE)
    assert [each.code for each in killed] == [4, -signal.SIGKILL]
    assert not (tmp_path / "out" / ADAPTER).exists()
    for each in job.ranks(tmp_path / "out", **WHOLE):
        done(each)
    assert_same(tmp_path / "out", two("tensor"))


# ---- what is wrong between the ranks -------------------------------------------------------------------------------


def _assert_stopped_for_unequal_ranks(codes: list[int], lines: list[str], tmp_path: Path) -> None:
    _assert_stopped_by_one_line(codes, lines, tmp_path)
    assert "ranks differ from rank 0" in lines[0]


def _assert_stopped_by_one_line(codes: list[int], lines: list[str], tmp_path: Path) -> None:
    assert codes == [3, 3]
    assert len(lines) == 1
    assert not list((tmp_path / "out").glob("**/adapter_model.safetensors"))
    said = json.loads((tmp_path / "out.exit.json").read_text())
    assert said["code"] == 3 and said["message"] in lines[0]


def test_a_weight_that_changed_on_one_rank_stops_both(job: Job, tmp_path: Path) -> None:
    harmed = "layers.1.mlp.up_proj"
    fault = {"HF_ROCM_TUNE_FAULT": f"kind=after,stage=weights,tensor=*{harmed}.weight,count=1"}
    results = job.ranks(tmp_path / "out", each=[{}, fault])
    lines = error_lines(result.stderr for result in results)
    _assert_stopped_by_one_line([result.code for result in results], lines, tmp_path)
    # rank 1 compares with what it loaded before the ranks are compared with each other
    assert "[rank 1] error: frozen weights changed in memory (since they were loaded" in lines[0] and harmed in lines[0]


@pytest.mark.long
def test_frozen_weights_are_not_broadcast_at_start(job: Job, tmp_path: Path) -> None:
    """Were they, rank 1's changed copy would be overwritten, and this run would end as if nothing had happened."""
    argv, ranks = job.argv(tmp_path / "out"), environments(tmp_path / "out.exit.json")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.unequal_ranks", *argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | rank,
        )
        for rank in ranks
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT)[1] for each in running]
    finally:
        for each in running:
            each.kill()  # does nothing to one that has ended
    lines = error_lines(said)
    _assert_stopped_for_unequal_ranks([each.returncode for each in running], lines, tmp_path)
    assert "after DistributedDataParallel" in lines[0]


@pytest.mark.parametrize(
    ("way", "fault", "code", "says"),
    [
        ("tensor", "kind=after,stage=weights,tensor=*o_proj*,count=1", 0, ""),
        ("tensor", "kind=flip,stage=gathered,first=9,count=1", 3, "partial sums of model.layers.1.self_attn.o_proj"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("tensor", "kind=zero,stage=gathered,tensor=*gradient of its input,count=1", 3, "card arrived wrong"),
                ("tensor", "kind=after,stage=weights,tensor=*o_proj*", 3, "do not make the tensor"),
                ("fsdp2", "kind=after,stage=weights,tensor=*embed_tokens*,count=1", 0, ""),
                ("fsdp2", "kind=after,stage=weights,tensor=*embed_tokens*", 3, "weight do not make the tensor"),
                ("fsdp2", "kind=flip,stage=gathered,first=20,count=1", 3, "gathered from the other cards arrived"),
                ("fsdp2", "kind=zero,stage=gradients,first=3,count=2", 0, ""),
                ("fsdp2", "kind=swap,stage=gradients,first=3,count=1,seed=3", 0, ""),
                ("fsdp2", "kind=zero,stage=gradients,first=3,persist=1", 3, "through the host failed too"),
            )
        ),
    ],
)
def test_faults_between_the_ranks(way: str, fault: str, code: int, says: str, job: Job, tmp_path: Path) -> None:
    env, settings = WAYS[way]
    short = settings | {"max_steps": 4, "save_strategy": "no", "eval_strategy": "no"}
    ended = job.ranks(tmp_path / "out", each=[{**env, "HF_ROCM_TUNE_FAULT": fault}] * 2, **short)
    assert [each.code for each in ended] == [code, code], [each.stderr[-1500:] for each in ended]
    assert any(says in each.stderr for each in ended)
    if code == 0:
        found = report_of(tmp_path / "out")["incidents"]
        assert found and {row["outcome"] for row in found} == {"recovered"}
        assert "weights" not in fault or {row["kind"] for row in found} == {"wrong shard"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"load_in_4bit": True}, "--load_in_4bit: packed weights cannot be cut"),
        pytest.param({"use_dora": True}, "DoRA computes with whole weights", marks=pytest.mark.long),
        ({"lora_modules_to_save": "lm_head"}, "lm_head.modules_to_save.default.weight is trained but is not a LoRA"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(
    more: dict[str, object], says: str, job: Job, tmp_path: Path
) -> None:
    ended = job.ranks(tmp_path / "out", **WHOLE, **more)
    assert [each.code for each in ended] == [2, 2], [each.stderr[-1500:] for each in ended]
    line = max((each.stderr for each in ended), key=len)  # the first rank to refuse says it
    assert "--tensor_parallel: " in line and says in line


# ---- the full matrix --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("before", ["cpu_dual", "cpu_dual_fsdp2"])
def test_a_checkpoint_is_continued_with_fsdp2_through_the_launcher(
    before: str, job: Job, two: Callable[[str], Path], tmp_path: Path
) -> None:
    killed = job.launched(before, tmp_path / "out", {"HF_ROCM_TUNE_CRASH": "step=12,kind=kill,rank=1"})
    assert killed.returncode not in (0, 2, 3)
    assert not (tmp_path / "out" / ADAPTER).exists()
    again = job.launched("cpu_dual_fsdp2", tmp_path / "out")
    assert again.returncode == 0, again.stderr[-3000:]
    if before == "cpu_dual_fsdp2":
        assert_same(tmp_path / "out", two("fsdp2"))
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(two("fsdp2")), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("way", ["fsdp2", "tensor"])
@pytest.mark.parametrize("arch", ["llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "window", [{"one_pass_loss": True}, {"gradient_accumulation_steps": 2, "packing": True, "lora_r": 3}]
)
def test_windows_and_architectures_like_one_process(
    way: str, arch: str, window: dict[str, object], job: Job, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {"model_name_or_path": model_of(arch), "max_steps": 8, "save_steps": 8, "eval_steps": 4, **window}
    more |= {"gradient_checkpointing": way == "fsdp2"}
    job.done(tmp_path / "one", **more | {"per_device_train_batch_size": 2 * BATCH})
    for each in job.ranks(tmp_path / "two", each=[WAYS[way][0]] * 2, **more | WAYS[way][1]):
        done(each)
    logs = [rows_of(tmp_path / output, steps=8) for output in ("one", "two")]
    logs = [[row[name] for row in rows for name in ("loss", "eval_loss") if name in row] for rows in logs]
    assert len(logs[0]) == 10 and logs[1] == pytest.approx(logs[0], rel=1e-4)
    assert report_of(tmp_path / "two")["coverage"]["unverified"] == []


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "host"])
def test_tensor_parallelism_by_the_launcher_on_two_cards(way: str, job: Job, tmp_path: Path) -> None:
    """On simulated cards, by the stand-in for RCCL and through the host: the losses of one process; killed and resumed;
    a wrong summand."""
    try:
        card = {**simcard.environment(), "SIMCARD_DEVICES": "2"}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    together = replace(job, settings=job.settings | WHOLE)
    short = {"max_steps": 6, "save_steps": 3, "dtype": "float32", "bf16": False, "eval_strategy": "no"}
    job.done(tmp_path / "one", **short, per_device_train_batch_size=2 * BATCH)

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
    assert_same(tmp_path / "again", tmp_path / "two")
    code, said = launch("wrong", HF_ROCM_TUNE_FAULT="kind=flip,stage=gathered,first=9,count=1")
    assert code == 3 and "partial sums of model.layers" in said
