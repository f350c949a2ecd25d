"""Averages of gradients in real two-process runs, over the process group and through the host: wrong ones are made
again before the optimizer, bit for bit, or all ranks stop; compressed ones are near the plain ones. And ranks that
drift apart all the same: an update comes out wrong by one bit, which nothing on that rank can tell.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_rocm_tune.survive import manifest
from tests import tiny
from tests.e2e.command import TIMEOUT, CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.two_ranks import environments

STEPS = 5
ADAPTER = "adapter_model.safetensors"
TO_HOST, TO_DEVICE = "stage=buckets,tensor=*to host", "stage=buckets,tensor=*to device"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command for two processes, and the output of an undisturbed run of it over the process group."""

    server: CommandServer
    argv: list[str]
    clean: Path

    def run(
        self,
        output: Path,
        faults: tuple[str, str] = ("", ""),
        environ: tuple[dict[str, str], dict[str, str]] = ({}, {}),
        **changed: object,
    ) -> list[Result]:
        """Runs both ranks, each with its own faults and variables."""
        argv = [*self.argv, *flags(output_dir=output, **changed)]
        each = [{"HF_ROCM_TUNE_FAULT": fault, **more} for fault, more in zip(faults, environ, strict=True)]
        ranks = environments(output.with_suffix(".exit.json"), each)
        running = [self.server.start(*argv, env=each) for each in ranks]
        return [each.wait() for each in running]

    def done(self, output: Path, *more: object, **changed: object) -> Path:
        """Runs both ranks, which must end well; the output directory."""
        _assert_done(self.run(output, *more, **changed))  # type: ignore[arg-type]
        return output


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """The undisturbed run."""
    root = scratch / "gradients"
    argv = flags(
        model_name_or_path=model_of("llama3"),
        dataset_name=tiny.write_dataset_dir(root / "data", train=24, test=4),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_length=64,
        learning_rate=0.01,
        lora_dropout=0.0,
        logging_steps=1,
        save_steps=2,
        eval_strategy="no",
        disable_tqdm=True,
    )
    made = Job(server=server, argv=argv, clean=root / "clean")
    made.done(made.clean)
    return made


def _error_line(results: list[Result]) -> str:
    """The one line of both ranks together, which found corruption."""
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    said = [line for result in results for line in result.stderr.splitlines()]
    lines = [line for line in said if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]
    assert len(lines) == 1 and not any("Traceback" in line for line in said)
    return lines[0]


