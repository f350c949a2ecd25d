"""Two processes of `script`, started by the launcher, on two simulated cards: exit codes, reports, incidents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.loops.conftest import RunFile

TRAINING = """
import argparse, pathlib, sys, torch
from accelerate import Accelerator
flags = argparse.ArgumentParser()
flags.add_argument("--output_dir", type=pathlib.Path)
flags.add_argument("--code", type=int, default=0)
flags.add_argument("--config")  # of the script: neither a recipe nor the launcher's
given = flags.parse_args()
accelerator = Accelerator()
given.output_dir.mkdir(exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
rows = torch.utils.data.TensorDataset(torch.randn(32, 32))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), 1e-2), torch.utils.data.DataLoader(rows, batch_size=4)
)
for number, (batch,) in enumerate(loader):
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if number == 2 and accelerator.process_index == 1:
        torch.ones(77).to(accelerator.device)
        if given.code:
            sys.exit(given.code)
accelerator.print(f"epoch 0: loss {loss.item():.6f}")
"""
LAUNCHER = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 2
num_machines: 1
mixed_precision: 'no'
"""


@pytest.mark.parametrize(
    ("faults", "arguments", "code"),
    [
        pytest.param("kind=zero,rate=1,persist=1,tensor=?77? *", (), 3, id="fault of one rank"),
        pytest.param("kind=flip,rate=0.3,seed=4", (), 0, id="recovered", marks=pytest.mark.long),
        pytest.param("", ("--code", 7), 7, id="code of the script", marks=pytest.mark.long),
    ],
)
def test_the_job_ends_with_the_code_of_the_rank_that_failed(
    run_file: RunFile, card: dict[str, str], tmp_path: Path, faults: str, arguments: tuple[Any, ...], code: int
) -> None:
    script, launcher, output = tmp_path / "train.py", tmp_path / "two.yaml", tmp_path / "out"
    script.write_text(TRAINING)
    launcher.write_text(LAUNCHER)
    env = {**card, "SIMCARD_DEVICES": "2", "HF_ROCM_TUNE_FAULT": faults}
    command = (
        "-m",
        "hf_rocm_tune",
        "script",
        "--config_file",
        launcher,
        script,
        "--config",
        "mine.txt",
        "--output_dir",
        output,
    )
    done = run_file(*command, *arguments, env=env)
    assert done.returncode == code, done.stderr[-3000:]
    reports = [json.loads((place / "transfer_report.json").read_text()) for place in (output, output / "rank1")]
    for report in reports:
        assert report["coverage"]["unverified"] == []
        assert report["coverage"]["crossed_bytes"] == report["coverage"]["verified_bytes"] > 4 * 32 * 32
    incidents = [{row["outcome"] for row in report["incidents"]} for report in reports]
    if code == 3:
        assert incidents == [set(), {"failed"}]
        assert done.stderr.count("arrived wrong on cuda:1") == 1, done.stderr[-3000:]
    elif faults:
        assert all(found == {"recovered"} for found in incidents)
        assert "epoch 0" in done.stdout
