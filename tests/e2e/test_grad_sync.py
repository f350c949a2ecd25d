"""Gradients averaged through the host in real two-process runs: the same adapter as over the process group, bit for
bit, whatever is wrong on the way; and compressed averages, near it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, losses_of, report_of
from tests.two_ranks import environments

STEPS = 5
ADAPTER = "adapter_model.safetensors"
TO_HOST, TO_DEVICE = "stage=buckets,tensor=*to host", "stage=buckets,tensor=*to device"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command for two processes."""

    server: CommandServer
    argv: list[str]
    root: Path

    def run(
        self, output: Path, faults: tuple[str, str] = ("", ""), step_fault: str = "", **changed: object
    ) -> list[Result]:
        """Runs both ranks, each with its own faults; the second with the fault of a step."""
        argv = [*self.argv, *flags(output_dir=output, **changed)]
        each = [{"HF_ROCM_TUNE_FAULT": fault} for fault in faults]
        each[1]["HF_ROCM_TUNE_STEP_FAULT"] = step_fault
        ranks = environments(output.with_suffix(".exit.json"), each)
        running = [self.server.start(*argv, env=each) for each in ranks]
        return [each.wait() for each in running]

    def done(self, output: Path, *more: object, **changed: object) -> Path:
        """Runs both ranks, which must end well; the output directory."""
        results = self.run(output, *more, **changed)  # type: ignore[arg-type]
        assert [result.code for result in results] == [0, 0], [result.stderr[-3000:] for result in results]
        return output

    def plain(self, name: str, **changed: object) -> Path:
        """The output of an undisturbed run over the process group, made once for each name."""
        output = self.root / name
        return output if output.exists() else self.done(output, **changed)


@pytest.fixture(scope="module")
def job(server: CommandServer, model_of: Callable[[str], Path], scratch: Path) -> Job:
    """LoRA with an accumulation of two, dropout 0."""
    root = scratch / "grad-sync"
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
    return Job(server=server, argv=argv, root=root)


def _assert_same(output: Path, plain: Path) -> None:
    assert (output / ADAPTER).read_bytes() == (plain / ADAPTER).read_bytes()
    assert losses_of(output) == losses_of(plain)


def test_faults_on_the_way_to_the_host_and_back_leave_no_trace_in_the_adapter(job: Job, tmp_path: Path) -> None:
    plain = job.plain("plain")
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
def test_a_fault_that_stays_stops_all_ranks_with_one_line_and_goes_on_over_the_other_way(
    job: Job, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    results = job.run(output, ("", f"{TO_HOST},kind=zero,first=5,persist=1"), grad_sync="host")
    assert [result.code for result in results] == [3, 3], [result.stderr[-3000:] for result in results]
    said = [line for result in results for line in result.stderr.splitlines()]
    lines = [line for line in said if re.match(r"hf-rocm-tune: (\[rank \d+\] )?error: ", line)]
    assert len(lines) == 1 and not any("Traceback" in line for line in said)
    assert "the average of the gradients in bucket" in lines[0] and "was not used" in lines[0]
    assert json.loads(output.with_suffix(".exit.json").read_text())["code"] == 3
    assert not (output / ADAPTER).exists()
    job.done(output)  # the same run, however its gradients are averaged
    _assert_same(output, job.plain("plain"))


def test_powersgd_through_the_host_is_refused(server: CommandServer, base_flags: list[str], tmp_path: Path) -> None:
    result = server.run(
        "--model_name_or_path", "none", *base_flags, *flags(grad_sync="host", grad_compression="powersgd")
    )
    assert result.code == 2
    (line,) = result.error_lines
    assert "--grad_compression powersgd does not go with --grad_sync host" in line
    assert not (tmp_path / "out").exists()


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
    plain = job.plain("plain")
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
    exact = load_file(job.plain("plain-sgd", optim="sgd") / ADAPTER)
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
