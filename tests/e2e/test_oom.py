"""Real commands, on one process and on two, whose steps run out of memory or whose gradients are NaN.

The run ends where the undisturbed one ends: same loss and gradient norm at each step, same tokens, same number of
steps, so the effective batch never changed. When it cannot, all ranks stop with one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_rocm_tune.survive import manifest
from hf_rocm_tune.train.faults import STEP_VARIABLE as VARIABLE
from tests.e2e.command import Result, error_lines
from tests.e2e.conftest import ADAPTER, Job, MakeJob, checkpoint, done, report_of

STEPS = 5
COMPARED = ("loss", "grad_norm", "learning_rate", "num_tokens", "epoch")
BATCHES: dict[str, dict[str, Any]] = {
    "padded": {"per_device_train_batch_size": 4, "max_length": 64},
    "packed": {"per_device_train_batch_size": 1, "max_length": 224, "packing": True},  # 1 to 3 sequences a row
}


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """Adam makes much of rounding where a gradient is near zero."""
    settings = {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 1.0, "lora_dropout": 0.0}
    return make_job("oom", train=64, max_steps=STEPS, save_steps=2, eval_strategy="no", **settings)


def run(job: Job, output: Path, *faults: str, batches: str = "padded", **changed: object) -> list[Result]:
    """Runs as many ranks as there are faults, each with its own."""
    each = [{VARIABLE: fault} for fault in faults]
    settings = {**BATCHES[batches], **changed}
    if len(each) == 1:
        return [job.run(output, env=each[0], **settings)]
    return job.ranks(output, each=each, **settings)


def all_done(results: list[Result]) -> None:
    for result in results:
        done(result)


def the_line(results: list[Result]) -> str:
    """The line of all ranks together."""
    (line,) = error_lines(result.stderr for result in results)
    return line


def steps_of(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [{name: row[name] for name in COMPARED} for row in history if "loss" in row]


def assert_same_end(output: Path, clean: Path, *, resumed: bool = False) -> None:
    """TRL counts tokens from 0 again when it resumes."""
    ours, theirs = steps_of(output), steps_of(clean)
    assert len(ours) == STEPS and theirs[0]["loss"] - theirs[-1]["loss"] > 0.05  # it learned
    for mine, other in zip(ours, theirs, strict=True):
        if resumed:
            del mine["num_tokens"], other["num_tokens"]
        assert mine == pytest.approx(other, rel=2e-5)
        assert resumed or mine["num_tokens"] == other["num_tokens"]
    expected = load_file(clean / "adapter_model.safetensors")
    for name, tensor in load_file(output / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def shortages_of(output: Path) -> list[dict[str, Any]]:
    return [row for row in report_of(output)["incidents"] if row["kind"] == "out of memory"]


@pytest.mark.long  # `tests/train/test_oom.py` has it in one process
@pytest.mark.parametrize(
    ("batches", "fault"), [("packed", "kind=oom,rows=1"), ("padded", "kind=oom,rate=0.4,seed=4,rows=1")]
)
def test_the_trajectory_is_the_undisturbed_one(job: Job, tmp_path: Path, batches: str, fault: str) -> None:
    output = tmp_path / "out"
    all_done(run(job, output, fault, batches=batches))
    assert_same_end(output, job.clean(ranks=1, **BATCHES[batches]))
    found = shortages_of(output)
    assert len(found) >= 2 and {row["outcome"] for row in found} == {"recovered"}
    memory = report_of(output)["memory"]
    assert memory["shortages"] == memory["recovered"] == len(found)
    assert memory["micro_batch_divisor"] > max(row["divisor"] for row in found)
    assert report_of(output)["step_fault_injection"]["injected"] == len(found)


def assert_told(results: list[Result], output: Path, said: str) -> None:
    """Rank 1 has ended the job with one line and code 5."""
    assert results[1].code == 5 and results[0].code != 0, [result.stderr[-3000:] for result in results]
    line = the_line(results)
    assert "rank 1: out of memory with" in line and said in line
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 5


def assert_went_on(output: Path, clean: Path) -> None:
    """A second start has ended as the undisturbed run did, with what the first one learned."""
    assert_same_end(output, clean, resumed=True)
    (last, before), (other, earlier) = (
        [row["num_tokens"] for row in steps_of(each)[:-3:-1]] for each in (output, clean)
    )
    assert last - before == other - earlier  # of all ranks, however many parts each had
    (found,) = shortages_of(output)
    assert (found["on_rank"], found["outcome"]) == (1, "recovered")
    report = report_of(output)
    assert report["memory"]["micro_batch_divisor"] > found["divisor"] and report["replicas"]["mismatches"] == 0


@pytest.mark.parametrize(
    ("batches", "fault"),
    [
        ("packed", "kind=oom,where=backward,first=4,rows=1"),
        pytest.param("padded", "kind=oom,where=forward,first=3,rows=1", marks=pytest.mark.long),
    ],
)
def test_with_several_ranks_the_same_command_goes_on_with_smaller_parts(
    job: Job, tmp_path: Path, batches: str, fault: str
) -> None:
    output = tmp_path / "out"
    assert_told(run(job, output, "", fault, batches=batches), output, "start the same command again")
    all_done(run(job, output, "", fault, batches=batches))
    assert_went_on(output, job.clean(ranks=2, **BATCHES[batches]))


@pytest.mark.long
def test_a_row_that_fits_on_no_account_stops_all_ranks_with_one_line(job: Job, tmp_path: Path) -> None:
    output, fault = tmp_path / "out", "kind=oom,first=4,where=backward"
    assert_told(run(job, output, "", fault), output, "start the same command again")
    results = run(job, output, "", fault)
    assert_told(results, output, "1 row (64 tokens) at step 4")
    assert "hf-rocm-tune plan" in the_line(results)
    assert manifest.verify(output / "checkpoint-2") == [] and not (output / "adapter_model.safetensors").exists()
    all_done(run(job, output, "", ""))  # the same command goes on, with what it has learned
    assert report_of(output)["memory"]["micro_batch_divisor"] == 4
    assert_same_end(output, job.clean(ranks=2, **BATCHES["padded"]), resumed=True)


def test_gradients_that_are_nan_on_one_rank_are_used_on_none(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    all_done(run(job, output, "", "kind=nan,first=3,count=1"))
    report = report_of(output)
    (found,) = [row for row in report["incidents"] if row["stage"] == "guard"]
    assert (found["step"], found["kind"], found["outcome"]) == (3, "not finite", "skipped")
    assert report["guard"]["skipped_steps"] == 1 and report["replicas"]["mismatches"] == 0
    third, fourth = (load_adapter(output, step) for step in (2, 4))
    assert all(tensor.isfinite().all() for tensor in fourth.values())
    assert any(not torch.equal(third[name], tensor) for name, tensor in fourth.items())


def load_adapter(output: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(checkpoint(output, step) / ADAPTER)
    return found


def test_gradients_that_stay_nan_stop_all_ranks_at_the_last_good_checkpoint(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    results = run(job, output, "", "kind=nan,first=3", max_skipped_steps=2, max_steps=20)
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    line = the_line(results)
    assert "step 5: loss" in line and "learning rate" in line and "checkpoint-4 is the newest checkpoint" in line
    assert manifest.verify(output / "checkpoint-4") == []
    second, fourth = (load_adapter(output, step) for step in (2, 4))
    assert all(torch.equal(second[name], tensor) for name, tensor in fourth.items())  # nothing of them was used


def test_a_fault_that_is_not_understood_stops_before_the_model_is_loaded(job: Job, tmp_path: Path) -> None:
    (result,) = run(job, tmp_path / "out", "kind=oom,rows=many")
    assert result.code == 2 and VARIABLE in the_line([result]) and "rows=many" in the_line([result])
    assert "Loading weights" not in result.stderr
