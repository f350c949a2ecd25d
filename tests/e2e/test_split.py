"""One model over two logical cards through the real command line: the same run as on one, and proof of what crossed.

Two stages on the CPU run the code of two cards, with real copies between them. What only cards can show (memory that
lies apart, two devices' streams) is in tests marked `gpu` beside `models.split`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import TIMEOUT, Result
from tests.e2e.conftest import ADAPTER, MakeJob, done, flags, report_of

COMPARED = ("loss", "grad_norm", "learning_rate", "num_tokens", "entropy", "mean_token_accuracy", "eval_loss", "epoch")
STEPS = 16


@pytest.fixture
def command(make_job: MakeJob, model_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., Result]:
    """Runs one job of a tiny model into ``tmp_path / name``."""
    job = make_job("split", train=48, test=9, max_steps=4, lora_dropout=0.0, doctor="off")

    def run(name: str, arch: str = "llama3", **settings: Any) -> Result:
        return job.run(tmp_path / name, model_name_or_path=model_of(arch), **settings)

    return run


def trajectory(output: Path) -> list[dict[str, float]]:
    """What was logged, as the newest checkpoint has it."""
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [{name: row[name] for name in COMPARED if name in row} for row in history]


def assert_equal(one: Path, other: Path, *, steps: int) -> None:
    logged = trajectory(one)
    assert logged == trajectory(other)  # bit for bit
    losses = [row["loss"] for row in logged if "loss" in row]
    assert len(losses) == steps and losses[0] - min(losses) > 0.05
    assert_equal_adapters(one, other)


SAMPLE = [
    # what differs from LoRA of llama3 with checkpointing, as the default is
    pytest.param(
        "llama3",
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": False},
        id="lora-accumulated",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "gemma3", {"load_in_4bit": True, "packing": True, "gradient_accumulation_steps": 2}, id="qlora-packed-tied"
    ),
]
MATRIX = [
    pytest.param(
        arch,
        {
            "gradient_checkpointing": checkpointing,
            "gradient_accumulation_steps": accumulation,
            "packing": packing,
            **({"load_in_4bit": True} if four_bit else {}),
        },
        id=f"{arch}-{'qlora' if four_bit else 'lora'}-{accumulation}-{checkpointing}-{packing}",
        marks=pytest.mark.long,
    )
    for arch in ("llama3", "qwen3", "gemma3", "qwen3_moe")
    for four_bit in (False, True)
    for accumulation in (1, 3)
    for checkpointing in (False, True)
    for packing in (False, True)
]


@pytest.mark.parametrize(("arch", "settings"), [*SAMPLE, *MATRIX])
def test_the_trajectory_is_that_of_one_card(
    arch: str, settings: dict[str, Any], command: Callable[..., Result], tmp_path: Path
) -> None:
    """With an evaluation; then the adapters are the same bytes."""
    both = settings | {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": STEPS, "save_steps": STEPS}
    done(command("one", arch, **both))
    result = done(command("split", arch, **both, split_layers="auto"))
    assert_equal(tmp_path / "one", tmp_path / "split", steps=STEPS)
    report = report_of(tmp_path / "split")
    assert report["coverage"]["unverified"] == []
    assert report["coverage"]["verified_bytes"] == report["coverage"]["device_bytes"] > 0
    crossed = report["activations"]
    # There and back, forward and backward, each with two legs; and the norm of the gradients of two cards.
    assert crossed["tensors"] >= STEPS * (8 + 4) and crossed["verified_bytes"] == crossed["bytes"]
    cards = report["split"]["cards"]
    assert [row["layers"] for row in cards] == [[0, 0], [1, 1]]
    assert sum(row["activations"]["bytes"] for row in cards) == crossed["bytes"]
    assert sum(row["weights"]["bytes"] for row in cards) == report["weights"]["bytes"]
    assert all(row["weights"]["bytes"] > 0 < row["model_bytes"] for row in cards)
    assert report_of(tmp_path / "one")["split"] is None and report_of(tmp_path / "one")["activations"]["bytes"] == 0
    planned = re.findall(r"split: planned card (\d): layers .* of 19.9 GiB", result.stdout)
    assert planned == ["0", "1"]


def test_faults_on_hops_are_healed_and_a_run_goes_on_where_it_was_stopped(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    """Faults forward; a run on one card resumed as a split, with faults backward: always the adapter of one card."""
    both = {"max_steps": 4, "save_steps": 2, "num_train_epochs": 1, "gradient_accumulation_steps": 2}
    done(command("one", **both))
    fault = "kind=zero,stage=activations,tensor=forward.layers.1.0.*,rate=0.5,seed=4"
    told = done(command("two", **both, split_layers="1", pipeline="auto", fault=fault))
    assert "split: planned with the activations of 2 micro-batches in flight" in told.stdout
    assert_equal_adapters(tmp_path / "one", tmp_path / "two")
    first = report_of(tmp_path / "two")
    assert first["activations"]["mismatches"] == first["activations"]["recovered"] > 2
    assert first["split"]["micro_batches_in_flight"] == 4
    assert {row["card"] for row in first["incidents"]} == {0, 1}
    # What the run on one card would have left if it had died after step 2; it goes on as a split.
    again = shutil.copytree(tmp_path / "one", tmp_path / "again")
    shutil.rmtree(again / "checkpoint-4")
    for name in (ADAPTER, "integrity.json"):
        (again / name).unlink()
    record = again / "run.json"
    record.write_text(record.read_text().replace('"finished"', '"running"'))
    fault = "kind=flip,stage=activations,tensor=backward*,rate=0.5,seed=1"
    done(command("again", **both, split_layers="1,1", fault=fault))
    # TRL counts tokens from zero again when it resumes; all else goes on.
    learned = [[(row["loss"], row["grad_norm"]) for row in trajectory(each)] for each in (tmp_path / "one", again)]
    assert learned[0] == learned[1] and len(learned[0]) == 4
    assert_equal_adapters(tmp_path / "one", again)
    report = report_of(again)
    assert report["activations"]["mismatches"] == report["activations"]["recovered"] > 1
    assert report["optimizer"]["tensors"] > 0 < report["adapter"]["tensors"]
    assert report["optimizer"]["verified_bytes"] == report["optimizer"]["bytes"]


@pytest.mark.long
def test_a_run_that_is_killed_between_its_micro_batches_goes_on(command: Callable[..., Result], tmp_path: Path) -> None:
    both = {
        "max_steps": 4,
        "save_steps": 2,
        "gradient_accumulation_steps": 4,
        "split_layers": "auto",
        "pipeline": "auto",
    }
    done(command("whole", **both))
    killed = command("killed", **both, env={"HF_ROCM_TUNE_CRASH": "step=4,kind=kill"})
    assert killed.code == -signal.SIGKILL
    done(command("killed", **both))
    assert_equal_adapters(tmp_path / "whole", tmp_path / "killed")
    assert report_of(tmp_path / "killed")["split"]["micro_batches_in_flight"] == 4


def assert_equal_adapters(one: Path, other: Path) -> None:
    """Plain PEFT loads both alike: weights and configuration are the same."""
    assert (one / ADAPTER).read_bytes() == (other / ADAPTER).read_bytes()
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (one, other)]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]


@pytest.mark.parametrize(("way", "first"), [("forward", 9), pytest.param("backward", 2, marks=pytest.mark.long)])
def test_a_fault_that_stays_ends_the_run_with_code_3(
    way: str, first: int, command: Callable[..., Result], tmp_path: Path
) -> None:
    fault = f"kind=flip,stage=activations,tensor={way}*to?,first={first},persist=1"
    ended = command("out", split_layers="auto", save_strategy="no", fault=fault)
    assert ended.code == 3 and len(ended.error_lines) == 1
    assert f"activations tensor '{way}.layers.1" in ended.error_lines[0] and "It was not used" in ended.stderr
    assert not (tmp_path / "out" / ADAPTER).exists()
    report = report_of(tmp_path / "out")
    assert report["incidents"][-1]["outcome"] == "failed"


def test_a_step_that_runs_out_of_memory_is_done_again_in_parts(command: Callable[..., Result], tmp_path: Path) -> None:
    out_of_memory = {"HF_ROCM_TUNE_STEP_FAULT": "kind=oom,rows=1,count=1,where=backward"}
    done(command("out", "qwen3", split_layers="auto", max_steps=2, save_strategy="no", env=out_of_memory))
    report = report_of(tmp_path / "out")
    assert report["memory"]["micro_batch_divisor"] == 2 and report["memory"]["recovered"] == 1
    assert report["activations"]["mismatches"] == 0


@pytest.mark.long
def test_several_processes_and_a_split_are_refused(
    model_of: Callable[[str], Path], messages: Path, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "hf_rocm_tune", "sft", "--accelerate_config", "cpu_dual"]
    line += flags(model_name_or_path=model_of("llama3"), dataset_name=messages, output_dir=tmp_path / "out")
    ended = subprocess.run(
        [*line, "--split_layers", "auto"], capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert ended.returncode == 2 and "a split runs in one process" in ended.stderr
