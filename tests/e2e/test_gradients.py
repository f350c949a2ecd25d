"""Averages of gradients in real two-process runs: over the process group or through the host the same adapter bit for
bit, whatever is wrong on the way; compressed ones near it; wrong ones made again before the optimizer, or all stop.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_rocm_tune.survive import manifest
from tests.e2e.command import Result, error_lines
from tests.e2e.conftest import ADAPTER, Job, MakeJob, done, losses_of, report_of

STEPS = 5
TO_HOST, TO_DEVICE = "stage=buckets,tensor=*to host", "stage=buckets,tensor=*to device"


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    """LoRA with an accumulation of two."""
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "save_steps": 2}
    return make_job("averages", train=24, lora_dropout=0.0, eval_strategy="no", **sizes)


def both(job: Job, output: Path, faults: tuple[str, str] = ("", ""), **changed: object) -> list[Result]:
    """Runs both ranks, each with its own faults."""
    return job.ranks(output, each=[{"HF_ROCM_TUNE_FAULT": fault} for fault in faults], **changed)


def both_done(job: Job, output: Path, faults: tuple[str, str] = ("", ""), **changed: object) -> Path:
    for result in both(job, output, faults, **changed):
        done(result)
    return output


def the_line(results: list[Result]) -> str:
    """Both ranks have ended with code 3, and one line of both together."""
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    (line,) = error_lines(result.stderr for result in results)
    return line


def assert_stopped(results: list[Result], output: Path) -> None:
    line = the_line(results)
    assert "the average of the gradients of " in line and "was not used" in line
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 3
    assert not (output / ADAPTER).exists()


def assert_same(output: Path, plain: Path) -> None:
    assert (output / ADAPTER).read_bytes() == (plain / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(plain)


def assert_recovered(output: Path, clean: Path, mismatches: int) -> None:
    """Adapter and losses are bit for bit the undisturbed run's. Both ranks count each wrong bucket."""
    assert_same(output, clean)
    report = report_of(output)
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] == 2 * mismatches
    assert {(row["stage"], row["outcome"]) for row in report["incidents"]} == {("gradients", "recovered")}
    assert all("lora" in row["tensor"] for row in report["incidents"])


# ---- over the process group ---------------------------------------------------------------------------------


def test_a_wrong_average_on_one_rank_is_made_again(job: Job, tmp_path: Path) -> None:
    clean = job.clean(ranks=2)
    report = report_of(clean)
    assert report["gradients"]["buckets"] >= 2 * STEPS
    assert report["gradients"]["mismatches"] == 0 and report["incidents"] == []
    output = both_done(job, tmp_path / "out", ("", "kind=flip,stage=gradients,first=2,count=1"))
    assert_recovered(output, clean, mismatches=1)


@pytest.mark.parametrize("ranks", [pytest.param("one", marks=pytest.mark.long), "both"])
def test_a_persistent_one_stops_all_ranks_with_one_line(job: Job, tmp_path: Path, ranks: str) -> None:
    output, fault = tmp_path / "out", "kind=zero,stage=gradients,first=4,persist=1"
    assert_stopped(both(job, output, (fault if ranks == "both" else "", fault)), output)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert manifest.verify(output / "checkpoint-2") == []
    assert report_of(output)["incidents"][-1]["outcome"] == "failed"
    if ranks == "both":  # the same command goes on
        assert_same(both_done(job, output), job.clean(ranks=2))


def test_ranks_that_drift_apart_all_stop_and_name_what_differs(job: Job, tmp_path: Path) -> None:
    """One rank's update comes out wrong by one bit, which nothing on that rank can tell."""
    harm = {"MEMORY_ATTACK": json.dumps({"kind": "wrong update", "what": "weight", "step": 3})}
    line = the_line(job.ranks(tmp_path / "out", each=({}, harm), sentinel_every=1))
    assert "at step 3: ranks differ" in line
    assert re.search(r"lora_[AB]\.default\.weight \(ranks \[1\]\)", line) and "exp_avg" not in line
    assert not (tmp_path / "out" / ADAPTER).exists()