def _assert_same(output: Path, plain: Path) -> None:
    assert (output / ADAPTER).read_bytes() == (plain / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(plain)


def _assert_done(results: list[Result]) -> None:
    assert [result.code for result in results] == [0, 0], [result.stderr[-3000:] for result in results]


def _assert_recovered(output: Path, clean: Path, mismatches: int) -> None:
    """Adapter and losses are bit for bit the undisturbed run's. Both ranks count each wrong bucket."""
    assert (output / ADAPTER).read_bytes() == (clean / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(clean)
    report = report_of(output)
    assert report["gradients"]["mismatches"] == report["gradients"]["recovered"] == 2 * mismatches
    assert {(row["stage"], row["outcome"]) for row in report["incidents"]} == {("gradients", "recovered")}
    assert all("lora" in row["tensor"] for row in report["incidents"])


def test_every_step_of_a_clean_run_is_checked(job: Job) -> None:
    report = report_of(job.clean)
    assert report["gradients"]["buckets"] >= 2 * STEPS
    assert report["gradients"]["mismatches"] == 0 and report["incidents"] == []


def test_a_wrong_average_on_one_rank_is_made_again(job: Job, tmp_path: Path) -> None:
    output = tmp_path / "out"
    _assert_done(job.run(output, ("", "kind=flip,stage=gradients,first=2,count=1")))
    _assert_recovered(output, job.clean, mismatches=1)


@pytest.mark.long
def test_clipping_does_not_pass_for_a_wrong_average_nor_hide_one(job: Job, tmp_path: Path) -> None:
    plain, harmed = tmp_path / "plain", tmp_path / "harmed"
    _assert_done(job.run(plain, max_grad_norm=1e-3))
    assert report_of(plain)["gradients"]["mismatches"] == 0
    _assert_done(job.run(harmed, ("kind=zero_range,stage=gradients,count=2",) * 2, max_grad_norm=1e-3))
    _assert_recovered(harmed, plain, mismatches=2)


@pytest.mark.long
def test_through_the_launcher_an_average_that_is_wrong_alike_on_both_ranks_is_made_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    monkeypatch.setenv("HF_ROCM_TUNE_FAULT", "kind=zero,stage=gradients,first=2,count=1")
    command = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual", *job.argv]
    command += flags(output_dir=output)
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert launched.returncode == 0, launched.stderr[-3000:]
    _assert_recovered(output, job.clean, mismatches=1)
    assert report_of(output)["fault_injection"]["injected"] == 1
    assert "averages of gradients checked (2 wrong, 2 recovered)" in launched.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("way", "faults"),
    [
        ("ddp", ("kind=zero,stage=gradients,first=4,persist=1",) * 2),
        pytest.param("ddp", ("", "kind=zero,stage=gradients,first=4,persist=1"), marks=pytest.mark.long),
        pytest.param("host", ("", f"{TO_HOST},kind=zero,first=5,persist=1"), marks=pytest.mark.long),
    ],
    ids=["both", "one", "to-host"],
)
def test_a_persistent_one_stops_all_ranks_with_one_line_and_the_same_command_goes_on(
    job: Job, tmp_path: Path, way: str, faults: tuple[str, str]
) -> None:
    output = tmp_path / "out"
    results = job.run(output, faults, grad_sync=way)
    line = _error_line(results)
    assert "the average of the gradients in bucket" in line and "was not used" in line
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 3
    assert not (output / ADAPTER).exists()
    assert manifest.verify(output / "checkpoint-2") == []
    assert report_of(output)["incidents"][-1]["outcome"] == "failed"
    job.done(output)  # the same run, however its gradients are averaged
    assert (output / ADAPTER).read_bytes() == (job.clean / ADAPTER).read_bytes()


def test_an_adapter_that_differs_between_the_ranks_is_named_and_stops_both(job: Job, tmp_path: Path) -> None:
    harm = {"MEMORY_ATTACK": json.dumps({"kind": "wrong update", "what": "weight", "step": 3})}
    line = _error_line(job.run(tmp_path / "out", environ=({}, harm), sentinel_every=1, save_strategy="no"))
    assert "at step 3: ranks differ" in line
    assert re.search(r"lora_[AB]\.default\.weight \(ranks \[1\]\)", line) and "exp_avg" not in line
    assert not (tmp_path / "out" / ADAPTER).exists()


# ---- through the host, and compressed -------------------------------------------------------------------------


def test_faults_on_the_way_to_the_host_and_back_leave_no_trace_in_the_adapter(job: Job, tmp_path: Path) -> None:
    plain = job.clean
    output = job.done(
        tmp_path / "out", (f"{TO_HOST},kind=flip,rate=0.5,seed=3", f"{TO_DEVICE},kind=zero,rate=0.5"), grad_sync="host"
    )
    _assert_same(output, plain)
    report = report_of(output)
    crossed = report["buckets"]
    assert crossed["mismatches"] == crossed["recovered"] == len(report["incidents"]) > 1
    assert crossed["verified_bytes"] == crossed["bytes"] > 0
    assert {row["rank"] for row in report["incidents"]} == {0, 1}
    assert report["gradients"]["mismatches"] == 0 < report["gradients"]["buckets"]
    sync = report["grad_sync"]
    assert (sync["way"], sync["judged"], sync["process_group"], sync["averages"]) == (
        "host",
        "projections",
        "gloo",
        STEPS,
    )
    assert sync["bytes_to_host_and_back_per_step"] == 2 * sync["bytes_between_ranks_per_step"] > 0
    assert sync["wait_seconds"] > 0
    assert report_of(plain)["grad_sync"]["way"] == "ddp"


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
    plain, host = (job.done(tmp_path / way, grad_sync=way, **changed) for way in ("ddp", "host"))
    name = ADAPTER if changed.get("use_peft", True) else "model.safetensors"
    assert (host / name).read_bytes() == (plain / name).read_bytes()
    assert losses_of(host) == losses_of(plain)
    assert report_of(host)["incidents"] == []


@pytest.mark.long
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_casts_are_the_same_either_way_and_near_the_plain_run(job: Job, tmp_path: Path, compression: str) -> None:
    plain = job.clean
    ddp, host = (
        job.done(tmp_path / way, grad_sync=way, grad_compression=compression, optim="sgd") for way in ("ddp", "host")
    )
    _assert_same(host, ddp)
    for output in (ddp, host):
        report = report_of(output)
        assert report["grad_sync"]["compression"] == compression
        assert report["gradients"]["mismatches"] == 0 and report["incidents"] == []
        assert (
            report["grad_sync"]["bytes_between_ranks_per_step"] * 2
            == (report_of(plain)["grad_sync"]["bytes_between_ranks_per_step"])
        )
    exact = load_file(job.done(tmp_path / "plain", optim="sgd") / ADAPTER)
    start = job.done(tmp_path / "start", optim="sgd", learning_rate=0.0)
    moved = torch.cat([(exact[name] - tensor).flatten() for name, tensor in load_file(start / ADAPTER).items()])
    off = torch.cat([(exact[name] - tensor).flatten() for name, tensor in load_file(host / ADAPTER).items()])
    assert 0 < off.norm() < {"fp16": 2e-3, "bf16": 2e-2}[compression] * moved.norm()


@pytest.mark.long
def test_powersgd_trains_and_all_ranks_agree(job: Job, tmp_path: Path) -> None:
    output = job.done(tmp_path / "out", grad_sync="ddp", grad_compression="powersgd", max_steps=12)
    report = report_of(output)
    assert report["grad_sync"]["judged"] == "equal on all ranks"
    assert report["replicas"]["checks"] > 0 == report["replicas"]["mismatches"]
    assert losses_of(output)[-1] < losses_of(output)[0]
    exact = job.done(tmp_path / "exact", max_steps=12)
    assert (output / ADAPTER).read_bytes() != (exact / ADAPTER).read_bytes()