# ---- through the host ---------------------------------------------------------------------------------------


def test_faults_on_the_way_to_the_host_and_back_leave_no_trace_in_the_adapter(job: Job, tmp_path: Path) -> None:
    faults = (f"{TO_HOST},kind=flip,rate=0.5,seed=3", f"{TO_DEVICE},kind=zero,rate=0.5")
    output = both_done(job, tmp_path / "out", faults, grad_sync="host")
    assert_same(output, job.clean(ranks=2))
    report = report_of(output)
    crossed = report["buckets"]
    assert crossed["mismatches"] == crossed["recovered"] == len(report["incidents"]) > 1
    assert crossed["verified_bytes"] == crossed["bytes"] > 0
    assert {row["rank"] for row in report["incidents"]} == {0, 1}
    assert report["gradients"]["mismatches"] == 0 < report["gradients"]["buckets"]
    sync = report["grad_sync"]
    said = [sync[name] for name in ("method", "judged", "process_group", "averages")]
    assert said == ["host", "projections", "gloo", STEPS]
    assert sync["bytes_to_host_and_back_per_step"] == 2 * sync["bytes_between_ranks_per_step"] > 0
    assert report_of(job.clean(ranks=2))["grad_sync"]["method"] == "ddp"


@pytest.mark.long
@pytest.mark.parametrize(
    "changed",
    [
        {"load_in_4bit": True},
        {"gradient_accumulation_steps": 1},
        {"packing": True},
        {"on_oom": "stop"},  # averages overlap with the last backward
        {"use_peft": False, "learning_rate": 1e-4},
        {"verify": "off"},
        {"verify": "sample"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_adapter_is_bit_for_bit_that_of_the_process_group(
    job: Job, tmp_path: Path, changed: dict[str, object]
) -> None:
    plain, host = (both_done(job, tmp_path / way, grad_sync=way, **changed) for way in ("ddp", "host"))
    name = ADAPTER if changed.get("use_peft", True) else "model.safetensors"
    assert (host / name).read_bytes() == (plain / name).read_bytes()
    assert losses_of(host) == losses_of(plain)
    assert report_of(host)["incidents"] == []


# ---- compressed ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("compression", "away"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_casts_are_the_same_either_way_and_near_the_plain_run(
    job: Job, tmp_path: Path, compression: str, away: float
) -> None:
    settings = {"grad_compression": compression, "optim": "sgd"}
    ddp, host = (both_done(job, tmp_path / way, grad_sync=way, **settings) for way in ("ddp", "host"))
    assert_same(host, ddp)
    sent = report_of(job.clean(ranks=2))["grad_sync"]["bytes_between_ranks_per_step"]
    for report in map(report_of, (ddp, host)):
        assert report["grad_sync"]["compression"] == compression
        assert report["gradients"]["mismatches"] == 0 and report["incidents"] == []
        assert report["grad_sync"]["bytes_between_ranks_per_step"] * 2 == sent
    exact = load_file(job.clean(ranks=2, optim="sgd") / ADAPTER)
    start = job.clean(ranks=2, optim="sgd", learning_rate=0.0)
    moved, off = (
        torch.cat([(exact[name] - tensor).flatten() for name, tensor in load_file(each / ADAPTER).items()])
        for each in (start, host)
    )
    assert 0 < off.norm() < away * moved.norm()


@pytest.mark.long
def test_powersgd_trains_and_all_ranks_agree(job: Job, tmp_path: Path) -> None:
    output = both_done(job, tmp_path / "out", grad_sync="ddp", grad_compression="powersgd", max_steps=12)
    report = report_of(output)
    assert report["grad_sync"]["judged"] == "equal on all ranks"
    assert report["replicas"]["checks"] > 0 == report["replicas"]["mismatches"]
    assert losses_of(output)[-1] < losses_of(output)[0]
    assert (output / ADAPTER).read_bytes() != (job.clean(ranks=2, max_steps=12) / ADAPTER).read_bytes()
